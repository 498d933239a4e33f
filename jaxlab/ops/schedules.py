"""Learning-rate schedules: linear warm-up to a peak, then one of eight shapes.

Each shape is one formula, evaluated in float64 with NumPy by `schedule_values` and inside the
traced program by the `optax.Schedule` that `make_schedule` returns, so what is planned on the host
is what the optimiser applies.

Steps are counted from 1: step `t` of `T` is optax's `count = t - 1`, and the last step, `t = T`,
has exactly the final value. (Several of optax's own schedules reach it only one step later.)
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int

__all__ = ["SCHEDULES", "make_schedule", "schedule_values"]


@dataclass(frozen=True)
class _Plan:
    """The checked arguments of a schedule; `peak_lr` may be traced."""

    name: str
    num_steps: int
    peak_lr: Any
    warmup_steps: int
    final_ratio: float
    step_at: float
    decay_fraction: float
    num_cycles: int

    @property
    def last_full_step(self) -> int:
        """The last step of `step` before its drop."""
        # 0.7 * 90 is 62.999...: without the slack the drop would come a step too early.
        return math.floor(self.step_at * self.num_steps * (1 + 1e-12))


# A shape maps the step t (a float, at least 1) and the share s of the steps after warm-up that are
# still to come (1 at the end of warm-up, 0 at the last step) to a multiple of the peak. Writing
# shapes in s rather than in 1 - s keeps float32 exact where the rate approaches zero.
def _constant(xp: Any, t: Any, s: Any, plan: _Plan) -> Any:
    return xp.ones_like(t)


def _linear(xp: Any, t: Any, s: Any, plan: _Plan) -> Any:
    return plan.final_ratio + (1 - plan.final_ratio) * s


def _cosine(xp: Any, t: Any, s: Any, plan: _Plan) -> Any:
    return plan.final_ratio + (1 - plan.final_ratio) * xp.sin(math.pi / 2 * s) ** 2


def _step(xp: Any, t: Any, s: Any, plan: _Plan) -> Any:
    return xp.where(t <= plan.last_full_step, 1.0, plan.final_ratio).astype(t.dtype)


def _wsd(xp: Any, t: Any, s: Any, plan: _Plan) -> Any:
    remaining = (plan.num_steps - t) / (plan.decay_fraction * plan.num_steps)
    return plan.final_ratio + (1 - plan.final_ratio) * xp.clip(remaining, 0.0, 1.0)


def _inverse_sqrt(xp: Any, t: Any, s: Any, plan: _Plan) -> Any:
    return xp.sqrt(plan.warmup_steps / t)


def _cyclic(xp: Any, t: Any, s: Any, plan: _Plan) -> Any:
    phase = plan.num_cycles * (1 - s) % 1.0
    return plan.final_ratio + (1 - plan.final_ratio) * abs(1 - 2 * phase)


_SHAPES: dict[str, Callable[[Any, Any, Any, _Plan], Any]] = {
    "constant": _constant,
    "linear": _linear,
    "d2z": _linear,
    "cosine": _cosine,
    "step": _step,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "cyclic": _cyclic,
}

SCHEDULES: tuple[str, ...] = tuple(_SHAPES)
"""The names that `make_schedule` and `schedule_values` know."""


def make_schedule(
    name: str,
    num_steps: int,
    peak_lr: float | Float[Array, ""],
    warmup_steps: int = 0,
    final_ratio: float = 0.0,
    *,
    step_at: float = 0.7,
    decay_fraction: float = 0.2,
    num_cycles: int = 4,
) -> optax.Schedule:
    """A learning-rate schedule for optax.

    With `T = num_steps`, `W = warmup_steps`, `r = final_ratio` and `x = (t - W) / (T - W)`, step
    `t` has `peak_lr` times `t / W` up to `t = W`, and then times

    ================  ===========================================================================
    `constant`        1
    `linear`          `1 - (1 - r) x`
    `d2z`             `1 - x`: linear decay to zero
    `cosine`          `r + (1 - r) (1 + cos(pi x)) / 2`
    `step`            1 while `t <= step_at * T`, then `r`
    `wsd`             1 until `(1 - decay_fraction) T`, then linear to `r` at `T`
    `inverse_sqrt`    `sqrt(W / t)`
    `cyclic`          `r + (1 - r) |1 - 2 frac(num_cycles x)|`: triangles that start and end high
    ================  ===========================================================================

    Args:
      name: one of `SCHEDULES`.
      num_steps: optimiser steps `T` of the run, warm-up included.
      peak_lr: the largest learning rate, positive; it may be traced.
      warmup_steps: steps of linear warm-up, from 0 to `num_steps - 1`; at least 1 for
        `inverse_sqrt`.
      final_ratio: final over peak learning rate, in [0, 1]; 0 for `d2z`. `constant` and
        `inverse_sqrt` have no final ratio and leave it unused.
      step_at: where `step` drops, as a share of all steps, in [0, 1].
      decay_fraction: share of all steps in which `wsd` decays, in (0, 1].
      num_cycles: cycles of `cyclic`, at least 1.

    Returns:
      A function of optax's `count` (0 at the first step), a scalar or an array of any shape,
      traced or not. It gives a float32 array (float64 under `jax_enable_x64`), and holds the last
      value for counts beyond the run.

    Raises:
      ValueError: an argument is out of range; the message names it, its value and what is allowed.

    Example:
      >>> schedule = make_schedule("d2z", num_steps=4, peak_lr=1.0)
      >>> [float(schedule(count)) for count in range(4)]
      [0.75, 0.5, 0.25, 0.0]
    """
    plan = _check(
        name, num_steps, peak_lr, warmup_steps, final_ratio, step_at, decay_fraction, num_cycles
    )

    def schedule(count: Any) -> Array:
        return _evaluate(jnp, jnp.asarray(count), jnp.result_type(float), plan)

    return schedule


def schedule_values(
    name: str,
    num_steps: int,
    peak_lr: float,
    warmup_steps: int = 0,
    final_ratio: float = 0.0,
    *,
    step_at: float = 0.7,
    decay_fraction: float = 0.2,
    num_cycles: int = 4,
) -> np.ndarray:
    """The learning rate of every step of a run, on the host.

    Args:
      name: one of `SCHEDULES`; see `make_schedule` for this and the other arguments.
      num_steps: optimiser steps of the run.
      peak_lr: the largest learning rate.
      warmup_steps: steps of linear warm-up.
      final_ratio: final over peak learning rate.
      step_at: where `step` drops, as a share of all steps.
      decay_fraction: share of all steps in which `wsd` decays.
      num_cycles: cycles of `cyclic`.

    Returns:
      float64 [num_steps]; entry `t - 1` belongs to step `t`.

    Raises:
      ValueError: as `make_schedule`.

    Example:
      >>> schedule_values("step", 5, 1.0, warmup_steps=2, final_ratio=0.1, step_at=0.6).tolist()
      [0.5, 1.0, 1.0, 0.1, 0.1]
    """
    plan = _check(
        name, num_steps, peak_lr, warmup_steps, final_ratio, step_at, decay_fraction, num_cycles
    )
    return _evaluate(np, np.arange(plan.num_steps), np.dtype(np.float64), plan)


def _evaluate(xp: Any, count: Int[Array, "..."] | np.ndarray, dtype: Any, plan: _Plan) -> Any:
    """The learning rate at each count, with the array module `xp`."""
    t = xp.clip(count.astype(dtype) + 1, 1.0, float(plan.num_steps))
    warmup = plan.warmup_steps
    s = (plan.num_steps - t) / (plan.num_steps - warmup)
    ratio = xp.where(t <= warmup, t / max(warmup, 1), _SHAPES[plan.name](xp, t, s, plan))
    return xp.asarray(plan.peak_lr, dtype) * ratio


def _check(
    name: str,
    num_steps: int,
    peak_lr: Any,
    warmup_steps: int,
    final_ratio: float,
    step_at: float,
    decay_fraction: float,
    num_cycles: int,
) -> _Plan:
    """The arguments of a schedule, or ValueError."""
    if name not in _SHAPES:
        close = difflib.get_close_matches(str(name), SCHEDULES, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"name={name!r}: must be one of {', '.join(SCHEDULES)}{hint}")
    num_steps, warmup_steps = operator.index(num_steps), operator.index(warmup_steps)
    num_cycles = operator.index(num_cycles)
    _require(num_steps >= 1, "num_steps", num_steps, "must be at least 1")
    lowest = 1 if name == "inverse_sqrt" else 0
    _require(
        lowest <= warmup_steps < num_steps,
        "warmup_steps",
        warmup_steps,
        f"must be at least {lowest} and below num_steps={num_steps} with name={name!r}",
    )
    if not isinstance(peak_lr, Tracer):
        positive = bool(np.all(np.asarray(peak_lr) > 0) and np.all(np.isfinite(peak_lr)))
        _require(positive, "peak_lr", peak_lr, "must be positive and finite")
    if name == "d2z":
        _require(final_ratio == 0, "final_ratio", final_ratio, "must be 0 with name='d2z'")
    _require(0 <= final_ratio <= 1, "final_ratio", final_ratio, "must lie in [0, 1]")
    _require(0 <= step_at <= 1, "step_at", step_at, "must lie in [0, 1]")
    _require(0 < decay_fraction <= 1, "decay_fraction", decay_fraction, "must lie in (0, 1]")
    _require(num_cycles >= 1, "num_cycles", num_cycles, "must be at least 1")
    if name == "wsd":
        longest = 1 - warmup_steps / num_steps
        _require(
            decay_fraction <= longest + 1e-12,
            "decay_fraction",
            decay_fraction,
            f"must be at most {longest:g}, the share of the run after warm-up",
        )
    return _Plan(
        name,
        num_steps,
        peak_lr,
        warmup_steps,
        float(final_ratio),
        float(step_at),
        float(decay_fraction),
        num_cycles,
    )


def _require(condition: bool, argument: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{argument}={value}: {allowed}")
