"""AdamW as an exponential moving average of its updates: coefficients and their recording."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree

from jaxlab.methods.trec.arrays import (
    Curve,
    Curves,
    Scalars,
    check_curve,
    check_positive,
    check_steps,
    operands,
    plain,
)

__all__ = [
    "TraceEmaState",
    "adamw_alphas",
    "adamw_timescale",
    "coefficients_from_schedule",
    "ema_coefficients",
    "ema_from_opt_state",
    "momentum_coefficients",
    "trace_ema",
    "weight_decay_for_timescale",
]

_ALPHA_RANGE = "lr * weight_decay must lie in [0, 1)"


def ema_coefficients(alphas: Curves, *, initial: bool = False) -> Any:
    """The weight of every update in the final weights. Host or graph.

    AdamW, `theta_t = (1 - alpha_t) theta_{t-1} + alpha_t x_t` with `alpha_t = lr_t * weight_decay`
    and `x_t = -u_t / weight_decay` for Adam's update `u_t`, ends at
    `theta_T = c_0 theta_0 + sum_t c_t x_t`, where

        c_t = alpha_t prod_{j > t} (1 - alpha_j),    c_0 = prod_j (1 - alpha_j).

    The coefficients are at least 0 and sum to 1 with `c_0`. For several phases of training
    (pre-training, annealing, continued pre-training), concatenate their alphas.

    Args:
      alphas: smoothing factors [..., T], each in [0, 1). Only the host checks the range; in the
        graph a value above 1 gives NaN.
      initial: also return `c_0`, the weight of the initial parameters.

    Returns:
      `c` [..., T], or `(c, c_0)` with `c_0` [...] (on the host a float for one curve). Computed
      as sums of `log1p(-alpha)`, in O(T).

    Raises:
      ValueError: an alpha outside [0, 1); the message names the step, counted from 1.

    Source: arXiv 2509.25380, section on AdamW's EMA view.

    Example:
      >>> ema_coefficients([0.5, 0.5, 0.5])
      array([0.125, 0.25 , 0.5  ])
    """
    xp, (alpha,) = operands(alphas)
    check_curve("alphas", alpha)
    if xp is np:
        check_steps("alphas", alpha, (alpha >= 0) & (alpha < 1), _ALPHA_RANGE)
        suffix = np.flip(np.cumsum(np.flip(np.log1p(-alpha), -1), -1), -1)
    else:
        suffix = jax.lax.cumsum(jnp.log1p(-alpha), axis=alpha.ndim - 1, reverse=True)
    # suffix[i] = log prod_{j >= i} (1 - alpha_j), with a last entry for the empty product.
    suffix = xp.concatenate([suffix, xp.zeros_like(alpha, shape=(*alpha.shape[:-1], 1))], -1)
    c = alpha * xp.exp(suffix[..., 1:])
    return (c, plain(xp, xp.exp(suffix[..., 0]))) if initial else c


def adamw_alphas(
    lrs: Curves,
    weight_decay: Scalars,
    *,
    decay_scaled_by_lr: bool = True,
) -> Any:
    """The smoothing factors of AdamW's moving average. Host or graph.

    Args:
      lrs: learning rates [..., T] as applied to the decayed parameters (under muP, after its
        scaling), at least 0.
      weight_decay: lambda, at least 0: a scalar, or an array that broadcasts to `lrs`.
      decay_scaled_by_lr: True where the optimiser multiplies the decay by the learning rate, as
        optax and PyTorch do: `alpha_t = lr_t * weight_decay`. False for an independent weight
        decay, `alpha_t = weight_decay`.

    Returns:
      alphas [..., T].

    Raises:
      ValueError: a negative learning rate or weight decay, or an alpha of 1 or more; the message
        names the step.
    """
    xp, (lr, decay) = operands(lrs, weight_decay)
    check_curve("lrs", lr)
    decay = xp.broadcast_to(decay, lr.shape)
    alphas = lr * decay if decay_scaled_by_lr else decay
    if xp is np:
        check_steps("lrs", lr, lr >= 0, "learning rates must not be negative")
        check_steps("weight_decay", decay, decay >= 0, "must not be negative")
        check_steps("alphas", alphas, alphas < 1, _ALPHA_RANGE)
    return alphas


def coefficients_from_schedule(
    lrs: Curves,
    weight_decay: Scalars,
    *,
    decay_scaled_by_lr: bool = True,
) -> Any:
    """EMA coefficients of a schedule, also without weight decay. Host or graph.

    As the weight decay goes to 0, `c_t / weight_decay` goes to `lr_t`: plain Adam weighs its
    updates by the learning rate. A run whose alphas are all 0 therefore gets its learning rates,
    normalised to sum 1, which serve as well, since predictions are compared by Pearson
    correlation and ignore scale. The host warns when it does so; the graph cannot.

    Args:
      lrs: learning rates [..., T].
      weight_decay: lambda; see `adamw_alphas`.
      decay_scaled_by_lr: see `adamw_alphas`.

    Returns:
      `c` [..., T].

    Raises:
      ValueError: as `adamw_alphas`, or (host) all learning rates of a run are 0.
    """
    xp, (lr, decay) = operands(lrs, weight_decay)
    alphas = adamw_alphas(lr, decay, decay_scaled_by_lr=decay_scaled_by_lr)
    undecayed = ~xp.any(alphas > 0, axis=-1, keepdims=True)
    total = xp.sum(lr, axis=-1, keepdims=True)
    if xp is np and undecayed.any():
        if (total[undecayed] == 0).any():
            raise ValueError("lrs=0 at every step: at least one learning rate must be positive")
        warnings.warn(
            "weight_decay=0: AdamW keeps no moving average; using the normalised learning rates",
            stacklevel=2,
        )
    by_lr = lr / xp.where(total > 0, total, xp.ones_like(total))
    return xp.where(undecayed, by_lr, ema_coefficients(alphas))


def momentum_coefficients(c: Curve, *, b1: float = 0.9) -> Any:
    """The weight of every *gradient* in the final weights. Host or graph.

    Adam's first moment hands the gradient of step `t` on to the updates from `t` on:
    `c~_t = sum_{i >= t} c_i (1 - b1) b1^(i - t) / (1 - b1^i)`. (The second moment's normalisation
    is left out.) The paper finds that the betas hardly matter, so predictions use `c` itself.

    Args:
      c: EMA coefficients [T].
      b1: decay of the first moment, in [0, 1).

    Returns:
      `c~` [T].

    Raises:
      ValueError: `b1` outside [0, 1), or several curves (use vmap).
    """
    if not 0 <= b1 < 1:
        raise ValueError(f"b1={b1}: must lie in [0, 1)")
    xp, (updates,) = operands(c)
    if updates.ndim != 1:
        raise ValueError(f"c of shape {updates.shape}: must be one curve [steps]; vmap over more")
    if b1 == 0:
        return updates
    steps = xp.arange(1, len(updates) + 1, dtype=updates.dtype)
    shares = updates * ((1 - b1) / -xp.expm1(steps * math.log(b1)))

    def step(later: Any, share: Any) -> tuple[Any, Any]:
        total = share + b1 * later
        return total, total

    if xp is np:
        totals = itertools.accumulate(shares[::-1], lambda later, share: step(later, share)[0])
        return np.fromiter(totals, np.float64, len(shares))[::-1].copy()
    return jax.lax.scan(step, jnp.zeros((), shares.dtype), shares, reverse=True)[1]


def adamw_timescale(peak_lr: Scalars, weight_decay: Scalars, num_steps: int) -> Any:
    """The share of the run that AdamW's moving average spans, `1 / (lr * weight_decay * T)`.

    Args:
      peak_lr: the largest learning rate as applied (under muP, after its scaling), positive.
      weight_decay: lambda, positive.
      num_steps: optimiser steps `T`, warm-up included.

    Returns:
      tau; positive, small for a short memory.

    Raises:
      ValueError: an argument is not positive (checked unless it is a `jax.Array`).
    """
    check_positive(peak_lr=peak_lr, weight_decay=weight_decay, num_steps=num_steps)
    return 1.0 / (peak_lr * weight_decay * num_steps)


def weight_decay_for_timescale(tau: Scalars, peak_lr: Scalars, num_steps: int) -> Any:
    """The weight decay that gives AdamW the time scale `tau`, `1 / (tau * lr * T)`.

    Args:
      tau: time scale as a share of the run, positive; see `adamw_timescale`.
      peak_lr: the largest learning rate, positive.
      num_steps: optimiser steps `T`, warm-up included.

    Returns:
      lambda.

    Raises:
      ValueError: an argument is not positive (checked unless it is a `jax.Array`).

    Example:
      >>> weight_decay_for_timescale(0.25, peak_lr=0.5, num_steps=16)
      0.5
    """
    check_positive(tau=tau, peak_lr=peak_lr, num_steps=num_steps)
    return 1.0 / (tau * peak_lr * num_steps)


class TraceEmaState(NamedTuple):
    """State of `trace_ema`: what a checkpoint needs to continue the trace.

    Attributes:
      count: steps taken, int32 [].
      alphas: smoothing factors float32 [T]; 0 for the steps to come.
    """

    count: Int[Array, "*batch"]
    alphas: Float[Array, "*batch steps"]


def trace_ema(
    schedule: optax.Schedule | Scalars, weight_decay: Scalars, num_steps: int
) -> optax.GradientTransformation:
    """Records AdamW's smoothing factors while it trains; passes updates through unchanged.

    Append it to the chain, with the schedule and weight decay of its neighbours:

        optax.chain(
            optax.scale_by_adam(),
            optax.add_decayed_weights(weight_decay, mask),
            optax.scale_by_learning_rate(schedule),
            trace_ema(schedule, weight_decay, num_steps),
        )

    An optax state holds the count but not the schedule, so this is what lets a (resumed) state
    alone yield the prediction: see `ema_from_opt_state`.

    Args:
      schedule: a function of optax's count, learning rates [num_steps], or a constant learning
        rate. Arrays may be traced, e.g. over the trials of a sweep.
      weight_decay: lambda, a scalar that may be traced.
      num_steps: steps of the whole run, at least 1. Later steps cannot be recorded.

    Returns:
      The transformation; its state is a `TraceEmaState`.

    Raises:
      ValueError: `num_steps` below 1, or learning rates of another length.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps}: must be at least 1")
    if not callable(schedule) and jnp.shape(schedule) not in ((), (num_steps,)):
        raise ValueError(
            f"schedule of shape {jnp.shape(schedule)}: must be a function of the count, a scalar, "
            f"or learning rates of shape ({num_steps},)"
        )

    def lr_at(count: Int[Array, ""]) -> Any:
        if callable(schedule):
            # optax's own schedules mix dtypes.
            with jax.numpy_dtype_promotion("standard"):
                return schedule(count)
        lrs = jnp.asarray(schedule)
        return lrs.at[count].get(mode="clip") if lrs.ndim else lrs

    def init(params: PyTree) -> TraceEmaState:
        del params
        return TraceEmaState(jnp.zeros((), jnp.int32), jnp.zeros((num_steps,), jnp.float32))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, TraceEmaState]:
        del params
        lr = jnp.asarray(lr_at(state.count), jnp.float32)
        alpha = lr * jnp.asarray(weight_decay, jnp.float32)
        alphas = state.alphas.at[state.count].set(alpha, mode="drop")
        return updates, TraceEmaState(state.count + 1, alphas)

    return optax.GradientTransformation(init, update)


