"""Predicting the shape of a training re-evaluation curve, and fitting what the prediction needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float

from jaxlab.methods.trec.arrays import (
    Curve,
    Curves,
    Scalars,
    check_curve,
    check_lengths,
    check_positive,
    check_steps,
    check_varies,
    fractions,
    split,
)
from jaxlab.ops.arrays import operands, plain

__all__ = [
    "SMALL_LM_LAW",
    "PowerLaw",
    "TrainingFractionFit",
    "effective_tpp",
    "fit_power_law",
    "fit_training_fraction",
    "predict_trec",
]


def predict_trec(
    c: Curves,
    *,
    m: float | Float[Array, ""],
    p: float | Float[Array, ""] = 0.5,
) -> Any:
    """The predicted shape of the curve, `1 - c^p (t / T)^m`. Host or graph.

    Only the shape is predicted: compare by `pearson`, which ignores scale and offset.

    Args:
      c: EMA coefficients [..., T], at least 0.
      m: training-fraction exponent, at least 0: how far early updates count less than their
        coefficient says, because the minimum that they point to moves as training goes on.
      p: exponent of the coefficients, at least 0; 0.5 in the paper.

    Returns:
      [..., T], at most 1.

    Raises:
      ValueError: (host) a negative coefficient or exponent.

    Source: arXiv 2509.25380, equation of the predicted TREC.

    Example:
      >>> predict_trec([0.04, 0.16, 0.64], m=1.0).round(3).tolist()
      [0.933, 0.733, 0.2]
    """
    xp, (coefficients, m_value, p_value) = operands(c, m, p)
    check_curve("c", coefficients)
    for name, value in (("m", m_value), ("p", p_value)):
        if value.ndim:
            raise ValueError(f"{name} of shape {value.shape}: must be a scalar; vmap over more")
    if xp is np:
        check_steps("c", coefficients, coefficients >= 0, "coefficients must not be negative")
        _check_exponent("m", m_value)
        _check_exponent("p", p_value)
    return 1 - coefficients**p_value * fractions(xp, coefficients) ** m_value


def _check_exponent(name: str, value: Any) -> None:
    if not value >= 0:
        raise ValueError(f"{name}={value}: must not be negative")


class TrainingFractionFit(NamedTuple):
    """Result of `fit_training_fraction`; floats for one curve, arrays [...] for many.

    Attributes:
      m: the exponent that fits best.
      r: Pearson correlation of the binned curves at `m`.
      at_edge: `m` is an end of the searched range [0, 12], so only a bound on the best exponent.
    """

    m: Any
    r: Any
    at_edge: Any


_GRID_STEP = 0.05
_GRID_SIZE = 241  # 0, 0.05, ..., 12
_TAYLOR_TERMS = 10
_GOLDEN_STEPS = 40
_ROUNDING = 1e-14  # of a correlation
_FLAT = 1e-12  # a prediction that varies less, relative to the largest dip, is constant


def fit_training_fraction(
    measured: Curves,
    c: Curve,
    *,
    p: float = 0.5,
    num_bins: int = 50,
) -> TrainingFractionFit:
    """The training-fraction exponent whose prediction correlates best with measured curves.

    A host function. Maximises the Pearson correlation of the binned curves over `m` in [0, 12]: on
    a grid of step 0.05, then by golden-section search around the best grid point. (The paper does
    not state its objective.) Many curves of one schedule, e.g. bootstrap replicates, cost one
    matrix product; they share all else.

    Args:
      measured: curves [..., T].
      c: EMA coefficients [T] of their schedule.
      p: exponent of the coefficients.
      num_bins: bins `K` >= 2 in which curves are compared; must divide `T`.

    Returns:
      `(m, r, at_edge)`.

    Raises:
      ValueError: lengths differ, `num_bins` does not divide them, a measured curve is constant, or
        no exponent gives a prediction that varies (coefficients all 0).
    """
    curves, coefficients = np.asarray(measured, np.float64), np.asarray(c, np.float64)
    check_curve("measured", curves)
    if coefficients.ndim != 1:
        raise ValueError(f"c of shape {coefficients.shape}: must be one schedule's [steps]")
    check_lengths("measured", curves, "c", coefficients)
    check_steps("c", coefficients, coefficients >= 0, "coefficients must not be negative")
    _check_exponent("p", p)
    if num_bins < 2:
        raise ValueError(f"num_bins={num_bins}: must be at least 2")
    target = split(np, "measured", curves, num_bins).mean(-1).reshape(-1, num_bins)
    check_varies(f"measured in {num_bins} bins", target)
    target = target - target.mean(-1, keepdims=True)
    target /= np.linalg.norm(target, axis=-1, keepdims=True)

    dip = coefficients**p
    grid = _prediction_grid(dip, num_bins)
    norms = np.linalg.norm(grid, axis=-1, keepdims=True)
    usable = norms > _FLAT * dip.max()
    if not usable.any():
        raise ValueError("c: no exponent gives a prediction that varies; are all coefficients 0?")
    scores = np.where(usable.T, target @ (grid / np.where(usable, norms, 1.0)).T, -np.inf)
    m, r = _refine(target, scores.argmax(-1), dip)
    at_edge = (m <= 0) | (m >= _GRID_STEP * (_GRID_SIZE - 1))
    m, r, at_edge = (plain(np, x.reshape(curves.shape[:-1])) for x in (m, r, at_edge))
    return TrainingFractionFit(m, r, at_edge)


def _prediction_grid(dip: np.ndarray, num_bins: int) -> np.ndarray:
    """Binned, centred `-dip t^m` [grid, K] for every `m` of the grid; `dip` [T] is `c^p`."""
    factor = fractions(np, dip) ** _GRID_STEP
    values = -dip
    rows = np.empty((_GRID_SIZE, num_bins))
    for row in rows:
        row[:] = values.reshape(num_bins, -1).mean(-1)
        values = values * factor
    return rows - rows.mean(-1, keepdims=True)


def _refine(target: np.ndarray, best: np.ndarray, dip: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Golden-section search within one grid step of each curve's best grid point.

    Around a grid point, `t^(m + d) = t^m sum_j (d log t)^j / j!`, where `|d log t|` is at most
    0.7 even for a million steps: ten terms are plenty. A curve's correlation is then one small
    polynomial over the root of another, whatever the number of steps and bins.

    Args:
      target: binned curves [N, K], centred and of norm 1.
      best: index of each curve's best grid point [N].
      dip: `c^p` [T].

    Returns:
      `(m, r)`, each [N].
    """
    num_bins = target.shape[-1]
    points, which = np.unique(best, return_inverse=True)
    log_t = np.log(fractions(np, dip))
    basis = np.empty((len(points), _TAYLOR_TERMS, num_bins))
    for rows, point in zip(basis, points, strict=True):
        values = -dip * np.exp(point * _GRID_STEP * log_t)
        for order, row in enumerate(rows):
            row[:] = values.reshape(num_bins, -1).mean(-1)
            values = values * log_t / (order + 1)
    basis -= basis.mean(-1, keepdims=True)
    slopes = np.einsum("nk,njk->nj", target, basis[which])
    gram = np.einsum("gjk,glk->gjl", basis, basis)[which]

    def score(offset: np.ndarray) -> np.ndarray:
        powers = offset[:, None] ** np.arange(_TAYLOR_TERMS)
        square = np.einsum("nj,njl,nl->n", powers, gram, powers)
        usable = square > (_FLAT * dip.max()) ** 2
        norm = np.sqrt(np.where(usable, square, 1.0))
        return np.where(usable, (powers * slopes).sum(-1) / norm, -np.inf)

    low = np.where(best == 0, 0.0, -_GRID_STEP)
    high = np.where(best == _GRID_SIZE - 1, 0.0, _GRID_STEP)
    ends = low.copy(), high.copy()
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(_GOLDEN_STEPS):
        width = golden * (high - low)
        left, right = high - width, low + width
        keep_left = score(left) >= score(right)
        low, high = np.where(keep_left, low, left), np.where(keep_left, right, high)
    # The ends of the range are never tried by the search itself, and win where rounding decides.
    candidates = np.stack([*ends, (low + high) / 2])
    scores = np.stack([score(offset) for offset in candidates])
    chosen = (scores >= scores.max(0) - _ROUNDING).argmax(0)[None]
    offset, r = (np.take_along_axis(x, chosen, 0)[0] for x in (candidates, scores))
    return best * _GRID_STEP + offset, np.clip(r, -1.0, 1.0)


