"""Safetensors: one file, or several with an index.

A file is eight bytes of header length, a JSON header that gives every tensor's type, shape and
place, and the tensors' bytes without gaps. Tensors are views of the mapped file, bfloat16 among
them, and are written one after another, so neither direction holds a second copy of a model.

Source: the format of the safetensors project, version 0.x ("Format" in its README).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxlab.errors import StorageError
from jaxlab.models.pretrained.tensors import (
    Extent,
    check_disjoint,
    file_error,
    json_object,
    map_file,
    shown,
)

__all__ = ["INDEX_NAME", "SINGLE_NAME", "SafetensorsFile", "ShardedSafetensors", "save_safetensors"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_LONGEST_HEADER = 100_000_000
_MOST_AXES = 32
_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class SafetensorsFile:
    """One file of tensors.

    Attributes:
      path: the file.
      metadata: texts that the writer added.
    """

    def __init__(self, path: os.PathLike[str] | str) -> None:
        """Reads the header.

        Raises:
          UserError: the file cannot be read, is damaged, or holds a type that is not supported.
        """
        self.path = Path(path)
        self._data = map_file(path)
        try:
            self.metadata, self._tensors = _parse(self._data)
        except (ValueError, RecursionError) as error:
            raise file_error(path, str(error)) from error

    def keys(self) -> list[str]:
        """Names of all tensors, in the order of the file."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._tensors[name][1]

    def dtype(self, name: str) -> np.dtype:
        """Type of a tensor."""
        return self._tensors[name][0]

    def read(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of the file."""
        dtype, shape, start = self._tensors[name]
        return np.frombuffer(self._data, dtype, math.prod(shape), start).reshape(shape)


class ShardedSafetensors:
    """The tensors that an index spreads over several files of its folder.

    Attributes:
      path: the index.
    """

    def __init__(self, path: os.PathLike[str] | str) -> None:
        """Reads the index and the headers of all its files.

        Raises:
          UserError: the index or a file is missing or damaged, or they do not fit together.
        """
        self.path = Path(path)
        places = _read_index(self.path)
        names = sorted(set(places.values()))
        missing = [name for name in names if not (self.path.parent / name).exists()]
        if missing:
            raise file_error(path, f"names files that are missing: {_listed(missing)}")
        files = {name: SafetensorsFile(self.path.parent / name) for name in names}
        present = {name: set(file.keys()) for name, file in files.items()}
        absent = [tensor for tensor, name in places.items() if tensor not in present[name]]
        if absent:
            raise file_error(path, f"names tensors that their files do not hold: {_listed(absent)}")
        self._files = {tensor: files[name] for tensor, name in places.items()}

    def keys(self) -> list[str]:
        """Names of all tensors, in the order of the index."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._files[name].shape(name)

    def dtype(self, name: str) -> np.dtype:
        """Type of a tensor."""
        return self._files[name].dtype(name)

    def read(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of its file."""
        return self._files[name].read(name)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(shown(name) for name in names[:3]) + more


def _parse(data: Any) -> tuple[dict[str, str], dict[str, tuple[np.dtype, tuple[int, ...], int]]]:
    size = len(data)
    length = int.from_bytes(data[:8], "little")
    if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise ValueError(
            f"is not a safetensors file, or not a whole one: a header of {length} bytes in a file"
            f" of {size}"
        )
    fields = json_object(data[8 : 8 + length], "its header")
    metadata = fields.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its header's __metadata__ are not texts")
    tensors, extents = {}, []
    for name, field in fields.items():
        dtype, shape, begin, end = _checked_field(name, field)
        tensors[name] = (dtype, shape, 8 + length + begin)
        extents.append(Extent(name, 8 + length + begin, 8 + length + end))
    check_disjoint(extents, size=size)
    held = sum(extent.stop - extent.start for extent in extents)
    if held != size - 8 - length:
        raise ValueError(
            f"has {size - 8 - length} bytes of data, but its tensors take {held}: is it whole?"
        )
    return metadata, tensors


def _checked_field(name: str, field: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    try:
        kind, shape, (begin, end) = field["dtype"], tuple(field["shape"]), field["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(
            f"tensor {shown(name)} lacks a dtype, a shape or two data_offsets"
        ) from None
    if not isinstance(kind, str) or kind not in _DTYPES:
        supported = ", ".join(_DTYPES)
        raise ValueError(f"tensor {shown(name)} has type {shown(kind)}; supported are {supported}")
    if len(shape) > _MOST_AXES or not all(
        type(number) is int and 0 <= number < 1 << 63 for number in (*shape, begin, end)
    ):
        raise ValueError(f"tensor {shown(name)} has no usable shape or data_offsets")
    needed = math.prod(shape) * _DTYPES[kind].itemsize
    if end - begin != needed:
        raise ValueError(
            f"tensor {shown(name)} of type {kind} and shape {shown(shape)} needs {shown(needed)}"
            f" bytes, but has {end - begin}"
        )
    return _DTYPES[kind], shape, begin, end


def _read_index(path: Path) -> dict[str, str]:
    try:
        places = json_object(map_file(path)[:], "the index").get("weight_map")
    except ValueError as error:
        raise file_error(path, str(error)) from error
    if not isinstance(places, dict) or not places:
        raise file_error(path, "has no weight_map")
    for tensor, name in places.items():
        # A plain name: an index has no business outside its folder.
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
            raise file_error(
                path, f"puts {shown(tensor)} into {shown(name)}, which is no file's name"
            )
    return places


def save_safetensors(
    folder: os.PathLike[str] | str,
    tensors: Mapping[str, Any],
    *,
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> list[str]:
    """Writes `model.safetensors`, or several files and an index where one would be too large.

    Each file is written under a temporary name and takes its own when it is complete; the index
    comes last. Then files of an earlier save that this one does not use are removed.

    Args:
      folder: must exist.
      tensors: NumPy or JAX arrays by name; each is fetched when its turn comes.
      max_shard_bytes: what the tensors of a file take together at most; a larger one has its own.
      metadata: texts for the headers; by default the `{"format": "pt"}` that Hugging Face
        readers ask for.

    Returns:
      Names of the files that were written, the index last.

    Raises:
      ValueError: there are no tensors, one has a type that the format does not name, or the size
        is below 1.
      jaxlab.errors.StorageError: a file could not be written; an older one of its name stays.
    """
    if not tensors:
        raise ValueError("tensors={}: must hold at least one")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes}: must be at least 1")
    words = dict({"format": "pt"} if metadata is None else metadata)
    sizes = {name: _num_bytes(name, tensor) for name, tensor in tensors.items()}
    shards = _shards(sizes, max_shard_bytes)
    names = [SINGLE_NAME]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_file(Path(folder, name), {tensor: tensors[tensor] for tensor in shard}, words)
    if len(shards) > 1:
        places = {t: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        with _replacing(Path(folder, INDEX_NAME)) as file:
            file.write((json.dumps(index, indent=2) + "\n").encode())
        names.append(INDEX_NAME)
    _remove_older(Path(folder), set(names))
    return names


def _num_bytes(name: str, tensor: Any) -> int:
    if np.dtype(tensor.dtype) not in _NAMES:
        raise ValueError(f"tensor {name} has type {tensor.dtype}; allowed: {', '.join(_DTYPES)}")
    return math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut before the one that would exceed the limit."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if shards[-1] and held + size > limit:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _write_file(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for name, tensor in tensors.items():
        end = place + _num_bytes(name, tensor)
        kind = _NAMES[np.dtype(tensor.dtype)]
        fields[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # so that the data are aligned
    with _replacing(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the name when it is complete and on the disk."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StorageError(f"cannot write {path}: {reason}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _remove_older(folder: Path, written: set[str]) -> None:
    for path in folder.glob("model*.safetensors*"):
        if _OURS.fullmatch(path.name) and path.name not in written:
            with contextlib.suppress(OSError):
                path.unlink()
