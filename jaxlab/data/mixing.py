"""Mixtures of sources: which source gives the batch of a step, fixed before the first one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxlab.data.batches import EndlessBatches
from jaxlab.errors import UserError

__all__ = ["MixedBatches", "read_mixture", "weights_to_ids"]

Batch = TypeVar("Batch")

_FIELD = "data.mixture"
_MAX_STEPS = 100_000_000
_MAX_SOURCES = 2**16
_KEYS = ("num_steps", "segments", "default")


class MixedBatches(EndlessBatches[Batch]):
    """Batches of several sources, each of which is read in its own order without gaps.

    The batch of a step comes from the step's source, at the index that counts the earlier steps
    of that source. It depends on the step alone, so steps may be read in any order, and each
    source's batches are those it gives by itself. Unlike other sources this one ends; only as a
    Grain data set it begins again, as all of those do.

    Attributes:
      sources: what is mixed.
      source_ids: index of each step's source, `[num_steps]`, read-only.

    >>> from jaxlab.data.markov import MarkovBatches
    >>> even = np.full((2, 2), 0.5)
    >>> sources = [MarkovBatches(even, batch_size=2, length=3, seed=seed) for seed in (0, 1)]
    >>> mixed = MixedBatches(sources, np.array([0, 1, 0]))
    >>> len(mixed), bool((mixed[2] == sources[0][1]).all())
    (3, True)
    """

    def __init__(self, sources: Sequence[EndlessBatches[Batch]], source_ids: np.ndarray) -> None:
        """Counts the steps of each source.

        Args:
          sources: at least one, with batches of one form.
          source_ids: index of each step's source, integers `[num_steps]`.

        Raises:
          TypeError: the indices are not integers.
          ValueError: they are not one row, or one names no source.
        """
        source_ids = np.asarray(source_ids)
        if not np.issubdtype(source_ids.dtype, np.integer):
            raise TypeError(f"source_ids have type {source_ids.dtype}: must be integers")
        if source_ids.ndim != 1:
            raise ValueError(f"source_ids have shape {source_ids.shape}: must be one row")
        unknown = (source_ids < 0) | (source_ids >= len(sources))
        if unknown.any():
            step = int(unknown.argmax())
            raise ValueError(
                f"source_ids[{step}]={source_ids[step]}: must be in [0, {len(sources)}), "
                "the number of sources"
            )
        self.sources = tuple(sources)
        # Small types: there may be as many steps as a long run has.
        self.source_ids = source_ids.astype(np.min_scalar_type(max(0, len(sources) - 1)))
        self.source_ids.flags.writeable = False
        self._indices = np.empty(len(source_ids), np.min_scalar_type(len(source_ids)))
        for source in range(len(sources)):
            steps = np.flatnonzero(self.source_ids == source)
            self._indices[steps] = np.arange(len(steps))

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.source_ids)

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0.

        Raises:
          IndexError: the mixture ends before this step.
        """
        if step >= len(self):
            raise IndexError(f"step={step}: the mixture has {len(self)} steps")
        return self.sources[self.source_ids[step]][int(self._indices[step])]


def weights_to_ids(weights: Sequence[float] | np.ndarray, num_steps: int, seed: int) -> np.ndarray:
    """Draws each step's source independently.

    A larger `num_steps` appends to the steps of a smaller one.

    Args:
      weights: of each source, at least 0; their sum is taken as the whole.
      num_steps: at least 0.
      seed: at least 0.

    Returns:
      Indices of sources, unsigned integers `[num_steps]`, for `MixedBatches`.

    Raises:
      ValueError: a number is out of its range.

    >>> np.bincount(weights_to_ids([3, 0, 1], 1000, seed=0)).tolist()
    [733, 0, 267]
    """
    weights = np.asarray(weights, np.float64)
    if weights.ndim != 1 or not len(weights):
        raise ValueError(f"weights have shape {weights.shape}: must be one row, with a source")
    if not ((weights >= 0).all() and 0 < weights.sum() < np.inf):
        raise ValueError(f"weights={weights.tolist()}: must be at least 0, with a positive sum")
    if num_steps < 0 or seed < 0:
        raise ValueError(f"num_steps={num_steps}, seed={seed}: must be at least 0")
    bounds = weights.cumsum()
    # Exactly 1 at the end: a uniform number below 1 always finds a source of positive weight.
    bounds /= bounds[-1]
    uniform = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).random(num_steps)
    ids = np.searchsorted(bounds, uniform, side="right")
    return ids.astype(np.min_scalar_type(len(weights) - 1))


