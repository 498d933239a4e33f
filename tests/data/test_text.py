import hashlib
import sysconfig
import types
from pathlib import Path

import numpy as np
import pytest

from jaxlab.data import text
from jaxlab.data.text import (
    Document,
    encode_bytes,
    split_documents,
    standard_library_corpus,
    standard_library_documents,
)
from jaxlab.errors import UserError


@pytest.fixture
def installation(tmp_path, monkeypatch):
    """A small installation in place of the real one; its folder."""
    files = {
        "abc.py": b"import abc\n",
        "json/decoder.py": b"a = 1\r\nb = 2\r\n",
        "json/tool.py": "é = 3\n".encode(),
        "empty.py": b"",
        "latin.py": b"# \xe9\n",
        "notes.txt": b"no source",
        "test/test_abc.py": b"test",
        "json/tests/test_tool.py": b"test",
        "idlelib/idle_test/test_it.py": b"test",
        "site-packages/numpy.py": b"package",
        "dist-packages/numpy.py": b"package",
        "json/__pycache__/tool.py": b"cache",
        "pydoc_data/topics.py": b"topics = {}",
        "_sysconfigdata__linux_x86_64.py": b"prefix = '/home/somebody'",
        "config-3.12-x86_64/python-config.py": b"prefix = '/home/somebody'",
        "sitecustomize.py": b"site",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    topics = types.SimpleNamespace(topics={"if": "The if statement\n", "del": "The del\n"})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(text.importlib, "import_module", lambda name: topics)
    text._corpus.cache_clear()
    yield tmp_path
    text._corpus.cache_clear()


def test_only_the_languages_own_text_is_taken(installation):
    documents = {document.name: document.text for document in standard_library_documents()}
    assert documents == {
        "source/abc.py": b"import abc\n",
        "source/json/decoder.py": b"a = 1\nb = 2\n",
        "source/json/tool.py": "é = 3\n".encode(),
        "topic/if": b"The if statement\n",
        "topic/del": b"The del\n",
    }


def test_kinds_select(installation):
    topics = standard_library_documents(kinds=("topic",))
    sources = standard_library_documents(kinds=["source"])
    assert {document.name for document in topics} == {"topic/if", "topic/del"}
    assert all(document.name.startswith("source/") for document in sources)
    both = standard_library_documents()
    assert [d for d in both if d in topics] == topics
    assert [d for d in both if d in sources] == sources


def test_the_order_does_not_come_from_the_file_system(installation, monkeypatch):
    walk = text.os.walk

    def backwards(root):
        for folder, subfolders, files in walk(root):
            subfolders.reverse()
            yield folder, subfolders, files[::-1]

    expected = standard_library_documents()
    monkeypatch.setattr(text.os, "walk", backwards)
    assert standard_library_documents() == expected


def test_a_budget_takes_a_prefix_and_cuts_the_last_document(installation):
    everything = standard_library_documents()
    size = sum(len(document.text) for document in everything)
    for budget in range(1, size + 3):
        documents = standard_library_documents(budget)
        joined = b"".join(document.text for document in documents)
        whole = b"".join(document.text for document in everything)
        assert whole.startswith(joined)
        assert joined.decode()
        # The only character of two bytes may fall on the cut.
        assert min(budget, size) - len(joined) in (0, 1)
        assert all(a.name == b.name for a, b in zip(documents, everything, strict=False))
    assert standard_library_documents(size) == everything


def test_a_file_that_cannot_be_read_is_left_out(installation, monkeypatch):
    read_text = Path.read_text

    def refuse(path, **options):
        if path.name == "abc.py":
            raise PermissionError(path)
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert "source/abc.py" not in {document.name for document in standard_library_documents()}


def test_a_python_without_sources_is_named(installation):
    for path in installation.rglob("*.py"):
        path.unlink()
    with pytest.raises(UserError, match=r"data=standard library: needs Python's own source files"):
        standard_library_documents()
    assert len(standard_library_documents(kinds=("topic",))) == 2


def test_a_python_without_topics_is_named(installation, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(text.importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"pydoc_data\.topics"):
        standard_library_documents()
    assert len(standard_library_documents(kinds=("source",))) == 3


def test_misuse_is_refused(installation):
    with pytest.raises(ValueError, match="max_bytes=0"):
        standard_library_documents(0)
    with pytest.raises(ValueError, match="kinds="):
        standard_library_documents(kinds=("sources",))
    with pytest.raises(ValueError, match="kinds="):
        standard_library_corpus(kinds=())
    with pytest.raises(ValueError, match=r"validation_fraction=1\.0"):
        split_documents([], 1.0)


NAMED = [Document(f"source/module_{index}.py", b"x") for index in range(400)]


def test_the_split_depends_on_the_name_alone():
    training, validation = split_documents(NAMED, 0.25)
    assert not {d.name for d in training} & {d.name for d in validation}
    assert sorted(d.name for d in training + validation) == sorted(d.name for d in NAMED)
    again = split_documents(NAMED[::-2], 0.25)[1]
    assert {d.name for d in again} == {d.name for d in validation} & {d.name for d in NAMED[::-2]}
    # Binomial(400, 1/4): outside 60..140 with probability below 1e-5.
    assert 60 < len(validation) < 140
    assert set(split_documents(NAMED, 0.1)[1]) <= set(validation)
    assert split_documents(NAMED, 0.0) == (NAMED, [])


def test_the_split_of_a_name_is_fixed():
    hashed = int.from_bytes(hashlib.sha256(b"split:source/abc.py").digest()[:8], "big") / 2**64
    document = Document("source/abc.py", b"x")
    assert split_documents([document], hashed * 0.999) == ([document], [])
    assert split_documents([document], hashed * 1.001) == ([], [document])


def test_documents_are_joined_with_a_separator():
    tokens = encode_bytes([Document("a", b"ab"), Document("b", "é".encode())])
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == [97, 98, 0, 0xC3, 0xA9]
    assert encode_bytes([]).size == 0


def test_the_corpus_holds_each_side_of_the_split(installation):
    corpus = standard_library_corpus(validation_fraction=0.4)
    training, validation = split_documents(standard_library_documents(), 0.4)
    assert training
    assert validation
    np.testing.assert_array_equal(corpus.train, encode_bytes(training))
    np.testing.assert_array_equal(corpus.validation, encode_bytes(validation))
    assert len(bytes.fromhex(corpus.digest)) == 32
    assert not corpus.train.flags.writeable
    assert not corpus.validation.flags.writeable
    assert standard_library_corpus(validation_fraction=0.4, kinds=["topic", "source"]) is corpus


def test_the_digest_tells_corpora_apart(installation):
    whole = standard_library_corpus(validation_fraction=0.0)
    assert whole.validation.size == 0
    parted = standard_library_corpus(validation_fraction=0.4)
    shorter = standard_library_corpus(validation_fraction=0.0, max_bytes=20)
    assert len({whole.digest, parted.digest, shorter.digest}) == 3
    text._corpus.cache_clear()
    assert standard_library_corpus(validation_fraction=0.0).digest == whole.digest


def test_a_one_sided_split_is_named(installation):
    with pytest.raises(UserError, match="max_bytes=1: only 1 documents fit"):
        standard_library_corpus(max_bytes=1)


def test_the_running_python_has_text_enough():
    documents = standard_library_documents(200_000)
    assert 199_996 < sum(len(document.text) for document in documents) <= 200_000
    corpus = standard_library_corpus(max_bytes=400_000)
    assert corpus.train.size > 10 * corpus.validation.size > 0
    assert corpus.train.max() < 256
