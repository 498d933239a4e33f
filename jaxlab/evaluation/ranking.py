"""Does a score tell wrong answers from right ones? AUROC, rejection, abstention, reliability.

A score is an uncertainty: larger means less sure. Only its order counts, except where a threshold
is returned; infinities are scores like others, NaN is none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

__all__ = [
    "Abstention",
    "BootstrapAuroc",
    "Reliability",
    "abstention_threshold",
    "area_under_rejection_accuracy",
    "auroc",
    "paired_bootstrap",
    "rejection_accuracy",
    "reliability",
    "wilson_interval",
]

_CHUNK = 1 << 21  # weights that are held at a time


class Abstention(NamedTuple):
    """A rule: answer where `score <= threshold`, and what it did on the data it was made from.

    Attributes:
      threshold: -inf if no answer may be given.
      kept: answers given.
      right: those of them that are right.
      total: all questions.
    """

    threshold: float
    kept: int
    right: int
    total: int

    @property
    def accuracy(self) -> float:
        """Of the answers that were given; NaN if there are none."""
        return self.right / self.kept if self.kept else float("nan")

    @property
    def coverage(self) -> float:
        """The share of questions that were answered, in [0, 1]."""
        return self.kept / self.total


class Reliability(NamedTuple):
    """Bins of rising score; all arrays are [bins].

    Attributes:
      score: the median score in each bin (the lower one of two).
      lowest, highest: the range of scores in it.
      count: answers in it, at least 1.
      accuracy: the share of them that are right.
      low, high: Wilson's interval of the accuracy.
    """

    score: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray
    count: np.ndarray
    accuracy: np.ndarray
    low: np.ndarray
    high: np.ndarray


class BootstrapAuroc(NamedTuple):
    """AUROCs of several scores on the same questions, with percentile intervals.

    Attributes:
      auroc, low, high: of each score, [scores].
      difference, difference_low, difference_high: to the reference, whose own are 0, [scores].
      samples: the AUROCs on every resample, [scores, resamples].
      redrawn: resamples that were drawn anew, since all answers in them were right or all wrong.
    """

    auroc: np.ndarray
    low: np.ndarray
    high: np.ndarray
    difference: np.ndarray
    difference_low: np.ndarray
    difference_high: np.ndarray
    samples: np.ndarray
    redrawn: int


def auroc(is_wrong: ArrayLike, score: ArrayLike) -> Any:
    """The chance that a wrong answer has a larger score than a right one; ties count one half.

    `P(u_wrong > u_right) + P(u_wrong = u_right) / 2`, the area under the ROC curve of the score
    as a detector of wrong answers.

    Args:
      is_wrong: True or 1 where the answer is wrong, [questions].
      score: uncertainties, [..., questions].

    Returns:
      In [0, 1], [...]; a float for a single row of scores. 0.5 is chance.

    Raises:
      ValueError: all answers are right or all are wrong, a score is NaN, or shapes differ.

    Example:
      >>> auroc([False, True, False, True], [0.1, 0.4, 0.4, 0.9])
      0.875
    """
    wrong, scores = _checked("is_wrong", is_wrong, score)
    _check_classes(wrong)
    weight = wrong[None, :].astype(np.float64)
    values = [_weighted_auroc(weight, 1 - weight, row)[0] for row in _rows(scores)]
    return _shaped(np.array(values), scores.shape[:-1])


def rejection_accuracy(correct: ArrayLike, score: ArrayLike, fractions: ArrayLike) -> Any:
    """The accuracy among the least uncertain answers, for each fraction that is kept.

    Kept is `score <= quantile(score, fraction)`, so equal scores are kept or rejected together.

    Args:
      correct: True or 1 where the answer is right, [questions].
      score: uncertainties, [..., questions].
      fractions: in [0, 1], [fractions] or a number. At 0 the smallest score is kept.

    Returns:
      Accuracies in [0, 1], [..., fractions]; without the last axis for one fraction.

    Raises:
      ValueError: a fraction is outside [0, 1], a score is NaN, or shapes differ.

    Example:
      >>> rejection_accuracy([1, 1, 0, 1, 0], [0.1, 0.2, 0.3, 0.4, 0.5], [0.25, 0.5, 1.0])
      array([1.        , 0.66666667, 0.6       ])
    """
    right, scores = _checked("correct", correct, score)
    shares = np.asarray(fractions, np.float64)
    if shares.ndim > 1 or not ((shares >= 0) & (shares <= 1)).all():
        raise ValueError(f"fractions={fractions}: must be numbers in [0, 1], at most one row")
    # A quantile lies between two neighbours in rank, so what it keeps are all scores up to the
    # lower one. The rounding undoes that of a product that should be whole.
    places = np.floor(np.round(shares * (len(right) - 1), 9)).astype(np.intp)
    accuracies = []
    for row in _rows(scores):
        ordered, hits = _by_score(right, row)
        kept = np.searchsorted(ordered, ordered[places], side="right")
        accuracies.append(hits[kept - 1] / kept)
    return _shaped(np.array(accuracies), (*scores.shape[:-1], *shares.shape))


def area_under_rejection_accuracy(
    correct: ArrayLike, score: ArrayLike, *, lowest: float = 0.1, num: int = 20
) -> Any:
    """The sum of `rejection_accuracy` over evenly spaced fractions, times their spacing.

    A perfect score and accuracy 1 throughout give `(1 - lowest) * num / (num - 1)`, not 1.

    Args:
      correct: True or 1 where the answer is right, [questions].
      score: uncertainties, [..., questions].
      lowest: the smallest fraction that is kept, in [0, 1).
      num: fractions from `lowest` to 1, at least 2.

    Returns:
      Areas, [...]; a float for a single row of scores.

    Raises:
      ValueError: an argument is out of its range, a score is NaN, or shapes differ.

    Source: Farquhar et al. 2024, "Detecting hallucinations in large language models using
    semantic entropy", the area under the thresholded accuracy as their code computes it.
    """
    if not 0 <= lowest < 1 or num < 2:
        raise ValueError(f"lowest={lowest}, num={num}: must lie in [0, 1) and be at least 2")
    fractions = np.linspace(lowest, 1, num)
    accuracies = rejection_accuracy(correct, score, fractions)
    area = accuracies.sum(-1) * (fractions[1] - fractions[0])
    return _shaped(area, area.shape)


def abstention_threshold(
    correct: ArrayLike, score: ArrayLike, target_accuracy: float
) -> Abstention:
    """The largest threshold whose kept answers are right at least so often.

    The threshold is chosen and measured on the same answers, which flatters it: measure its
    accuracy on other questions before relying on it.

    Args:
      correct: True or 1 where the answer is right, [questions].
      score: uncertainties, [questions].
      target_accuracy: the wanted share of right answers among those that are given, in [0, 1].

    Returns:
      The rule; of several thresholds with the same answers, the largest kept score.

    Raises:
      ValueError: the target is outside [0, 1], a score is NaN, or shapes differ.

    Example:
      >>> abstention_threshold([1, 1, 0, 1, 0], [0.1, 0.2, 0.3, 0.4, 0.5], 0.75)
      Abstention(threshold=0.4, kept=4, right=3, total=5)
    """
    right, scores = _checked("correct", correct, score, single=True)
    if not 0 <= target_accuracy <= 1:
        raise ValueError(f"target_accuracy={target_accuracy}: must lie in [0, 1]")
    ordered, hits = _by_score(right, scores)
    kept = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)) + 1
    good = kept[hits[kept - 1] / kept >= target_accuracy]
    if not len(good):
        return Abstention(float("-inf"), 0, 0, len(right))
    last = int(good[-1])
    return Abstention(float(ordered[last - 1]), last, int(hits[last - 1]), len(right))


def reliability(
    correct: ArrayLike, score: ArrayLike, num_bins: int = 10, *, level: float = 0.95
) -> Reliability:
    """The accuracy in bins of rising score, for a figure of how uncertainty goes with error.

    Bins hold equal numbers of answers as far as ties allow: equal scores are never parted, and
    a bin that is left empty is left out.

    Args:
      correct: True or 1 where the answer is right, [questions].
      score: uncertainties, [questions].
      num_bins: at least 1.
      level: of the intervals, in (0, 1).

    Raises:
      ValueError: an argument is out of its range, a score is NaN, or shapes differ.
    """
    right, scores = _checked("correct", correct, score, single=True)
    if num_bins < 1:
        raise ValueError(f"num_bins={num_bins}: must be at least 1")
    ordered, hits = _by_score(right, scores)
    first = np.searchsorted(ordered, ordered, side="left")
    last = np.searchsorted(ordered, ordered, side="right")
    # The middle of a group of ties decides for all of them; halves of whole numbers are exact.
    bins = (first + last) * num_bins // (2 * len(ordered))
    begin = np.flatnonzero(np.append(True, bins[1:] != bins[:-1]))
    end = np.append(begin[1:], len(ordered))
    count = end - begin
    right_in_bin = hits[end - 1] - np.append(0, hits[begin[1:] - 1])
    low, high = wilson_interval(right_in_bin, count, level=level)
    return Reliability(
        score=ordered[(begin + end - 1) // 2],
        lowest=ordered[begin],
        highest=ordered[end - 1],
        count=count,
        accuracy=right_in_bin / count,
        low=low,
        high=high,
    )


def wilson_interval(
    successes: ArrayLike, total: ArrayLike, *, level: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's score interval of a share: usable for few trials and for shares of 0 and 1.

    Args:
      successes: counts, [...], from 0 to `total`.
      total: trials, [...], at least 1.
      level: of the interval, in (0, 1).

    Returns:
      (low, high), each [...], in [0, 1].

    Raises:
      ValueError: an argument is out of its range.
    """
    hits, trials = np.asarray(successes, np.float64), np.asarray(total, np.float64)
    if not ((trials >= 1) & (hits >= 0) & (hits <= trials)).all():
        raise ValueError("successes and total: must satisfy 0 <= successes <= total, 1 <= total")
    from scipy.special import ndtri  # far lighter to import than scipy.stats

    z2 = float(ndtri((1 + _checked_level(level)) / 2)) ** 2
    center = hits + z2 / 2
    half = np.sqrt(z2 * (hits * (trials - hits) / trials + z2 / 4))
    return np.maximum(center - half, 0) / (trials + z2), np.minimum(
        (center + half) / (trials + z2), 1
    )


