"""Training recipes of several phases: learning rates, smoothing factors and tokens of every step.

Host functions in float64.
"""

from __future__ import annotations

import difflib
import itertools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

import numpy as np

from jaxlab.methods.trec.ema import adamw_alphas
from jaxlab.ops.schedules import SCHEDULES, schedule_values

__all__ = ["Phase", "Recipe", "RecipeSteps", "recipe_steps"]

_MAX_STEPS = 100_000_000
_WITHOUT_FINAL = ("constant", "inverse_sqrt")


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one learning-rate schedule.

    Exactly one of `steps` and `tokens` says how long it is.

    Attributes:
      schedule: a name of `make_schedule`.
      batch_tokens: tokens in a batch of one optimiser update; or stages `((start, size), ...)`:
        from so many tokens of the phase on, batches of so many tokens. The first starts at 0.
      weight_decay: lambda, at least 0.
      steps: optimiser updates.
      tokens: training tokens. Batches are whole, so the last may exceed them.
      peak_lr: the largest learning rate; None: the rate at which the phase before ended.
      final_lr: the rate to which the schedule decays; None: 0. `constant` and `inverse_sqrt` have
        none.
      start_lr: where the warm-up starts.
      warmup_steps: steps of linear warm-up from `start_lr` to `peak_lr`.
      horizon: the length for which the schedule was planned, in steps or tokens as the length of
        the phase, where the phase ends earlier than its schedule. None: as long as the phase.
      step_at: where `step` drops, as a share of the horizon.
      decay_fraction: share of the horizon in which `wsd` decays.
      num_cycles: cycles of `cyclic`.
      decay_scaled_by_lr: True where the weight decay is multiplied by the learning rate. (A weight
        decay that follows the schedule but not the peak is one of `weight_decay / peak_lr`.)
      high_quality: the whole phase trains on high-quality data.

    Raises:
      ValueError: an attribute is out of range, or contradicts another.
    """

    schedule: str
    batch_tokens: float | tuple[tuple[float, float], ...]
    weight_decay: float
    steps: int | None = None
    tokens: float | None = None
    peak_lr: float | None = None
    final_lr: float | None = None
    start_lr: float = 0.0
    warmup_steps: int = 0
    horizon: float | None = None
    step_at: float = 0.7
    decay_fraction: float = 0.2
    num_cycles: int = 4
    decay_scaled_by_lr: bool = True
    high_quality: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            close = difflib.get_close_matches(str(self.schedule), SCHEDULES, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            _fail("schedule", self.schedule, f"must be one of {', '.join(SCHEDULES)}{hint}")
        self._check_length()
        self._check_batches()
        self._check_rates()
        _check(_is_rate(self.weight_decay), "weight_decay", self.weight_decay, "at least 0")
        _check(0 <= self.step_at <= 1, "step_at", self.step_at, "in [0, 1]")
        _check(0 < self.decay_fraction <= 1, "decay_fraction", self.decay_fraction, "in (0, 1]")
        _check(self.num_cycles >= 1, "num_cycles", self.num_cycles, "at least 1")
        _check(self.num_steps <= _MAX_STEPS, "steps", self.num_steps, f"at most {_MAX_STEPS}")
        _check(
            0 <= self.warmup_steps < self.num_steps,
            "warmup_steps",
            self.warmup_steps,
            f"at least 0 and below the {self.num_steps} steps of the phase",
        )

    def _check_length(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            _fail("steps", self.steps, "exactly one of steps and tokens must be given")
        if self.steps is not None:
            _check(
                self.steps >= 1 and self.steps == int(self.steps),
                "steps",
                self.steps,
                "a whole number, at least 1",
            )
        if self.tokens is not None:
            _check(0 < self.tokens < math.inf, "tokens", self.tokens, "positive and finite")
        if self.horizon is not None:
            length = self.tokens if self.steps is None else self.steps
            assert length is not None
            allowed = f"at least the phase's own length {length:g}, and finite"
            _check(length <= self.horizon < math.inf, "horizon", self.horizon, allowed)

    def _check_batches(self) -> None:
        if isinstance(self.batch_tokens, tuple):
            starts = [start for start, _ in self.batch_tokens]
            if not starts or starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
                _fail(
                    "batch_tokens",
                    self.batch_tokens,
                    "stages must start at 0 tokens and then at ever larger numbers",
                )
        sizes = [size for _, size in self._stages()]
        good = all(1 <= size < math.inf for size in sizes)
        _check(good, "batch_tokens", self.batch_tokens, "at least 1 and finite")

    def _check_rates(self) -> None:
        peak, final = self.peak_lr, self.final_lr
        if peak is not None:
            _check(0 < peak < math.inf, "peak_lr", peak, "positive and finite")
        elif self.warmup_steps:
            _fail("warmup_steps", self.warmup_steps, "must be 0 without a peak_lr to warm up to")
        if final is not None:
            if self.schedule in _WITHOUT_FINAL or (self.schedule == "d2z" and final):
                _fail("final_lr", final, f"must be left out with schedule={self.schedule!r}")
            allowed = "at least 0 and at most peak_lr"
            _check(_is_rate(final) and (peak is None or final <= peak), "final_lr", final, allowed)
        good = self.start_lr == 0 or (
            peak is not None and self.warmup_steps and 0 < self.start_lr <= peak
        )
        allowed = "in [0, peak_lr], and 0 without warm-up"
        _check(bool(good), "start_lr", self.start_lr, allowed)

    @property
    def num_steps(self) -> int:
        """Optimiser updates of the phase."""
        return int(self.steps) if self.steps is not None else self._count(self.tokens)

    def batches(self) -> np.ndarray:
        """The tokens of every step's batch, float64 [num_steps]."""
        sizes = [size for _, size in self._stages()]
        return np.repeat(np.asarray(sizes, np.float64), self._counts(math.inf))[: self.num_steps]

    def rates(self, previous_lr: float | None = None) -> np.ndarray:
        """The learning rate of every step, float64 [num_steps].

        Args:
          previous_lr: the last learning rate of the phase before, for a phase without `peak_lr`.

        Raises:
          ValueError: there is no rate to go on from, or one that does not fit the schedule.
        """
        peak = previous_lr if self.peak_lr is None else self.peak_lr
        if not peak:
            _fail("peak_lr", self.peak_lr, "must be given where no phase before ended above zero")
        final = self.final_lr or 0.0
        allowed = f"at most the rate {peak:g} at which the phase starts"
        _check(final <= peak, "final_lr", final, allowed)
        if self.horizon is None:
            length = self.num_steps
        else:
            length = int(self.horizon) if self.steps is not None else self._count(self.horizon)
        lrs = schedule_values(
            self.schedule,
            length,
            peak,
            self.warmup_steps,
            final / peak,
            step_at=self.step_at,
            decay_fraction=self.decay_fraction,
            num_cycles=self.num_cycles,
        )[: self.num_steps]
        rise = np.arange(1, self.warmup_steps + 1) / max(self.warmup_steps, 1)
        lrs[: self.warmup_steps] = self.start_lr + (peak - self.start_lr) * rise
        return lrs

    def _stages(self) -> tuple[tuple[float, float], ...]:
        if isinstance(self.batch_tokens, tuple):
            return self.batch_tokens
        return ((0.0, self.batch_tokens),)

    def _counts(self, tokens: float) -> list[int]:
        """Steps of each stage; those of the last one are bounded where `tokens` is infinite."""
        stages = self._stages()
        stops = [*(start for start, _ in stages[1:]), math.inf]
        counts = []
        for (start, size), stop in zip(stages, stops, strict=True):
            length = (min(stop, tokens) - start) / size
            counts.append(
                self.num_steps if math.isinf(length) else max(0, math.ceil(length * (1 - 1e-12)))
            )
        return counts

    def _count(self, tokens: float | None) -> int:
        assert tokens is not None
        return sum(self._counts(tokens))


