"""AdamW as jaxlab trains with it, and the train step around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxlab.parallel.mesh import replicated

__all__ = [
    "TrainState",
    "adamw",
    "decay_matrices",
    "init_state",
    "make_train_step",
    "state_shardings",
]

LossFn = Callable[[Any, Any, jax.Array], jax.Array]


class TrainState(NamedTuple):
    """What training changes.

    Attributes:
      step: int32 scalar, steps done.
      params: the network's parameters.
      opt_state: Optax's state.
      key: PRNG key of this replicate; step t uses `fold_in(key, t)`.
      ema: exponential moving average of the parameters, or None.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array
    ema: Any = None


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
    weight_decay: jax.typing.ArrayLike | optax.Schedule,
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
      weight_decay: lambda; each step multiplies the weights by 1 - lr * lambda. May be traced;
        or a schedule of its own.
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


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    average: bool = False,
) -> TrainState:
    """The state before the first step.

    Args:
      params: the network's parameters.
      optimizer: from `adamw`, or any of Optax.
      key: PRNG key of this replicate.
      average: whether the state carries a moving average of the parameters, for
        `make_train_step(ema_decay=...)`.
    """
    with jax.numpy_dtype_promotion("standard"):
        opt_state = optimizer.init(params)
    # Copied: two leaves that are one buffer could not both be donated.
    ema = jax.tree.map(jnp.array, params) if average else None
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, key, ema)


def state_shardings(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    params: Any,
    mesh: jax.sharding.Mesh,
) -> Any:
    """Where each part of a state lies on a mesh, from where its parameters do.

    Optax tells which leaves of its state belong to parameters, so nothing is guessed from shapes;
    everything else is whole on every device.

    Args:
      state: abstract, e.g. `Program.abstract_state()`.
      optimizer: whose state it holds.
      params: pytree of shardings of the parameters.
      mesh: they lie on.
    """
    whole = replicated(mesh)
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state.opt_state,
        params,
        transform_non_params=lambda _: whole,
    )
    places: Any = (whole, params, opt_state, whole, None if state.ema is None else params)
    return TrainState(*places)


def make_train_step(
    loss_fn: LossFn,
    optimizer_fn: Callable[[Any], optax.GradientTransformation],
    *,
    accumulate: int = 1,
    ema_decay: float | None = None,
) -> Callable[[Any, TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """A pure train step for `Program.step`.

    Args:
      loss_fn: `(params, batch, key) -> float32 scalar`.
      optimizer_fn: a trial's arrays to its optimiser.
      accumulate: parts into which each batch is cut, whose gradients are averaged before the
        update: less memory, the same step up to rounding. Every part must weigh the same in
        the loss, and the batch's first axis must be a multiple.
      ema_decay: the state's average becomes `decay * average + (1 - decay) * parameters` after
        each update; None leaves it alone.

    Returns:
      `(trial, state, batch) -> (state, {"loss", "grad_norm"})`; both float32 scalars, measured
      before the update.
    """

    def step(trial: Any, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(state.key, state.step)
        loss, grads = _loss_and_grads(loss_fn, state.params, batch, key, accumulate)
        norm = optax.tree.norm(grads)
        # Optax's bias correction and schedules mix float32 with int32 counts.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer_fn(trial).update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": norm.astype(jnp.float32)}
        ema = state.ema
        if ema_decay is not None:
            rate = 1 - ema_decay
            ema = jax.tree.map(
                lambda old, new: (old + rate * (new - old)).astype(old.dtype),
                ema,
                params,
            )
        return TrainState(state.step + 1, params, opt_state, state.key, ema), metrics

    return step


def _loss_and_grads(
    loss_fn: LossFn, params: Any, batch: Any, key: jax.Array, accumulate: int
) -> tuple[jax.Array, Any]:
    """The loss and its gradient, over the batch as a whole or part by part."""
    if accumulate == 1:
        return jax.value_and_grad(loss_fn)(params, batch, key)

    def part(leaf: jax.Array) -> jax.Array:
        # Strided, so that every device keeps its own examples in each part.
        split = leaf.reshape(leaf.shape[0] // accumulate, accumulate, *leaf.shape[1:])
        return split.swapaxes(0, 1)

    def add(carry: Any, item: Any) -> tuple[Any, None]:
        i, part_of_batch = item
        found = jax.value_and_grad(loss_fn)(params, part_of_batch, jax.random.fold_in(key, i))
        return jax.tree.map(lambda a, b: a + b, carry, found), None

    loss_shape = jax.eval_shape(loss_fn, params, jax.tree.map(lambda x: part(x)[0], batch), key)
    zero = (jnp.zeros((), loss_shape.dtype), jax.tree.map(jnp.zeros_like, params))
    places = jnp.arange(accumulate, dtype=jnp.int32)
    total, _ = jax.lax.scan(add, zero, (places, jax.tree.map(part, batch)))
    return jax.tree.map(lambda x: x / accumulate, total)
