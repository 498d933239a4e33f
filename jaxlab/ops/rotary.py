"""Rotary position embedding in the half-split layout of Llama.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2;
Llama pairs coordinate i with i + head_dim / 2, where the paper pairs neighbours.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

__all__ = ["apply_rotary", "rotary_frequencies"]


def rotary_frequencies(head_dim: int, theta: float = 10000.0) -> Float[Array, " half_dim"]:
    """Angle in radians by which each coordinate pair turns from one position to the next.

    Args:
      head_dim: width of a head, even and positive.
      theta: base of the geometric series, positive; larger reaches further.

    Returns:
      `theta ** (-2 i / head_dim)` for `i` in `[0, head_dim / 2)`, in JAX's default float type.

    Raises:
      ValueError: `head_dim` is odd or not positive, or `theta` is not positive.

    >>> [round(turn, 4) for turn in rotary_frequencies(4, theta=100.0).tolist()]
    [1.0, 0.1]
    """
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: rotary embedding needs an even, positive width")
    if theta <= 0:
        raise ValueError(f"theta={theta}: must be positive")
    # The powers are taken in float64 and rounded once.
    return jnp.asarray(theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim))


def apply_rotary(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "batch seq"],
    frequencies: Float[Array, " half_dim"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Turns each pair `(x[i], x[i + head_dim / 2])` by `position * frequencies[i]`.

    The inner product of a turned query and a turned key depends on their positions through the
    difference only. Angles and products are float32 (float64 for float64 input).

    Args:
      x: queries or keys.
      positions: place of every token in its sequence, in tokens from 0.
      frequencies: from `rotary_frequencies`; half as many as `head_dim`.

    Returns:
      An array like `x`, of its type.

    Raises:
      ValueError: the shapes do not fit together.
    """
    if 2 * frequencies.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{frequencies.shape[0]} frequencies for head_dim={x.shape[-1]}: "
            "there must be one for each pair of coordinates"
        )
    if positions.shape != x.shape[:2]:
        raise ValueError(f"positions has shape {positions.shape}; x of {x.shape} needs [batch seq]")
    # NumPy's rule, since JAX's is switched off under strict promotion.
    compute_dtype = np.promote_types(x.dtype, np.float32)
    angles = positions.astype(frequencies.dtype)[:, :, None] * frequencies[None, None, :]
    cosine = jnp.cos(angles).astype(compute_dtype)[:, :, None, :]
    sine = jnp.sin(angles).astype(compute_dtype)[:, :, None, :]
    first, second = jnp.split(x.astype(compute_dtype), 2, axis=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
