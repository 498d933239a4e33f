import json
import os
import random
import sys

import numpy as np
import pytest

from jaxlab.data.readers import read_documents
from jaxlab.data.text import Document, standard_library_documents
from jaxlab.data.tokenizers import (
    END_OF_TEXT,
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    cut_place,
    text_pieces,
    token_dtype,
)
from jaxlab.errors import StorageError, UserError

TEXTS = [
    "",
    "a",
    " ",
    "\n\n\n",
    "  two spaces, \t tabs \r\n and\rold line ends\n",
    "def f(x):\n        return 'it''s'  # 12345\n\n\n",
    "é文字 e\u0301 \U0001f600\U0001f468\u200d\U0001f469 \u00a0\u3000 \ufeff",
    f"{END_OF_TEXT}text{END_OF_TEXT} {END_OF_TEXT}",
    "<|padding|> <s> </s> [CLS] \x01\x7f",
    "word" * 5000,
]


@pytest.fixture(scope="module")
def documents():
    return standard_library_documents(120_000, kinds=("source",))


@pytest.fixture(scope="module")
def bpe(documents):
    pytest.importorskip("tokenizers")
    return BpeTokenizer.train(documents, 600)


def definition(tokenizer: BpeTokenizer, path) -> dict:
    tokenizer.save(path)
    return json.loads(path.read_text())


def test_dtypes_are_the_smallest():
    sizes = {256: np.uint8, 257: np.uint16, 65536: np.uint16, 65537: np.uint32}
    assert {size: token_dtype(size) for size in sizes} == sizes
    for size in (0, -1, 2**32 + 1):
        with pytest.raises(ValueError, match="vocab_size"):
            token_dtype(size)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_come_back(text):
    tokenizer: Tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.separator not in tokens
    assert tokenizer.decode(tokens) == tokenizer.decode(tokens.tolist()) == text


def test_bytes_refuse_what_is_no_text():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.separator) == (256, 0)
    assert tokenizer.digest == ByteTokenizer().digest
    assert len(bytes.fromhex(tokenizer.digest)) == 32
    for text in ("a\0b", "\ud800"):
        with pytest.raises(ValueError, match=r"NUL|surrogates"):
            tokenizer.encode(text)
    assert tokenizer.decode([0xE9, 65]) == "\ufffdA"
    for ids in ([256], [-1], np.array([0, 300])):
        with pytest.raises(ValueError, match="must be in"):
            tokenizer.decode(ids)
    for ids in (np.array([1.5]), np.ones((2, 2), int), np.array(["a"])):
        with pytest.raises(TypeError, match="must be integers"):
            tokenizer.decode(ids)


@pytest.mark.parametrize("size", [2, 3, 10, 64])
def test_pieces_join_to_the_text(size):
    letters = random.Random(size)
    for length in (0, 1, size, size + 1, 40 * size):
        text = "".join(letters.choice("ab \n\u3000é") for _ in range(length))
        pieces = list(text_pieces(text, size))
        assert "".join(pieces) == text
        assert all(1 <= len(piece) <= size for piece in pieces)
        assert all(len(piece) >= size // 2 for piece in pieces[:-1])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("aaaaaa\nbbb\nccccc", 11),  # the last line that begins before the end of the piece
        ("aaaaaaaaa\n   cccc", 12),  # not before a line that begins with spaces: at full size
        ("aaaaaaaaa\n\ncccc", 12),  # nor after an empty one
        ("aaaaaaa bb\u3000 dddd", 7),  # nor at a space beside another one
        ("a\nbbbbbbbbbbbbbbbb", 12),  # nor in the first half
        ("short\nlines", 11),
    ],
)
def test_where_pieces_end(text, place):
    assert cut_place(text, 0, 12) == place
    assert cut_place("xxxx" + text, 4, 12) == place + 4


def test_training_is_deterministic(bpe, documents):
    again = BpeTokenizer.train(iter(documents), 600)
    assert again.digest == bpe.digest
    assert again.digest != BpeTokenizer.train(documents, 601).digest
    assert again.digest != BpeTokenizer.train(documents[:3], 600).digest


