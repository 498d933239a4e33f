"""The text that every Python installation carries: its documentation and its own sources.

It needs no download, but it is that of the running Python: another version has other text, which
the digest of the corpus tells apart.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxlab.errors import UserError

__all__ = [
    "BYTE_VOCABULARY_SIZE",
    "SEPARATOR",
    "Corpus",
    "Document",
    "encode_bytes",
    "split_documents",
    "standard_library_corpus",
    "standard_library_documents",
]

BYTE_VOCABULARY_SIZE = 256
SEPARATOR = 0

_KINDS = ("source", "topic")
# Third-party code, tests (full of random data), and the source form of the topics.
_SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
# Written when Python was built or by whoever packaged it: they hold paths of one machine.
_GENERATED_FOLDER_PREFIX = "config-"
_GENERATED_FILE_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Document:
    """A named piece of text.

    Attributes:
      name: unique, `source/<path>` or `topic/<title>`, the same on every machine.
      text: UTF-8, with `\\n` at the ends of lines.
    """

    name: str
    text: bytes


@dataclass(frozen=True, eq=False)
class Corpus:
    """Byte tokens for training and for validation, from different documents.

    Attributes:
      train: uint8 tokens, read-only.
      validation: uint8 tokens, read-only.
      digest: hexadecimal SHA-256 of both.
    """

    train: np.ndarray
    validation: np.ndarray
    digest: str


def standard_library_documents(
    max_bytes: int | None = None, *, kinds: Iterable[str] = _KINDS
) -> list[Document]:
    """Documentation topics and source files of the running Python, in a fixed mixed order.

    The order depends on the names alone, so it is the same on every file system, and a prefix of
    it is a fair sample. Files that are unreadable, empty or not UTF-8 are left out, and so are
    tests, installed packages and files that the build of Python generated.

    Args:
      max_bytes: the last document is cut so that the texts hold this many bytes (up to 3 fewer,
        not to split a character); everything by default.
      kinds: which of `"source"` and `"topic"` to take.

    Raises:
      ValueError: `max_bytes` is not positive, or `kinds` is empty or holds another word.
      UserError: this Python was installed without the text asked for.
    """
    if max_bytes is not None and max_bytes <= 0:
        raise ValueError(f"max_bytes={max_bytes}: must be positive, or None for everything")
    readers = _readers(_checked_kinds(kinds))
    documents: list[Document] = []
    total = 0
    for name in sorted(readers, key=lambda name: _stable_hash("order", name)):
        text = readers[name]()
        if max_bytes is not None and total + len(text) > max_bytes:
            text = text[: max_bytes - total].decode(errors="ignore").encode()
            max_bytes = total + len(text)
        if text:
            documents.append(Document(name, text))
        total += len(text)
        if total == max_bytes:
            break
    return documents


def split_documents(
    documents: Iterable[Document], validation_fraction: float = 0.05
) -> tuple[list[Document], list[Document]]:
    """Parts documents into training and validation by a hash of their names.

    A document falls on the same side on every machine, whatever other documents there are.

    Args:
      documents: their order is kept.
      validation_fraction: probability of falling into validation, in `[0, 1)`.

    Returns:
      `(training, validation)`.

    Raises:
      ValueError: the fraction is out of range.
    """
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction={validation_fraction}: must be in [0, 1)")
    bound = validation_fraction * 2.0**64
    training: list[Document] = []
    validation: list[Document] = []
    for document in documents:
        held_out = _stable_hash("split", document.name) < bound
        (validation if held_out else training).append(document)
    return training, validation


def encode_bytes(documents: Iterable[Document]) -> np.ndarray:
    """The bytes of the documents as uint8 tokens, with a separator token between two documents.

    >>> encode_bytes([Document("a", b"Hi"), Document("b", b"!")]).tolist()
    [72, 105, 0, 33]
    """
    joined = bytes([SEPARATOR]).join(document.text for document in documents)
    return np.frombuffer(joined, dtype=np.uint8)


def standard_library_corpus(
    *,
    max_bytes: int | None = None,
    validation_fraction: float = 0.05,
    kinds: Iterable[str] = _KINDS,
) -> Corpus:
    """Byte tokens of `standard_library_documents`, split by document.

    Built once per process for each setting.

    Args:
      max_bytes: bytes of text to use; everything by default.
      validation_fraction: share of the documents held out, in `[0, 1)`; at 0 there is no
        validation text.
      kinds: which of `"source"` and `"topic"` to take.

    Raises:
      ValueError: a value is out of its range.
      UserError: this Python was installed without the text asked for, or one side of the split
        got no document.
    """
    return _corpus(max_bytes, validation_fraction, _checked_kinds(kinds))


@functools.lru_cache(maxsize=4)
def _corpus(max_bytes: int | None, validation_fraction: float, kinds: tuple[str, ...]) -> Corpus:
    documents = standard_library_documents(max_bytes, kinds=kinds)
    training, held_out = split_documents(documents, validation_fraction)
    if not training or (validation_fraction > 0 and not held_out):
        raise UserError(
            "max_bytes",
            max_bytes,
            f"only {len(documents)} documents fit, all on one side of the split at "
            f"validation_fraction={validation_fraction}; allow more bytes",
        )
    train, validation = encode_bytes(training), encode_bytes(held_out)
    digest = hashlib.sha256(len(train).to_bytes(8, "little"))
    digest.update(train.tobytes())
    digest.update(validation.tobytes())
    return Corpus(train, validation, digest.hexdigest())


def _stable_hash(purpose: str, name: str) -> int:
    # The purpose keeps order and split independent: a prefix of the order holds both sides.
    return int.from_bytes(hashlib.sha256(f"{purpose}:{name}".encode()).digest()[:8], "big")


def _checked_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    wanted = tuple(sorted(set(kinds)))
    if not wanted or not set(wanted) <= set(_KINDS):
        raise ValueError(f"kinds={wanted}: must be one or both of {_KINDS}")
    return wanted


def _readers(kinds: tuple[str, ...]) -> dict[str, Callable[[], bytes]]:
    """What to call for the text of each document; files are read only if they are wanted."""
    readers: dict[str, Callable[[], bytes]] = {}
    if "topic" in kinds:
        topics = _topics()
        readers |= {
            f"topic/{title}": functools.partial(str.encode, topics[title]) for title in topics
        }
    if "source" in kinds:
        root = Path(sysconfig.get_path("stdlib"))
        files = {
            f"source/{path.relative_to(root).as_posix()}": functools.partial(_read_source, path)
            for path in _source_files(root)
        }
        if not files:
            raise UserError(
                "data",
                "standard library",
                f"needs Python's own source files (*.py), and {root} has none; "
                "use a Python that was installed with them",
            )
        readers |= files
    return readers


def _topics() -> dict[str, str]:
    try:
        return importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise UserError(
            "data",
            "standard library",
            "needs Python's documentation topics (the module pydoc_data.topics), which this "
            "installation lacks; use a complete Python, or sources only",
        ) from error


def _source_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _SKIPPED_FOLDERS and not name.startswith(_GENERATED_FOLDER_PREFIX)
        ]
        for name in files:
            if name.endswith(".py") and not name.startswith(_GENERATED_FILE_PREFIXES):
                yield Path(folder, name)


def _read_source(path: Path) -> bytes:
    try:
        # Universal newlines: an installation on Windows has the same text.
        return path.read_text(encoding="utf-8").encode()
    except (OSError, UnicodeDecodeError):
        return b""
