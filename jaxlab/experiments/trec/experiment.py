"""TREC: train, re-evaluate the training batches, compare with what AdamW's schedule predicts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxlab.data.corpora import load_corpus
from jaxlab.data.markov import MarkovBatches, entropy_rate, markov_transition
from jaxlab.data.text import BYTE_VOCABULARY_SIZE, Corpus, standard_library_corpus
from jaxlab.data.tokenizers import BpeTokenizer, ByteTokenizer
from jaxlab.data.windows import WindowBatches
from jaxlab.errors import UserError
from jaxlab.experiments.trec.conclusions import conclude, reference_replicate
from jaxlab.experiments.trec.config import Config
from jaxlab.methods import trec
from jaxlab.models.decoder import Decoder
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

__all__ = ["build", "conclude"]

_VALIDATION_SEED = 2**31 - 1  # no replicate has it


class _Task(NamedTuple):
    """A network with its data.

    Attributes:
      loss_fn: `(params, batch) -> mean cross-entropy in nats`.
      init: `key -> params`, each array boxed with the names of its axes.
      train: `seed -> source`, a source giving `[step] -> int32 [batch, length]`.
      validation: a source of text that is never trained on.
      fingerprint: names the data.
    """

    loss_fn: Callable[[Any, Any], jax.Array]
    init: Callable[[jax.Array], Any]
    train: Callable[[int], Any]
    validation: Any
    fingerprint: str


def build(config: Config) -> list[Program]:
    """The one program of this experiment: a trial is a learning-rate array and a weight decay.

    Args:
      config: all settings.

    Returns:
      A program whose evaluation `replay` gives every training batch's loss under the final
      weights, and under those of the next replicate.

    Raises:
      UserError: the text is too short for one batch.
    """
    task = _mlp_task(config) if config.variant == "mlp" else _text_task(config)
    trials = _trials(config)
    sources: dict[int, Any] = {}

    def batches(trial: int, seed: int, step: int) -> np.ndarray:
        if seed not in sources:
            sources[seed] = task.train(seed)
        return sources[seed][step]

    def optimizer(trial: Any) -> optax.GradientTransformation:
        return _optimizer(config, trial)

    def init(trial: Any, key: jax.Array) -> TrainState:
        return init_state(nn.unbox(task.init(key)), optimizer(trial), key)

    def validate(trial: Any, state: TrainState, batch: jax.Array) -> dict[str, jax.Array]:
        return {"loss": task.loss_fn(state.params, batch)}

    step = make_train_step(
        lambda params, batch, key: task.loss_fn(params, batch),
        optimizer,
        accumulate=config.accumulate,
    )
    return [
        Program(
            name=config.variant,
            trials=trials,
            num_steps=config.steps,
            init=init,
            step=step,
            batches=batches,
            evaluations={
                "validation": Evaluation(
                    validate,
                    lambda trial, seed, i: task.validation[i],
                    config.eval_batches,
                    every=config.eval_every,
                ),
                "replay": _replay(config, task.loss_fn, batches),
            },
            summarize=lambda trial, state: {"alphas": _trace(state.opt_state).alphas},
            best="validation/loss",
            examples_per_step=config.batch_size,
            shardings=lambda mesh: _shardings(task, init, optimizer, trials, mesh),
            fingerprint=task.fingerprint,
        )
    ]


def _shardings(
    task: _Task,
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


def _trials(config: Config) -> dict[str, np.ndarray]:
    chosen = config.optimizer
    rates = trec.schedule_values(
        chosen.schedule,
        config.steps,
        chosen.peak_lr,
        warmup_steps=round(chosen.warmup_fraction * config.steps),
        final_ratio=chosen.final_ratio,
        step_at=chosen.step_at,
        decay_fraction=chosen.decay_fraction,
        num_cycles=chosen.num_cycles,
    )
    decay = trec.weight_decay_for_timescale(chosen.tau, chosen.peak_lr, config.steps)
    return {
        "learning_rate": rates[None].astype(np.float32),
        "weight_decay": np.array([decay], np.float32),
    }


def _optimizer(config: Config, trial: Any) -> optax.GradientTransformation:
    def schedule(count: Any) -> Any:
        return trial["learning_rate"][count]

    decay = trial["weight_decay"]
    return adamw(
        schedule,
        decay,
        b1=config.optimizer.b1,
        b2=config.optimizer.b2,
        eps=config.optimizer.eps,
        clip_norm=config.optimizer.clip_norm,
        weight_decay_mask=decay_matrices,
        after=(trec.trace_ema(schedule, decay, config.steps),),
    )


def _trace(opt_state: Any) -> trec.TraceEmaState:
    return next(part for part in opt_state if isinstance(part, trec.TraceEmaState))


def _replay(
    config: Config, loss_fn: Callable[[Any, Any], jax.Array], batches: Callable[..., Any]
) -> Evaluation:
    def with_reference(trial: Any, state: TrainState, peer: TrainState, batch: Any) -> Any:
        return {
            "loss": trec.reevaluation_loss(loss_fn, state.params, batch),
            "reference_loss": trec.reevaluation_loss(loss_fn, peer.params, batch),
        }

    def alone(trial: Any, state: TrainState, batch: Any) -> Any:
        return {"loss": trec.reevaluation_loss(loss_fn, state.params, batch)}

    if config.reference == "none":
        return Evaluation(alone, batches, config.steps, keep="each")
    return Evaluation(with_reference, batches, config.steps, keep="each", peer=reference_replicate)


def _corpus(config: Config) -> tuple[Corpus, int]:
    """The text as tokens, and the size of their vocabulary."""
    data = config.data
    if data.path is None:
        try:
            corpus = standard_library_corpus(
                max_bytes=data.max_bytes, validation_fraction=data.validation_fraction
            )
        except UserError as error:
            field = error.field if error.field == "data" else f"data.{error.field}"
            raise UserError(field, error.value, error.allowed) from None
        return corpus, BYTE_VOCABULARY_SIZE
    byte = data.tokenizer == "byte"
    tokenizer = ByteTokenizer() if byte else BpeTokenizer.load(data.tokenizer)
    skipped: list[str] = []
    corpus = load_corpus(
        os.path.expanduser(data.path),
        tokenizer=tokenizer,
        field=data.field,
        pattern=data.pattern,
        validation_fraction=data.validation_fraction,
        skip_bad=data.skip_bad,
        on_skip=lambda place, reason: skipped.append(f"{place}: {reason}"),
    )
    if skipped:
        warnings.warn(
            f"{len(skipped)} bad lines or files skipped, first {skipped[0]}", stacklevel=2
        )
    return corpus, tokenizer.vocab_size


def _text_task(config: Config) -> _Task:
    corpus, vocab_size = _corpus(config)
    model = Decoder(
        vocab_size=vocab_size,
        width=config.model.width,
        num_layers=config.model.num_layers,
        num_heads=config.model.num_heads,
        num_kv_heads=config.model.num_kv_heads,
        hidden_width=config.model.hidden_width,
        dtype=jnp.dtype(config.dtype),
        remat=config.remat,
    )

    def init(key: jax.Array) -> Any:
        tokens = jnp.zeros((1, config.context), jnp.int32)
        return model.init(key, tokens)["params"]

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, batch[:, :-1])
        return cross_entropy(logits, batch[:, 1:])  # pyright: ignore[reportArgumentType]

    def windows(tokens: np.ndarray, seed: int) -> WindowBatches:
        return WindowBatches(
            tokens, batch_size=config.batch_size, context=config.context, seed=seed
        )

    return _Task(
        loss_fn,
        init,
        lambda seed: windows(corpus.train, seed),
        windows(corpus.validation, _VALIDATION_SEED),
        f"text {corpus.digest[:16]}, {vocab_size} kinds of tokens",
    )


def _mlp_task(config: Config) -> _Task:
    transition = markov_transition(
        config.data.chain_seed, config.data.vocab_size, config.data.concentration
    )
    model = MlpLanguageModel(
        vocab_size=config.data.vocab_size,
        window=config.context,
        embed_width=config.model.embed_width,
        hidden_width=config.model.hidden_width or 128,
        dtype=jnp.dtype(config.dtype),
    )

    def init(key: jax.Array) -> Any:
        tokens = jnp.zeros((1, config.context), jnp.int32)
        return model.init(key, tokens)["params"]

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, batch[:, :-1])
        return cross_entropy(logits, batch[:, -1])  # pyright: ignore[reportArgumentType]

    def source(seed: int) -> MarkovBatches:
        return MarkovBatches(
            transition, batch_size=config.batch_size, length=config.context + 1, seed=seed
        )

    entropy = entropy_rate(transition)
    name = f"Markov chain {config.data.chain_seed}, {entropy:.4f} nats a token"
    return _Task(loss_fn, init, source, source(_VALIDATION_SEED), name)
