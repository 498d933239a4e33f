"""TREC: train, re-evaluate the training batches, compare with what AdamW's schedule predicts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.data.corpora import load_corpus
from jaxlab.data.markov import MarkovBatches, entropy_rate, markov_transition
from jaxlab.data.text import BYTE_VOCABULARY_SIZE, Corpus, standard_library_corpus
from jaxlab.data.tokenizers import BpeTokenizer, ByteTokenizer
from jaxlab.data.windows import WindowBatches
from jaxlab.errors import UserError
from jaxlab.experiments.base import RunConfig
from jaxlab.experiments.trec import conclusions, measuring, studies, tools
from jaxlab.experiments.trec.config import Config
from jaxlab.experiments.trec.programs import (
    VALIDATION_SEED,
    AdamSettings,
    Task,
    mlp_task,
    training_program,
)
from jaxlab.experiments.trec.study_config import StudyConfig
from jaxlab.experiments.trec.tool_config import MeasureConfig, PlanConfig, RecipesConfig
from jaxlab.methods import trec
from jaxlab.models.decoder import Decoder
from jaxlab.ops.losses import cross_entropy
from jaxlab.reporting.report import Result
from jaxlab.training.program import Program

__all__ = ["build", "conclude"]


def build(config: RunConfig) -> list[Any]:
    """The programs of a study.

    Args:
      config: all settings.

    Returns:
      Of `text` and `mlp` one program, whose evaluation `replay` gives every training batch's loss
      under the final weights, and under those of another replicate; of a study one for each
      number of steps or size of model; of a tool that trains nothing, none.

    Raises:
      UserError: the text is too short for one batch, or a file cannot be read.
    """
    if isinstance(config, StudyConfig):
        return list(studies.build(config))
    if isinstance(config, MeasureConfig):
        return measuring.build(config)
    if isinstance(config, PlanConfig | RecipesConfig):
        tools.check(config)
        return []
    assert isinstance(config, Config)
    return [_single_program(config)]


def conclude(config: RunConfig, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Result:
    """What the programs' arrays say; see the study's own module.

    Args:
      config: all settings.
      arrays: by program, `[trial, replicate, ...]`.
    """
    if isinstance(config, StudyConfig):
        return studies.conclude(config, arrays)
    if isinstance(config, MeasureConfig):
        return measuring.conclude(config, arrays)
    if isinstance(config, PlanConfig | RecipesConfig):
        return tools.conclude(config)
    assert isinstance(config, Config)
    return conclusions.conclude(config, arrays)


def _single_program(config: Config) -> Program:
    task, train, validation = _mlp(config) if config.variant == "mlp" else _text(config)
    sources: dict[int, Any] = {}

    def batches(trial: int, seed: int, step: int) -> np.ndarray:
        if seed not in sources:
            sources[seed] = train(seed)
        return sources[seed][step]

    chosen = config.optimizer
    return training_program(
        config.variant,
        task,
        _trials(config),
        batches,
        adam=AdamSettings(chosen.b1, chosen.b2, chosen.eps, chosen.clip_norm),
        held_out={"validation": (lambda index: validation[index], config.eval_batches)},
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        reference=config.reference == "next",
        eval_every=config.eval_every,
        best="validation/loss",
    )


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


def _text(config: Config) -> tuple[Task, Any, Any]:
    """A decoder on text, the training data of a seed, and the validation data."""
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

    fingerprint = f"text {corpus.digest[:16]}, {vocab_size} kinds of tokens"
    return (
        Task(loss_fn, init, fingerprint),
        lambda seed: windows(corpus.train, seed),
        windows(corpus.validation, VALIDATION_SEED),
    )


def _mlp(config: Config) -> tuple[Task, Any, Any]:
    """An MLP on a Markov chain, the training data of a seed, and the validation data."""
    data = config.data
    transition = markov_transition(data.chain_seed, data.vocab_size, data.concentration)

    def source(seed: int) -> MarkovBatches:
        return MarkovBatches(
            transition, batch_size=config.batch_size, length=config.context + 1, seed=seed
        )

    task = mlp_task(
        vocab_size=data.vocab_size,
        context=config.context,
        embed_width=config.model.embed_width,
        hidden_width=config.model.hidden_width or 128,
        dtype=config.dtype,
        fingerprint=f"Markov chain {data.chain_seed}, {entropy_rate(transition):.4f} nats a token",
    )
    return task, source, source(VALIDATION_SEED)
