"""Pretrained decoders, from whatever a user calls them to parameters, and back to a folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlab.errors import StorageError, UserError
from jaxlab.models.decoder import Decoder, unstack_layers
from jaxlab.models.pretrained.families import (
    decoder_from_config,
    params_from_tensors,
    tensors_from_params,
)
from jaxlab.models.pretrained.folders import CONFIG_NAME, GENERATION_CONFIG_NAME, open_source
from jaxlab.models.pretrained.locate import resolve
from jaxlab.models.pretrained.safetensors_files import save_safetensors
from jaxlab.models.pretrained.tensors import GgufVocabulary, TensorSource, file_error, shown

__all__ = ["TOKENIZER_FILES", "Pretrained", "load_pretrained", "save_pretrained"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""What belongs to a tokenizer in a model's folder."""

_LAYERS = ("num_hidden_layers", "n_layer")
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "sliding_window"),
    *("n_embd", "n_head", "n_inner", "n_positions"),
)
_SAVED = re.compile(
    "|".join(
        [
            r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?",
            *(re.escape(name) for name in (CONFIG_NAME, GENERATION_CONFIG_NAME, *TOKENIZER_FILES)),
        ]
    )
)


@dataclass(frozen=True)
class Pretrained:
    """A pretrained decoder.

    Attributes:
      model: the network.
      params: its canonical parameters.
      config: content of `config.json`, or what a GGUF file says in its stead.
      generation_config: likewise of `generation_config.json`; may be empty.
      tokenizer: the folder with a `tokenizer.json`, or the vocabulary of a GGUF file, if any.
      path: the file or folder it came from.
    """

    model: Decoder
    params: Mapping[str, Any]
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer: Path | GgufVocabulary | None
    path: Path


def load_pretrained(
    model: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    dtype: Any = jnp.float32,
    param_dtype: Any = jnp.float32,
) -> Pretrained:
    """Loads a decoder of the Llama, Qwen2, Qwen3, Mistral or GPT-2 family.

    Args:
      model: see `resolve`: a folder with `config.json` and safetensors, a GGUF file, a name such
        as `smollm2-135m`, or a model on the Hugging Face Hub.
      mesh: over which to split the parameters as they are read; each process reads what its
        devices hold.
      dtype: type of the computation.
      param_dtype: type of the parameters.

    Raises:
      UserError: there is no such model, its files are damaged, or it is of a kind that is not
        supported.
    """
    source = open_source(resolve(model))
    decoder = _decoder(source, dtype, param_dtype)
    return Pretrained(
        model=decoder,
        params=params_from_tensors(source, decoder, source.config, mesh=mesh),
        config=dict(source.config),
        generation_config=dict(source.generation_config),
        tokenizer=source.tokenizer,
        path=source.path,
    )


def _decoder(source: TensorSource, dtype: Any, param_dtype: Any) -> Decoder:
    for name, limit in {**dict.fromkeys(_SIZES, 1 << 31), **_layer_limits(source)}.items():
        value = source.config.get(name)
        if type(value) is int and value >= limit:
            problem = f"config.{name}={shown(value)}: must be below {limit}"
            raise file_error(source.path, problem)
    try:
        return decoder_from_config(source.config, dtype=dtype, param_dtype=param_dtype)
    except UserError as error:
        raise file_error(source.path, str(error)) from error


def _layer_limits(source: TensorSource) -> dict[str, int]:
    """A layer has a tensor at least, so that no network is built that the file cannot fill."""
    return dict.fromkeys(_LAYERS, len(source.keys()) + 1)


def save_pretrained(
    folder: str | os.PathLike[str],
    params: Mapping[str, Any],
    model: Decoder,
    config: Mapping[str, Any],
    *,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer: Path | Mapping[str, str] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a folder that `load_pretrained` and the package `transformers` load.

    The folder takes its place in one step when all is written. It may hold an earlier save, which
    it replaces.

    Args:
      folder: is made.
      params: parameters, canonical or stacked as the model asks; all of each array must be
        addressable by this process. They are written in their own type.
      model: whose parameters they are.
      config: as `Pretrained.config`; its type of numbers is replaced by that of the parameters.
      generation_config: as `Pretrained.generation_config`.
      tokenizer: a folder whose tokenizer files are copied, or the texts of such files by name.
      max_shard_bytes: what the tensors of one file take together at most.

    Raises:
      UserError: the folder holds something else, or `tokenizer` names other files.
      jaxlab.errors.StorageError: it could not be written; an earlier save stays.
    """
    target = Path(folder)
    _check_replaceable(target)
    texts = _tokenizer_texts(tokenizer)
    if model.scan_layers:
        params, model = unstack_layers(params), model.clone(scan_layers=False)
    tensors = tensors_from_params(params, model, config)
    described = {key: value for key, value in config.items() if key != "dtype"}
    described["torch_dtype"] = str(np.result_type(*(t.dtype for t in tensors.values())))
    with _replacing_folder(target) as temporary:
        save_safetensors(temporary, tensors, max_shard_bytes=max_shard_bytes)
        _write_json(temporary / CONFIG_NAME, described)
        if generation_config:
            _write_json(temporary / GENERATION_CONFIG_NAME, generation_config)
        for name, text in texts.items():
            (temporary / name).write_bytes(text)


def _check_replaceable(folder: Path) -> None:
    if not os.path.lexists(folder):
        return
    allowed = "allowed: a folder that is new, empty, or from an earlier save"
    if not folder.is_dir():
        raise UserError("folder", folder, f"is no folder; {allowed}")
    for path in sorted(folder.iterdir()):
        if not _SAVED.fullmatch(path.name):
            raise UserError("folder", folder, f"holds {shown(path.name)}; {allowed}")


def _tokenizer_texts(tokenizer: Path | Mapping[str, str] | None) -> dict[str, bytes]:
    if tokenizer is None:
        return {}
    if isinstance(tokenizer, Mapping):
        for name in tokenizer:
            if name not in TOKENIZER_FILES:
                allowed = f"allowed: {', '.join(TOKENIZER_FILES)}"
                raise UserError("tokenizer", shown(name), f"is no file of a tokenizer; {allowed}")
        return {name: text.encode() for name, text in tokenizer.items()}
    found = [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
    if not found:
        raise UserError("tokenizer", tokenizer, "holds no files of a tokenizer")
    return {path.name: path.read_bytes() for path in found}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def _replacing_folder(target: Path) -> Iterator[Path]:
    """A new folder that takes the place of `target` when it is complete."""
    mark = secrets.token_hex(4)
    temporary = target.with_name(f".{target.name}.{mark}.tmp")
    old = target.with_name(f".{target.name}.{mark}.old")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if target.exists():
            target.rename(old)
        try:
            temporary.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StorageError(f"cannot write {target}: {reason}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
