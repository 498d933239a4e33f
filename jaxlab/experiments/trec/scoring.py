"""How well curves are predicted, and how certain that is over few seeds. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxlab.methods import trec
from jaxlab.reporting.claims import Claim, bootstrap_t_interval

__all__ = [
    "CurveShape",
    "Scores",
    "bin_centres",
    "binned_correlation",
    "cross_fit",
    "curve_claim",
    "fit_affine",
    "halves_of",
    "seed_resamples",
]

_NUM_RESAMPLES = 10_000
_DRAWS_AT_ONCE = 256


class CurveShape(Protocol):
    """How curves are compared; every configuration of this method has these two."""

    @property
    def num_bins(self) -> int:
        """Equal bins of a curve."""
        ...

    @property
    def power(self) -> float:
        """Exponent p of the EMA coefficient."""
        ...


class Scores(NamedTuple):
    """How well curves are predicted; each an array `[curve]`.

    Attributes:
      r: correlation of the binned prediction and the binned measurement.
      gain: what `r` has over the correlation at m = 0, EMA coefficients alone.
      gap: distance of predicted and measured valley, as a share of the run.
    """

    r: np.ndarray
    gain: np.ndarray
    gap: np.ndarray


def halves_of(replicates: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The first and the second half of the seeds; None if there is only one."""
    if replicates < 2:
        return None
    places = np.arange(replicates)
    return places[: replicates // 2], places[replicates // 2 :]


def seed_resamples(sizes: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
    """Draws of a bootstrap over seeds, each distinct one once.

    Few draws differ when seeds are few, so that what is costly is computed for those alone.

    Args:
      sizes: seeds in each group; each is resampled within itself.

    Returns:
      `(weights, place)`: for each group the seeds' weights `[distinct, size]`, whose rows sum to
      1, and for each draw the row that it has `[samples]`.
    """
    draw = np.random.default_rng(0)
    counts = [
        np.stack(
            [
                np.bincount(row, minlength=size)
                for row in draw.integers(size, size=(_NUM_RESAMPLES, size))
            ]
        )
        for size in sizes
    ]
    distinct, place = np.unique(np.concatenate(counts, axis=1), axis=0, return_inverse=True)
    parts = np.split(distinct, np.cumsum(sizes)[:-1], axis=1)
    return [part / size for part, size in zip(parts, sizes, strict=True)], place.reshape(-1)


def curve_claim(
    id: str,
    estimate: float,
    spread: np.ndarray,
    seeds: np.ndarray,
    groups: Sequence[np.ndarray],
    *,
    correlation: bool,
    **text: Any,
) -> Claim:
    """A claim about a statistic of groups' mean curves, with its interval from a bootstrap.

    Args:
      id: of the claim.
      estimate: the statistic.
      spread: the statistic on resampled seeds `[samples]`.
      seeds: the statistic of each seed `[replicate]`, to be stored.
      groups: of seeds, each resampled within itself.
      correlation: whether the interval is computed on Fisher's scale.
      **text: the claim's other attributes.
    """
    sizes = [len(group) for group in groups]
    transform = "fisher" if correlation else "none"
    low, high = bootstrap_t_interval(float(estimate), spread, sizes, transform=transform)
    if text["direction"] == "<=":
        low = max(low, 0.0) if np.isfinite(low) else low  # a distance
    values = tuple(seeds.tolist())
    return Claim(
        id=id, unit="seed", values=values, mean=float(estimate), low=low, high=high, **text
    )


def cross_fit(
    shape: CurveShape,
    curves: np.ndarray,
    coefficients: np.ndarray,
    halves: tuple[np.ndarray, np.ndarray],
) -> tuple[Scores, Scores, Scores]:
    """Fits m on each half of the seeds and scores it on the other.

    Returns:
      Scores, averaged over both ways, of the halves' mean curves `[1]` and of resampled seeds
      `[samples]` (NaN where a half has a single seed, whose spread is unknown); and of every
      seed's own curve `[replicate]`.
    """
    first, second = (curves[half] for half in halves)
    means = first.mean(axis=0)[None], second.mean(axis=0)[None]
    estimate = _both_ways(shape, *means, coefficients)
    one = _score(shape, first, _exponents(shape, means[1], coefficients), coefficients)
    two = _score(shape, second, _exponents(shape, means[0], coefficients), coefficients)
    seeds = Scores(*(np.concatenate(pair) for pair in zip(one, two, strict=True)))
    if min(map(len, halves)) < 2:
        unknown = Scores(*(np.full(_NUM_RESAMPLES, np.nan) for _ in Scores._fields))
        return estimate, unknown, seeds
    weights, place = seed_resamples([len(half) for half in halves])
    parts = []
    for start in range(0, len(weights[0]), _DRAWS_AT_ONCE):  # each draw has curves of all steps
        some = [w[start : start + _DRAWS_AT_ONCE] for w in weights]
        parts.append(_both_ways(shape, some[0] @ first, some[1] @ second, coefficients))
    spread = Scores(*map(np.concatenate, zip(*parts, strict=True)))
    return estimate, Scores(*(value[place] for value in spread)), seeds


def _both_ways(
    shape: CurveShape, first: np.ndarray, second: np.ndarray, coefficients: np.ndarray
) -> Scores:
    one = _score(shape, first, _exponents(shape, second, coefficients), coefficients)
    two = _score(shape, second, _exponents(shape, first, coefficients), coefficients)
    return Scores(*((a + b) / 2 for a, b in zip(one, two, strict=True)))


def _exponents(shape: CurveShape, curves: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    fit = trec.fit_training_fraction(curves, coefficients, p=shape.power, num_bins=shape.num_bins)
    return np.atleast_1d(fit.m)


def _score(
    shape: CurveShape, curves: np.ndarray, exponents: np.ndarray, coefficients: np.ndarray
) -> Scores:
    """Scores `[N]` of curves `[N, T]` by exponents `[N]`, or by one for all."""
    measured = trec.bin_curve(curves, shape.num_bins)[0]
    predicted = np.stack([trec.predict_trec(coefficients, m=m, p=shape.power) for m in exponents])
    alone = trec.predict_trec(coefficients, m=0.0, p=shape.power)[None]
    r, r_alone = (
        trec.pearson(trec.bin_curve(curve, shape.num_bins)[0], measured)
        for curve in (predicted, alone)
    )
    gap = trec.valley(predicted) - trec.valley(measured, num_steps=curves.shape[-1])
    return Scores(r, r - r_alone, np.abs(gap))


def binned_correlation(
    shape: CurveShape, mean: np.ndarray, coefficients: np.ndarray, m: float
) -> float:
    """Correlation of a curve `[T]` and its prediction, in bins."""
    predicted = trec.predict_trec(coefficients, m=m, p=shape.power)
    pair = [trec.bin_curve(curve, shape.num_bins)[0] for curve in (predicted, mean)]
    return float(trec.pearson(*pair))


def fit_affine(curve: np.ndarray, target: np.ndarray) -> np.ndarray:
    """`curve`, scaled by a factor that is not negative and shifted to lie closest to `target`."""
    centred = curve - curve.mean()
    slope = max(0.0, float(centred @ (target - target.mean())) / float(centred @ centred))
    return target.mean() + slope * centred


def bin_centres(num_bins: int) -> np.ndarray:
    """Training fractions `[num_bins]` in the middle of the bins."""
    return (np.arange(num_bins) + 0.5) / num_bins
