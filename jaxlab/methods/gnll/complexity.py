"""How many sequences must be drawn to estimate the most probable one, or the entropy."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxlab.ops.arrays import operands, plain

__all__ = ["entropy_sample_bound", "maximum_failure_probability", "maximum_sample_bound"]

Scalars = float | np.ndarray | Float[Array, "..."]


def maximum_failure_probability(
    num_samples: Scalars, mass: Scalars, *, weight_bound: Scalars = 1.0
) -> Any:
    """A bound of the probability that sampling misses all nearly best sequences. Host or graph.

    Let `M = -max_y log p(y)`, `M^ = -max_n log p(y_n)` over N independent draws from `q`, and
    `S` the sequences with `log p(y) >= -M - eps`. Always `M^ >= M`, and `M^ - M > eps` exactly
    where no draw lies in `S`. With `p(S) = P` and `p / q <= C` on `S`, `q(S) >= P / C`, so

        P(M^ - M > eps) = (1 - q(S))^N <= (1 - P / C)^N <= exp(-N P / C).

    For draws from `p` itself (`C = 1`) the first bound is exact.

    Args:
      num_samples: N, at least 1.
      mass: `P`, in (0, 1].
      weight_bound: `C`, at least `P`.

    Returns:
      `(1 - P / C)^N`, in [0, 1].

    Raises:
      ValueError: (host) a value is out of its range.

    Source: arXiv 2412.15176, Theorem 1; the steps are ours.

    Example:
      >>> maximum_failure_probability(2, 0.5)
      0.25
    """
    _check("num_samples", num_samples, "must be at least 1", least=1.0)
    _check_mass(mass, weight_bound)
    xp, (n, p, c) = operands(num_samples, mass, weight_bound)
    return plain(xp, (1 - p / c) ** n)


def maximum_sample_bound(mass: Scalars, delta: Scalars, *, weight_bound: Scalars = 1.0) -> Any:
    """Draws that suffice to find a nearly best sequence. Host or graph.

    `N >= (C / P) log(1 / delta)` gives `P(M^ - M > eps) <= delta`, since
    `exp(-N P / C) <= delta`; the terms are those of `maximum_failure_probability`. It does not
    depend on how long or how many the sequences are.

    Args:
      mass: `P`, in (0, 1].
      delta: probability of failure, in (0, 1).
      weight_bound: `C`, at least `P`.

    Returns:
      A real number; round it up.

    Raises:
      ValueError: (host) a value is out of its range.

    Source: as `maximum_failure_probability`.

    Example:
      >>> round(maximum_sample_bound(0.5, 0.01), 2)
      9.21
    """
    _check("delta", delta, "must lie in (0, 1)", above=0.0, below=1.0)
    _check_mass(mass, weight_bound)
    xp, (p, d, c) = operands(mass, delta, weight_bound)
    return plain(xp, -xp.log(d) * c / p)


def entropy_sample_bound(
    low: Scalars,
    high: Scalars,
    error: Scalars,
    delta: Scalars,
    *,
    weights: tuple[Scalars, Scalars] = (1.0, 1.0),
) -> Any:
    """Draws that suffice to estimate the entropy, by Hoeffding's inequality. Host or graph.

    With `y_n` drawn from `q` and weights `w = p / q` in `[c, C]`, the estimate
    `H^ = (1/N) sum_n w(y_n) (-log p(y_n))` is unbiased for `H`. Let `-log p` lie in `[a, b]`,
    `a >= 0`. The summand is a product of two non-negative factors, so it lies in
    `[c a, C b]`, an interval of length `R = C b - c a`, and

        P(|H^ - H| > error) <= 2 exp(-2 N error^2 / R^2) <= delta
        for  N >= R^2 / (2 error^2) log(2 / delta).

    For draws from `p` itself all weights are 1 and `R = b - a`. For other proposals a range of
    `C (b - a)`, as it is sometimes written, is too small: where all sequences are equally
    probable, `a = b`, it would ask for no draws at all, though the weights still vary. It is
    right for the estimate `a + (1/N) sum_n w(y_n) (-log p(y_n) - a)`, which has the same mean:
    give `low=0` and `high=b - a` for that one.

    Args:
      low: `a`, the least `-log p`, at least 0: the min-entropy.
      high: `b`, the largest, at least `a`.
      error: in nats, positive.
      delta: probability of a larger error, in (0, 1).
      weights: `(c, C)`, with `0 <= c <= 1 <= C`, as the weights' mean is 1.

    Returns:
      A real number; round it up.

    Raises:
      ValueError: (host) a value is out of its range.

    Source: arXiv 2412.15176, Theorem 1, with the range above.

    Example:
      >>> round(entropy_sample_bound(1.0, 3.0, 0.5, 0.05), 2)
      29.51
      >>> round(entropy_sample_bound(1.0, 3.0, 0.5, 0.05, weights=(0.0, 2.0)), 2)
      265.6
    """
    least, most = weights
    _check("low", low, "must be at least 0", least=0.0)
    _check("error", error, "must be positive", above=0.0)
    _check("delta", delta, "must lie in (0, 1)", above=0.0, below=1.0)
    _check("weights[0]", least, "must lie in [0, 1]", least=0.0, most=1.0)
    _check("weights[1]", most, "must be at least 1", least=1.0)
    if not any(isinstance(x, jax.Array) for x in (low, high)) and not np.all(
        np.asarray(low) <= np.asarray(high)
    ):
        raise ValueError(f"high={high}: must be at least low={low}")
    xp, (a, b, e, d, c, big) = operands(low, high, error, delta, least, most)
    return plain(xp, ((big * b - c * a) / e) ** 2 * xp.log(2 / d) / 2)


def _check_mass(mass: Scalars, weight_bound: Scalars) -> None:
    _check("mass", mass, "must lie in (0, 1]", above=0.0, most=1.0)
    if not any(isinstance(x, jax.Array) for x in (mass, weight_bound)) and not np.all(
        np.asarray(weight_bound) >= np.asarray(mass)
    ):
        raise ValueError(f"weight_bound={weight_bound}: must be at least mass={mass}")


def _check(
    name: str,
    value: Any,
    allowed: str,
    *,
    least: float = -np.inf,
    above: float = -np.inf,
    most: float = np.inf,
    below: float = np.inf,
) -> None:
    """Raises ValueError where a host value is not finite or lies outside its range."""
    if isinstance(value, jax.Array):
        return
    x = np.asarray(value, np.float64)
    if not np.all(np.isfinite(x) & (x >= least) & (x > above) & (x <= most) & (x < below)):
        raise ValueError(f"{name}={value}: {allowed}")
