import json
import os

import numpy as np
import pytest

from jaxlab.data import corpora
from jaxlab.data.corpora import load_corpus
from jaxlab.data.readers import read_documents
from jaxlab.data.text import encode_bytes, split_documents
from jaxlab.data.tokenizers import BpeTokenizer, ByteTokenizer
from jaxlab.data.windows import WindowBatches
from jaxlab.errors import StorageError, UserError
from tests.data.memory import peak, write_corpus


class CountingTokenizer(ByteTokenizer):
    """Bytes, and how many texts were encoded."""

    calls = 0

    def encode(self, text: str) -> np.ndarray:
        self.calls += 1
        return super().encode(text)


class WideTokenizer:
    """Code points, which need 4 bytes each."""

    vocab_size, separator, digest = 0x110000, 0, "wide"

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(letter) for letter in text], np.uint32)

    def decode(self, ids) -> str:
        return "".join(map(chr, ids))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("JAXLAB_DATA_CACHE", str(folder))
    return folder


@pytest.fixture
def shelf(tmp_path):
    """A folder of 60 documents in two kinds of files."""
    folder = tmp_path / "shelf"
    (folder / "inner").mkdir(parents=True)
    for number in range(30):
        (folder / "inner" / f"{number}.txt").write_text(f"text é {number}\n" * (number + 1))
    with open(folder / "many.jsonl", "w") as file:
        for number in range(30):
            file.write(json.dumps({"text": f"record {number}"}) + "\n")
    return folder


@pytest.mark.parametrize("fraction", [0.2, 0.5])
def test_the_tokens_are_those_of_the_documents_split_by_name(shelf, fraction):
    corpus = load_corpus(shelf, tokenizer=ByteTokenizer(), validation_fraction=fraction)
    train, validation = split_documents(read_documents(shelf), fraction)
    assert min(len(train), len(validation)) > 2
    for found, documents in ((corpus.train, train), (corpus.validation, validation)):
        assert isinstance(found, np.memmap)
        assert found.dtype == np.uint8
        assert not found.flags.writeable
        np.testing.assert_array_equal(found, encode_bytes(documents))


def test_long_documents_are_not_cut_by_separators(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in "abc":
        (tmp_path / "texts" / name).write_text(name * 300_000)
    corpus = load_corpus(tmp_path / "texts", tokenizer=ByteTokenizer(), validation_fraction=0.0)
    assert len(corpus.train) == 900_002
    assert np.flatnonzero(corpus.train == 0).tolist() == [300_000, 600_001]
    assert len(corpus.validation) == 0
    assert corpus.validation.dtype == np.uint8
    assert not corpus.validation.flags.writeable


@pytest.mark.parametrize("name", ["one.txt", "one.jsonl"])
@pytest.mark.parametrize("fraction", [0.05, 0.5])
def test_a_single_document_is_cut_at_a_line_end(tmp_path, name, fraction):
    # Longer than a piece, so that pieces before and after the cut are told apart.
    text = "".join(f"line {number} of a long text\n" for number in range(30_000))
    content = json.dumps({"text": text}) if name == "one.jsonl" else text
    (tmp_path / name).write_text(content)
    corpus = load_corpus(tmp_path / name, tokenizer=ByteTokenizer(), validation_fraction=fraction)
    train, validation = bytes(corpus.train).decode(), bytes(corpus.validation).decode()
    assert train + validation == text
    assert train.endswith("\n")
    assert abs(len(train) - (1 - fraction) * len(text)) < 30


@pytest.mark.parametrize(
    ("text", "train"),
    [
        ("abcdefghij", "abcdefgh"),  # no line end at all
        ("ab", "a"),
        ("abc\ndefghijklmnopq", "abc\n"),  # none after the place
        ("abcdefghijklmno\npq\n", "abcdefghijklmno\n"),
        ("a\nbcdefg\n", "a\n"),  # not the last, which would leave nothing
    ],
)
def test_short_texts_are_cut_too(tmp_path, text, train):
    (tmp_path / "one.txt").write_text(text)
    corpus = load_corpus(tmp_path / "one.txt", tokenizer=ByteTokenizer(), validation_fraction=0.2)
    assert bytes(corpus.train).decode() == train
    assert bytes(corpus.validation).decode() == text[len(train) :]


def test_the_second_time_it_comes_from_the_cache(shelf, cache):
    tokenizer = CountingTokenizer()
    first = load_corpus(shelf, tokenizer=tokenizer)
    calls = tokenizer.calls
    again = load_corpus(str(shelf), tokenizer=tokenizer)
    assert tokenizer.calls == calls > 0
    assert again.digest == first.digest
    np.testing.assert_array_equal(again.train, first.train)
    # Where it lies does not matter, nor does another pattern that matches the same.
    shelf.rename(shelf.with_name("elsewhere"))
    load_corpus(shelf.with_name("elsewhere"), tokenizer=tokenizer, pattern="**")
    assert tokenizer.calls == calls
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda shelf: (shelf / "inner" / "7.txt").write_text("other"),
        lambda shelf: (shelf / "inner" / "7.txt").rename(shelf / "inner" / "x.txt"),
        lambda shelf: (shelf / "new.txt").write_text("new"),
        lambda shelf: (shelf / "inner" / "7.txt").unlink(),
        lambda shelf: {"validation_fraction": 0.1},
        lambda shelf: {"pattern": "**/*.txt"},
        lambda shelf: {"skip_bad": True},
        lambda shelf: {"tokenizer": WideTokenizer()},
    ],
)
def test_whatever_changes_the_tokens_makes_another_entry(shelf, cache, change):
    first = load_corpus(shelf, tokenizer=ByteTokenizer(), validation_fraction=0.2)
    settings = change(shelf)
    settings = settings if isinstance(settings, dict) else {}
    second = load_corpus(
        shelf, **{"tokenizer": ByteTokenizer(), "validation_fraction": 0.2, **settings}
    )
    assert len(list(cache.iterdir())) == 2
    assert (second.digest == first.digest) == ("skip_bad" in settings)