def ema_from_opt_state(opt_state: PyTree, *, initial: bool = False) -> Any:
    """EMA coefficients of the steps that an optimiser has taken so far. Host or graph.

    Args:
      opt_state: an optax state with exactly one `TraceEmaState` anywhere in it. A state stacked
        over trials works too; on the host, its trials must have taken equally many steps.
      initial: also return the weight of the initial parameters.

    Returns:
      As `ema_coefficients`. From a concrete state: float64 NumPy, `c` [..., count]. From a traced
      state: float32, `c` [..., T], 0 for the steps to come, NaN after more than `T` steps.

    Raises:
      ValueError: no trace, or several; or (host) trials of different counts, or more steps than
        the trace has room for.
    """
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, TraceEmaState))
    traces = [leaf for leaf in leaves if isinstance(leaf, TraceEmaState)]
    if len(traces) != 1:
        raise ValueError(
            f"opt_state holds {len(traces)} TraceEmaState: it must hold exactly one; append "
            "trace_ema to the optimiser's chain"
        )
    count, alphas = traces[0]
    num_steps = alphas.shape[-1]
    if isinstance(count, Tracer) or isinstance(alphas, Tracer):
        complete = jnp.expand_dims(count <= num_steps, -1)
        return ema_coefficients(jnp.where(complete, alphas, jnp.nan), initial=initial)
    counts = np.unique(np.asarray(count))
    if counts.size != 1 or counts[0] > num_steps:
        raise ValueError(
            f"opt_state has taken {counts.tolist()} steps: all trials must have taken the same "
            f"number, at most num_steps={num_steps} of trace_ema"
        )
    return ema_coefficients(np.asarray(alphas)[..., : counts[0]], initial=initial)