@dataclass(frozen=True)
class Recipe:
    """How a model was or is to be trained with AdamW.

    Attributes:
      name: of the model or plan.
      phases: one after another, at least one.
      parameters: of the model, for tokens per parameter; of a mixture of experts, the active ones.
      parameter_kind: which parameters are counted.
      num_experts: experts of a layer; 1 for a dense model.
      experts_per_token: experts that a token visits.
      high_quality: disjoint intervals `((start, stop), ...)` of the run that train on high-quality
        data, besides the phases that are marked so.
      high_quality_unit: `"share"`: the intervals are shares of the run's tokens, in [0, 1];
        `"tokens"`: numbers of tokens from the start of the run.
      b1: decay of Adam's first moment: coefficients are then those of gradients, see
        `momentum_coefficients`. None: those of updates.
      source: where the recipe is published, in words.
      assumed: what of it is not published but assumed here, in words.

    Raises:
      ValueError: an attribute is out of range.
    """

    name: str
    phases: tuple[Phase, ...]
    parameters: float
    parameter_kind: Literal["total", "non-embedding"] = "total"
    num_experts: int = 1
    experts_per_token: int = 1
    high_quality: tuple[tuple[float, float], ...] = ()
    high_quality_unit: Literal["share", "tokens"] = "share"
    b1: float | None = None
    source: str = ""
    assumed: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(self.phases))
        object.__setattr__(self, "high_quality", tuple(map(tuple, self.high_quality)))
        if not self.phases:
            _fail("phases", self.phases, "must hold at least one phase")
        good = 0 < self.parameters < math.inf
        _check(good, "parameters", self.parameters, "positive and finite")
        for name, allowed in (
            ("parameter_kind", ("total", "non-embedding")),
            ("high_quality_unit", ("share", "tokens")),
        ):
            value = getattr(self, name)
            _check(value in allowed, name, repr(value), f"one of {', '.join(allowed)}")
        _check(self.num_experts >= 1, "num_experts", self.num_experts, "at least 1")
        _check(
            1 <= self.experts_per_token <= self.num_experts,
            "experts_per_token",
            self.experts_per_token,
            f"in [1, num_experts={self.num_experts}]",
        )
        largest = 1.0 if self.high_quality_unit == "share" else math.inf
        previous = 0.0
        for start, stop in sorted(self.high_quality):
            if not previous <= start < stop <= largest:
                _fail(
                    "high_quality",
                    self.high_quality,
                    f"must be disjoint intervals (start, stop) in [0, {largest:g}]",
                )
            previous = stop
        if self.b1 is not None:
            _check(0 <= self.b1 < 1, "b1", self.b1, "in [0, 1)")


