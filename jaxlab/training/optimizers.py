"""AdamW as jaxlab trains with it, and the train step around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

__all__ = ["TrainState", "adamw", "decay_matrices", "init_state", "make_train_step"]

LossFn = Callable[[Any, Any, jax.Array], jax.Array]


class TrainState(NamedTuple):
    """What training changes.

    Attributes:
      step: int32 scalar, steps done.
      params: the network's parameters.
      opt_state: Optax's state.
      key: PRNG key of this replicate; step t uses `fold_in(key, t)`.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array


def decay_matrices(params: Any) -> Any:
    """The usual decay mask: True for arrays of two or more dimensions.

    Args:
      params: pytree of per-layer parameters (not stacked).

    Returns:
      A pytree of booleans: biases and norm scales are not decayed.
    """
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def adamw(
    schedule: optax.Schedule,
    weight_decay: jax.typing.ArrayLike,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    clip_norm: float | None = None,
    weight_decay_mask: Any = None,
    after: tuple[optax.GradientTransformation, ...] = (),
) -> optax.GradientTransformation:
    """AdamW with clipping of the global gradient norm and decoupled, LR-scaled weight decay.

    Args:
      schedule: count of steps done to learning rate; may close over traced arrays.
      weight_decay: lambda; each step multiplies the weights by 1 - lr * lambda. May be traced.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      clip_norm: largest global norm of the gradient; None for no clipping.
      weight_decay_mask: pytree of booleans or a function of the parameters; None decays all.
      after: transformations that follow, e.g. a trace of the schedule.
    """
    clip = () if clip_norm is None else (optax.clip_by_global_norm(clip_norm),)
    return optax.chain(
        *clip,
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay, mask=weight_decay_mask),  # pyright: ignore[reportArgumentType]
        optax.scale_by_learning_rate(schedule),
        *after,
    )


def init_state(params: Any, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """The state before the first step."""
    with jax.numpy_dtype_promotion("standard"):
        opt_state = optimizer.init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, key)


def make_train_step(
    loss_fn: LossFn, optimizer_fn: Callable[[Any], optax.GradientTransformation]
) -> Callable[[Any, TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """A pure train step for `Program.step`.

    Args:
      loss_fn: `(params, batch, key) -> float32 scalar`.
      optimizer_fn: a trial's arrays to its optimiser.

    Returns:
      `(trial, state, batch) -> (state, {"loss", "grad_norm"})`; both float32 scalars, measured
      before the update.
    """

    def step(trial: Any, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(state.key, state.step)
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, key)
        norm = optax.tree.norm(grads)
        # Optax's bias correction and schedules mix float32 with int32 counts.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer_fn(trial).update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": norm.astype(jnp.float32)}
        return TrainState(state.step + 1, params, opt_state, state.key), metrics

    return step
