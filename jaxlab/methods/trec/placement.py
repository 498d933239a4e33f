"""Placing data by a training re-evaluation curve. Host functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxlab.methods.trec.arrays import Curve

__all__ = ["curriculum", "place_block", "place_lowest"]


def place_block(trec: Curve, fraction: float) -> tuple[int, int]:
    """The contiguous window with the lowest mean of a measured or predicted curve. Host.

    Args:
      trec: curve [T], by step or by bin.
      fraction: share of the run that the window covers, in (0, 1]; rounded to whole entries, at
        least one.

    Returns:
      `(start, stop)`, half open and from 0; among equal windows the earliest.

    Raises:
      ValueError: a fraction outside (0, 1], or a curve that is not finite.

    Example:
      >>> place_block([3.0, 2.0, 1.0, 1.0, 2.0], fraction=0.4)
      (2, 4)
    """
    trec, size = _budget(trec, fraction)
    centred = trec - trec.mean()
    cumulative = np.concatenate([[0.0], np.cumsum(centred)])
    sums = cumulative[size:] - cumulative[:-size]
    # Equal windows differ by the rounding of the cumulative sum.
    slack = np.finfo(np.float64).eps * len(trec) * np.abs(centred).max()
    start = int(np.argmax(sums <= sums.min() + slack))
    return start, start + size


def place_lowest(trec: Curve, fraction: float) -> np.ndarray:
    """The lowest entries of a measured or predicted curve, wherever they lie. Host.

    Args:
      trec: curve [T], by step or by bin.
      fraction: share of the entries to choose, in (0, 1]; rounded to whole entries, at least one.

    Returns:
      Indices from 0, int64 [n], ascending; among equal entries the earliest are chosen.

    Raises:
      ValueError: a fraction outside (0, 1], or a curve that is not finite.

    Example:
      >>> place_lowest([3.0, 1.0, 2.0, 1.0], fraction=0.5).tolist()
      [1, 3]
    """
    trec, size = _budget(trec, fraction)
    return np.sort(np.argsort(trec, kind="stable")[:size])


def curriculum(num_steps: int, start: int, stop: int) -> np.ndarray:
    """The data source of every step: 1 (high quality) in a window, 0 (base) elsewhere. Host.

    Args:
      num_steps: steps `T` of the run.
      start: first step of the window, from 0.
      stop: first step after it; equal to `start` for no window.

    Returns:
      int32 [T].

    Raises:
      ValueError: not `0 <= start <= stop <= num_steps`.

    Example:
      >>> curriculum(5, 2, 4).tolist()
      [0, 0, 1, 1, 0]
    """
    if not 0 <= start <= stop <= num_steps:
        raise ValueError(
            f"start={start}, stop={stop}: must satisfy 0 <= start <= stop <= num_steps={num_steps}"
        )
    steps = np.arange(num_steps)
    return ((steps >= start) & (steps < stop)).astype(np.int32)


def _budget(trec: Any, fraction: float) -> tuple[np.ndarray, int]:
    """A checked curve [T] and the entries that a fraction of it has."""
    trec = np.asarray(trec, np.float64)
    if trec.ndim != 1 or not trec.size or not np.isfinite(trec).all():
        raise ValueError(f"trec of shape {trec.shape}: must be one curve [steps] of finite values")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction}: must lie in (0, 1]")
    return trec, max(1, round(fraction * trec.size))
