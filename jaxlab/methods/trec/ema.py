"""AdamW as an exponential moving average of its updates: the coefficients of updates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from jaxlab.methods.trec.arrays import (
    Curve,
    Curves,
    Scalars,
    accumulate_back,
    check_curve,
    check_lengths,
    check_positive,
    check_steps,
    check_unit,
)
from jaxlab.ops.arrays import operands, plain

__all__ = [
    "adamw_alphas",
    "adamw_timescale",
    "coefficients_from_schedule",
    "ema_coefficients",
    "exponential_averaging",
    "momentum_coefficients",
    "recommended_timescale",
    "sum_repeats",
    "update_coefficients",
    "weight_decay_for_timescale",
]

_ALPHA_RANGE = "lr * weight_decay must lie in [0, 1)"


def ema_coefficients(
    alphas: Curves, *, averaging: Curves | None = None, initial: bool = False
) -> Any:
    """The weight of every update in the final weights. Host or graph.

    AdamW, `theta_t = (1 - alpha_t) theta_{t-1} + alpha_t x_t` with `alpha_t = lr_t * weight_decay`
    and `x_t = -u_t / weight_decay` for Adam's update `u_t`, ends at
    `theta_T = c_0 theta_0 + sum_t c_t x_t`, where

        c_t = alpha_t prod_{j > t} (1 - alpha_j),    c_0 = prod_j (1 - alpha_j).

    The coefficients are at least 0 and sum to 1 with `c_0`. For several phases of training
    (pre-training, annealing, continued pre-training), concatenate their alphas.

    Where an average of the weights is evaluated, `sum_t w_t theta_t` (Polyak averaging, an
    exponential moving average of the weights, checkpoint averaging), its coefficients are those of
    every step's weights in the same average, `sum_t w_t c_{t,i}`; this is exact, in O(T).

    Args:
      alphas: smoothing factors [..., T], each in [0, 1). Only the host checks the range; in the
        graph a value above 1 gives NaN.
      averaging: weights `w` [T] of the steps' weights in the evaluated average, at least 0, e.g.
        from `exponential_averaging`; or [T + 1], with that of the initial parameters first.
        They should sum to 1. None: the final weights are evaluated.
      initial: also return `c_0`, the weight of the initial parameters.

    Returns:
      `c` [..., T], or `(c, c_0)` with `c_0` [...] (on the host a float for one curve). Computed
      as sums of `log1p(-alpha)`, in O(T).

    Raises:
      ValueError: an alpha outside [0, 1); the message names the step, counted from 1. A wrong
        number of averaging weights, or (host) a negative one.

    Source: arXiv 2509.25380, section on AdamW's EMA view; the average of weights is ours.

    Example:
      >>> ema_coefficients([0.5, 0.5, 0.5])
      array([0.125, 0.25 , 0.5  ])
      >>> ema_coefficients([0.5, 0.5, 0.5], averaging=[0.0, 0.5, 0.5])
      array([0.1875, 0.375 , 0.25  ])
    """
    xp, values = operands(alphas, *(() if averaging is None else (averaging,)))
    alpha = values[0]
    check_curve("alphas", alpha)
    if xp is np:
        check_steps("alphas", alpha, (alpha >= 0) & (alpha < 1), _ALPHA_RANGE)
    kept = _kept(xp, alpha, None if averaging is None else values[1])
    c = alpha * kept[..., 1:]
    return (c, plain(xp, kept[..., 0])) if initial else c


def _kept(xp: Any, alpha: Any, averaging: Any) -> Any:
    """What the evaluated weights keep of the initial parameters and every update [..., T + 1].

    Entry `i` is `prod_{j > i} (1 - alpha_j)`, or for an average
    `sum_{t >= i} w_t prod_{i < j <= t} (1 - alpha_j)`.
    """
    none = xp.zeros_like(alpha, shape=(*alpha.shape[:-1], 1))
    if averaging is None:
        if xp is np:
            suffix = np.flip(np.cumsum(np.flip(np.log1p(-alpha), -1), -1), -1)
        else:
            suffix = jax.lax.cumsum(jnp.log1p(-alpha), axis=alpha.ndim - 1, reverse=True)
        return xp.exp(xp.concatenate([suffix, none], -1))
    length = alpha.shape[-1]
    if averaging.ndim != 1 or averaging.shape[0] not in (length, length + 1):
        raise ValueError(
            f"averaging of shape {averaging.shape}: must hold a weight for each of the {length} "
            "steps, or before them one more for the initial parameters"
        )
    if xp is np:
        check_steps("averaging", averaging, averaging >= 0, "must not be negative")
    missing = xp.zeros_like(averaging, shape=(length + 1 - averaging.shape[0],))
    weights = xp.concatenate([missing, averaging])
    return accumulate_back(
        xp,
        xp.broadcast_to(weights, (*alpha.shape[:-1], length + 1)),
        xp.concatenate([1 - alpha, none], -1),
    )


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


def update_coefficients(
    lrs: Curves,
    alphas: Curves,
    *,
    averaging: Curves | None = None,
    initial: bool = False,
) -> Any:
    """The weight of every Adam update in the final weights, for any weight decay. Host or graph.

    `theta_t = (1 - alpha_t) theta_{t-1} - lr_t u_t` ends at
    `theta_T = c_0 theta_0 - k sum_t c_t u_t` with `c_t` proportional to
    `lr_t prod_{j > t} (1 - alpha_j)`. While the weight decay is constant and multiplied by the
    learning rate, this is `ema_coefficients(alphas)` and `k = 1 / weight_decay`. In all other
    cases the `x_t` of that moving average differ in scale, and it is the updates that compare:
    a weight decay that changes between phases, is independent of the learning rate, or is 0.

    Args:
      lrs: learning rates [..., T], at least 0.
      alphas: smoothing factors [..., T], see `adamw_alphas`.
      averaging: see `ema_coefficients`.
      initial: also return `c_0`, the weight of the initial parameters.

    Returns:
      `c` [..., T], scaled to the sum of `ema_coefficients(alphas)`, that is `1 - c_0`; where all
      alphas are 0, to the sum 1. Or `(c, c_0)`, as `ema_coefficients`.

    Raises:
      ValueError: as `ema_coefficients`, or lengths differ, or (host) a learning rate is negative
        or all of a run are 0.
    """
    xp, (lr, alpha, *rest) = operands(lrs, alphas, *(() if averaging is None else (averaging,)))
    check_curve("lrs", lr)
    check_curve("alphas", alpha)
    check_lengths("lrs", lr, "alphas", alpha)
    if xp is np:
        check_steps("lrs", lr, lr >= 0, "learning rates must not be negative")
        check_steps("alphas", alpha, (alpha >= 0) & (alpha < 1), _ALPHA_RANGE)
        if not np.all(lr.sum(-1) > 0):
            raise ValueError("lrs=0 at every step: at least one learning rate must be positive")
    kept = _kept(xp, alpha, rest[0] if rest else None)
    weight = lr * kept[..., 1:]
    total = xp.sum(weight, axis=-1, keepdims=True)
    mass = xp.sum(alpha * kept[..., 1:], axis=-1, keepdims=True)
    one = xp.ones_like(mass)
    c = weight * xp.where(mass > 0, mass, one) / xp.where(total > 0, total, one)
    return (c, plain(xp, kept[..., 0])) if initial else c


def coefficients_from_schedule(
    lrs: Curves,
    weight_decay: Scalars,
    *,
    decay_scaled_by_lr: bool = True,
    averaging: Curves | None = None,
) -> Any:
    """Coefficients of a schedule's updates, also without weight decay. Host or graph.

    The `update_coefficients` of `adamw_alphas`. As the weight decay goes to 0, they become
    proportional to the learning rates: plain Adam weighs its updates by them. A run without weight
    decay therefore gets its learning rates, normalised to sum 1, which serve as well, since
    predictions are compared by Pearson correlation and ignore scale. The host warns when it does
    so; the graph cannot.

    Args:
      lrs: learning rates [..., T].
      weight_decay: lambda; see `adamw_alphas`.
      decay_scaled_by_lr: see `adamw_alphas`.
      averaging: see `ema_coefficients`.

    Returns:
      `c` [..., T].

    Raises:
      ValueError: as `adamw_alphas` and `update_coefficients`.
    """
    xp, (lr, decay) = operands(lrs, weight_decay)
    alphas = adamw_alphas(lr, decay, decay_scaled_by_lr=decay_scaled_by_lr)
    if xp is np and lr.any(-1).all() and not alphas.any(-1).all():
        warnings.warn(
            "weight_decay=0: AdamW keeps no moving average; using the normalised learning rates",
            stacklevel=2,
        )
    return update_coefficients(lr, alphas, averaging=averaging)


def exponential_averaging(
    num_steps: int, decay: float, *, from_initial: bool = False
) -> np.ndarray:
    """The steps' weights in an exponential moving average of the weights. Host.

    `a_t = decay a_{t-1} + (1 - decay) theta_t`, evaluated after step `T`.

    Args:
      num_steps: steps `T`, at least 1.
      decay: in [0, 1); 0 gives the final weights.
      from_initial: False: the average starts at zero and is corrected for it, as `optax.ema` does
        by default: `a_T / (1 - decay^T)`. True: it starts at the initial parameters.

    Returns:
      Weights that sum to 1, [T]; from the initial parameters [T + 1], theirs first. For the
      `averaging` of `ema_coefficients` and others.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> exponential_averaging(2, 0.5, from_initial=True)
      array([0.25, 0.25, 0.5 ])
    """
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps}: must be at least 1")
    check_unit("decay", decay, below_one=True)
    weights = (1 - decay) * decay ** np.arange(num_steps - 1, -1, -1.0)
    if from_initial:
        return np.concatenate([[decay**num_steps], weights])
    return weights / weights.sum()


def sum_repeats(
    c: Curves,
    batch_ids: np.ndarray | Int[Array, " steps"] | Sequence[int],
    num_batches: int | None = None,
) -> Any:
    """The coefficients of batches that training sees several times. Host or graph.

    The final weights hold every one of a batch's updates, so its coefficients add up. (The paper
    trains for a single epoch.)

    Args:
      c: coefficients [..., T].
      batch_ids: the batch of each step, integers [T] from 0.
      num_batches: batches `N`; by default one more than the largest id, which must then be known
        while tracing. The graph leaves out ids beyond.

    Returns:
      Sums [..., N]; 0 for batches that are never seen.

    Raises:
      ValueError: the ids are not one row of T integers, or (host) lie outside [0, N).

    Example:
      >>> sum_repeats([0.1, 0.2, 0.3, 0.4], [0, 1, 0, 1])
      array([0.4, 0.6])
    """
    xp, (values,) = operands(c)
    check_curve("c", values)
    known = not isinstance(batch_ids, Tracer)
    ids: Any = np.asarray(batch_ids) if known else batch_ids
    if ids.shape != values.shape[-1:] or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"batch_ids of shape {ids.shape} and type {ids.dtype}: must be integers of shape "
            f"({values.shape[-1]},)"
        )
    if num_batches is None:
        if not known:
            raise ValueError("num_batches=None: must be given where batch_ids are traced")
        num_batches = int(ids.max(initial=-1)) + 1
    if known and not ((ids >= 0) & (ids < num_batches)).all():
        raise ValueError(
            f"batch_ids from {ids.min()} to {ids.max()}: must lie in [0, num_batches={num_batches})"
        )
    shape = (*values.shape[:-1], num_batches)
    if xp is np and isinstance(ids, np.ndarray):
        rows = values.reshape(-1, len(ids))
        sums = [np.bincount(ids, weights=row, minlength=num_batches) for row in rows]
        return np.asarray(sums).reshape(shape)
    values = jnp.asarray(values)
    return jnp.zeros(shape, values.dtype).at[..., ids].add(values, mode="drop")


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
    return accumulate_back(xp, shares, xp.full_like(shares, b1))


def adamw_timescale(
    peak_lr: Scalars, weight_decay: Scalars, num_steps: int, *, decay_scaled_by_lr: bool = True
) -> Any:
    """The share of the run that AdamW's moving average spans, `1 / (lr * weight_decay * T)`.

    Args:
      peak_lr: the largest learning rate as applied (under muP, after its scaling), positive.
      weight_decay: lambda, positive.
      num_steps: optimiser steps `T`, warm-up included.
      decay_scaled_by_lr: False for an independent weight decay, `1 / (weight_decay * T)`.

    Returns:
      tau; positive, small for a short memory.

    Raises:
      ValueError: an argument is not positive (checked unless it is a `jax.Array`).
    """
    check_positive(peak_lr=peak_lr, weight_decay=weight_decay, num_steps=num_steps)
    return 1.0 / ((peak_lr if decay_scaled_by_lr else 1.0) * weight_decay * num_steps)


def weight_decay_for_timescale(
    tau: Scalars, peak_lr: Scalars, num_steps: int, *, decay_scaled_by_lr: bool = True
) -> Any:
    """The weight decay that gives AdamW the time scale `tau`, `1 / (tau * lr * T)`.

    Args:
      tau: time scale as a share of the run, positive; see `adamw_timescale`.
      peak_lr: the largest learning rate, positive.
      num_steps: optimiser steps `T`, warm-up included.
      decay_scaled_by_lr: False for an independent weight decay, `1 / (tau * T)`.

    Returns:
      lambda.

    Raises:
      ValueError: an argument is not positive (checked unless it is a `jax.Array`).

    Example:
      >>> weight_decay_for_timescale(0.25, peak_lr=0.5, num_steps=16)
      0.5
    """
    check_positive(tau=tau, peak_lr=peak_lr, num_steps=num_steps)
    return 1.0 / (tau * (peak_lr if decay_scaled_by_lr else 1.0) * num_steps)


def recommended_timescale(tpp: Scalars) -> Any:
    """The time scale that trains best at so many tokens per parameter, `1.084 * TPP^-0.527`.

    The exponent is well established; the factor is less certain, and depends on the model and
    data. For a mixture of experts, give `effective_tpp`.

    Args:
      tpp: training tokens per parameter, positive.

    Returns:
      tau, in the argument's kind and shape.

    Raises:
      ValueError: `tpp` is not positive (checked unless it is a `jax.Array`).

    Source: arXiv 2505.13738, power law of the optimal EMA time scale.

    Example:
      >>> round(recommended_timescale(20.0), 3)
      0.224
    """
    check_positive(tpp=tpp)
    return 1.084 * tpp**-0.527
