"""The container of GGUF: metadata, a table of tensors, and their data, mapped from the file.

Every length in a file is held against the bytes that are left of it before anything is read, so a
damaged file costs no more time or memory than its own size.

Source: the GGUF specification of ggml (`docs/gguf.md`), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlab.models.pretrained.quantization import FORMATS, PLAIN_TYPES, TYPE_NAMES, dequantize
from jaxlab.models.pretrained.tensors import Extent, check_disjoint, file_error, map_file, shown

__all__ = ["GgufFile", "StoredTensor"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LONGEST_KEY = 1 << 16
_MOST_AXES = 4
_LONGEST_AXIS = 1 << 31
_LARGEST_ALIGNMENT = 1 << 20

_STRING, _ARRAY, _BOOL, _FLOAT32 = 8, 9, 7, 6
_NUMBERS: Mapping[int, np.dtype] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    _FLOAT32: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_LENGTH = struct.Struct("<Q")
# What an entry takes at least: an empty key, a type and a byte; a name, axes, a type, an offset.
_SMALLEST_ENTRY, _SMALLEST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
      kind: name of its type, e.g. `F32` or `Q4_1`.
      shape: slowest axis first, as NumPy counts; the file has them the other way round.
      start: first byte, counted from the start of the file.
      num_bytes: length of its data; 0 where the type is not known.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class GgufFile:
    """A GGUF file, under the names that it uses itself.

    Attributes:
      path: the file.
      metadata: key to text, number, boolean, tuple of texts, or NumPy array of numbers.
      tensors: by name, in the order of the file.
    """

    def __init__(self, path: os.PathLike[str] | str) -> None:
        """Reads the header.

        Raises:
          UserError: the file cannot be read or is not a whole GGUF file.
        """
        self.path = Path(path)
        self._data = map_file(path)
        try:
            self.metadata, self.tensors = _parse(self._data)
        except ValueError as error:
            raise file_error(path, str(error)) from error

    def dtype(self, name: str) -> np.dtype:
        """The type that `read` returns."""
        return PLAIN_TYPES.get(self.tensors[name].kind, np.dtype(np.float32))

    def read(self, name: str) -> np.ndarray:
        """A tensor; float32 where it is quantised, else a view of the file.

        Raises:
          KeyError: there is no such tensor.
          UserError: it has a type that is not supported, or a scale that is not finite.
        """
        tensor = self.tensors[name]
        kind = tensor.kind
        if kind in PLAIN_TYPES:
            found = np.frombuffer(
                self._data, PLAIN_TYPES[kind], math.prod(tensor.shape), tensor.start
            )
            return found.reshape(tensor.shape)
        if kind not in FORMATS:
            supported = ", ".join([*PLAIN_TYPES, *FORMATS])
            raise file_error(
                self.path, f"tensor {shown(name)} has type {kind}; supported are {supported}"
            )
        data = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)
        try:
            return dequantize(data, kind).reshape(tensor.shape)
        except ValueError as error:
            raise file_error(self.path, f"tensor {shown(name)}: {error}") from error


class _Cursor:
    """A place in the file that only moves forward and never beyond the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self.place = 0

    def left(self) -> int:
        return self._size - self.place

    def skip(self, count: int, what: str) -> int:
        """Moves on by so many bytes and returns where they begin."""
        if count > self.left():
            raise ValueError(
                f"{what} at byte {self.place} takes {count} bytes of {self.left()} that are left:"
                " is the file whole?"
            )
        start = self.place
        self.place += count
        return start

    def number(self, dtype: np.dtype, what: str) -> Any:
        start = self.skip(dtype.itemsize, what)
        return np.frombuffer(self._data, dtype, 1, start)[0].item()

    def length(self, what: str) -> int:
        return _LENGTH.unpack_from(self._data, self.skip(8, what))[0]

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.length(what)
        if limit is not None and length > limit:
            raise ValueError(f"{what} at byte {self.place} has {length} bytes, more than {limit}")
        start = self.skip(length, what)
        try:
            return self._data[start : self.place].decode()
        except UnicodeDecodeError:
            raise ValueError(f"{what} at byte {start} is not UTF-8") from None

    def texts(self, count: int, what: str) -> tuple[str, ...]:
        # A vocabulary has a hundred thousand: no call for each.
        found, data, size, place = [], self._data, self._size, self.place
        read_length, entry = _LENGTH.unpack_from, f"an entry of {what}"
        for _ in range(count):
            if size - place < 8 or (length := read_length(data, place)[0]) > size - place - 8:
                raise ValueError(f"{entry} at byte {place} goes beyond the end: is the file whole?")
            start = place + 8
            place = start + length
            try:
                found.append(data[start:place].decode())
            except UnicodeDecodeError:
                raise ValueError(f"{entry} at byte {start} is not UTF-8") from None
        self.place = place
        return tuple(found)

    def numbers(self, dtype: np.dtype, count: int, what: str) -> np.ndarray:
        start = self.skip(dtype.itemsize * count, what)
        return np.frombuffer(self._data, dtype, count, start)