@dataclass(frozen=True)
class PowerLaw:
    """The training-fraction exponent as a power law, `m = C * TPP^mu_tpp * tau^mu_tau`.

    Attributes:
      C: factor.
      mu_tpp: exponent of tokens per parameter.
      mu_tau: exponent of AdamW's time scale.
      r2: coefficient of determination of the fitted `m`; None where unknown.
      r2_log: the same for `log m`, which the fit minimises.

    Source: arXiv 2509.25380, equation 4.
    """

    C: float
    mu_tpp: float
    mu_tau: float
    r2: float | None = None
    r2_log: float | None = None

    def __call__(self, tpp: Scalars, tau: Scalars) -> Any:
        """The exponent `m` of a run.

        Args:
          tpp: training tokens per parameter, positive.
          tau: AdamW's time scale, positive; see `adamw_timescale`.

        Returns:
          `m`, in the arguments' kind and shape.

        Raises:
          ValueError: an argument is not positive (checked unless it is a `jax.Array`).
        """
        check_positive(tpp=tpp, tau=tau)
        return self.C * tpp**self.mu_tpp * tau**self.mu_tau


SMALL_LM_LAW = PowerLaw(C=0.743, mu_tpp=0.208, mu_tau=-0.493, r2_log=0.963)
"""Our own fit to an MLP language model of 17 thousand parameters under linear decay to zero.

The paper's constants are not published. A fit to the schedule and model at hand is more accurate.
"""


