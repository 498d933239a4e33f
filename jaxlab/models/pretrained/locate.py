"""From what a user calls a model to a file or folder on this machine."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from jaxlab.errors import UserError
from jaxlab.models.pretrained.registry import REGISTRY, fetch
from jaxlab.models.pretrained.tensors import shown

__all__ = ["resolve"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "merges.txt",
)


def resolve(model: str | os.PathLike[str]) -> Path:
    """The file or folder of a model, fetched first if need be.

    Args:
      model: a path; a name in `REGISTRY`, e.g. `smollm2-135m`; or a model on the Hugging Face
        Hub, `organisation/name`. A path that exists wins. From the Hub come the configuration,
        safetensors and the tokenizer's files; nothing that is pickled.

    Returns:
      What `open_source` opens.

    Raises:
      UserError: it is none of these, or could not be fetched.
    """
    name = os.fspath(model)
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if name in REGISTRY:
        return fetch(name, REGISTRY[name])
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name)
    known = ", ".join(REGISTRY)
    raise UserError(
        "model",
        shown(name),
        f"no such file or folder{_hint(name)}; allowed: a path, one of {known}, or"
        " organisation/name on the Hugging Face Hub",
    )


def _hint(name: str) -> str:
    """The name in the registry that is like what was written, as a question."""
    last = name.rstrip("/").rpartition("/")[2].lower()
    close = difflib.get_close_matches(last, REGISTRY, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _from_hub(name: str) -> Path:
    missing = "no such file or folder"
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError(
            "model",
            name,
            f"{missing}{_hint(name)}; for the Hugging Face Hub: pip install 'jaxlab[hub]'",
        ) from None
    print(f"{name}: from the Hugging Face Hub", file=sys.stderr, flush=True)
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the library lets errors of several network libraries through
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = shown(lines[0] if lines else type(error).__name__)
        raise UserError(
            "model", name, f"{missing}, and not from the Hugging Face Hub: {reason}{_hint(name)}"
        ) from error
