"""Recording AdamW's smoothing factors in the optimiser's state while it trains."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree

from jaxlab.methods.trec.arrays import Scalars
from jaxlab.methods.trec.ema import ema_coefficients

__all__ = ["TraceEmaState", "ema_from_opt_state", "find_trace", "trace_ema"]


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
    alone yield the prediction: see `ema_from_opt_state`. Without weight decay, or with one that is
    independent of the learning rate, use `coefficients_from_schedule` instead.

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


def find_trace(opt_state: PyTree) -> TraceEmaState | None:
    """What `trace_ema` has recorded in an optimiser's state, or in any pytree that holds one.

    Args:
      opt_state: an optax state, concrete or traced, also stacked over trials.

    Returns:
      The trace; None if there is none.

    Raises:
      ValueError: there are several.
    """
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, TraceEmaState))
    traces = [leaf for leaf in leaves if isinstance(leaf, TraceEmaState)]
    if len(traces) > 1:
        raise ValueError(f"opt_state holds {len(traces)} TraceEmaState: at most one can be meant")
    return traces[0] if traces else None


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
    trace = find_trace(opt_state)
    if trace is None:
        raise ValueError(
            "opt_state holds 0 TraceEmaState: it must hold one; append trace_ema to the "
            "optimiser's chain"
        )
    count, alphas = trace
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