def effective_tpp(tpp: Scalars, num_experts: int, top_k: int = 1) -> Any:
    """Tokens per parameter as a mixture of experts sees them, `TPP * top_k / E`.

    Each of `E` experts trains on the share `top_k / E` of the tokens. Fewer tokens per parameter
    give a smaller exponent `m`, and an earlier and deeper valley.

    Args:
      tpp: training tokens per active parameter, that is of the dense model of the same compute.
      num_experts: experts `E` of a layer, at least 1; 1 for a dense model.
      top_k: experts that a token visits, from 1 to `num_experts`.

    Returns:
      Effective tokens per parameter, in the kind and shape of `tpp`; for `PowerLaw` and
      `recommended_timescale`.

    Raises:
      ValueError: an argument is out of range.

    Source: arXiv 2509.25380, section on mixtures of experts (for `top_k = 1`).

    Example:
      >>> effective_tpp(20.0, num_experts=8)
      2.5
    """
    check_positive(tpp=tpp, num_experts=num_experts)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k}: must lie in [1, num_experts={num_experts}]")
    return tpp * (top_k / num_experts)


def fit_power_law(
    tpp: np.ndarray | Sequence[float],
    tau: np.ndarray | Sequence[float],
    m: np.ndarray | Sequence[float],
) -> PowerLaw:
    """Fits `m = C * TPP^mu_tpp * tau^mu_tau` by least squares on logarithms. A host function.

    Args:
      tpp: tokens per parameter of each run [N], positive.
      tau: AdamW's time scale of each run [N], positive.
      m: the runs' fitted exponents [N], positive: leave out those at the edge of their search.

    Returns:
      The law, with both coefficients of determination (1 where all `m` are equal).

    Raises:
      ValueError: lengths differ, a value is not positive, or the runs do not determine the law:
        fewer than three, or `tpp` and `tau` that do not vary independently.
    """
    values = {"tpp": np.asarray(tpp), "tau": np.asarray(tau), "m": np.asarray(m)}
    shapes = {name: value.shape for name, value in values.items()}
    if len(set(shapes.values())) != 1 or values["m"].ndim != 1:
        raise ValueError(f"shapes {shapes}: must be one-dimensional and equal")
    check_positive(**values)
    x = np.log(values["tpp"]), np.log(values["tau"])
    design = np.stack([np.ones_like(x[0]), *x], axis=-1)
    y = np.log(values["m"])
    solution, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    if rank < 3:
        raise ValueError(
            f"{len(y)} runs do not determine the law: at least 3 are needed, in which tpp and tau "
            "vary independently"
        )
    fitted = design @ solution
    return PowerLaw(
        C=float(np.exp(solution[0])),
        mu_tpp=float(solution[1]),
        mu_tau=float(solution[2]),
        r2=_determination(values["m"], np.exp(fitted)),
        r2_log=_determination(y, fitted),
    )


def _determination(y: np.ndarray, fitted: np.ndarray) -> float:
    """R squared; 1 where `y` is constant."""
    total = float(np.sum((y - y.mean()) ** 2))
    constant = np.ptp(y) <= 1e-12 * np.abs(y).max()
    return 1.0 if constant else 1.0 - float(np.sum((y - fitted) ** 2)) / total