class RecipeSteps(NamedTuple):
    """Every step of a recipe; see `recipe_steps`.

    Attributes:
      lrs: learning rates [T].
      alphas: smoothing factors [T].
      batch_tokens: tokens of each step's batch [T].
      starts: first step of each phase and the number of steps, [phases + 1], from 0.
      high_quality: windows `(start, stop)` of steps from 0, half open, in order.
    """

    lrs: np.ndarray
    alphas: np.ndarray
    batch_tokens: np.ndarray
    starts: tuple[int, ...]
    high_quality: tuple[tuple[int, int], ...]


def recipe_steps(recipe: Recipe) -> RecipeSteps:
    """Lays out a recipe step by step. Host.

    Args:
      recipe: how the model is trained.

    Returns:
      Learning rates, smoothing factors and batch sizes of the `T` steps, and where phases and
      high-quality data begin and end. An interval of the data starts and stops at the steps'
      boundaries that are nearest, and holds at least one step.

    Raises:
      ValueError: a phase cannot go on from the one before, a learning rate and weight decay give
        an alpha of 1 or more, there are too many steps, or an interval of data lies beyond the
        run; the message names the phase, counted from 0.
    """
    total = sum(phase.num_steps for phase in recipe.phases)
    _check(total <= _MAX_STEPS, "phases", f"{total} steps", f"at most {_MAX_STEPS} steps")
    lrs: list[np.ndarray] = []
    alphas: list[np.ndarray] = []
    for index, phase in enumerate(recipe.phases):
        try:
            rates = phase.rates(float(lrs[-1][-1]) if lrs else None)
            decayed = adamw_alphas(
                rates, phase.weight_decay, decay_scaled_by_lr=phase.decay_scaled_by_lr
            )
        except ValueError as error:
            raise ValueError(f"phases[{index}].{error}") from None
        lrs.append(rates)
        alphas.append(decayed)
    batches = np.concatenate([phase.batches() for phase in recipe.phases])
    counts = [phase.num_steps for phase in recipe.phases]
    starts = tuple(itertools.accumulate(counts, initial=0))
    return RecipeSteps(
        np.concatenate(lrs),
        np.concatenate(alphas),
        batches,
        starts,
        _high_quality(recipe, batches, starts),
    )


def _high_quality(
    recipe: Recipe, batches: np.ndarray, starts: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """The windows of steps with high-quality data; those that overlap are one."""
    ends = np.concatenate([[0.0], np.cumsum(batches)])
    scale = ends[-1] if recipe.high_quality_unit == "share" else 1.0
    windows = [
        (starts[i], starts[i + 1]) for i, phase in enumerate(recipe.phases) if phase.high_quality
    ]
    for start, stop in recipe.high_quality:
        if start * scale >= ends[-1] or stop * scale > ends[-1] * (1 + 1e-6) + batches[-1]:
            _fail(
                "high_quality",
                (start, stop),
                f"must lie within the run's {ends[-1]:.6g} tokens",
            )
        first = min(_nearest(ends, start * scale), len(batches) - 1)
        windows.append((first, max(first + 1, _nearest(ends, stop * scale))))
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(windows):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def _nearest(ends: np.ndarray, position: float) -> int:
    after = min(int(np.searchsorted(ends, position)), len(ends) - 1)
    return after - 1 if after and position - ends[after - 1] < ends[after] - position else after


def _is_rate(value: float) -> bool:
    return 0 <= value < math.inf


def _check(good: bool, name: str, value: object, allowed: str) -> None:
    if not good:
        _fail(name, value, f"must be {allowed}")


def _fail(name: str, value: object, allowed: str) -> NoReturn:
    raise ValueError(f"{name}={value}: {allowed}")
