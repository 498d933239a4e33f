"""A model's folder or file, opened: configuration, tensors, and where the tokenizer lies."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlab.models.pretrained.gguf_source import GgufSource
from jaxlab.models.pretrained.safetensors_files import (
    INDEX_NAME,
    SINGLE_NAME,
    SafetensorsFile,
    ShardedSafetensors,
)
from jaxlab.models.pretrained.tensors import (
    TensorSource,
    file_error,
    json_object,
    map_file,
    shown,
)

__all__ = [
    "CONFIG_NAME",
    "EXPORT_FOLDER",
    "GENERATION_CONFIG_NAME",
    "TOKENIZER_NAME",
    "FolderSource",
    "content_mark",
    "open_source",
]

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
TOKENIZER_NAME = "tokenizer.json"
EXPORT_FOLDER = "export"

_LONGEST_JSON = 1 << 24
_DESCRIBING = (CONFIG_NAME, GENERATION_CONFIG_NAME, TOKENIZER_NAME, "tokenizer_config.json")
_PIECES, _PIECE = 256, 1 << 10


class FolderSource:
    """A `TensorSource` over a folder as the Hub has them and as `save_pretrained` writes them.

    Attributes:
      path: the folder.
      config: content of `config.json`.
      generation_config: content of `generation_config.json`; empty where there is none.
      tokenizer: the folder, where it has a `tokenizer.json`, else None.
    """

    def __init__(self, path: os.PathLike[str] | str) -> None:
        """Reads the configuration and the headers of the tensors.

        Raises:
          UserError: a file is missing or damaged, or the weights are quantised.
        """
        self.path = Path(path)
        self.config: Mapping[str, Any] = _read_json(self.path / CONFIG_NAME)
        self.generation_config: Mapping[str, Any] = {}
        if (self.path / GENERATION_CONFIG_NAME).exists():
            self.generation_config = _read_json(self.path / GENERATION_CONFIG_NAME)
        self.tokenizer = self.path if (self.path / TOKENIZER_NAME).exists() else None
        self._tensors = _open_tensors(self.path)
        self._refuse_quantised()

    def keys(self) -> Sequence[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._tensors.shape(name)

    def dtype(self, name: str) -> np.dtype:
        """Type of a tensor."""
        return self._tensors.dtype(name)

    def read(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of its file.

        Raises:
          KeyError: there is no such tensor.
        """
        return self._tensors.read(name)

    def _refuse_quantised(self) -> None:
        settings = self.config.get("quantization_config")
        if not settings:
            return
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        packed = [name for name in self.keys() if self.dtype(name).kind in "iub"]
        where = f", e.g. its tensor {shown(packed[0])}" if packed else ""
        raise file_error(
            self.path,
            f"is quantised by {shown(method)}{where}, which is not supported; allowed: float"
            " weights, or a GGUF file",
        )


def open_source(path: os.PathLike[str] | str) -> TensorSource:
    """Opens what `resolve` has found.

    Args:
      path: a `.gguf` file; a folder with `config.json` and safetensors, or with one `.gguf` file;
        or a run's folder with such an `export` folder in it.

    Raises:
      UserError: it is none of these, or damaged.
    """
    path = Path(path)
    if not path.is_dir():
        if path.suffix.lower() != ".gguf" and path.exists():
            raise file_error(path, "allowed: a .gguf file, or a folder with config.json")
        return GgufSource(path)
    if _has_safetensors(path):
        return FolderSource(path)
    found = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if len(found) == 1:
        return GgufSource(found[0])
    if found:
        names = ", ".join(shown(file.name) for file in found[:3])
        raise file_error(path, f"has {len(found)} .gguf files; name one of them: {names}")
    if (path / EXPORT_FOLDER / CONFIG_NAME).exists():
        return FolderSource(path / EXPORT_FOLDER)
    if (path / "checkpoints").is_dir():
        raise file_error(path, f"is a run without an {EXPORT_FOLDER} folder")
    return FolderSource(path)


def content_mark(path: os.PathLike[str] | str) -> str:
    """A short name of what a model's files hold, to tell whether they are still the same.

    Made of the sizes of its configuration, weights and tokenizer, and of many small pieces of
    each: further training changes them; a change of a few bytes may go unseen.

    Args:
      path: of a `TensorSource`.

    Raises:
      UserError: a file cannot be read.
    """
    path = Path(path)
    files = [path]
    if path.is_dir():
        described = [path / name for name in _DESCRIBING]
        files = [*filter(Path.exists, described), *sorted(path.glob("*.safetensors"))]
    mark = hashlib.sha256()
    for file in files:
        data = map_file(file)
        mark.update(f"{file.name if path.is_dir() else ''} {len(data)}\n".encode())
        for begin in range(0, len(data), max(_PIECE, len(data) // _PIECES)):
            mark.update(data[begin : begin + _PIECE])
    return mark.hexdigest()[:12]


def _has_safetensors(folder: Path) -> bool:
    return (folder / SINGLE_NAME).exists() or (folder / INDEX_NAME).exists()


def _open_tensors(folder: Path) -> SafetensorsFile | ShardedSafetensors:
    if (folder / SINGLE_NAME).exists():
        return SafetensorsFile(folder / SINGLE_NAME)
    if (folder / INDEX_NAME).exists():
        return ShardedSafetensors(folder / INDEX_NAME)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    extra = f"; {shown(pickled[0])} is pickled, which is never read" if pickled else ""
    raise file_error(folder, f"has neither {SINGLE_NAME} nor {INDEX_NAME}{extra}")


def _read_json(path: Path) -> dict[str, Any]:
    data = map_file(path)
    if len(data) > _LONGEST_JSON:
        raise file_error(path, f"has {len(data)} bytes, more than {_LONGEST_JSON}")
    try:
        return json_object(data[:], "the file")
    except ValueError as error:
        raise file_error(path, str(error)) from error