def _parse(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    cursor = _Cursor(data)
    if data[: cursor.skip(4, "magic number") + 4] != _MAGIC:
        raise ValueError("is not a GGUF file: it does not begin with GGUF")
    version = cursor.number(np.dtype("<u4"), "version")
    if version not in _VERSIONS:
        if version and version % (1 << 16) == 0:
            raise ValueError("is a big-endian GGUF file, which is not supported")
        raise ValueError(f"is of GGUF version {version}; supported are 2 and 3")
    num_tensors = cursor.length("number of tensors")
    num_entries = cursor.length("number of metadata entries")
    needed = num_tensors * _SMALLEST_TENSOR + num_entries * _SMALLEST_ENTRY
    if needed > cursor.left():
        raise ValueError(
            f"announces {num_tensors} tensors and {num_entries} metadata entries, which do not"
            f" fit into {len(data)} bytes: is the file whole?"
        )
    metadata = _parse_metadata(cursor, num_entries)
    alignment = _alignment(metadata)
    table = [_parse_tensor(cursor) for _ in range(num_tensors)]
    data_start = -(-cursor.place // alignment) * alignment
    return metadata, _placed(table, data_start, alignment, len(data))


def _parse_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("a metadata key", _LONGEST_KEY)
        if key in metadata:
            raise ValueError(f"has the metadata key {shown(key)} twice")
        metadata[key] = _parse_value(cursor, f"metadata {shown(key)}")
    return metadata


def _parse_value(cursor: _Cursor, what: str) -> Any:
    kind = cursor.number(np.dtype("<u4"), what)
    if kind == _STRING:
        return cursor.text(what)
    if kind == _ARRAY:
        return _parse_array(cursor, what)
    if kind not in _NUMBERS:
        raise ValueError(f"{what} has the unknown type {kind}")
    value = cursor.number(_NUMBERS[kind], what)
    # The shortest decimal of a float32: 1e-05, not 9.999999747378752e-06.
    return float(str(np.float32(value))) if kind == _FLOAT32 else value


def _parse_array(cursor: _Cursor, what: str) -> tuple[str, ...] | np.ndarray:
    kind = cursor.number(np.dtype("<u4"), what)
    count = cursor.length(what)
    if kind == _STRING:
        if count * 8 > cursor.left():
            raise ValueError(f"{what} announces {count} texts: is the file whole?")
        return cursor.texts(count, what)
    if kind not in _NUMBERS:
        raise ValueError(f"{what} is an array of the unsupported type {kind}")
    return cursor.numbers(_NUMBERS[kind], count, what)


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 1 <= value <= _LARGEST_ALIGNMENT or value & (value - 1):
        raise ValueError(
            f"general.alignment={shown(value)}: must be a power of two up to {_LARGEST_ALIGNMENT}"
        )
    return value


def _parse_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, axes in the order of the file, number of the type, offset in the data."""
    name = cursor.text("a tensor's name", _LONGEST_KEY)
    what = f"tensor {shown(name)}"
    num_axes = cursor.number(np.dtype("<u4"), what)
    if not 1 <= num_axes <= _MOST_AXES:
        raise ValueError(f"{what} has {num_axes} axes; must be from 1 to {_MOST_AXES}")
    axes = tuple(cursor.length(what) for _ in range(num_axes))
    kind = cursor.number(np.dtype("<u4"), what)
    return name, axes, kind, cursor.length(what)


def _placed(
    table: list[tuple[str, tuple[int, ...], int, int]], data_start: int, alignment: int, size: int
) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name, axes, number, offset in table:
        if name in tensors:
            raise ValueError(f"has the tensor {shown(name)} twice")
        if 0 in axes:
            raise ValueError(f"tensor {shown(name)} of axes {axes} is empty")
        if max(axes) >= _LONGEST_AXIS:
            raise ValueError(f"tensor {shown(name)} has an axis of {max(axes)}: is the file whole?")
        if offset % alignment:
            raise ValueError(f"tensor {shown(name)} is not aligned to {alignment} bytes")
        kind = TYPE_NAMES.get(number, f"number {number}")
        num_bytes = _num_bytes(name, kind, axes)
        tensors[name] = StoredTensor(kind, axes[::-1], data_start + offset, num_bytes)
    check_disjoint(
        (Extent(name, t.start, t.start + t.num_bytes) for name, t in tensors.items()), size=size
    )
    return tensors


def _num_bytes(name: str, kind: str, axes: tuple[int, ...]) -> int:
    if kind in PLAIN_TYPES:
        return math.prod(axes) * PLAIN_TYPES[kind].itemsize
    if kind not in FORMATS:
        return 0
    values, layout, _ = FORMATS[kind]
    if axes[0] % values:
        raise ValueError(
            f"tensor {shown(name)} has rows of {axes[0]} values; {kind} needs whole blocks of"
            f" {values}"
        )
    return math.prod(axes) // values * layout.itemsize