def test_the_field_makes_another_entry(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one one", "body": "two two"}')
    for field, text in (("text", b"one one"), ("body", b"two two")):
        corpus = load_corpus(
            tmp_path / "a.jsonl", tokenizer=ByteTokenizer(), field=field, validation_fraction=0.0
        )
        assert bytes(corpus.train) == text


def test_wide_vocabularies(shelf):
    corpus = load_corpus(shelf, tokenizer=WideTokenizer())
    assert corpus.train.dtype == np.uint32
    train, _ = split_documents(read_documents(shelf), 0.05)
    assert WideTokenizer().decode(corpus.train) == "\0".join(d.text.decode() for d in train)
    assert WindowBatches(corpus.train, batch_size=2, context=8, seed=0)[0].dtype == np.int32


def test_bpe(shelf):
    pytest.importorskip("tokenizers")
    tokenizer = BpeTokenizer.train(read_documents(shelf), 300)
    corpus = load_corpus(shelf, tokenizer=tokenizer)
    assert corpus.train.dtype == np.uint16
    train, _ = split_documents(read_documents(shelf), 0.05)
    parts = np.split(corpus.train, np.flatnonzero(corpus.train == tokenizer.separator))
    decoded = [tokenizer.decode(part[place > 0 :]) for place, part in enumerate(parts)]
    assert decoded == [document.text.decode() for document in train]


def test_skipped_input_is_told_each_time(tmp_path):
    good = json.dumps({"text": "good text"})
    (tmp_path / "a.jsonl").write_text(f"[]\n{good}\n" + f"{good}\nbroken\n" * 20)
    seen = []
    for _ in range(2):
        places = []
        corpus = load_corpus(
            tmp_path / "a.jsonl",
            tokenizer=ByteTokenizer(),
            validation_fraction=0.0,
            skip_bad=True,
            on_skip=lambda *place, places=places: places.append(place),
        )
        assert bytes(corpus.train) == b"\0".join([b"good text"] * 21)
        seen.append(places)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 21
    assert seen[0][0] == (
        "a.jsonl line 1",
        "holds an array; allowed: one JSON object a line",
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "train.bin").write_bytes(
            (folder / "train.bin").read_bytes()[:-1] + b"!"
        ),
        lambda folder: (folder / "validation.bin").unlink(),
        lambda folder: (folder / "corpus.json").write_text("{}"),
        lambda folder: (folder / "complete.json").unlink(),
    ],
)
def test_a_damaged_entry_is_built_anew(shelf, cache, damage):
    first = load_corpus(shelf, tokenizer=ByteTokenizer())
    tokens = first.train.copy()
    (entry,) = cache.iterdir()
    damage(entry)
    tokenizer = CountingTokenizer()
    again = load_corpus(shelf, tokenizer=tokenizer)
    assert tokenizer.calls > 0
    assert again.digest == first.digest
    np.testing.assert_array_equal(again.train, tokens)
    assert list(cache.iterdir()) == [entry]


def test_a_disk_that_keeps_nothing_is_named(shelf, cache, monkeypatch):
    monkeypatch.setattr(corpora, "_open", lambda folder: None)
    with pytest.raises(StorageError, match="does not keep"):
        load_corpus(shelf, tokenizer=ByteTokenizer())
    assert list(cache.iterdir()) == []


def test_a_file_that_changes_meanwhile_is_named(shelf, cache):
    class Meddler(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            os.utime(shelf / "inner" / "3.txt", ns=(0, 0))
            return super().encode(text)

    with pytest.raises(UserError, match=r"data\.path=inner/3\.txt: changed while it was read"):
        load_corpus(shelf, tokenizer=Meddler())
    assert list(cache.iterdir()) == []


def test_each_side_gets_a_document(tmp_path, cache):
    """Where all names fall on one side of the split, the first document goes to the other."""
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "six"}')
    for fraction, first in ((1e-9, "validation"), (0.999999999, "train")):
        corpus = load_corpus(
            tmp_path / "a.jsonl", tokenizer=ByteTokenizer(), validation_fraction=fraction
        )
        assert bytes(getattr(corpus, first)) == b"one"
        other = corpus.train if first == "validation" else corpus.validation
        assert bytes(other) == b"two\x00six"


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan"), float("inf")])
def test_fractions_out_of_range(shelf, fraction):
    with pytest.raises(UserError, match=r"data\.validation_fraction="):
        load_corpus(shelf, tokenizer=ByteTokenizer(), validation_fraction=fraction)


@pytest.mark.parametrize("kind", ["txt", "jsonl.gz"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, kind):
    small, large = (peak(write_corpus(tmp_path, kind, size)) for size in (2_000_000, 20_000_000))
    assert large - small < 20_000_000
