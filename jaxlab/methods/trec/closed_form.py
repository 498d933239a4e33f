"""Peaks of the coefficients and valleys of the predicted curve in continuous time. Host functions.

With the learning rate `f(t)` relative to its peak at the training fraction `t`, the coefficients of
a run are proportional to `f(t) exp(-(1 / tau) int_t^1 f)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import xlogy

from jaxlab.methods.trec.arrays import check_positive, check_unit
from jaxlab.ops.arrays import plain
from jaxlab.ops.schedules import SCHEDULES

__all__ = [
    "d2z_valley",
    "ema_peak",
    "linear_ema_peak",
    "predicted_valley",
    "step_critical_timescale",
    "wsd_ema_peak",
]

_BISECTIONS = 60
_COSINE_PIECES = 64


class _Shape(NamedTuple):
    """A schedule after warm-up; functions of the training fraction `t`, arrays of any shape.

    Attributes:
      edges: training fractions between which to look for one maximum each, ascending.
      relative: learning rate `f` over its peak.
      log_slope: `f' / f`.
      integral: of `f` from `t` to 1.
    """

    edges: Any
    relative: Callable[[Any], Any]
    log_slope: Callable[[Any], Any]
    integral: Callable[[Any], Any]


def ema_peak(
    schedule: str,
    tau: float | np.ndarray,
    *,
    final_ratio: float = 0.0,
    warmup_fraction: float = 0.0,
    step_at: float = 0.7,
    decay_fraction: float = 0.2,
    num_cycles: int = 4,
    decay_scaled_by_lr: bool = True,
) -> Any:
    """Where the coefficients of a schedule peak, in continuous time. Host.

    The valley of the predicted curve at `m = 0`; see `predicted_valley` for the arguments. With
    `w` the warm-up's share, `r` the final ratio and `tau' = tau / (1 - w)`, the peak lies

    ================  ===========================================================================
    `constant`        at 1
    `linear`, `d2z`   where `f = sqrt(tau' (1 - r))`, clipped to [r, 1]
    `cosine`          to 0: at `w + (1 - w) (2 / pi) atan(u)` with `u^3 + u = 1 / (pi tau')`;
                      to `r`: there `-f' tau = f^2`, a root of degree 4, or at 1
    `step`            at `step_at`, or at 1 below `step_critical_timescale`
    `wsd`             where `f = sqrt(tau (1 - r) / decay_fraction)`, clipped to [r, 1]
    `inverse_sqrt`    at `w` or at 1, whichever coefficient is larger
    `cyclic`          at 1, where the last cycle ends high
    ================  ===========================================================================

    Args:
      schedule: see `predicted_valley`, as are all others.
      tau: AdamW's time scale.
      final_ratio: final over peak learning rate.
      warmup_fraction: share of the run in warm-up.
      step_at: where `step` drops.
      decay_fraction: share of the run in which `wsd` decays.
      num_cycles: cycles of `cyclic`.
      decay_scaled_by_lr: False for an independent weight decay.

    Returns:
      Training fraction in [0, 1], in the shape of `tau`.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> round(ema_peak("cosine", tau=0.104, final_ratio=0.01), 3)
      0.57
    """
    return predicted_valley(
        schedule,
        tau,
        0.0,
        final_ratio=final_ratio,
        warmup_fraction=warmup_fraction,
        step_at=step_at,
        decay_fraction=decay_fraction,
        num_cycles=num_cycles,
        decay_scaled_by_lr=decay_scaled_by_lr,
    )


def predicted_valley(
    schedule: str,
    tau: float | np.ndarray,
    m: float | np.ndarray,
    *,
    p: float = 0.5,
    final_ratio: float = 0.0,
    warmup_fraction: float = 0.0,
    step_at: float = 0.7,
    decay_fraction: float = 0.2,
    num_cycles: int = 4,
    decay_scaled_by_lr: bool = True,
) -> Any:
    """Where the predicted curve `1 - c^p t^m` of a schedule is lowest, in continuous time. Host.

    It is never in warm-up, where `c` and `t` both rise. For `constant` and `cyclic` it is at 1, and
    for `step` and `inverse_sqrt` at the better one of two known places. Elsewhere it is a root of
    `p (f' / f + f / tau) + m / t`, found by bisection: the only one of `linear`, `d2z` and `wsd`
    (where the expression falls), or the best of `cosine`.

    Args:
      schedule: a name of `make_schedule`.
      tau: AdamW's time scale, positive; infinity for no weight decay. Broadcasts against `m`.
      m: training-fraction exponent, at least 0.
      p: exponent of the coefficients, positive.
      final_ratio: final over peak learning rate, in [0, 1]; 0 for `d2z`.
      warmup_fraction: share `w` of the run in linear warm-up, in [0, 1); positive for
        `inverse_sqrt`.
      step_at: training fraction at which `step` drops, in [`warmup_fraction`, 1].
      decay_fraction: share of the run in which `wsd` decays, in (0, 1 - `warmup_fraction`].
      num_cycles: cycles of `cyclic`, at least 1.
      decay_scaled_by_lr: False for an independent weight decay, whose coefficients are
        proportional to `f exp(-(1 - t) / tau)`; see `update_coefficients`.

    Returns:
      Training fraction in [0, 1], in the broadcast shape of `tau` and `m`. Where the curve is flat
      at its lowest, the end of that part.

    Raises:
      ValueError: an argument is out of range.
    """
    check_positive(tau=tau, p=p)
    if not np.all(np.asarray(m) >= 0):
        raise ValueError(f"m={m}: must not be negative")
    shape = _shape(schedule, final_ratio, warmup_fraction, step_at, decay_fraction, num_cycles)
    tau, m = np.broadcast_arrays(np.asarray(tau, np.float64), np.asarray(m, np.float64))

    def slope(t: np.ndarray) -> np.ndarray:
        decay = shape.relative(t) if decay_scaled_by_lr else 1.0
        return p * (shape.log_slope(t) + decay / tau) + m / t

    def height(t: np.ndarray) -> np.ndarray:
        kept = shape.integral(t) if decay_scaled_by_lr else 1 - t
        return p * (np.log(shape.relative(t)) - kept / tau) + xlogy(m, t)

    edges = np.asarray(shape.edges, np.float64).reshape(-1, *(1,) * tau.ndim)
    edges = np.broadcast_to(edges, (len(edges), *tau.shape))
    low, high = edges[:-1].copy(), edges[1:].copy()
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            rising = slope(middle) > 0
            low, high = np.where(rising, middle, low), np.where(rising, high, middle)
        places = np.sort(np.concatenate([edges, (low + high) / 2]), axis=0)
        heights = height(places)
    best = heights.max(0)
    slack = 4 * np.finfo(np.float64).eps * np.maximum(1.0, np.abs(best))
    last = len(places) - 1 - np.argmax((heights >= best - slack)[::-1], axis=0)
    return plain(np, np.take_along_axis(places, last[None], 0)[0])


def _shape(
    schedule: str,
    final_ratio: float,
    warmup_fraction: float,
    step_at: float,
    decay_fraction: float,
    num_cycles: int,
) -> _Shape:
    """The checked schedule."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: must be one of {', '.join(SCHEDULES)}")
    r, w = float(final_ratio), float(warmup_fraction)
    check_unit("final_ratio", r)
    check_unit("warmup_fraction", w, below_one=True)
    check_positive(num_cycles=num_cycles)
    if schedule == "d2z" and r:
        raise ValueError(f"final_ratio={r}: must be 0 with schedule='d2z'")
    if schedule == "step":
        return _step(r, w, step_at)
    if schedule == "wsd":
        return _wsd(r, w, decay_fraction)
    if schedule == "inverse_sqrt":
        if w == 0:
            raise ValueError("warmup_fraction=0: must be positive with schedule='inverse_sqrt'")
        return _Shape(
            edges=(w, 1.0),
            relative=lambda t: np.sqrt(w / t),
            log_slope=lambda t: -0.5 / t,
            integral=lambda t: 2 * math.sqrt(w) * (1 - np.sqrt(t)),
        )
    if schedule == "cosine":
        return _cosine(r, w)
    if schedule in ("linear", "d2z"):
        return _linear(r, 1 - w, w)
    # The peak of the coefficients and of t^m alike: constant, and cyclic, which ends high.
    return _Shape((1.0, 1.0), np.ones_like, np.zeros_like, lambda t: 1 - t)