def read_mixture(path: Path | str, *, num_sources: int | None = None) -> np.ndarray:
    """Each step's source from a JSON file.

    The file holds `{"num_steps": T, "segments": [[start, stop, source], ...], "default": source}`:
    steps `start` to `stop`, without `stop`, read that source, all others the default, which may
    be left out if there are no others.

    Args:
      path: the file.
      num_sources: how many sources there are, if that is known here.

    Returns:
      Indices of sources, unsigned integers `[num_steps]`, for `MixedBatches`.

    Raises:
      UserError: the file cannot be read, or is no such mixture; names the file and the place.
    """
    tree = _load_object(path)
    num_steps = tree["num_steps"]
    if not _is_whole(num_steps) or not 1 <= num_steps <= _MAX_STEPS:
        problem = f"num_steps is {num_steps!r}: must be a whole number in [1, {_MAX_STEPS}]"
        raise UserError(_FIELD, path, problem)
    segments = _checked_segments(path, tree["segments"], num_steps, num_sources)
    covered = sum(stop - start for start, stop, _ in segments)
    if "default" in tree:
        _check_source(path, "default", tree["default"], num_sources)
    elif covered < num_steps:
        problem = f"the key default is missing, and segments cover {covered} of {num_steps} steps"
        raise UserError(_FIELD, path, problem)
    default = tree.get("default", 0)
    highest = max([default, *(source for _, _, source in segments)])
    ids = np.full(num_steps, default, np.min_scalar_type(highest))
    for start, stop, source in segments:
        ids[start:stop] = source
    return ids


def _load_object(path: Path | str) -> dict[str, Any]:
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(_FIELD, path, f"cannot be read ({error.strerror or error})") from None
    except json.JSONDecodeError as error:
        problem = f"is not JSON (line {error.lineno} column {error.colno}: {error.msg})"
        raise UserError(_FIELD, path, problem) from None
    except (ValueError, RecursionError):
        raise UserError(_FIELD, path, "is not JSON in UTF-8") from None
    if not isinstance(tree, dict):
        raise UserError(_FIELD, path, "must hold an object with the keys num_steps and segments")
    for key in ("num_steps", "segments"):
        if key not in tree:
            raise UserError(_FIELD, path, f"the key {key} is missing")
    if unknown := sorted(tree.keys() - set(_KEYS)):
        problem = f"unknown key {unknown[0]!r}; allowed: {', '.join(_KEYS)}"
        raise UserError(_FIELD, path, problem)
    return tree


def _checked_segments(
    path: Path | str, segments: Any, num_steps: int, num_sources: int | None
) -> list[tuple[int, int, int]]:
    """The segments as they are, if each is in range and no two overlap."""
    if not isinstance(segments, list):
        raise UserError(_FIELD, path, f"segments is {segments!r}: must be a list")
    for place, segment in enumerate(segments):
        name = f"segments[{place}]"
        if not (isinstance(segment, list) and len(segment) == 3 and all(map(_is_whole, segment))):
            problem = f"{name} is {segment}: must be [start, stop, source], whole numbers"
            raise UserError(_FIELD, path, problem)
        start, stop, source = segment
        if not 0 <= start < stop <= num_steps:
            problem = f"{name} is {segment}: needs 0 <= start < stop <= num_steps={num_steps}"
            raise UserError(_FIELD, path, problem)
        _check_source(path, f"{name}, {segment},", source, num_sources)
    ordered = sorted(segments)
    for before, after in itertools.pairwise(ordered):
        if after[0] < before[1]:
            raise UserError(_FIELD, path, f"the segments {before} and {after} overlap")
    return ordered


def _check_source(path: Path | str, place: str, source: Any, num_sources: int | None) -> None:
    limit = _MAX_SOURCES if num_sources is None else num_sources
    if not _is_whole(source) or not 0 <= source < limit:
        problem = f"{place} names source {source!r}: must be a whole number in [0, {limit})"
        raise UserError(_FIELD, path, problem)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
