"""Losses over discrete targets."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

__all__ = ["cross_entropy", "cross_entropy_per_token"]


def cross_entropy_per_token(
    logits: Float[Array, "*batch vocab"], targets: Integer[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Negative log-likelihood of every target, in nats.

    Computed as `logsumexp(logits) - logits[target]`, in float32 whatever the narrower type of
    the logits (float64 for float64 logits).

    Args:
      logits: unnormalised log-probabilities.
      targets: classes in `[0, vocab)`; one at or above `vocab` gives NaN.

    Returns:
      Values of at least 0, float32.

    Raises:
      ValueError: the shape of `targets` is not that of `logits` without its last axis.

    >>> losses = cross_entropy_per_token(jnp.zeros((2, 4)), jnp.array([0, 3]))
    >>> [round(loss, 4) for loss in losses.tolist()]
    [1.3863, 1.3863]
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets has shape {targets.shape}; logits of shape {logits.shape} "
            f"need {logits.shape[:-1]}"
        )
    # NumPy's rule, since JAX's is switched off under strict promotion.
    logits = logits.astype(np.promote_types(logits.dtype, np.float32))
    return _negative_log_likelihood(logits, targets)


def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Integer[Array, "*batch"],
    mask: Bool[Array, "*batch"] | Float[Array, "*batch"] | None = None,
) -> Float[Array, ""]:
    """Mean negative log-likelihood of the targets, in nats a token.

    Args:
      logits: unnormalised log-probabilities.
      targets: classes in `[0, vocab)`; where the mask is zero they may be anything, such as -100.
      mask: True where a token counts, or weights of at least 0; all tokens by default.

    Returns:
      Sum of mask times loss over the sum of the mask, a float32 scalar; 0 for an empty mask.

    Raises:
      ValueError: the shapes do not fit together.

    >>> logits = jnp.array([[0.0, 0.0], [9.0, 0.0]])
    >>> targets, mask = jnp.array([1, -100]), jnp.array([True, False])
    >>> round(float(cross_entropy(logits, targets, mask)), 4)
    0.6931
    """
    if mask is None:
        return jnp.mean(cross_entropy_per_token(logits, targets))
    if mask.shape != targets.shape:
        raise ValueError(f"mask has shape {mask.shape}; targets has {targets.shape}")
    # A masked target may be out of range: its NaN would not reach the sum, but would stop a run
    # that checks for NaN.
    counted = mask.astype(jnp.bool_)
    losses = cross_entropy_per_token(logits, jnp.where(counted, targets, jnp.zeros_like(targets)))
    weights = mask.astype(losses.dtype)
    total = jnp.sum(weights)
    weighted = jnp.sum(jnp.where(counted, weights * losses, jnp.zeros_like(losses)))
    return weighted / jnp.where(total > 0, total, jnp.ones_like(total))


@jax.custom_jvp
def _negative_log_likelihood(logits: jax.Array, targets: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


@_negative_log_likelihood.defjvp
def _negative_log_likelihood_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, Any]
) -> tuple[jax.Array, jax.Array]:
    # Softmax minus target in one expression. Differentiated through the look-up, the gradient
    # would be scattered into a second array of the size of the logits.
    logits, targets = primals
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    classes = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    hot = (classes == targets[..., None]).astype(logits.dtype)
    slope = jnp.exp(logits - total[..., None]) - hot
    return total - chosen, jnp.sum(slope * tangents[0], axis=-1)
