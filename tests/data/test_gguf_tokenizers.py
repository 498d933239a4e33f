import functools
import json
from typing import Any

import numpy as np
import pytest

from jaxlab.data.gguf_tokenizers import gguf_tokenizer
from jaxlab.errors import UserError
from tests.data.tiny_tokenizers import BYTES, LETTERS, spelled
from tests.goldens import FOLDER


@functools.cache
def golden() -> dict[str, Any]:
    """Ids that transformers 5.24 and sentencepiece 0.2.3 give for hard texts."""
    return json.loads((FOLDER / "gguf_tokenizers.json").read_text())


def words(pre: str, merges: list[bytes], text: str) -> list[str]:
    """How a text is cut, seen through a vocabulary in which every pair of characters merges."""
    tokens = [*LETTERS, *(spelled(data) for data in merges)]
    pairs = [f"{token[:-1]} {token[-1:]}" for token in tokens[256:]]
    tokenizer = gguf_tokenizer("gpt2", tokens, merges=pairs, pre=pre)
    return [tokenizer.decode([number]) for number in tokenizer.encode(text)]


@pytest.mark.parametrize(
    "pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"]
)
def test_byte_level_ids_are_those_of_transformers(pre):
    found = golden()["words"]
    tokenizer = gguf_tokenizer(
        "gpt2",
        found["tokens"],
        merges=found["merges"],
        token_types=np.array(found["types"]),
        pre=pre,
    )
    for text, ids in zip(golden()["texts"], found["ids"][pre], strict=True):
        assert tokenizer.encode(text, parse_special=True).tolist() == ids, text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_those_of_sentencepiece(prefix):
    found = golden()["sentencepiece"]
    tokenizer = gguf_tokenizer(
        "llama",
        found["tokens"],
        scores=np.array(found["scores"], np.float32),
        token_types=found["types"],
        unk_id=0,
        bos_id=1,
        eos_id=2,
        add_space_prefix=prefix,
    )
    ids = found["ids"]["prefix" if prefix else "plain"]
    for text, expected in zip(golden()["texts"], ids, strict=True):
        assert tokenizer.encode(text).tolist() == expected, text
        assert tokenizer.decode(expected) == text


@pytest.mark.parametrize(
    ("pre", "text", "cut"),
    [
        ("default", "12345", ["123", "4", "5"]),
        ("gpt-2", "1234", ["1234"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("deepseek-v3", "1234", ["123", "4"]),
        ("deepseek-coder", "1234", ["1", "2", "3", "4"]),
        ("falcon", "1234", ["123", "4"]),
    ],
)
def test_numbers_are_cut_as_the_name_says(pre, text, cut):
    assert words(pre, [b"12", b"123", b"1234", b"12345"], text) == cut


def test_known_words_need_no_merges():
    tokens = [*LETTERS, "abc"]
    assert gguf_tokenizer("gpt2", tokens, pre="llama-bpe").encode("abc").tolist() == [256]
    assert gguf_tokenizer("gpt2", tokens, pre="qwen2").encode("abc").tolist() == [97, 98, 99]


def test_special_tokens_and_what_is_around_a_text():
    tokens = [*LETTERS, "<s>", "</s>", "<turn ▁>", "<tool>"]
    make = functools.partial(
        gguf_tokenizer,
        "gpt2",
        tokens,
        token_types=[1] * 256 + [3, 3, 3, 4],
        bos_id=256,
        eos_id=257,
        more_stop_ids=[258, 257],
        chat_template="x",
    )
    tokenizer = make(pre="gpt-2")
    assert tokenizer.settings.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.settings.stop_ids == (257, 258)
    assert tokenizer.settings.chat_templates == {"default": "x"}
    assert tokenizer.special_ids == {256, 257, 258}
    assert tokenizer.encode("<turn ▁><tool>", parse_special=True).tolist() == [258, 259]
    assert tokenizer.decode([258]) == "<turn ▁>"
    around = {
        "gpt-2": [97],
        "llama-bpe": [256, 97],
    }
    for pre, ids in around.items():
        assert make(pre=pre).encode("a", add_special_tokens=True).tolist() == ids
    said = make(pre="llama-bpe", add_bos=False, add_eos=True)
    assert said.encode("a", add_special_tokens=True).tolist() == [97, 257]


def test_merges_follow_the_scores():
    tokens = ["<unk>", *BYTES, "▁", "a", "b", "c", "ab", "bc", "<c>", "<", ">", "<c"]
    types = [2, *[6] * 256, *[1] * 6, 3, 1, 1, 1]
    make = functools.partial(
        gguf_tokenizer, "llama", tokens, token_types=types, unk_id=0, add_space_prefix=False
    )
    low = make(scores=[*[0.0] * 261, -2.0, -1.0, *[0.0] * 4])
    assert [low.token(number) for number in low.encode("abc é")] == [
        "a",
        "bc",
        "▁",
        "<0xC3>",
        "<0xA9>",
    ]
    high = make(scores=[*[0.0] * 261, -1.0, -2.0, *[0.0] * 4])
    assert [high.token(number) for number in high.encode("abc")] == ["ab", "c"]
    # Nothing that is no text is put together from text.
    assert [high.token(number) for number in high.encode("<c>")] == ["<c", ">"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"model": "bert"}, "model 'bert'; allowed: gpt2"),
        ({"pre": "lama-bpe"}, "pre-tokenizer 'lama-bpe'; did you mean llama-bpe"),
        ({"tokens": []}, "has no tokens"),
        ({"tokens": [*LETTERS, "a"]}, "has the token 'a' twice"),
        ({"token_types": [1]}, "has 256 tokens, but types for 1"),
        ({"merges": ["a"]}, "the merge 'a'"),
        ({"merges": ["a b"]}, "the merge 'a b'"),
        ({"merges": ["a b c"]}, "the merge 'a b c'"),
        ({"eos_id": 256}, "eos_token_id is 256; it has 256 tokens"),
        ({"model": "llama"}, "has 256 tokens, but scores for 0"),
    ],
)
def test_bad_entries_are_one_line(arguments, problem):
    given = {"model": "gpt2", "tokens": LETTERS, "name": "x.gguf", "field": "model", **arguments}
    with pytest.raises(UserError, match=problem) as caught:
        gguf_tokenizer(**given)
    assert str(caught.value).startswith("model=x.gguf: ")
    assert "\n" not in str(caught.value)
