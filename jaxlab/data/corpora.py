"""A user's text as tokens for training and validation, prepared once and kept in the cache.

The tokens are files that are mapped into memory, and everything on the way there streams, so
memory does not grow with the corpus, except for the names of its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxlab.data import cache
from jaxlab.data.readers import OnSkip, Piece, Source, find_source, read_pieces
from jaxlab.data.text import Corpus, Document, split_documents
from jaxlab.data.tokenizers import Tokenizer, token_dtype
from jaxlab.errors import StorageError, UserError

__all__ = ["load_corpus"]

# To be raised when the same files and settings would give other tokens than before.
_FORMAT = 1
_TRAIN, _VALIDATION = "train.bin", "validation.bin"
_SUMMARY, _SKIPPED = "corpus.json", "skipped.jsonl"
_BUFFER = 1 << 20


def load_corpus(
    path: os.PathLike[str] | str,
    *,
    tokenizer: Tokenizer,
    field: str = "text",
    pattern: str = "**/*",
    validation_fraction: float = 0.05,
    skip_bad: bool = False,
    on_skip: OnSkip | None = None,
) -> Corpus:
    """Tokens of a file or folder, split by document, with separators between documents.

    The first call reads and encodes everything into `cache.cache_folder()`; later ones with files
    of the same names and contents, and with the same settings, find it there. On which side of
    the split a document falls depends on its name alone (`text.split_documents`). If all fall on
    one side, the first goes to the other. The text of a single document is split at a line end
    instead, so that its last part is held out.

    Args:
      path: as for `readers.read_documents`.
      tokenizer: makes the tokens.
      field: as for `readers.read_documents`.
      pattern: as for `readers.read_documents`.
      validation_fraction: share held out, in `[0, 1)`; at 0 there are no tokens for validation.
      skip_bad: pass over lines and files that cannot be used.
      on_skip: then called with the place and the reason of each; also when the corpus comes from
        the cache.

    Returns:
      Read-only tokens in `token_dtype(tokenizer.vocab_size)`, mapped into memory. The digest is
      SHA-256 over both sides and their type, and is checked every time.

    Raises:
      UserError: as for `readers.read_documents`; or the fraction is out of range, one side of the
        split got nothing, a file changed meanwhile, or the cache cannot be written.
      StorageError: the cache does not keep what is written to it.
    """
    if not 0 <= validation_fraction < 1:
        raise UserError(
            "data.validation_fraction", validation_fraction, "must be at least 0 and below 1"
        )
    settings = _Settings(tokenizer, field, float(validation_fraction), skip_bad)
    source = find_source(path, pattern=pattern, skip_bad=skip_bad, on_skip=on_skip)
    before = list(_states(source))
    key = settings.key(source)

    def build(folder: Path) -> None:
        _write_corpus(folder, source, settings)
        for file, old, new in zip(source.files, before, _states(source), strict=True):
            if old != new:
                raise UserError("data.path", file.shown, "changed while it was read; run again")

    for _ in range(2):
        folder = cache.cached(key, build)
        corpus = _open(folder)
        if corpus is not None:
            if on_skip is not None:
                _tell_skipped(folder, on_skip)
            return corpus
        cache.discard(key)
    raise StorageError(f"{cache.cache_folder()} does not keep what is written to it")


@dataclass(frozen=True)
class _Settings:
    """What the tokens depend on besides the files."""

    tokenizer: Tokenizer
    field: str
    validation_fraction: float
    skip_bad: bool

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.tokenizer.vocab_size).newbyteorder("<")

    def key(self, source: Source) -> str:
        settings = [self.tokenizer.digest, self.field, self.validation_fraction, self.skip_bad]
        digest = hashlib.sha256(json.dumps([_FORMAT, *settings]).encode())
        for file in source.files:
            try:
                with open(file.path, "rb") as content:
                    found = hashlib.file_digest(content, "sha256").hexdigest()
            except OSError:
                found = "unreadable"  # which is an error or skipped when it is to be read
            digest.update(json.dumps([file.name, found]).encode())
        return f"corpus-{digest.hexdigest()}"

    def pieces(self, source: Source, on_skip: OnSkip | None = None) -> Iterator[Piece]:
        return read_pieces(source, field=self.field, skip_bad=self.skip_bad, on_skip=on_skip)


class _TokenFile:
    """Tokens on their way to the disk."""

    def __init__(self, file: BinaryIO, settings: _Settings) -> None:
        self._file, self._encode = file, settings.tokenizer.encode
        self._dtype = settings.dtype
        self._separator = np.array([settings.tokenizer.separator], self._dtype)
        self.filled = False

    def add(self, text: str, *, first: bool) -> None:
        if first and self.filled:
            self._file.write(self._separator.data)
        self._file.write(self._encode(text).astype(self._dtype, copy=False).data)
        self.filled = True


def _states(source: Source) -> Iterator[int]:
    """A number for each file that changes with its content."""
    for file in source.files:
        try:
            status = os.stat(file.path)
        except OSError:
            yield -1
        else:
            yield hash((status.st_ino, status.st_size, status.st_mtime_ns))


def _write_corpus(folder: Path, source: Source, settings: _Settings) -> None:
    fraction = settings.validation_fraction
    alone = _length_if_alone(settings.pieces(source)) if fraction > 0 else None
    filled = _write_tokens(folder, source, settings, alone)
    if filled != (True, True) and fraction > 0 and alone is None:
        # Few documents may all fall on one side: then one of them is put on the other.
        filled = _write_tokens(folder, source, settings, None, spare_side=not filled[1])
    if not filled[0] or (fraction > 0 and not filled[1]):
        raise UserError(
            "data.validation_fraction",
            fraction,
            f"everything in {source.shown} falls on one side of the split; "
            "allowed: another fraction, or more documents",
        )
    dtype = settings.dtype.str
    summary = {"dtype": dtype, "digest": _digest(folder, dtype)}
    (folder / _SUMMARY).write_text(json.dumps(summary) + "\n", encoding="utf-8")


def _write_tokens(
    folder: Path,
    source: Source,
    settings: _Settings,
    alone: int | None,
    spare_side: bool | None = None,
) -> tuple[bool, bool]:
    """Writes both token files; whether each got any.

    With `spare_side` the first document goes to that side (True for validation), all others to
    the other.
    """
    with contextlib.ExitStack() as stack:
        train, validation, skipped = (
            stack.enter_context(open(folder / name, "wb", buffering=_BUFFER))
            for name in (_TRAIN, _VALIDATION, _SKIPPED)
        )

        def note(where: str, reason: str) -> None:
            skipped.write(json.dumps([where, reason]).encode() + b"\n")

        pieces = settings.pieces(source, note)
        if spare_side is not None:
            parts = _split_off_first(pieces, spare_side)
        elif alone is not None:
            parts = _split_within(pieces, alone, settings.validation_fraction)
        else:
            parts = _split_by_name(pieces, settings.validation_fraction)
        sides = (_TokenFile(train, settings), _TokenFile(validation, settings))
        for piece, held_out in parts:
            sides[held_out].add(piece.text, first=piece.first)
    return sides[0].filled, sides[1].filled


def _length_if_alone(pieces: Iterable[Piece]) -> int | None:
    """Characters of the only document, or None if there are several."""
    length = documents = 0
    for piece in pieces:
        documents += piece.first
        if documents > 1:
            return None
        length += len(piece.text)
    return length


def _split_by_name(pieces: Iterable[Piece], fraction: float) -> Iterator[tuple[Piece, bool]]:
    held_out = False
    for piece in pieces:
        if piece.first:
            _, validation = split_documents([Document(piece.name, b"")], fraction)
            held_out = bool(validation)
        yield piece, held_out


def _split_off_first(pieces: Iterable[Piece], side: bool) -> Iterator[tuple[Piece, bool]]:
    documents = 0
    for piece in pieces:
        documents += piece.first
        yield piece, side if documents == 1 else not side


def _split_within(
    pieces: Iterable[Piece], length: int, fraction: float
) -> Iterator[tuple[Piece, bool]]:
    """Cuts the only document in two."""
    cut = min(round(length * (1 - fraction)), length - 1)
    start, held_out = 0, False
    for piece in pieces:
        text, end = piece.text, start + len(piece.text)
        if held_out or end <= cut:
            yield piece, held_out
        else:
            last = len(text) - (end == length)
            place = _line_end_near(text, cut - start, last)
            for part, held_out in ((text[:place], False), (text[place:], True)):
                if part:
                    yield Piece(piece.name, part, piece.first and not held_out), held_out
        start = end


def _line_end_near(text: str, place: int, last: int) -> int:
    """The line end nearest to `place` and not beyond `last`, or `place` if there is none."""
    ends = (text.rfind("\n", 0, place) + 1, text.find("\n", place) + 1)
    return min(
        (end for end in ends if 0 < end <= last),
        key=lambda end: abs(end - place),
        default=min(place, last),
    )


def _digest(folder: Path, dtype: str) -> str:
    size = (folder / _TRAIN).stat().st_size
    digest = hashlib.sha256(f"{dtype} {size} ".encode())
    for name in (_TRAIN, _VALIDATION):
        with open(folder / name, "rb") as file:
            # Read and not mapped: mapped pages would count as memory of this process.
            while block := file.read(_BUFFER):
                digest.update(block)
    return digest.hexdigest()


def _open(folder: Path) -> Corpus | None:
    """The tokens in a folder, or None if they are not what was written."""
    try:
        summary = json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))
        dtype, digest = summary["dtype"], summary["digest"]
        if _digest(folder, dtype) != digest:
            return None
        train, validation = (_mapped(folder / name, dtype) for name in (_TRAIN, _VALIDATION))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Corpus(train, validation, digest)


def _mapped(path: Path, dtype: str) -> np.ndarray:
    if path.stat().st_size:
        return np.memmap(path, dtype, mode="r")
    nothing = np.empty(0, dtype)
    nothing.flags.writeable = False
    return nothing


def _tell_skipped(folder: Path, on_skip: OnSkip) -> None:
    with open(folder / _SKIPPED, encoding="utf-8") as lines:
        for line in lines:
            on_skip(*json.loads(line))
