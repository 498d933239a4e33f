import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.data.incremental_decoding import StopStrings, incremental_decoder
from jaxlab.data.pretrained_tokenizers import PretrainedTokenizer
from jaxlab.data.tokenizers import ByteTokenizer
from tests.data.tiny_tokenizers import (
    byte_fallback,
    byte_level,
    definition,
    spelled,
    unigram,
    word_piece,
)

_PARTS = [b"\xe6\x96", b"\x96\x87a", "文".encode(), b"\xff\x80", b" a", b"\xf0\x9f", b"\x98\x80"]
_CHAIN_END = {"type": "BPEDecoder", "suffix": "</w>"}
MADE = {
    "byte-level": byte_level(_PARTS),
    "byte fallback": byte_fallback(more=["<0x4g>", "<0xab>", "▁a▁"]),
    "byte fallback, two spaces": byte_fallback(strip=2),
    "byte fallback, no space": byte_fallback(strip=0),
    "Unigram": unigram(),
    "WordPiece": word_piece(),
    "no decoder": definition({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}),
    "suffixes": definition(
        {"type": "BPE", "vocab": {"a</w>": 0, "b": 1}, "merges": []}, decoder=_CHAIN_END
    ),
}
TOKENIZERS = {name: PretrainedTokenizer(made) for name, made in MADE.items()}


def pieces(decoder, ids):
    state, found = decoder.start(), []
    for number in ids:
        text, state = decoder.step(state, number)
        found.append(text)
    return [*found, decoder.finish(state)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_pieces_are_the_text_of_all_tokens(name):
    tokenizer, chance = TOKENIZERS[name], random.Random(0)
    size = tokenizer.vocab_size
    for trial in range(600):
        # From all tokens, from few of them so that runs are long, and from the bytes of text.
        pools = [range(size), chance.sample(range(size), min(3, size))]
        texts = tokenizer.encode("文 a\U0001f600é  b").tolist()
        pool = [*pools, [*texts, size - 1]][trial % 3]
        ids = [chance.choice(pool) for _ in range(chance.randrange(12))]
        for skip in (False, True):
            decoder = incremental_decoder(tokenizer, skip_special_tokens=skip)
            whole = tokenizer.decode(ids, skip_special_tokens=skip)
            assert "".join(pieces(decoder, ids)) == whole, ids


@pytest.mark.parametrize("name", ["byte-level", "byte fallback"])
@given(text=st.text(max_size=20))
@settings(deadline=None, max_examples=60)
def test_no_piece_of_a_text_is_half_a_character(name, text):
    tokenizer = TOKENIZERS[name]
    found = pieces(incremental_decoder(tokenizer), tokenizer.encode(text).tolist())
    assert "".join(found) == text
    assert sum(piece.count("\ufffd") for piece in found) == text.count("\ufffd")


def test_text_comes_as_soon_as_it_is_settled():
    bytes_ = TOKENIZERS["byte-level"]
    assert pieces(incremental_decoder(bytes_), "aé文".encode()) == [
        *("a", "", "é", "", "", "文"),
        "",
    ]
    first = bytes_.token_id(spelled(b"\xe6\x96"))
    second = bytes_.token_id(spelled(b"\x96\x87a"))
    assert pieces(incremental_decoder(bytes_), [first, 0x87, first, 97, second]) == [
        *("", "文", "", "\ufffda", "\ufffd\ufffda"),
        "",
    ]
    # A byte that does not fit makes the whole run unreadable, so it waits for its end.
    fallback = TOKENIZERS["byte fallback"]
    ids = [fallback.token_id(token) for token in ("▁a", "<0xC3>", "<0xA9>", "▁", "b")]
    assert pieces(incremental_decoder(fallback), ids) == ["a", "", "", "é ", "b", ""]
    assert pieces(incremental_decoder(TOKENIZERS["suffixes"]), [1, 0, 1]) == ["", "", "", "ba b"]


def test_a_vocabulary_is_spelled_once_for_many_texts(monkeypatch):
    tokenizer = PretrainedTokenizer(byte_level(_PARTS))
    incremental_decoder(tokenizer)
    monkeypatch.delattr(PretrainedTokenizer, "token")
    ids = tokenizer.encode("ab</s>", parse_special=True).tolist()
    for skip, text in ((False, "ab</s>"), (True, "ab")):
        decoder = incremental_decoder(tokenizer, skip_special_tokens=skip)
        assert "".join(pieces(decoder, ids)) == text


def test_a_state_can_be_used_twice():
    decoder = incremental_decoder(ByteTokenizer())
    _, state = decoder.step(decoder.start(), 0xC3)
    assert [decoder.step(state, last)[0] for last in (0xA9, 0xA8, 0xA9)] == ["é", "è", "é"]
    assert decoder.finish(state) == "\ufffd"
    assert decoder.start() == decoder.start()
    assert hash(state)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_unknown_ids_are_refused(name):
    tokenizer = TOKENIZERS[name]
    decoder = incremental_decoder(tokenizer)
    for number in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token={number}: must be in"):
            decoder.step(decoder.start(), number)


def stopped(strings, parts):
    stops = StopStrings(strings)
    text, held = "", ""
    for part in parts:
        step = stops.step(held, part)
        text, held = text + step.text, step.held
        if step.stop is not None:
            return text, step.stop
    return text + held, None


@given(
    strings=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    parts=st.lists(st.text("ab\n", max_size=5), max_size=8),
)
@settings(deadline=None, max_examples=400)
def test_where_a_text_stops_does_not_depend_on_its_pieces(strings, parts):
    text = "".join(parts)
    ends = [
        (place + len(stop), place, stop)
        for stop in strings
        for place in range(len(text))
        if text.startswith(stop, place)
    ]
    expected = (text[: min(ends)[1]], min(ends)[2]) if ends else (text, None)
    assert stopped(strings, parts) == expected
    assert stopped(strings, text) == expected


def test_only_what_could_be_a_stop_string_is_held():
    stops = StopStrings(["<end>", "\n\n"])
    assert stops.step("", "ab<en") == ("ab", "<en", None)
    assert stops.step("<en", "!") == ("<en!", "", None)
    assert stops.step("<en", "d> more") == ("", "", "<end>")
    assert stops.step("", "a\n") == ("a", "\n", None)
    # Of two that end together the longer one counts.
    assert StopStrings(["b", "ab"]).step("", "xab") == ("x", "", "ab")
    assert StopStrings([]).step("", "text") == ("text", "", None)
    with pytest.raises(ValueError, match="empty stop string"):
        StopStrings(["a", ""])