def test_training_passes_on_what_reading_raises(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n[]\n')
    with pytest.raises(UserError, match=r"a\.jsonl line 2: holds an array"):
        BpeTokenizer.train(read_documents(tmp_path / "a.jsonl"), 300)


def test_bpe_has_the_size_that_was_asked_for(bpe, documents):
    assert bpe.vocab_size == 600
    assert bpe.separator == 0
    assert bpe.decode([bpe.separator]) == END_OF_TEXT
    text = "".join(document.text.decode() for document in documents)
    tokens = bpe.encode(text)
    assert tokens.dtype == np.uint16
    assert len(tokens) < 0.6 * len(text)
    assert tokens.max() == 599
    # Two bytes of text have nothing to merge.
    assert BpeTokenizer.train([Document("a", b"ab")], 1000).vocab_size == 257


@pytest.mark.parametrize("text", TEXTS)
def test_bpe_comes_back(bpe, text):
    tokens = bpe.encode(text)
    assert bpe.separator not in tokens
    assert bpe.decode(tokens) == bpe.decode(tokens.tolist()) == text


def test_bpe_decodes_strictly(bpe):
    assert bpe.decode(np.empty(0, np.uint16)) == ""
    with pytest.raises(ValueError, match="must be in"):
        bpe.decode([600])
    with pytest.raises(TypeError, match="must be integers"):
        bpe.decode(np.array([0.5]))
    with pytest.raises((ValueError, TypeError)):
        bpe.encode("\ud800")


def test_cutting_does_not_change_the_tokens(bpe, documents):
    text = "".join(document.text.decode() for document in documents)
    whole = bpe._tokenizer.encode(text, add_special_tokens=False).ids
    assert bpe.encode(text).tolist() == whole
    for size in (1000, 5000):
        pieces = [bpe.encode(piece) for piece in text_pieces(text, size)]
        assert np.concatenate(pieces).tolist() == whole


def test_bpe_is_saved_and_loaded(bpe, tmp_path):
    path = tmp_path / "tokenizer.json"
    bpe.save(path)
    loaded = BpeTokenizer.load(path)
    assert (loaded.digest, loaded.vocab_size, loaded.separator) == (bpe.digest, 600, 0)
    assert loaded.encode(TEXTS[5]).tolist() == bpe.encode(TEXTS[5]).tolist()
    # Another layout of the same JSON is the same tokenizer.
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4))
    assert BpeTokenizer.load(str(path)).digest == bpe.digest
    assert os.listdir(tmp_path) == ["tokenizer.json"]


def test_a_failed_save_leaves_nothing(bpe, tmp_path):
    with pytest.raises(StorageError, match="cannot write"):
        bpe.save(tmp_path / "none" / "tokenizer.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="cannot write"):
        bpe.save(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]


def test_what_cuts_fills_or_varies_is_switched_off(bpe, tmp_path):
    path = tmp_path / "tokenizer.json"
    fields = definition(bpe, path)
    fields["model"]["dropout"] = 0.5
    fields["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    fields["padding"] = {
        "strategy": {"Fixed": 100},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": END_OF_TEXT,
    }
    path.write_text(json.dumps(fields))
    loaded = BpeTokenizer.load(path)
    assert loaded.digest == bpe.digest
    assert loaded.encode(TEXTS[5]).tolist() == bpe.encode(TEXTS[5]).tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "back as it was"),
        (
            {
                "pre_tokenizer": {
                    "type": "ByteLevel",
                    "add_prefix_space": True,
                    "trim_offsets": True,
                    "use_regex": True,
                }
            },
            "back as it was",
        ),
        ({"decoder": None}, "back as it was"),
        ({"added_tokens": []}, "no token <|endoftext|>"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, "WordLevel"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}, "255 of the 256 bytes"),
    ],
)
def test_lossy_tokenizers_are_refused(bpe, tmp_path, change, words):
    path = tmp_path / "tokenizer.json"
    fields = {**definition(bpe, path), **change}
    if not fields["added_tokens"]:
        fields["model"]["vocab"].pop(END_OF_TEXT)
    path.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"data\.tokenizer=.*tokenizer\.json: ") as caught:
        BpeTokenizer.load(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_changed_tokenizers_load_or_are_refused_in_one_line(bpe, tmp_path):
    # One field of the definition at a time gets a value of another kind, or goes.
    text = json.dumps(definition(bpe, tmp_path / "tokenizer.json"))
    values = [None, -1, 10**12, "x", [], {}, ["a b"], {"type": "BPE"}]
    chance, refusals = random.Random(0), []
    for _ in range(120):
        fields = node = json.loads(text)
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
        (tmp_path / "changed.json").write_text(json.dumps(fields))
        try:
            loaded = BpeTokenizer.load(tmp_path / "changed.json")
        except UserError as error:
            refusals.append(str(error))
        else:
            assert loaded.decode(loaded.encode(TEXTS[6])) == TEXTS[6]
    assert len(refusals) > 60
    assert all(refusal.isprintable() and len(refusal) < 600 for refusal in refusals)


def test_without_the_library_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="pip install tokenizers"):
        BpeTokenizer.train([], 300)
