"""Named tensors in files: what a reader offers, and what all readers check."""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxlab.errors import UserError

__all__ = [
    "Extent",
    "GgufVocabulary",
    "TensorSource",
    "check_disjoint",
    "file_error",
    "json_object",
    "map_file",
    "shown",
]


@dataclass(frozen=True)
class GgufVocabulary:
    """What a GGUF file says of its tokenizer, as it stands there.

    The attributes have the names of the arguments of `data.gguf_tokenizers.gguf_tokenizer`, so
    `gguf_tokenizer(**vars(vocabulary))` is the tokenizer.

    Attributes:
      model: kind of tokenizer: `gpt2` is byte-level BPE, `llama` is SentencePiece.
      tokens: the text of every token, in its tokenizer's alphabet.
      merges: pairs that BPE merges, best first, each as `left right`; may be empty.
      scores: one for every token, or empty.
      token_types: one for every token, or empty: 1 normal, 2 unknown, 3 control, 4 user-defined,
        5 unused, 6 byte.
      pre: name of the rule that splits text into words, e.g. `smollm`.
      bos_id, eos_id, unk_id, pad_id: tokens that begin a text, end it, stand for what is unknown
        and fill rows; None where the file names none.
      more_stop_ids: further tokens that end an answer.
      add_bos, add_eos, add_space_prefix: None where the file does not say.
      chat_template: Jinja text, or None.
    """

    model: str
    tokens: tuple[str, ...]
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    token_types: tuple[int, ...] = ()
    pre: str = "default"
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    more_stop_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    add_eos: bool | None = None
    add_space_prefix: bool | None = None
    chat_template: str | None = None


class TensorSource(Protocol):
    """The tensors of a pretrained model under the names, and with the configuration, of the Hub.

    Nothing is read before it is asked for; what is read lies in the mapped file where it can.
    """

    @property
    def path(self) -> Path:
        """The file or folder."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of `config.json`, or what it would be."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The content of `generation_config.json`, or what it would be; may be empty."""
        ...

    @property
    def tokenizer(self) -> Path | GgufVocabulary | None:
        """The folder with a `tokenizer.json`, or the vocabulary of a GGUF file, if any."""
        ...

    def keys(self) -> Sequence[str]:
        """Names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; that of a linear layer is `[outputs, inputs]`."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Type that `read` returns: float32 for quantised tensors, else the stored one."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor, maybe as a read-only view of the file.

        Raises:
          KeyError: there is no such tensor.
          UserError: it is stored in a way that is not supported.
        """
        ...


@dataclass(frozen=True)
class Extent:
    """Where a tensor's bytes lie in its file: `[start, stop)`."""

    name: str
    start: int
    stop: int


def shown(text: object) -> str:
    """Text from a file or a path as it may stand in a one-line message.

    >>> shown("a\\nb"), len(shown("x" * 500))
    ('a\\\\nb', 120)
    """
    words = str(text)
    words = words if words.isprintable() else ascii(words)[1:-1]
    return words if len(words) <= 120 else words[:117] + "..."


def file_error(path: os.PathLike[str] | str, problem: str) -> UserError:
    """The error that says what is wrong with a model's file or folder."""
    name = os.fspath(path)
    return UserError("model", name if name.isprintable() else ascii(name)[1:-1], problem)


def map_file(path: os.PathLike[str] | str) -> mmap.mmap:
    """A regular file that is not empty, mapped for reading.

    Raises:
      UserError: it is missing, empty, something else than a file, or cannot be read.
    """
    try:
        # Asked first: opening a named pipe would wait for ever.
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise file_error(path, "is not a file")
        if status.st_size == 0:
            raise file_error(path, "is empty")
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise file_error(path, "is missing") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise file_error(path, f"cannot be read: {reason}") from error


def json_object(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object in which no name stands twice.

    Raises:
      ValueError: the text is something else; the message begins with `what`.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands there twice")
        return found

    try:
        found = json.loads(text.decode(), object_pairs_hook=unique)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} is not valid JSON: {shown(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{what} is not a JSON object")
    return found


def check_disjoint(extents: Iterable[Extent], *, size: int) -> None:
    """Whether all tensors lie inside the file and none shares bytes with another.

    Raises:
      ValueError: one does not; the message names it.
    """
    before: Extent | None = None
    for extent in sorted(extents, key=lambda extent: (extent.start, extent.stop)):
        if extent.stop > size:
            raise ValueError(
                f"tensor {shown(extent.name)} ends at byte {extent.stop}, but the file has {size}"
                " bytes: is it whole?"
            )
        if before is not None and extent.start < before.stop:
            raise ValueError(f"tensors {shown(before.name)} and {shown(extent.name)} overlap")
        before = extent if extent.stop > extent.start or before is None else before