def _step(r: float, w: float, step_at: float) -> _Shape:
    drop = float(step_at)
    if not w <= drop <= 1:
        raise ValueError(f"step_at={step_at}: must lie in [warmup_fraction={w}, 1]")
    return _Shape(
        edges=(drop, 1.0),
        relative=lambda t: np.where(t <= drop, 1.0, r),
        log_slope=np.zeros_like,
        integral=lambda t: np.maximum(drop - t, 0) + r * (1 - np.maximum(t, drop)),
    )


def _linear(r: float, length: float, start: float) -> _Shape:
    """Decay from 1 to `r` over the last `length` of the run, 1 before; from `start` on."""
    fall = 1 - r
    return _Shape(
        edges=(start, 1 - length, 1.0) if start < 1 - length else (start, 1.0),
        relative=lambda t: r + fall * np.clip((1 - t) / length, 0, 1),
        log_slope=lambda t: (
            -fall / length * (t > 1 - length) / (r + fall * np.clip((1 - t) / length, 0, 1))
        ),
        integral=lambda t: _line_integral(t, r, length),
    )


def _line_integral(t: Any, r: float, length: float) -> Any:
    s = np.clip((1 - t) / length, 0, 1)
    return np.maximum(1 - length - t, 0) + length * s * (r + (1 - r) * s / 2)


