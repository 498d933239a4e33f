import concurrent.futures
import json
import random

import numpy as np
import pytest

from jaxlab.data.pretrained_tokenizers import (
    PretrainedTokenizer,
    TokenizerSettings,
    check_vocabulary_size,
    stop_ids,
)
from jaxlab.data.tokenizers import Tokenizer
from jaxlab.errors import UserError
from tests.data.tiny_tokenizers import byte_fallback, byte_level, definition, unigram, word_piece

NAMES = TokenizerSettings(special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, stop_ids=(257,))
BYTES = PretrainedTokenizer(byte_level(), NAMES)


def test_it_is_a_tokenizer():
    tokenizer: Tokenizer = BYTES
    text = "Zwölf\n\n  \U0001f600 \x00"
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens) == text
    assert (tokenizer.vocab_size, tokenizer.separator, BYTES.bos_id) == (259, 257, 256)
    assert BYTES.pad_id is None
    assert BYTES.special_ids == {256, 257}


def test_special_tokens_in_a_text_are_read_only_on_request():
    text = "a<s></s><tool>"
    assert BYTES.encode(text, parse_special=True).tolist() == [97, 256, 257, 258]
    # What is not special is found all the same.
    assert BYTES.encode(text).tolist() == [*b"a<s></s>", 258]
    assert BYTES.decode([97, 256, 258]) == "a<s><tool>"
    assert BYTES.decode([97, 256, 258], skip_special_tokens=True) == "a<tool>"


def test_special_tokens_around_a_text():
    defined = PretrainedTokenizer(byte_level(begins=True), NAMES)
    assert defined.encode("a", add_special_tokens=True).tolist() == [256, 97]
    assert defined.encode("a").tolist() == [97]
    said = PretrainedTokenizer(
        byte_level(begins=True), TokenizerSettings(prefix_ids=(), suffix_ids=(257,))
    )
    assert said.encode("a", add_special_tokens=True).tolist() == [97, 257]


@pytest.mark.parametrize(
    ("made", "text", "tokens", "back"),
    [
        (byte_fallback(), "a  aé文", ["▁a", "▁", "▁a", "<0xC3>", "<0xA9>", "文"], "a  aé文"),
        (byte_fallback(), "", [], ""),
        (unigram(), "ab xb", ["▁ab", "▁", "<unk>", "b"], "ab b"),
        (word_piece(), "Abab, don't", ["ab", "##a", "##b", ",", "don", "'", "t"], "abab, don ' t"),
    ],
)
def test_every_kind_is_read(made, text, tokens, back):
    tokenizer = PretrainedTokenizer(made)
    ids = tokenizer.encode(text)
    assert [tokenizer.token(number) for number in ids] == tokens
    assert tokenizer.decode(ids, skip_special_tokens=True) == back


def test_offsets_are_places_in_the_text():
    text = "aé<s>b"
    tokens, offsets = BYTES.encode_with_offsets(text, parse_special=True)
    assert tokens.tolist() == [*"aé".encode(), 256, 98]
    assert [text[a:b] for a, b in offsets.tolist()] == ["a", "é", "é", "<s>", "b"]
    tokens, offsets = BYTES.encode_with_offsets("")
    assert tokens.shape == (0,)
    assert offsets.shape == (0, 2)


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(ValueError, match="surrogate"):
        BYTES.encode("\ud800")
    with pytest.raises(ValueError, match="surrogate"):
        BYTES.encode_with_offsets("\ud800")
    with pytest.raises(ValueError, match="must be in"):
        BYTES.decode([259])


def test_the_digest_tells_tokenizers_apart():
    again = PretrainedTokenizer(json.dumps(json.loads(byte_level()), indent=1), NAMES)
    assert BYTES.digest == again.digest
    others = [
        PretrainedTokenizer(byte_level([b"ab"]), NAMES),
        BYTES.with_settings(TokenizerSettings()),
        BYTES.with_settings(TokenizerSettings(NAMES.special_tokens, (256,))),
    ]
    assert len({BYTES.digest, *(other.digest for other in others)}) == 4
    assert others[1].encode("ab").tolist() == [97, 98]


