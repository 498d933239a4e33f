"""Rotary position embedding in the half-split layout of Llama, and its extensions to long texts.

Sources: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2;
Llama pairs coordinate i with i + head_dim / 2, where the paper pairs neighbours. Chen et al.,
"Extending Context Window of Large Language Models via Position Interpolation" (linear); Peng et
al., "YaRN: Efficient Context Window Extension of Large Language Models", sections 3.2 to 3.4;
Llama 3.1's frequencies as its model card gives them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

__all__ = [
    "LinearScaling",
    "Llama3Scaling",
    "RotaryScaling",
    "RotaryTables",
    "YarnScaling",
    "apply_rotary",
    "rotary_amplitude",
    "rotary_frequencies",
    "rotary_tables",
    "rotate",
]


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """All positions are divided by a factor.

    Attributes:
      factor: at least 1.
    """

    factor: float

    def __post_init__(self) -> None:
        _check(self, "factor", self.factor >= 1, "must be at least 1")


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Long waves are divided by a factor, short ones are kept, with a ramp between.

    Attributes:
      factor: at least 1.
      original_length: tokens of context before the extension.
      low_frequency_factor: waves longer than `original_length / low_frequency_factor` tokens are
        divided.
      high_frequency_factor: waves shorter than `original_length / high_frequency_factor` tokens
        are kept; larger than `low_frequency_factor`.
    """

    factor: float
    original_length: int
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0

    def __post_init__(self) -> None:
        _check(self, "factor", self.factor >= 1, "must be at least 1")
        _check(self, "original_length", self.original_length >= 1, "must be at least 1")
        order = 0 < self.low_frequency_factor < self.high_frequency_factor
        rule = f"must be above low_frequency_factor={self.low_frequency_factor}, which is positive"
        _check(self, "high_frequency_factor", order, rule)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """NTK-by-parts interpolation with a correction of the attention's temperature.

    Attributes:
      factor: at least 1.
      original_length: tokens of context before the extension.
      beta_fast: pairs that turn more often than this over `original_length` are kept.
      beta_slow: pairs that turn less often are divided by `factor`; below `beta_fast`.
      truncate: whether the ends of the ramp between the two are rounded outwards to whole pairs.
      amplitude: factor of the turned queries and keys; None for `0.1 ln(factor) + 1`.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float | None = None

    def __post_init__(self) -> None:
        _check(self, "factor", self.factor >= 1, "must be at least 1")
        _check(self, "original_length", self.original_length >= 1, "must be at least 1")
        order = 0 < self.beta_slow < self.beta_fast
        rule = f"must be above beta_slow={self.beta_slow}, which is positive"
        _check(self, "beta_fast", order, rule)


RotaryScaling = LinearScaling | Llama3Scaling | YarnScaling


class RotaryTables(NamedTuple):
    """Cosines and sines of every position's angles.

    Attributes:
      cosine: `[batch seq half_dim]`, float32 or wider.
      sine: likewise.
    """

    cosine: Float[Array, "batch seq half_dim"]
    sine: Float[Array, "batch seq half_dim"]


def rotary_frequencies(
    head_dim: int, theta: float = 10000.0, scaling: RotaryScaling | None = None
) -> Float[Array, " half_dim"]:
    """Angle in radians by which each coordinate pair turns from one position to the next.

    Args:
      head_dim: width of a head, even and positive.
      theta: base of the geometric series, positive; larger reaches further.
      scaling: extension to longer texts.

    Returns:
      `theta ** (-2 i / head_dim)` for `i` in `[0, head_dim / 2)`, changed by `scaling`, in JAX's
      default float type.

    Raises:
      ValueError: `head_dim` is odd or not positive, or `theta` is not positive, or with YaRN not
        above 1.

    >>> [round(turn, 4) for turn in rotary_frequencies(4, theta=100.0).tolist()]
    [1.0, 0.1]
    """
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: rotary embedding needs an even, positive width")
    if theta <= 0:
        raise ValueError(f"theta={theta}: must be positive")
    # The powers are taken in float64 and rounded once.
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if isinstance(scaling, LinearScaling):
        return jnp.asarray(plain / scaling.factor)
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_length * plain / (2 * math.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
    elif isinstance(scaling, YarnScaling):
        if theta <= 1:
            raise ValueError(f"theta={theta}: must be above 1 with YaRN, whose waves grow longer")
        kept = _yarn_kept(scaling, head_dim, theta)
    else:
        return jnp.asarray(plain)
    return jnp.asarray(kept * plain + (1 - kept) * plain / scaling.factor)


def rotary_amplitude(scaling: RotaryScaling | None) -> float:
    """Factor of turned queries and keys: that of YaRN, 1 for everything else.

    >>> round(rotary_amplitude(YarnScaling(4.0, 4096)), 5)
    1.13863
    """
    if not isinstance(scaling, YarnScaling):
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1 if scaling.amplitude is None else scaling.amplitude


def rotary_tables(
    positions: Int[Array, "batch seq"],
    frequencies: Float[Array, " half_dim"],
    amplitude: float = 1.0,
) -> RotaryTables:
    """What `rotate` needs; computed once for all layers.

    Args:
      positions: place of every token in its sequence, in tokens from 0.
      frequencies: from `rotary_frequencies`.
      amplitude: from `rotary_amplitude`.
    """
    angles = positions.astype(frequencies.dtype)[:, :, None] * frequencies[None, None, :]
    factor = jnp.asarray(amplitude, angles.dtype)
    return RotaryTables(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def rotate(
    x: Float[Array, "batch seq heads head_dim"], tables: RotaryTables
) -> Float[Array, "batch seq heads head_dim"]:
    """Turns each pair `(x[i], x[i + head_dim / 2])` by its angle.

    Products are float32 (float64 for float64 input).

    Args:
      x: queries or keys.
      tables: for the positions of `x`.

    Returns:
      An array like `x`, of its type.

    Raises:
      ValueError: the shapes do not fit together.
    """
    if 2 * tables.cosine.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"{tables.cosine.shape[-1]} frequencies for head_dim={x.shape[-1]}: "
            "there must be one for each pair of coordinates"
        )
    # NumPy's rule, since JAX's is switched off under strict promotion.
    compute_dtype = np.promote_types(x.dtype, np.float32)
    cosine = tables.cosine.astype(compute_dtype)[:, :, None, :]
    sine = tables.sine.astype(compute_dtype)[:, :, None, :]
    first, second = jnp.split(x.astype(compute_dtype), 2, axis=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def apply_rotary(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "batch seq"],
    frequencies: Float[Array, " half_dim"],
) -> Float[Array, "batch seq heads head_dim"]:
    """`rotate` by `position * frequencies[i]`.

    The inner product of a turned query and a turned key depends on their positions through the
    difference only.

    Args:
      x: queries or keys.
      positions: place of every token in its sequence, in tokens from 0.
      frequencies: from `rotary_frequencies`; half as many as `head_dim`.

    Returns:
      An array like `x`, of its type.

    Raises:
      ValueError: the shapes do not fit together.
    """
    if positions.shape != x.shape[:2]:
        raise ValueError(f"positions has shape {positions.shape}; x of {x.shape} needs [batch seq]")
    return rotate(x, rotary_tables(positions, frequencies))


def _yarn_kept(scaling: YarnScaling, head_dim: int, theta: float) -> np.ndarray:
    """The share of each pair's frequency that is not interpolated (equations 17 to 21)."""

    def pair_with(turns: float) -> float:
        """The pair that turns so often over the original length, as a real number."""
        wave = scaling.original_length / (2 * math.pi * turns)
        return head_dim * math.log(wave) / (2 * math.log(theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    # Published checkpoints were made with this width of a ramp without any.
    width = last - first if last != first else 0.001
    return 1 - np.clip((np.arange(head_dim // 2) - first) / width, 0, 1)


def _check(scaling: RotaryScaling, name: str, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name}={getattr(scaling, name)}: {rule}")
