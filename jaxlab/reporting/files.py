"""Reading and writing the small files of a run: whole or not at all, and strictly valid JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from jaxlab.errors import StorageError

__all__ = ["is_remote", "read_json", "to_plain", "write_atomic", "write_json"]


def is_remote(path: os.PathLike[str] | str) -> bool:
    """Whether `path` lies in an object store (`gs://`, `s3://`, `az://`, `hf://`).

    >>> is_remote("gs://bucket/run"), is_remote("runs/trec")
    (True, False)
    """
    return "://" in os.fspath(epath.Path(path))


def write_atomic(path: os.PathLike[str] | str, data: bytes | str) -> None:
    """Writes a file so that every reader sees either its old or its new content.

    On a local disk the data goes to a temporary file in the same folder, is flushed to the disk
    and takes the name in one step. An object store publishes an object only when it is complete,
    so there the file is written directly.

    Args:
      path: the file; its folder must exist.
      data: the whole content; text is encoded as UTF-8.

    Raises:
      TypeError: `data` is neither bytes nor text.
      jaxlab.errors.StorageError: the file could not be written. The old file, if there was one,
        is untouched and no temporary file is left.
    """
    if isinstance(data, str):
        data = data.encode("utf-8")
    if not isinstance(data, bytes):
        raise TypeError(f"data must be bytes or str, got {type(data).__name__}")
    if is_remote(path):
        try:
            epath.Path(path).write_bytes(data)
        except Exception as error:  # every store brings exception types of its own
            raise StorageError(f"cannot write {os.fspath(path)}: {error}") from error
        return
    try:
        _replace_local(os.fspath(path), data)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"cannot write {os.fspath(path)}: {reason}") from error


def _replace_local(path: str, data: bytes) -> None:
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")
    # os.open honours the umask, so the file is as readable as any other of this user; the
    # tempfile module would make it private.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(path: os.PathLike[str] | str, obj: Any) -> None:
    """Writes `to_plain(obj)` as strictly valid, indented JSON with `write_atomic`.

    Raises:
      TypeError, ValueError: see `to_plain`; nothing is written then.
      jaxlab.errors.StorageError: see `write_atomic`.
    """
    write_atomic(path, json.dumps(to_plain(obj), indent=2, allow_nan=False) + "\n")


def read_json(path: os.PathLike[str] | str) -> Any:
    """The content of a JSON file.

    Raises:
      OSError: the file cannot be read, e.g. `FileNotFoundError`.
      ValueError: it is not valid JSON; the message names the file and the place.
    """
    try:
        return json.loads(epath.Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is not valid JSON: {error}") from error


def to_plain(obj: Any) -> Any:
    """`obj` in the types of JSON: dict, list, str, int, float, bool and None.

    Mappings become dicts with text keys, sequences and arrays (NumPy's, or anything with
    `__array__`) become lists, zero-dimensional arrays and NumPy scalars become numbers, paths
    become text, and NaN and infinities, which JSON cannot express, become None.

    Raises:
      TypeError: a value of any other type, or a key that is neither text nor a whole number.
      ValueError: two keys are equal as text.

    >>> to_plain({"loss": np.float32(0.5), 3: (np.arange(2), float("inf"))})
    {'loss': 0.5, '3': [[0, 1], None]}
    """
    if obj is None or isinstance(obj, bool):
        return obj
    if isinstance(obj, str):
        return str.__str__(obj)  # of an enumeration its value, of np.str_ the text
    if isinstance(obj, int):
        return int(obj)
    if isinstance(obj, float):
        return float(obj) if math.isfinite(obj) else None
    if isinstance(obj, Mapping):
        return _plain_mapping(obj)
    if isinstance(obj, list | tuple):
        return [to_plain(item) for item in obj]
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    if hasattr(obj, "__array__"):
        array = np.asarray(obj)
        if array.dtype.kind in "cOMm":
            raise TypeError(f"an array of dtype {array.dtype} has no form in JSON")
        return to_plain(array.tolist())
    raise TypeError(f"{type(obj).__name__} has no form in JSON: {obj!r:.80}")


def _plain_mapping(obj: Mapping[Any, Any]) -> dict[str, Any]:
    plain = {}
    for key, value in obj.items():
        if not isinstance(key, str | int | np.integer):
            raise TypeError(f"a JSON key must be text or a whole number, got {key!r:.80}")
        if str(key) in plain:
            raise ValueError(f"two keys are {str(key)!r} as text")
        plain[str(key)] = to_plain(value)
    return plain