def _wsd(r: float, w: float, decay_fraction: float) -> _Shape:
    length = float(decay_fraction)
    if not 0 < length <= 1 - w + 1e-12:
        raise ValueError(
            f"decay_fraction={decay_fraction}: must lie in (0, {1 - w:g}], the share of the run "
            "after warm-up"
        )
    return _linear(r, length, w)


def _cosine(r: float, w: float) -> _Shape:
    fall, length = 1 - r, 1 - w

    def remaining(t: Any) -> Any:
        return (1 - t) / length

    def relative(t: Any) -> Any:
        return r + fall * np.sin(math.pi / 2 * remaining(t)) ** 2

    return _Shape(
        # The slope may change its sign three times. Two changes within one piece, where it hardly
        # leaves zero, are no maximum: the height goes on rising after them.
        edges=np.linspace(w, 1.0, _COSINE_PIECES + 1),
        relative=relative,
        log_slope=lambda t: (
            -fall * math.pi / 2 / length * np.sin(math.pi * remaining(t)) / relative(t)
        ),
        integral=lambda t: (
            length
            * ((1 + r) / 2 * remaining(t) - fall / 2 * np.sin(math.pi * remaining(t)) / math.pi)
        ),
    )


def d2z_valley(tau: float | np.ndarray, m: float | np.ndarray, p: float = 0.5) -> Any:
    """Where the predicted curve of linear decay to zero is lowest. Host.

    With `s = 1 - t/T`, the coefficients are proportional to `s exp(-s^2 / (2 tau))`, and the valley
    of `1 - c^p (1 - s)^m` is the root of `p (tau - s^2) (1 - s) = m tau s`.

    Args:
      tau: AdamW's time scale, positive; broadcasts against `m`.
      m: training-fraction exponent, at least 0; 0 gives the peak of the coefficients.
      p: exponent of the coefficients, positive.

    Returns:
      Training fraction in [0, 1).

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> round(d2z_valley(tau=0.25, m=0.0), 6)
      0.5
    """
    check_positive(tau=tau, p=p)
    if np.any(np.asarray(m) < 0):
        raise ValueError(f"m={m}: must not be negative")
    tau, m = np.broadcast_arrays(np.asarray(tau, np.float64), np.asarray(m, np.float64))
    # Divided by 1 - s, the left side minus the right falls strictly on (0, 1): one root.
    low, high = np.zeros_like(tau), np.ones_like(tau)
    for _ in range(60):
        s = (low + high) / 2
        above = p * (tau - s**2) * (1 - s) > m * tau * s
        low, high = np.where(above, s, low), np.where(above, high, s)
    return plain(np, 1 - (low + high) / 2)


def linear_ema_peak(tau: float | np.ndarray, final_ratio: float | np.ndarray) -> Any:
    """Where the coefficients of linear decay peak. Host.

    Args:
      tau: AdamW's time scale, positive.
      final_ratio: final over peak learning rate, in [0, 1); broadcasts against `tau`.

    Returns:
      Training fraction in [0, 1]: where the relative learning rate is
      `sqrt(tau (1 - final_ratio))`, clipped to its range.

    Raises:
      ValueError: an argument is out of range.
    """
    check_positive(tau=tau)
    ratio = check_unit("final_ratio", final_ratio, below_one=True)
    lr = np.clip(np.sqrt(tau * (1 - ratio)), ratio, 1.0)
    return plain(np, 1 - (lr - ratio) / (1 - ratio))


def wsd_ema_peak(tau: float | np.ndarray, decay_fraction: float | np.ndarray) -> Any:
    """Where the coefficients of warm-up, stable, decay (to zero) peak. Host.

    Args:
      tau: AdamW's time scale, positive.
      decay_fraction: share `d` of the run in which the rate decays, in (0, 1]; broadcasts.

    Returns:
      Training fraction `1 - min(d, sqrt(tau d))`.

    Raises:
      ValueError: an argument is out of range.
    """
    check_positive(tau=tau, decay_fraction=decay_fraction)
    decay = check_unit("decay_fraction", decay_fraction)
    return plain(np, 1 - np.minimum(decay, np.sqrt(tau * decay)))


def step_critical_timescale(final_ratio: float | np.ndarray, step_at: float | np.ndarray) -> Any:
    """The time scale below which a step schedule's coefficients peak at the end. Host.

    Above it they peak just before the drop, and so does the value of good data.

    Args:
      final_ratio: learning rate after the drop over that before, in (0, 1).
      step_at: training fraction of the drop, in [0, 1]; broadcasts.

    Returns:
      `r (1 - step_at) / log(1 / r)`.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> round(step_critical_timescale(0.1, 0.7), 4)
      0.013
    """
    check_positive(final_ratio=final_ratio)
    ratio = check_unit("final_ratio", final_ratio, below_one=True)
    drop = check_unit("step_at", step_at)
    return plain(np, ratio * (1 - drop) / -np.log(ratio))
