"""Arrays and argument checks that the modules of this method share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

__all__ = [
    "Curve",
    "Curves",
    "Scalars",
    "accumulate_back",
    "check_curve",
    "check_lengths",
    "check_positive",
    "check_steps",
    "check_unit",
    "check_varies",
    "fractions",
    "split",
]

Curve = Float[Array, " steps"] | np.ndarray | Sequence[float]
"""One value for each step [T]."""

Curves = Float[Array, "*batch steps"] | np.ndarray | Sequence[Any]
"""One value for each step [..., T]."""

Scalars = float | np.ndarray | Float[Array, "..."]
"""A number, or an array of them."""


def fractions(xp: Any, curve: Any) -> Any:
    """The training fraction `t / T` of each entry, shaped to broadcast against the curve."""
    length = curve.shape[-1]
    steps = xp.arange(1, length + 1, dtype=curve.dtype) / length
    return steps.reshape((1,) * (curve.ndim - 1) + (length,))


def accumulate_back(xp: Any, add: Any, keep: Any) -> Any:
    """`y_i = add_i + keep_i y_{i+1}` along the last axis, from its end; all [..., T]."""

    def step(later: Any, terms: tuple[Any, Any]) -> Any:
        return terms[0] + terms[1] * later

    if xp is np:
        sums = np.empty(add.shape)
        flat = (x.reshape(-1, add.shape[-1])[:, ::-1] for x in (add, keep, sums))
        for terms, factors, row in zip(*flat, strict=True):
            pairs = zip(terms.tolist(), factors.tolist(), strict=True)
            totals = itertools.accumulate(pairs, step, initial=0.0)
            next(totals)
            row[:] = np.fromiter(totals, np.float64, len(row))
        return sums
    terms = jnp.moveaxis(add, -1, 0), jnp.moveaxis(keep, -1, 0)
    start = jnp.zeros(add.shape[:-1], add.dtype)
    _, sums = jax.lax.scan(lambda y, x: (step(y, x),) * 2, start, terms, reverse=True)
    return jnp.moveaxis(sums, 0, -1)


def split(xp: Any, name: str, curve: Any, num_bins: int) -> Any:
    """The curve [..., T] as bins [..., K, T // K]."""
    check_curve(name, curve)
    length = curve.shape[-1]
    if not 1 <= num_bins <= length or length % num_bins:
        raise ValueError(
            f"num_bins={num_bins}: must be a divisor of the {length} steps of {name}; drop the "
            "tail of the curve if need be"
        )
    return xp.reshape(curve, (*curve.shape[:-1], num_bins, length // num_bins))


def check_curve(name: str, curve: Any) -> None:
    """Raises ValueError where the steps' axis is missing."""
    if curve.ndim < 1:
        raise ValueError(f"{name}={curve}: must be an array with the steps on its last axis")


def check_lengths(name_a: str, a: Any, name_b: str, b: Any) -> None:
    """Raises ValueError where two curves have different lengths."""
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"{name_a} has {a.shape[-1]} steps and {name_b} has {b.shape[-1]}: must be equal"
        )


def check_varies(name: str, curves: np.ndarray) -> None:
    """Raises ValueError where a curve is constant up to rounding, or not finite."""
    if not np.isfinite(curves).all():
        raise ValueError(f"{name} is not finite everywhere: correlation is undefined")
    slack = 4 * np.finfo(np.float64).eps * np.abs(curves).max(-1, initial=0.0)
    if np.any(np.ptp(curves, axis=-1) <= slack):
        raise ValueError(f"{name} is constant: correlation is undefined")


def check_steps(name: str, curve: np.ndarray, good: np.ndarray, allowed: str) -> None:
    """Raises ValueError that names the first step which is not good."""
    if not good.all():
        index = np.argwhere(~good)[0].tolist()
        where = f" of curve {tuple(index[:-1])}" if len(index) > 1 else ""
        raise ValueError(f"{name}={curve[tuple(index)]} at step {index[-1] + 1}{where}: {allowed}")


def check_positive(**values: Any) -> None:
    """Raises ValueError for a named host value that is not positive."""
    for name, value in values.items():
        if not isinstance(value, jax.Array) and not np.all(np.asarray(value) > 0):
            raise ValueError(f"{name}={value}: must be positive")


def check_unit(name: str, value: Any, *, below_one: bool = False) -> np.ndarray:
    """The value as an array, or ValueError where it lies outside the unit interval."""
    array = np.asarray(value, np.float64)
    if not np.all((array >= 0) & ((array < 1) if below_one else (array <= 1))):
        raise ValueError(f"{name}={value}: must lie in [0, 1{')' if below_one else ']'}")
    return array
