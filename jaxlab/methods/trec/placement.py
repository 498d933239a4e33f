"""Placing data by a training re-evaluation curve. Host functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxlab.methods.trec.arrays import Curve

__all__ = ["curriculum", "place_block", "place_lowest"]


def place_block(trec: Curve, fraction: float, *, sizes: Curve | None = None) -> tuple[int, int]:
    """The contiguous window with the lowest mean of a measured or predicted curve. Host.

    Args:
      trec: curve [T], by step or by bin.
      fraction: share of the run that the window covers, in (0, 1]; rounded to whole entries, at
        least one.
      sizes: where entries differ in size, e.g. the tokens of each step's batch, positive [T]: the
        window covers `fraction` of their sum, and its mean is weighted by them. None: all alike.

    Returns:
      `(start, stop)`, half open and from 0; among equal windows the earliest.

    Raises:
      ValueError: a fraction outside (0, 1], a curve that is not finite, or sizes that are not
        positive or not [T].

    Example:
      >>> place_block([3.0, 2.0, 1.0, 1.0, 2.0], fraction=0.4)
      (2, 4)
      >>> place_block([3.0, 2.0, 1.0, 1.0, 1.5], fraction=0.4, sizes=[4, 1, 1, 1, 1])
      (2, 5)
    """
    trec, size = _budget(trec, fraction)
    centred = trec - trec.mean()
    if sizes is None:
        starts = np.arange(len(trec) - size + 1)
        stops = starts + size
        lengths = np.float64(size)
    else:
        sizes = np.asarray(sizes, np.float64)
        if sizes.shape != trec.shape or not (np.isfinite(sizes) & (sizes > 0)).all():
            raise ValueError(f"sizes of shape {sizes.shape}: must be positive, {trec.shape}")
        ends = np.concatenate([[0.0], np.cumsum(sizes)])
        starts, stops = _windows(ends, fraction * ends[-1])
        lengths = ends[stops] - ends[starts]
        centred = centred * sizes
    cumulative = np.concatenate([[0.0], np.cumsum(centred)])
    means = (cumulative[stops] - cumulative[starts]) / lengths
    # Equal windows differ by the rounding of the cumulative sum.
    slack = np.finfo(np.float64).eps * len(trec) * np.abs(centred).max() / np.min(lengths)
    best = int(np.argmax(means <= means.min() + slack))
    return int(starts[best]), int(stops[best])


def _windows(ends: np.ndarray, length: float) -> tuple[np.ndarray, np.ndarray]:
    """From every entry on, the window nearest to `length`, if the run is long enough.

    Args:
      ends: cumulative sizes [T + 1], from 0.
      length: positive, at most the last of them.

    Returns:
      Starts and stops [N], N at least 1.
    """
    starts = np.arange(len(ends) - 1)
    targets = ends[:-1] + length
    after = np.clip(np.searchsorted(ends, targets), starts + 1, len(ends) - 1)
    before = np.maximum(after - 1, starts + 1)
    nearer = targets - ends[before] < ends[after] - targets
    stops = np.where(nearer, before, after)
    # Not those that the end of the run cuts off.
    fits = targets <= ends[-1] + (ends[-1] - ends[-2]) / 2
    fits[0] = True
    return starts[fits], stops[fits]


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
