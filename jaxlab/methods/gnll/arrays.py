"""Arrays and argument checks that the modules of this method share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy import special

from jaxlab.ops.arrays import operands

__all__ = [
    "Ids",
    "Mask",
    "Values",
    "check_choice",
    "check_finite_somewhere",
    "check_log_probs",
    "cluster_labels",
    "counted_tokens",
    "log_softmax",
    "logsumexp",
    "sample_log_likelihoods",
]

Values = Float[Array, "..."] | np.ndarray | Sequence[Any]
"""Real numbers, as an array or nested sequences."""

Mask = Bool[Array, "..."] | np.ndarray | Sequence[Any]
"""True, or 1, for tokens that count."""

Ids = Int[Array, "..."] | np.ndarray | Sequence[Any]
"""Integers."""

# How far rounding may lift the logarithm of a probability above 0.
_ROUNDING = 1e-6


def logsumexp(xp: Any, x: Any, *, keepdims: bool = False) -> Any:
    """Over the last axis; minus infinity where all terms are."""
    reduce = special.logsumexp if xp is np else jax.nn.logsumexp
    return reduce(x, axis=-1, keepdims=keepdims)


def log_softmax(xp: Any, logits: Any) -> Any:
    """Over the last axis; at most 0."""
    return xp.minimum(logits - logsumexp(xp, logits, keepdims=True), 0.0)


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ValueError where a word is not one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: allowed: {', '.join(allowed)}")


def check_log_probs(name: str, values: np.ndarray, counted: np.ndarray | None = None) -> None:
    """Raises ValueError that names the first entry which is no log-probability."""
    bad = np.isnan(values) | (values > _ROUNDING)
    if counted is not None:
        bad &= counted
    if bad.any():
        index = _first(bad)
        raise ValueError(f"{name}={values[index]} at index {index}: must be at most 0, in nats")


def check_finite_somewhere(name: str, values: np.ndarray) -> None:
    """Raises ValueError for a row of log-probabilities that are all minus infinity."""
    impossible = np.isneginf(values).all(-1)
    if impossible.any():
        raise ValueError(f"{name}: {_row(impossible)} is minus infinity throughout")


def counted_tokens(
    token_values: Any, mask: Any, *, include_eos: bool = True, log_probs: bool = True
) -> tuple[Any, Any, Any]:
    """The array module, the tokens' values with 0 where they do not count, and which count.

    Args:
      token_values: one for each token [..., T].
      mask: of the same shape; None for all tokens. Those that count are one run in each row.
      include_eos: False to leave out the last token of each row that ends before T.
      log_probs: whether the values are checked as log-probabilities on the host.
    """
    xp, (values,) = operands(token_values, beside=(mask,))
    if values.ndim < 1 or values.shape[-1] < 1:
        raise ValueError(f"tokens of shape {values.shape}: must be an array [..., T], T at least 1")
    counted = xp.ones(values.shape, bool) if mask is None else xp.asarray(mask).astype(bool)
    if counted.shape != values.shape:
        raise ValueError(f"mask has shape {counted.shape}; the tokens have {values.shape}")
    if not include_eos:
        last = xp.ones_like(counted[..., :1])
        counted = counted & xp.concatenate([counted[..., 1:], last], -1)
    if xp is np:
        empty = ~counted.any(-1)
        if empty.any():
            without = "" if include_eos else " but the end of sequence"
            raise ValueError(f"mask: {_row(empty)} has no tokens{without}: an empty generation")
        if log_probs:
            check_log_probs("token_logprobs", values, counted)
    return xp, xp.where(counted, values, xp.zeros_like(values)), counted


def sample_log_likelihoods(
    seq_ll: Any, *, lengths: Any = None, beside: Sequence[Any] = ()
) -> tuple[Any, Any]:
    """The array module, and checked log-likelihoods [..., N], for each token where lengths are."""
    xp, (values,) = operands(seq_ll, beside=(*beside, lengths))
    if values.ndim < 1 or values.shape[-1] < 1:
        raise ValueError(f"seq_ll of shape {values.shape}: must be [..., N] with N at least 1")
    if xp is np:
        check_log_probs("seq_ll", values)
    if lengths is None:
        return xp, values
    counts = xp.asarray(lengths, values.dtype)
    if counts.shape != values.shape:
        raise ValueError(f"lengths has shape {counts.shape}; seq_ll has {values.shape}")
    if xp is np and not (counts >= 1).all():
        index = _first(~(counts >= 1))
        raise ValueError(f"lengths={counts[index]:g} at index {index}: must be at least 1")
    return xp, values / xp.maximum(counts, 1.0)


def cluster_labels(xp: Any, cluster_ids: Any, shape: tuple[int, ...] | None = None) -> Any:
    """Checked cluster ids [..., N]."""
    ids = xp.asarray(cluster_ids)
    if ids.ndim < 1 or ids.shape[-1] < 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"cluster_ids of shape {ids.shape} and type {ids.dtype}: must be integers [..., N] "
            "with N at least 1"
        )
    if shape is not None and ids.shape != shape:
        raise ValueError(f"cluster_ids has shape {ids.shape}; seq_ll has {shape}")
    if xp is np and (ids < 0).any():
        index = _first(ids < 0)
        raise ValueError(f"cluster_ids={ids[index]} at index {index}: must be at least 0")
    return ids


def _first(bad: np.ndarray) -> tuple[int, ...]:
    return tuple(np.argwhere(bad)[0].tolist())


def _row(bad: Any) -> str:
    index = _first(bad)
    return f"row {index[0] if len(index) == 1 else index}" if index else "the only row"
