"""TREC's training programs: a network with its data, trained by AdamW, replayed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxlab.methods import trec
from jaxlab.models.mlp_lm import MlpLanguageModel
from jaxlab.ops.losses import cross_entropy
from jaxlab.parallel.rules import shardings_for
from jaxlab.training.optimizers import (
    TrainState,
    adamw,
    decay_matrices,
    init_state,
    make_train_step,
    state_shardings,
)
from jaxlab.training.program import Evaluation, Program

__all__ = [
    "VALIDATION_SEED",
    "AdamSettings",
    "Task",
    "mlp_task",
    "reference_replicate",
    "training_program",
]

VALIDATION_SEED = 2**31 - 1  # no replicate has it


class Task(NamedTuple):
    """A network.

    Attributes:
      loss_fn: `(params, batch) -> mean cross-entropy in nats`.
      init: `key -> params`, each array boxed with the names of its axes.
      fingerprint: names the data.
    """

    loss_fn: Callable[[Any, Any], jax.Array]
    init: Callable[[jax.Array], Any]
    fingerprint: str


class AdamSettings(NamedTuple):
    """What all trials of a program share of AdamW; see `training.optimizers.adamw`."""

    b1: float
    b2: float
    eps: float
    clip_norm: float | None = None


def mlp_task(
    *,
    vocab_size: int,
    context: int,
    embed_width: int,
    hidden_width: int,
    dtype: str,
    fingerprint: str,
) -> Task:
    """An MLP language model, which predicts the last token of each window."""
    model = MlpLanguageModel(
        vocab_size=vocab_size,
        window=context,
        embed_width=embed_width,
        hidden_width=hidden_width,
        dtype=jnp.dtype(dtype),
    )

    def init(key: jax.Array) -> Any:
        tokens = jnp.zeros((1, context), jnp.int32)
        return model.init(key, tokens)["params"]

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, batch[:, :-1])
        return cross_entropy(logits, batch[:, -1])  # pyright: ignore[reportArgumentType]

    return Task(loss_fn, init, fingerprint)


def reference_replicate(replicate: int, replicates: int) -> int:
    """Whose model is the reference of a replicate's curve.

    The next one of the same half, so that the halves share no model and one can be predicted
    from the other; with fewer than four replicates the next one of all.

    >>> [reference_replicate(r, 4) for r in range(4)], [reference_replicate(r, 3) for r in range(3)]
    ([1, 0, 3, 2], [1, 2, 0])
    """
    if replicates < 4:
        return (replicate + 1) % replicates
    half = replicates // 2
    first, size = (0, half) if replicate < half else (half, replicates - half)
    return first + (replicate - first + 1) % size


def training_program(
    name: str,
    task: Task,
    trials: dict[str, np.ndarray],
    batches: Callable[[int, int, int], Any],
    *,
    adam: AdamSettings,
    held_out: Mapping[str, tuple[Callable[[int], Any], int]],
    batch_size: int,
    accumulate: int = 1,
    replay: bool = True,
    reference: bool = True,
    eval_every: int | None = None,
    best: str | None = None,
) -> Program:
    """One program: a trial is a learning-rate array with a weight decay.

    Args:
      name: of the program.
      task: the network.
      trials: `learning_rate` `[trial, T]`, and `weight_decay` `[trial]` or `[trial, T]`; other
        arrays are carried along.
      batches: `(trial, seed, step) -> batch`.
      adam: the optimiser's other settings.
      held_out: by name, data that is never trained on: `index -> batch`, and how many of them.
      batch_size: sequences in a batch.
      accumulate: parts of a batch that are computed one after another.
      replay: whether every training batch is evaluated after training.
      reference: whether also by the model of another replicate.
      eval_every: steps between evaluations on held-out data; None for once, after training.
      best: see `Program`.

    Returns:
      The program; it summarises to `alphas`, the smoothing factors that the optimiser recorded.
    """
    num_steps = trials["learning_rate"].shape[-1]

    def optimizer(trial: Any) -> optax.GradientTransformation:
        return _optimizer(trial, adam, num_steps)

    def init(trial: Any, key: jax.Array) -> TrainState:
        return init_state(nn.unbox(task.init(key)), optimizer(trial), key)

    def validate(trial: Any, state: TrainState, batch: jax.Array) -> dict[str, jax.Array]:
        return {"loss": task.loss_fn(state.params, batch)}

    evaluations = {
        key: Evaluation(validate, _indexed(source), count, every=eval_every)
        for key, (source, count) in held_out.items()
    }
    if replay:
        evaluations["replay"] = _replay(task.loss_fn, batches, num_steps, reference)

    def summarize(trial: Any, state: TrainState) -> dict[str, jax.Array]:
        trace = trec.find_trace(state.opt_state)
        assert trace is not None
        return {"alphas": trace.alphas}

    step = make_train_step(
        lambda params, batch, key: task.loss_fn(params, batch), optimizer, accumulate=accumulate
    )
    return Program(
        name=name,
        trials=trials,
        num_steps=num_steps,
        init=init,
        step=step,
        batches=batches,
        evaluations=evaluations,
        summarize=summarize,
        best=best,
        examples_per_step=batch_size,
        shardings=lambda mesh: _shardings(task, init, optimizer, trials, mesh),
        fingerprint=task.fingerprint,
    )


def _indexed(source: Callable[[int], Any]) -> Callable[[int, int, int], Any]:
    return lambda trial, seed, index: source(index)


def _optimizer(trial: Any, adam: AdamSettings, num_steps: int) -> optax.GradientTransformation:
    rates, decay = trial["learning_rate"], trial["weight_decay"]
    decays = decay if jnp.ndim(decay) else jnp.broadcast_to(jnp.asarray(decay), rates.shape)

    def schedule(count: Any) -> Any:
        return rates[count]

    return adamw(
        schedule,
        (lambda count: decay[count]) if jnp.ndim(decay) else decay,
        **adam._asdict(),
        weight_decay_mask=decay_matrices,
        # The product as the schedule, since the decay may change between phases.
        after=(trec.trace_ema(lambda count: rates[count] * decays[count], 1.0, num_steps),),
    )


def _replay(
    loss_fn: Callable[[Any, Any], jax.Array],
    batches: Callable[..., Any],
    num_steps: int,
    reference: bool,
) -> Evaluation:
    def with_reference(trial: Any, state: TrainState, peer: TrainState, batch: Any) -> Any:
        return {
            "loss": trec.reevaluation_loss(loss_fn, state.params, batch),
            "reference_loss": trec.reevaluation_loss(loss_fn, peer.params, batch),
        }

    def alone(trial: Any, state: TrainState, batch: Any) -> Any:
        return {"loss": trec.reevaluation_loss(loss_fn, state.params, batch)}

    if not reference:
        return Evaluation(alone, batches, num_steps, keep="each")
    return Evaluation(with_reference, batches, num_steps, keep="each", peer=reference_replicate)


def _shardings(
    task: Task,
    init: Callable[..., Any],
    optimizer: Callable[[Any], optax.GradientTransformation],
    trials: dict[str, np.ndarray],
    mesh: Mesh,
) -> Any:
    """The state's places on a mesh, from the names that the network gives to its axes."""
    boxed = jax.eval_shape(task.init, jax.random.key(0))
    params = shardings_for(nn.unbox(boxed), nn.get_partition_spec(boxed), mesh)
    trial = {name: value[0] for name, value in trials.items()}
    state = jax.eval_shape(init, trial, jax.random.key(0))
    return state_shardings(state, optimizer(trial), params, mesh)
