"""Studies with trained models: questions about made-up entities, answered from memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxlab.data.closed_book import ClosedBook, Phrasing, answers_of
from jaxlab.evaluation.ranking import auroc
from jaxlab.experiments.gnll.config import ClosedBookConfig
from jaxlab.experiments.gnll.estimators import ESTIMATORS, Texts, estimate
from jaxlab.models.decoder import Decoder
from jaxlab.models.generation import GenerationSettings, decode, start
from jaxlab.models.prefill import Prefilled, prefill
from jaxlab.ops.losses import cross_entropy
from jaxlab.ops.schedules import schedule_values
from jaxlab.parallel.rules import shardings_for
from jaxlab.training.optimizers import (
    TrainState,
    adamw,
    init_state,
    make_train_step,
    state_shardings,
)
from jaxlab.training.program import Program

__all__ = ["NAME", "Scores", "build", "scores", "world"]

NAME = "closed_book"
_B2 = 0.999


def world(config: ClosedBookConfig, phrasing: Phrasing, seed: int) -> ClosedBook:
    """The entities of one task and seed."""
    chosen = config.world
    return ClosedBook(
        seed,
        num_entities=chosen.num_entities,
        num_candidates=chosen.num_candidates,
        num_words=chosen.num_words,
        phrasing=phrasing,
        num_phrasings=chosen.num_phrasings,
        exponent=chosen.exponent,
        batch_size=config.batch_size,
    )


def build(config: ClosedBookConfig, phrasings: Sequence[Phrasing]) -> Program:
    """One program; its trials are the tasks, which differ in how answers are phrased.

    After training every question is answered greedily and by samples; the summary has their
    `tokens`, `lengths` and `log_probs`, as `greedy_*` and `sample_*`.
    """
    worlds = functools.cache(lambda trial, seed: world(config, phrasings[trial], seed))
    example: ClosedBook = worlds(0, 0)
    chosen = config.network
    model = Decoder(
        vocab_size=example.vocab_size,
        width=chosen.width,
        num_layers=chosen.num_layers,
        num_heads=chosen.num_heads,
    )

    def initial(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, example.prompt_length), jnp.int32))["params"]

    def optimizer(trial: Any) -> optax.GradientTransformation:
        return adamw(lambda count: trial["learning_rate"][count], 0.0, b2=_B2)

    def init(trial: Any, key: jax.Array) -> TrainState:
        return init_state(nn.unbox(initial(key)), optimizer(trial), key)

    def loss_fn(params: Any, batch: Mapping[str, jax.Array], key: jax.Array) -> jax.Array:
        del key
        logits: Any = model.apply({"params": params}, batch["tokens"][:, :-1])
        return cross_entropy(logits, batch["tokens"][:, 1:], batch["weights"])

    # The same in every world: entities differ in their answers, not in their names.
    prompts = jnp.asarray(example.questions().prompts)

    def summarize(trial: Any, state: TrainState) -> dict[str, jax.Array]:
        del trial
        key = jax.random.fold_in(state.key, config.steps)
        new = example.answer_length
        done = prefill(model, state.params, prompts, capacity=prompts.shape[1] + new)

        def answers(number: int, temperature: float) -> dict[str, jax.Array]:
            settings = GenerationSettings(
                max_new_tokens=new, num_samples=number, temperature=temperature, stop_ids=(0,)
            )
            return _answers(model, state.params, done, key, settings)

        greedy, drawn = answers(1, 0.0), answers(config.num_samples, 1.0)
        found = {f"greedy_{name}": value[:, 0] for name, value in greedy.items()}
        return found | {f"sample_{name}": value for name, value in drawn.items()}

    def shardings(mesh: Mesh) -> Any:
        boxed = jax.eval_shape(initial, jax.random.key(0))
        params = shardings_for(nn.unbox(boxed), nn.get_partition_spec(boxed), mesh)
        trial = {name: value[0] for name, value in trials.items()}
        state = jax.eval_shape(init, trial, jax.random.key(0))
        return state_shardings(state, optimizer(trial), params, mesh)

    rates = schedule_values("cosine", config.steps, config.peak_lr, final_ratio=0.0)
    trials = {"learning_rate": np.tile(rates.astype(np.float32), (len(phrasings), 1))}
    return Program(
        name=NAME,
        trials=trials,
        num_steps=config.steps,
        init=init,
        step=make_train_step(loss_fn, optimizer),
        batches=lambda trial, seed, step: worlds(trial, seed)[step],
        summarize=summarize,
        examples_per_step=config.batch_size,
        shardings=shardings,
        fingerprint=f"closed book, {'+'.join(phrasings)}",
    )


def _answers(
    model: Decoder, params: Any, done: Prefilled, key: jax.Array, settings: GenerationSettings
) -> dict[str, jax.Array]:
    """Texts after every prompt: `[question, sample, new]`, lengths `[question, sample]`."""
    rows = jnp.arange(len(done.lengths), dtype=jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
    state = start(model, done, keys, settings=settings)
    state = decode(model, params, state, settings.max_new_tokens - 1, settings=settings)
    lead = (len(rows), settings.num_samples)
    return {
        "tokens": state.tokens.reshape(*lead, -1),
        "lengths": state.lengths.reshape(lead),
        "log_probs": state.log_probs.reshape(*lead, -1),
    }


class Scores(NamedTuple):
    """What came out for one task.

    Attributes:
      auroc: by measure, `[replicate]`; NaN where all answers are right or all are wrong.
      accuracy: of the greedy answers, `[replicate]`.
    """

    auroc: dict[str, np.ndarray]
    accuracy: np.ndarray


def scores(
    config: ClosedBookConfig, phrasing: Phrasing, arrays: Mapping[str, np.ndarray]
) -> Scores:
    """How well every measure tells wrong greedy answers from right ones.

    Args:
      config: of the study.
      phrasing: of the task.
      arrays: the task's `[replicate, question, ...]`.
    """
    found: dict[str, list[float]] = {}
    accuracy = []
    for replicate, greedy_tokens in enumerate(arrays["greedy_tokens"]):
        own = world(config, phrasing, config.seed + replicate)
        answers = answers_of(greedy_tokens, own)
        wrong = (answers != own.questions().right).any(axis=-1)
        meanings = answers_of(arrays["sample_tokens"][replicate], own)
        measured = estimate(
            Texts(arrays["greedy_log_probs"][replicate], arrays["greedy_lengths"][replicate]),
            Texts(arrays["sample_log_probs"][replicate], arrays["sample_lengths"][replicate]),
            _clusters(meanings),
        )
        one_class = wrong.all() or not wrong.any()
        for name in measured:
            value = np.nan if one_class else auroc(wrong, measured[name])
            found.setdefault(name, []).append(value)
        accuracy.append(1 - wrong.mean())
    ordered = {name: np.array(found[name]) for name in ESTIMATORS if name in found}
    return Scores(ordered, np.array(accuracy))


def _clusters(meanings: np.ndarray) -> np.ndarray:
    """Numbers of equal meanings: `[question, sample]` from `[question, sample, 3]`."""
    same = (meanings[:, :, None] == meanings[:, None]).all(axis=-1)
    return same.argmax(axis=-1)
