import functools
import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.data.batches import EpochOrder
from jaxlab.data.chat import (
    ChatBatches,
    ChatTemplate,
    Message,
    encode_conversation,
    read_conversations,
)
from jaxlab.data.tokenizers import ByteTokenizer
from jaxlab.errors import UserError


class Pairs:
    """A tokenizer that joins neighbouring characters, so that it matters where a text begins."""

    vocab_size = 2**16
    separator = 2**16 - 1
    digest = "pairs"

    def encode(self, text: str) -> np.ndarray:
        codes = [min(ord(letter), 254) for letter in text]
        codes += [0] * (len(codes) % 2)
        return np.array(codes, np.uint16).reshape(-1, 2) @ np.array([1, 256], np.uint16)

    def decode(self, ids) -> str:
        return "".join(chr(code) for i in ids for code in (int(i) % 256, int(i) // 256) if code)


def turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


TALK = [
    turn("system", "Be brief."),
    turn("user", "Hi!"),
    turn("assistant", "Hello."),
    turn("user", "Who are you? [assistant]\nI am"),
    turn("assistant", "A modèl."),
]
BYTES = ByteTokenizer()


def spans(tokens, loss_mask) -> list[bytes]:
    """The stretches of byte tokens that count."""
    edges = np.flatnonzero(np.diff(loss_mask, prepend=False, append=False))
    return [tokens[a:b].astype(np.uint8).tobytes() for a, b in edges.reshape(-1, 2)]


def test_turns_are_header_content_and_separator():
    tokens, loss_mask = encode_conversation(TALK, BYTES)
    text = "".join(f"[{message['role']}]\n{message['content']}\0" for message in TALK)
    assert tokens.dtype == np.uint8
    assert loss_mask.dtype == np.bool_
    assert tokens.tobytes() == text.encode()
    assert spans(tokens, loss_mask) == [b"Hello.\0", "A modèl.\0".encode()]


@pytest.mark.parametrize("tokenizer", [BYTES, Pairs()], ids=["bytes", "pairs"])
@pytest.mark.parametrize("header", ["[{role}]\n", "<{role}> ", "{role}:"])
def test_exactly_the_answers_and_their_ends_count(tokenizer, header):
    tokens, loss_mask = encode_conversation(TALK, tokenizer, ChatTemplate(header))
    begin = 0
    for message in TALK:
        parts = header.replace("{role}", message["role"]), message["content"]
        sizes = [len(tokenizer.encode(part)) for part in parts]
        middle, end = begin + sizes[0], begin + sum(sizes) + 1
        assert tokenizer.decode(tokens[begin:middle]) == parts[0]
        assert tokenizer.decode(tokens[middle : end - 1]).startswith(parts[1][:5])
        assert tokens[end - 1] == tokenizer.separator
        assert not loss_mask[begin:middle].any()
        assert (loss_mask[middle:end] == (message["role"] == "assistant")).all()
        begin = end
    assert begin == len(tokens)


CONTENTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
MESSAGES = st.lists(
    st.builds(turn, st.sampled_from(["system", "user", "assistant"]), CONTENTS), max_size=5
)


@settings(deadline=None, max_examples=100)
@given(MESSAGES, CONTENTS, st.integers(8, 90))
def test_no_token_of_a_prompt_counts(messages, answer, length):
    """Tokens that count are, taken together, the end of all the answers' bytes."""
    messages = [*messages, turn("assistant", answer), turn("user", "Thanks"), *messages[:1]]
    answers = [m["content"].encode() + b"\0" for m in messages if m["role"] == "assistant"]
    tokens, loss_mask = encode_conversation(messages, BYTES)
    assert b"".join(spans(tokens, loss_mask)) == b"".join(answers)
    if len(answers[-1]) >= length:
        return
    batch = ChatBatches([(tokens, loss_mask)], length=length, batch_size=1, seed=0)[0]
    counted = b"".join(spans(batch["tokens"][0], batch["loss_mask"][0]))
    assert len(counted) >= len(answers[-1])
    assert b"".join(answers).endswith(counted)
    # The newest answer has something before it: its first token too is predicted.
    assert not batch["loss_mask"][0, 0] or len(counted) > len(answers[-1])


def test_misuse_of_encoding_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        encode_conversation([], BYTES)
    with pytest.raises(ValueError, match=r"messages\[1\] has role 'tool': allowed: system, user"):
        encode_conversation([*TALK[:1], turn("tool", "x")], BYTES)
    with pytest.raises(ValueError, match=r"header='role': must hold \{role\}"):
        ChatTemplate("role")

    class Leaky(Pairs):
        separator = ord("a") + 256 * ord("b")

    with pytest.raises(ValueError, match=r"messages\[0\] holds the separator, token 25185"):
        encode_conversation([turn("user", "..ab")], Leaky())


def encoded(*talks):
    return [encode_conversation(messages, BYTES) for messages in talks]


def row(messages, length) -> tuple[bytes, list[bytes]]:
    batch = ChatBatches(encoded(messages), length=length, batch_size=1, seed=0)[0]
    tokens, loss_mask = batch["tokens"][0], batch["loss_mask"][0]
    return tokens.astype(np.uint8).tobytes(), spans(tokens, loss_mask)


def test_rows_are_padded_at_their_end():
    tokens, _ = encode_conversation(TALK, BYTES)
    text, counted = row(TALK, len(tokens) + 5)
    assert text == tokens.tobytes() + bytes(5)
    assert counted == [b"Hello.\0", "A modèl.\0".encode()]


def test_what_follows_the_newest_answer_is_dropped():
    text, counted = row([*TALK[:3], turn("user", "Bye" * 50)], 60)
    assert text.rstrip(b"\0") == b"[system]\nBe brief.\0[user]\nHi!\0[assistant]\nHello."
    assert counted == [b"Hello.\0"]


@pytest.mark.parametrize("length", [20, 31, 70, 90])
def test_the_oldest_tokens_give_way_to_the_newest_answer(length):
    tokens, _ = encode_conversation(TALK, BYTES)
    text, counted = row(TALK, length)
    assert text == tokens.tobytes()[-length:]
    assert counted[-1] == "A modèl.\0".encode()


def test_an_answer_has_to_fit_after_another_token():
    talk = [turn("user", "Q"), turn("assistant", "x" * 20)]
    text, counted = row(talk, 22)
    assert text == b"\n" + b"x" * 20 + b"\0"
    assert counted == [b"x" * 20 + b"\0"]
    problem = "data=conversation 2: its newest answer has 21 tokens; rows of length=21 hold 20"
    with pytest.raises(UserError, match=problem):
        ChatBatches(encoded(TALK, talk), length=21, batch_size=1, seed=0)
    with pytest.raises(UserError, match="data=conversation 1: has no answer"):
        ChatBatches(encoded(TALK[:2]), length=21, batch_size=1, seed=0)


def test_what_cannot_be_used_may_be_left_out():
    talks = encoded(TALK, [turn("assistant", "x" * 20)], TALK[:2], TALK[:3])
    batches = ChatBatches(iter(talks), length=21, batch_size=2, seed=0, skip_bad=True)
    assert (batches.num_conversations, batches.num_skipped) == (2, 2)
    with pytest.raises(UserError, match=r"data=2 conversations: too few .* batch_size=3"):
        ChatBatches(talks, length=21, batch_size=3, seed=0, skip_bad=True)


@functools.cache
def many() -> list[tuple[np.ndarray, np.ndarray]]:
    return encoded(*([turn("user", "ab" * (i % 7)), turn("assistant", f"{i}")] for i in range(300)))


def test_an_epoch_visits_every_conversation_in_its_order():
    batches = ChatBatches(many(), length=50, batch_size=30, seed=2)
    assert batches.steps_per_epoch == 10
    order = EpochOrder(300, batch_size=30, seed=2)
    for step in (0, 13, 5, 10**9):
        batch = batches[step]
        assert batch["tokens"].dtype == np.int32
        assert batch["loss_mask"].dtype == np.bool_
        assert batch["tokens"].shape == batch["loss_mask"].shape == (30, 50)
        for tokens, loss_mask, index in zip(
            batch["tokens"], batch["loss_mask"], order.rows(step), strict=True
        ):
            assert spans(tokens, loss_mask) == [b"%d\0" % index]
            expected = many()[index][0].tolist()
            assert tokens.tolist() == expected + [0] * (50 - len(expected))


def test_grain_reads_the_same_batches():
    batches = ChatBatches(many(), length=50, batch_size=30, seed=2)
    iterator = iter(batches.dataset().to_iter_dataset())
    iterator.set_state({"next_index": 40})
    for name, value in next(iterator).items():
        np.testing.assert_array_equal(value, batches[40][name])


def test_padding_never_counts_whatever_the_first_token_is():
    answer = np.array([5, 6], np.uint8), np.array([True, True])
    batch = ChatBatches([answer], length=4, batch_size=1, seed=0)[0]
    assert batch["tokens"].tolist() == [[5, 6, 0, 0]]
    assert batch["loss_mask"].tolist() == [[True, True, False, False]]


def test_misuse_of_batches_is_refused():
    make = functools.partial(ChatBatches, length=50, batch_size=1, seed=0)
    with pytest.raises(ValueError, match="length=1"):
        ChatBatches(many(), length=1, batch_size=1, seed=0)
    with pytest.raises(ValueError, match="batch_size=0"):
        ChatBatches(many(), length=50, batch_size=0, seed=0)
    tokens, loss_mask = many()[0]
    for bad in ((tokens, loss_mask[1:]), (tokens[None], loss_mask[None]), (tokens, tokens)):
        with pytest.raises(ValueError, match="conversation 1 has tokens"):
            make([bad])


LINES = [
    json.dumps({"messages": TALK, "id": 7}),
    "",
    json.dumps({"prompt": "Q?", "response": "A\u2028."}, ensure_ascii=False),
]
READ = [TALK, [turn("user", "Q?"), turn("assistant", "A\u2028.")]]


def test_both_forms_are_read_plain_and_compressed(tmp_path):
    content = "\r\n".join(LINES).encode()
    (tmp_path / "talk.jsonl").write_bytes(b"\xef\xbb\xbf" + content + b"\n")
    (tmp_path / "talk.jsonl.gz").write_bytes(gzip.compress(content))
    assert list(read_conversations(tmp_path / "talk.jsonl")) == READ
    assert list(read_conversations(str(tmp_path / "talk.jsonl.gz"))) == READ


BAD_LINES = [
    ("{", "is not JSON"),
    ("[1]", "JSON object"),
    (b"\xff{}", "UTF-8"),
    ({"text": "x"}, "needs the key messages, or both prompt and response"),
    ({"prompt": "x"}, "needs the key messages, or both prompt and response"),
    ({"messages": []}, "messages must be a list with at least one message"),
    ({"messages": "hi"}, "messages must be a list with at least one message"),
    ({"messages": TALK[:2]}, "has no message of role assistant"),
    ({"messages": [*TALK, "hi"]}, r"messages\[5\] must be an object with role and content"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\] must be an object with role and content"),
    (
        {"messages": [turn("asistant", "x")]},
        r"messages\[0\] has role 'asistant'; did you mean assistant\? allowed: system, user, assis",
    ),
    ({"messages": [turn("User", "x")]}, r"role 'User'; did you mean user\? allowed"),
    ({"messages": [turn("\n", "x")]}, r"has role '\\n'; allowed: system, user, assistant"),
    ({"messages": [{"role": None, "content": "x"}]}, "has role None; allowed"),
    (
        {"messages": [*TALK, {"role": "user", "content": ["a\n", "x" * 99]}]},
        r"the content of messages\[5\] must be text, not \['a\\n', 'x+$",
    ),
    ({"prompt": 3, "response": "x"}, "the content of prompt must be text, not 3"),
    ({"prompt": "x", "response": None}, "the content of response must be text, not None"),
    ({"messages": [turn("assistant", "a\0b")]}, r"messages\[0\] holds a character that no text"),
    ({"messages": [turn("assistant", "\ud800")]}, r"messages\[0\] holds a character that no text"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named(tmp_path, line, problem):
    path = tmp_path / "talk.jsonl"
    if not isinstance(line, bytes):
        line = (line if isinstance(line, str) else json.dumps(line)).encode()
    path.write_bytes(f"{LINES[0]}\n\n".encode() + line + f"\n{LINES[2]}\n".encode())
    conversations = read_conversations(path)
    assert next(conversations) == READ[0]
    with pytest.raises(UserError, match=problem) as caught:
        next(conversations)
    assert str(caught.value).startswith("data.path=talk.jsonl line 3: ")
    assert "\n" not in str(caught.value)
    skipped: dict[str, str] = {}
    found = read_conversations(path, skip_bad=True, on_skip=skipped.__setitem__)
    assert list(found) == READ
    assert skipped == {"talk.jsonl line 3": caught.value.allowed}
    assert list(read_conversations(path, skip_bad=True)) == READ


def test_a_file_that_is_missing_is_refused_at_once(tmp_path):
    with pytest.raises(UserError, match=r"none.jsonl: does not exist"):
        read_conversations(tmp_path / "none.jsonl", skip_bad=True)