def paired_bootstrap(
    is_wrong: ArrayLike,
    scores: ArrayLike,
    *,
    reference: int = 0,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> BootstrapAuroc:
    """Intervals of AUROCs, and of their differences, by resampling the questions.

    All scores see the same resamples, so what makes a question hard for all of them cancels in
    the differences. A resample in which all answers are right, or all wrong, has no AUROC and is
    drawn anew; intervals are those of resamples that have one.

    Args:
      is_wrong: True or 1 where the answer is wrong, [questions].
      scores: uncertainties, [scores, questions].
      reference: the row of `scores` that the others are compared to.
      resamples: at least 1.
      level: of the percentile intervals, in (0, 1).
      seed: of the resampling; the same seed gives the same resamples.

    Raises:
      ValueError: all answers are right or all are wrong, an argument is out of its range, a score
        is NaN, or shapes differ.
    """
    wrong, rows = _checked("is_wrong", is_wrong, scores)
    _check_classes(wrong)
    if rows.ndim != 2:
        raise ValueError(f"scores of shape {rows.shape}: must be [scores, questions]")
    if not -len(rows) <= reference < len(rows):
        raise ValueError(f"reference={reference}: must be one of {len(rows)} rows of scores")
    if resamples < 1:
        raise ValueError(f"resamples={resamples}: must be at least 1")
    tail = (1 - _checked_level(level)) / 2
    generator = np.random.default_rng(seed)
    at_once = max(1, _CHUNK // len(wrong))
    parts, redrawn = [], 0
    for start in range(0, resamples, at_once):
        counts, again = _resampled(generator, wrong, min(at_once, resamples - start))
        redrawn += again
        wrong_counts, right_counts = counts * wrong, counts * ~wrong
        parts.append([_weighted_auroc(wrong_counts, right_counts, row) for row in rows])
    samples = np.concatenate(parts, axis=1)
    estimate = auroc(wrong, rows)
    low, high = np.quantile(samples, [tail, 1 - tail], axis=1)
    gaps = samples - samples[reference]
    gap_low, gap_high = np.quantile(gaps, [tail, 1 - tail], axis=1)
    gap = estimate - estimate[reference]
    return BootstrapAuroc(estimate, low, high, gap, gap_low, gap_high, samples, redrawn)


def _weighted_auroc(wrong: np.ndarray, right: np.ndarray, score: np.ndarray) -> np.ndarray:
    """AUROCs [rows] of answers that count several times: weights [rows, questions]."""
    order = np.argsort(score, kind="stable")
    ordered = score[order]
    groups = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    wrong_in = np.add.reduceat(wrong[:, order], groups, axis=1)
    right_in = np.add.reduceat(right[:, order], groups, axis=1)
    right_below = np.cumsum(right_in, axis=1) - right_in / 2
    # Sums of halves are exact, so only the division rounds.
    pairs = (wrong_in * right_below).sum(1)
    return pairs / (wrong.sum(1) * right.sum(1))


def _resampled(
    generator: np.random.Generator, wrong: np.ndarray, rows: int
) -> tuple[np.ndarray, int]:
    """How often each question was drawn, [rows, questions], and how many rows were redrawn."""
    total = len(wrong)
    counts = np.zeros((rows, total))
    open_rows, redrawn = np.arange(rows), 0
    while len(open_rows):
        drawn = generator.integers(total, size=(len(open_rows), total))
        drawn += np.arange(len(open_rows))[:, None] * total
        fresh = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        counts[open_rows] = fresh
        num_wrong = (fresh * wrong).sum(1)
        open_rows = open_rows[(num_wrong == 0) | (num_wrong == total)]
        redrawn += len(open_rows)
    return counts, redrawn


def _by_score(right: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores in rising order, and the number of right answers up to each."""
    order = np.argsort(score, kind="stable")
    return score[order], np.cumsum(right[order])


def _rows(scores: np.ndarray) -> np.ndarray:
    return scores.reshape(-1, scores.shape[-1])


def _shaped(values: np.ndarray, shape: tuple[int, ...]) -> Any:
    return values.reshape(shape) if shape else float(values.reshape(()))


def _checked(
    name: str, labels: ArrayLike, score: ArrayLike, *, single: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Labels as booleans [questions], and scores as float64 [..., questions]."""
    given, scores = np.asarray(labels), np.asarray(score, np.float64)
    if given.ndim != 1 or not len(given) or scores.shape[-1:] != given.shape:
        raise ValueError(
            f"{name} of shape {given.shape} and score of shape {scores.shape}: must be "
            "[questions] and [..., questions] with at least one question"
        )
    if single and scores.ndim != 1:
        raise ValueError(f"score of shape {scores.shape}: must be one row [questions]")
    if given.dtype.kind not in "biuf" or not ((given == 0) | (given == 1)).all():
        raise ValueError(f"{name}: must hold True and False, or 1 and 0")
    if np.isnan(scores).any():
        place = ", ".join(map(str, np.argwhere(np.isnan(scores))[0]))
        raise ValueError(f"score[{place}] is NaN: must be a number")
    return given.astype(bool), scores


def _check_classes(wrong: np.ndarray) -> None:
    if wrong.all() or not wrong.any():
        kind = "wrong" if wrong.all() else "right"
        raise ValueError(
            f"AUROC is undefined: all {len(wrong)} answers are {kind}; it needs both kinds"
        )


def _checked_level(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level={level}: must lie in (0, 1)")
    return level