def test_without_an_end_of_text_there_is_no_separator():
    with pytest.raises(UserError, match=r"tokenizer=tokenizer\.json: names no token that ends"):
        _ = PretrainedTokenizer(byte_level()).separator


def test_threads_do_not_disturb_each_other():
    def encode(parse: bool) -> list[int]:
        return BYTES.encode("<s>" * 50, parse_special=parse).tolist()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(encode, [True, False] * 200))
    assert found[::2] == [[256] * 50] * 200
    assert found[1::2] == [list(b"<s>" * 50)] * 200


def test_added_tokens_come_from_elsewhere_too():
    entry = {"content": "<extra>", "special": True, "lstrip": True}
    more = PretrainedTokenizer(byte_level(), added_tokens=[{**entry, "id": 259}])
    assert more.encode("a  <extra>b", parse_special=True).tolist() == [97, 259, 98]
    assert more.vocab_size == 260
    with pytest.raises(ValueError, match="is to have the id 300, but the vocabulary gives it 259"):
        PretrainedTokenizer(byte_level(), added_tokens=[{**entry, "id": 300}])
    # Without an id nothing is added to the vocabulary.
    none = PretrainedTokenizer(byte_level(), added_tokens=[entry, {"content": "a"}])
    assert none.vocab_size == 259
    assert none.encode("<extra>", parse_special=True).tolist() == [60, 101, 120, 116, 114, 97, 62]


def test_tokens_have_ids():
    assert BYTES.token_id("<tool>") == 258
    assert BYTES.token(258) == "<tool>"
    assert BYTES.token(999) is None
    with pytest.raises(UserError, match=r"x='<tol>': is no token .*; did you mean <tool>"):
        BYTES.token_id("<tol>", field="x")


def test_stop_tokens():
    assert stop_ids(BYTES) == (257,)
    assert stop_ids(BYTES, ["<tool>", "<s>", 3, 257]) == (3, 256, 257, 258)
    with pytest.raises(UserError, match=r"stop_tokens='<S>': .*did you mean <s>"):
        stop_ids(BYTES, ["<S>"])
    for number in (-1, 259):
        with pytest.raises(UserError, match="ids are from 0 to 258"):
            stop_ids(BYTES, [number])


def test_a_tokenizer_may_be_smaller_than_the_model_but_not_larger():
    check_vocabulary_size(100, 100)
    check_vocabulary_size(100, 128)
    with pytest.raises(UserError, match=r"ids up to 128, .* embeddings for 128 tokens") as caught:
        check_vocabulary_size(129, 128, name="a.json", field="model")
    assert (caught.value.field, caught.value.value) == ("model", "a.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        (byte_level()[:-5], "not JSON"),
        (definition({"type": "Neural", "vocab": {}}), "type 'Neural'; allowed: BPE, Unigram"),
        (definition({"type": ["BPE"], "vocab": {}}), "allowed: BPE"),
        (definition({"type": "BPE", "vocab": {}, "merges": []}), "no tokens"),
        (definition({"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}), "not a tokenizer"),
        (definition({"type": "Unigram", "vocab": [], "unk_id": 0}), "not a tokenizer"),
    ],
)
def test_what_is_no_tokenizer_is_refused_in_one_line(text, words):
    with pytest.raises(ValueError, match=words) as caught:
        PretrainedTokenizer(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("made", [byte_fallback(), unigram(), word_piece()])
def test_changed_definitions_load_or_are_refused(made):
    values = [None, -1, 10**12, "x", [], {}, ["a b"], {"type": "BPE"}]
    chance = random.Random(0)
    refusals = []
    for _ in range(100):
        fields = node = json.loads(made)
        while True:
            key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
            inner = node[key]
            if not isinstance(inner, dict | list) or not inner or chance.random() < 0.3:
                break
            node = inner
        if chance.random() < 0.3:
            del node[key]
        else:
            node[key] = chance.choice(values)
        try:
            tokenizer = PretrainedTokenizer(json.dumps(fields))
        except ValueError as error:
            refusals.append(str(error))
        else:
            assert isinstance(tokenizer.decode(tokenizer.encode("ab a")), str)
    assert 20 < len(refusals) < 100
    assert all("\n" not in refusal for refusal in refusals)
