"""Documents of any length packed into rows of one length, once and up front.

Each row holds whole documents, or pieces of long ones, and little padding. Since the rows lie on
disk and are addressed by number, any batch of packed documents can be replayed.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxlab.data.batches import EndlessBatches, EpochOrder
from jaxlab.errors import StorageError, UserError

__all__ = ["PackedBatches", "PackedRows", "pack_documents"]

_TOKENS, _BOUNDS, _SUMMARY = "tokens.bin", "bounds.bin", "rows.json"
# Documents are packed in chunks of about this many tokens or rows, whichever is more: sorting a
# chunk by length leaves less padding than taking the documents as they come.
_CHUNK_TOKENS = 2**20
_CHUNK_ROWS = 64
# Rows that are not full and wait for documents of the next chunk.
_OPEN_ROWS = 256


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of packed documents in a folder, mapped into memory.

    Segment numbers and positions are not stored: they follow from one bit a place.

    Attributes:
      folder: where the rows lie.
      tokens: `[rows, length]`, read-only; padding holds the separator.
      bounds: bits of `length + 1` places, packed along the second axis, read-only; set where a
        segment begins and where the last one of the row has ended.
      num_tokens: tokens in all segments, separators among them, without padding.
      digest: hexadecimal SHA-256 of the rows.
    """

    folder: Path
    tokens: np.ndarray
    bounds: np.ndarray
    num_tokens: int
    digest: str

    @classmethod
    def load(cls, folder: Path | str) -> PackedRows:
        """The rows that `pack_documents` left in a folder.

        Raises:
          UserError: the folder holds no packed rows, or damaged ones.
        """
        folder = Path(folder)
        try:
            summary = json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))
            shape = summary["rows"], summary["length"]
            return cls(
                folder,
                _mapped(folder / _TOKENS, summary["token_type"], shape),
                _mapped(folder / _BOUNDS, "|u1", (shape[0], shape[1] // 8 + 1)),
                summary["num_tokens"],
                summary["digest"],
            )
        except (OSError, LookupError, TypeError, ValueError) as error:
            problem = f"holds no complete packed rows ({error}); pack the documents again"
            raise UserError("folder", folder, problem) from None

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.tokens)

    def __reduce__(self) -> tuple[Callable[[Path], PackedRows], tuple[Path]]:
        # Another process maps the files again instead of receiving their content.
        return PackedRows.load, (self.folder,)

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return self.tokens.shape[1]

    @property
    def padding(self) -> float:
        """Share of the places that hold no token, in `[0, 1)`."""
        return 1.0 - self.num_tokens / self.tokens.size

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Some of the rows.

        Args:
          rows: their numbers, integers `[count]`.

        Returns:
          int32 `tokens`, `segment_ids` (1, 2, ... within a row; 0 for padding, which is at its
          end) and `positions` (from 0 in each segment; 0 in padding), each `[count, length]`.
        """
        marks = np.unpackbits(self.bounds[rows], axis=1, count=self.length + 1)
        numbers = marks.cumsum(axis=1, dtype=np.int32)
        # The last mark of a row is where its padding begins, behind the row if there is none.
        held = numbers[:, :-1] < numbers[:, -1:]
        places = np.arange(self.length, dtype=np.int32)[None, :]
        begins = np.maximum.accumulate(places * marks[:, :-1], axis=1)
        return {
            "tokens": self.tokens[rows].astype(np.int32),
            "segment_ids": numbers[:, :-1] * held,
            "positions": (places - begins) * held,
        }


class PackedBatches(EndlessBatches[dict[str, np.ndarray]]):
    """Batches of packed rows, in the orders of `EpochOrder`.

    A batch is a dict of int32 arrays `[batch_size, length]`: `tokens`, `segment_ids` and
    `positions`, as `PackedRows.read` gives them.

    Attributes:
      rows: what the batches are read from.
      batch_size: rows in a batch.
      seed: of the orders.
      steps_per_epoch: batches in a pass over the rows.
    """

    def __init__(self, rows: PackedRows, *, batch_size: int, seed: int) -> None:
        """Reads nothing yet.

        Args:
          rows: packed documents.
          batch_size: rows in a batch, at least 1.
          seed: of the orders, at least 0.

        Raises:
          ValueError: a number is out of its range.
          UserError: there are too few rows for one batch.
        """
        if len(rows) < batch_size:
            raise UserError(
                "data",
                f"{len(rows)} packed rows of {rows.length} tokens",
                f"too few for one batch: batch_size={batch_size}",
            )
        self._order = EpochOrder(len(rows), batch_size=batch_size, seed=seed)
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.steps_per_epoch = self._order.steps_per_epoch

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step."""
        return self.rows.read(self._order.rows(step))


def pack_documents(
    documents: Iterable[np.ndarray], length: int, *, separator: int, folder: Path | str
) -> PackedRows:
    """Packs documents into rows of one length and writes them to a folder.

    The separator follows each document and ends its segment, so that a model can learn where
    documents end; it also fills the padding. A document that does not fit into a row with its
    separator is cut into pieces of `length`, each a segment of its own; there is no separator
    where it would be a piece by itself. Empty documents are left out.

    Documents are read one after another and written as rows fill up; memory holds a chunk of
    about a million tokens, of a mapped document too. Within a chunk the longest pieces are placed
    first, each into the open row that it fills best. The same documents give the same rows.

    Args:
      documents: tokens of each, integers `[n]`, all of one type, which the rows keep.
      length: tokens in a row, at least 2.
      separator: token that is no part of a document.
      folder: made if it is missing; earlier rows in it are replaced. Until all is written it
        counts as holding none.

    Returns:
      The rows, read from the folder.

    Raises:
      TypeError: a document's tokens are not integers, or of another type than those before.
      ValueError: a document is not one row of tokens, or a number is out of its range.
      UserError: there are no tokens.
      jaxlab.errors.StorageError: the folder could not be written.
    """
    if length < 2:
        raise ValueError(f"length={length}: must be at least 2")
    folder = Path(folder)
    # A whole number of rows: a document may be cut there without a trace.
    size = max(_CHUNK_TOKENS // length, _CHUNK_ROWS) * length
    open_rows = _OpenRows(length, separator)
    with _Writer(folder) as writer:
        for chunk in _chunks(_parts(documents, size, separator), size):
            writer.add(*open_rows.add(chunk))
        if not open_rows.num_tokens:
            raise UserError("data", "0 tokens", "there is nothing to pack: no document has text")
        writer.add(*open_rows.close(0))
        writer.finish(open_rows.num_tokens)
    return PackedRows.load(folder)


class _OpenRows:
    """Rows that still have space, and the placing of documents into them."""

    def __init__(self, length: int, separator: int) -> None:
        self.num_tokens = 0
        self._length, self._separator = length, separator
        # Space left in each open row, ascending, and the row's number.
        self._spaces: list[int] = []
        self._rows: list[int] = []
        self._tokens = np.empty((0, length), np.uint8)
        self._bounds = np.empty((0, length + 1), np.bool_)

    def add(self, documents: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Places documents; gives the tokens and bounds of the rows that are closed by that."""
        tokens, sizes = _pieces(documents, self._length, self._separator)
        starts, count = self._places(sizes)
        self._grow(count, tokens.dtype)
        row, place = np.divmod(starts, self._length)
        self._bounds[row, place] = True
        ends = np.cumsum(sizes)
        targets = np.repeat(starts - (ends - sizes), sizes) + np.arange(len(tokens))
        self._tokens.reshape(-1)[targets] = tokens
        self.num_tokens += len(tokens)
        return self.close(_OPEN_ROWS)

    def close(self, keep: int) -> tuple[np.ndarray, np.ndarray]:
        """Gives all rows but the `keep` emptiest ones, which stay open."""
        ends = np.full(len(self._tokens), self._length)
        ends[self._rows] = self._length - np.array(self._spaces, np.int64)
        first = max(0, len(self._rows) - keep)
        kept = self._rows[first:]
        closed = np.ones(len(self._tokens), np.bool_)
        closed[kept] = False
        bounds = self._bounds[closed]
        bounds[np.arange(len(bounds)), ends[closed]] = True
        done = self._tokens[closed], bounds
        self._tokens, self._bounds = self._tokens[kept], self._bounds[kept]
        self._spaces, self._rows = self._spaces[first:], list(range(len(kept)))
        return done

    def _places(self, sizes: np.ndarray) -> tuple[np.ndarray, int]:
        """Best fit, the largest pieces first.

        Returns:
          Where each piece begins in the rows laid end to end, and the number of rows.
        """
        length, spaces, rows = self._length, self._spaces, self._rows
        count = len(self._tokens)
        starts = np.empty(len(sizes), np.int64)
        order = np.argsort(-sizes, kind="stable")
        found = []
        for size in sizes[order].tolist():
            best = bisect.bisect_left(spaces, size)
            if best < len(spaces):
                space, row = spaces.pop(best), rows.pop(best)
            else:
                space, row = length, count
                count += 1
            found.append((row + 1) * length - space)
            if space > size:
                at = bisect.bisect_left(spaces, space - size)
                spaces.insert(at, space - size)
                rows.insert(at, row)
        starts[order] = found
        return starts, count

    def _grow(self, count: int, token_type: np.dtype) -> None:
        old = len(self._tokens)
        tokens = np.full((count, self._length), self._separator, token_type)
        bounds = np.zeros((count, self._length + 1), np.bool_)
        tokens[:old], bounds[:old] = self._tokens, self._bounds
        self._tokens, self._bounds = tokens, bounds


def _parts(
    documents: Iterable[np.ndarray], max_tokens: int, separator: int
) -> Iterator[np.ndarray]:
    """The documents, checked; long ones in parts of `max_tokens`, empty ones not at all."""
    token_type = None
    for document in documents:
        if document.ndim != 1:
            raise ValueError(f"a document has shape {document.shape}: must be one row of tokens")
        if token_type is None:
            token_type = document.dtype
            _check_type(token_type, separator)
        if document.dtype != token_type:
            raise TypeError(f"a document has type {document.dtype}, one before it {token_type}")
        for begin in range(0, len(document), max_tokens):
            yield document[begin : begin + max_tokens]


def _chunks(parts: Iterable[np.ndarray], least_tokens: int) -> Iterator[list[np.ndarray]]:
    chunk: list[np.ndarray] = []
    total = 0
    for part in parts:
        chunk.append(part)
        total += len(part)
        if total >= least_tokens:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def _check_type(token_type: np.dtype, separator: int) -> None:
    if not np.issubdtype(token_type, np.integer):
        raise TypeError(f"tokens have type {token_type}: must be integers")
    if not 0 <= separator <= np.iinfo(token_type).max:
        raise ValueError(f"separator={separator}: must be a token of type {token_type}")


def _pieces(
    documents: list[np.ndarray], length: int, separator: int
) -> tuple[np.ndarray, np.ndarray]:
    """All tokens, separators among them, and the sizes of the pieces they are cut into."""
    end = np.array([separator], documents[0].dtype)
    parts = []
    for document in documents:
        parts.append(document)
        if len(document) % length:
            parts.append(end)
    sizes = np.fromiter(map(len, documents), np.int64, len(documents))
    sizes += sizes % length > 0
    counts = -(-sizes // length)
    pieces = np.full(counts.sum(), length)
    pieces[np.cumsum(counts) - 1] = sizes - (counts - 1) * length
    return np.concatenate(parts), pieces


class _Writer:
    """The files of packed rows; the summary, which makes them count, comes last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hashes = hashlib.sha256(), hashlib.sha256()
        self._num_rows, self._length, self._token_type = 0, 0, ""
        with _storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # Not written over: somebody may have mapped the earlier files.
            for name in (_SUMMARY, _TOKENS, _BOUNDS):
                (folder / name).unlink(missing_ok=True)
            self._files = [(folder / name).open("wb") for name in (_TOKENS, _BOUNDS)]

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._close()

    def _close(self) -> None:
        for file in self._files:
            file.close()

    def add(self, tokens: np.ndarray, bounds: np.ndarray) -> None:
        """Appends rows."""
        self._num_rows += len(tokens)
        self._length, self._token_type = tokens.shape[1], tokens.dtype.str
        packed = np.packbits(bounds, axis=1)
        with _storage_errors(self._folder):
            for file, hashed, rows in zip(self._files, self._hashes, (tokens, packed), strict=True):
                file.write(rows.data)
                hashed.update(rows.data)

    def finish(self, num_tokens: int) -> None:
        """Writes the summary."""
        summary = {
            "rows": self._num_rows,
            "length": self._length,
            "token_type": self._token_type,
            "num_tokens": num_tokens,
        }
        shape = json.dumps(summary).encode()
        digests = [hashed.digest() for hashed in self._hashes]
        summary["digest"] = hashlib.sha256(b"".join([shape, *digests])).hexdigest()
        unfinished = self._folder / f"{_SUMMARY}.part"
        with _storage_errors(self._folder):
            self._close()
            unfinished.write_text(json.dumps(summary), encoding="utf-8")
            unfinished.replace(self._folder / _SUMMARY)


@contextlib.contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}") from error


def _mapped(path: Path, type_name: str, shape: tuple[int, int]) -> np.ndarray:
    token_type = np.dtype(type_name)
    expected, actual = shape[0] * shape[1] * token_type.itemsize, path.stat().st_size
    if actual != expected:
        raise ValueError(f"{path.name} has {actual} bytes instead of {expected}")
    # A plain array over the mapped file: indexing a memmap itself is slower.
    return np.asarray(np.memmap(path, token_type, mode="r", shape=shape))
