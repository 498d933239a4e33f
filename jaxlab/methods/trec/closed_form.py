"""Closed forms in continuous time, for schedules without warm-up. Host functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxlab.methods.trec.arrays import check_positive, check_unit, plain

__all__ = ["d2z_valley", "linear_ema_peak", "step_critical_timescale", "wsd_ema_peak"]


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
