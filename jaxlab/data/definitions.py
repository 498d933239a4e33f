"""Definitions of tokenizers as JSON, and the package `tokenizers` that runs them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxlab.errors import UserError

__all__ = [
    "canonical_json",
    "checked_ids",
    "first_line",
    "plain_definition",
    "tokenizers_library",
]

_LONGEST_LINE = 200


def tokenizers_library() -> Any:
    """The package `tokenizers`.

    Raises:
      UserError: it is missing.
    """
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise UserError(
            "data.tokenizer", "bpe", "needs the package tokenizers: pip install tokenizers"
        ) from error


def plain_definition(definition: str) -> dict[str, Any]:
    """The fields of a `tokenizer.json`, with whatever cuts, fills or varies output switched off.

    Raises:
      ValueError: it is not JSON, or no object with a model in it.
    """
    try:
        fields = json.loads(definition)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON: {first_line(error)}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model"), dict):
        raise ValueError("it is not a tokenizer: there is no model in it")
    fields |= {"truncation": None, "padding": None}
    fields["model"] |= {"dropout": None}
    return fields


def canonical_json(fields: Any) -> str:
    """JSON without spaces, its keys in order."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def first_line(error: BaseException) -> str:
    """The beginning of an error's message, or its type where there is none."""
    lines = str(error).splitlines()
    return lines[0][:_LONGEST_LINE] if lines and lines[0] else type(error).__name__


def checked_ids(ids: Iterable[int] | np.ndarray, vocab_size: int) -> list[int]:
    """Ids as a list.

    Raises:
      TypeError: they are not one row of integers.
      ValueError: one is not in `[0, vocab_size)`.
    """
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"ids have shape {array.shape} and type {array.dtype}: must be integers")
    if array.size and not (array.min() >= 0 and array.max() < vocab_size):
        raise ValueError(f"ids from {array.min()} to {array.max()}: must be in [0, {vocab_size})")
    return array.tolist()
