"""What the studies share: settings, their program, and curves from what it measured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxlab.data.markov import MarkovBatches, entropy_rate, markov_transition
from jaxlab.experiments.trec.programs import (
    VALIDATION_SEED,
    AdamSettings,
    mlp_task,
    training_program,
)
from jaxlab.experiments.trec.study_config import StudyConfig
from jaxlab.methods import trec
from jaxlab.training.program import Program

__all__ = [
    "Chains",
    "Setting",
    "chains",
    "curves_of",
    "make_setting",
    "num_parameters",
    "reference_notes",
    "schedule_rates",
    "study_program",
    "tokens_per_parameter",
]

_REMEMBERED_BYTES = 2**27
# Separate streams of one seed; validation has a seed of its own.
_TARGET_SEED_OFFSET = 2**20


def reference_notes(config: StudyConfig) -> list[str]:
    """What a reader must know of curves and intervals."""
    whose = "same half of the" if config.replicates >= 4 else "study's"
    notes = [
        "A measured curve is the final model's loss on each training batch minus that of another "
        f"replicate's final model on the same batch (the next one of the {whose} seeds)."
    ]
    if config.replicates < 4:
        notes.append(
            f"{config.replicates} replicates: intervals need at least 4, and 8 are advised."
        )
    return notes


class Setting(NamedTuple):
    """One trial of a study.

    Attributes:
      label: what it is called in figures and metrics.
      learning_rate: of each step, float64 `[T]`.
      weight_decay: one number, or one for each step `[T]`.
    """

    label: str
    learning_rate: np.ndarray
    weight_decay: float | np.ndarray


class Chains(NamedTuple):
    """The data of a study.

    Attributes:
      base: `seed, index -> batch` of the base chain.
      target: `seed, index -> batch` of the high-quality data, its blend with another chain.
      base_entropy: least loss on the base data, nats a token.
      target_entropy: least loss on the high-quality data.
      fingerprint: names both.
    """

    base: Callable[[int, int], np.ndarray]
    target: Callable[[int, int], np.ndarray]
    base_entropy: float
    target_entropy: float
    fingerprint: str


def chains(config: StudyConfig, batch_size: int) -> Chains:
    """The two sources of batches `[batch_size, context + 1]`; recent batches are remembered."""
    data = config.data
    first, second = (
        markov_transition(data.chain_seed + i, data.vocab_size, data.concentration) for i in (0, 1)
    )
    blend = (1 - data.blend) * first + data.blend * second

    batch_bytes = 4 * batch_size * (config.context + 1)

    def source(transition: np.ndarray, offset: int) -> Callable[[int, int], np.ndarray]:
        @functools.lru_cache(maxsize=1024)
        def stream(seed: int) -> MarkovBatches:
            length = config.context + 1
            return MarkovBatches(
                transition, batch_size=batch_size, length=length, seed=seed + offset
            )

        # Trials of one seed share their batches, and lanes run trial by trial.
        @functools.lru_cache(maxsize=_REMEMBERED_BYTES // batch_bytes)
        def batch(seed: int, index: int) -> np.ndarray:
            return stream(seed)[index]

        return batch

    entropies = entropy_rate(first), entropy_rate(blend)
    fingerprint = (
        f"Markov chain {data.chain_seed}, {entropies[0]:.4f} nats a token; "
        f"blend {data.blend}, {entropies[1]:.4f}"
    )
    return Chains(source(first, 0), source(blend, _TARGET_SEED_OFFSET), *entropies, fingerprint)


def schedule_rates(
    config: StudyConfig, schedule: str, steps: int, *, peak_lr: float | None = None
) -> np.ndarray:
    """Learning rates `[steps]` of a schedule with the study's parameters."""
    chosen = config.optimizer
    ratio = {"step": chosen.step_ratio, "d2z": 0.0, "wsd": 0.0}.get(schedule, chosen.final_ratio)
    return trec.schedule_values(
        schedule,
        steps,
        chosen.peak_lr if peak_lr is None else peak_lr,
        warmup_steps=round(chosen.warmup_fraction * steps),
        final_ratio=ratio,
        step_at=chosen.step_at,
        decay_fraction=chosen.decay_fraction,
        num_cycles=chosen.num_cycles,
    )


def make_setting(
    config: StudyConfig,
    schedule: str,
    tau: float,
    steps: int,
    *,
    label: str | None = None,
    lr_factor: float = 1.0,
) -> Setting:
    """A schedule at a time scale; the weight decay follows from the (scaled) peak rate."""
    peak = config.optimizer.peak_lr * lr_factor
    rates = schedule_rates(config, schedule, steps, peak_lr=peak)
    decay = trec.weight_decay_for_timescale(tau, peak, steps)
    return Setting(label or f"{schedule}, tau = {tau:g}", rates, decay)


def study_program(
    config: StudyConfig,
    name: str,
    settings: Sequence[Setting],
    *,
    batch_size: int | None = None,
    hidden_width: int | None = None,
    batches: Callable[[int, int, int], Any] | None = None,
    targets: bool = False,
    replay: bool = True,
) -> Program:
    """All settings of one shape as the trials of one program.

    Args:
      config: of the study.
      name: of the program.
      settings: of equal length.
      batch_size: windows in a batch; by default the study's.
      hidden_width: of the network; by default the study's.
      batches: `(trial, seed, step) -> batch`; by default the base chain's.
      targets: whether held-out high-quality data is evaluated, beside the base data.
      replay: whether training batches are evaluated after training.
    """
    size = batch_size or config.batch_size
    data = chains(config, size)
    task = mlp_task(
        vocab_size=config.data.vocab_size,
        context=config.context,
        embed_width=config.model.embed_width,
        hidden_width=hidden_width or config.model.hidden_width,
        dtype=config.dtype,
        fingerprint=data.fingerprint,
    )
    held_out = {"validation": (functools.partial(data.base, VALIDATION_SEED), config.eval_batches)}
    if targets:
        held_out["target"] = (functools.partial(data.target, VALIDATION_SEED), config.eval_batches)
    chosen = config.optimizer
    return training_program(
        name,
        task,
        {
            "learning_rate": np.stack([s.learning_rate for s in settings]).astype(np.float32),
            "weight_decay": np.stack([s.weight_decay for s in settings]).astype(np.float32),
        },
        batches or (lambda trial, seed, step: data.base(seed, step)),
        adam=AdamSettings(chosen.b1, chosen.b2, chosen.eps),
        held_out=held_out,
        batch_size=size,
        replay=replay,
    )


def num_parameters(config: StudyConfig, hidden_width: int | None = None) -> int:
    """Parameters of the network, embeddings included."""
    vocab, embed = config.data.vocab_size, config.model.embed_width
    hidden = hidden_width or config.model.hidden_width
    return vocab * embed + (config.context * embed + 1) * hidden + (hidden + 1) * vocab


def tokens_per_parameter(
    config: StudyConfig, steps: int, *, hidden_width: int | None = None
) -> float:
    """Predicted tokens per parameter of a run: each window counts once."""
    return steps * config.batch_size / num_parameters(config, hidden_width)


def curves_of(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Measured curves `[trial, replicate, T]` less the reference's, and coefficients `[trial, T]`.

    The coefficients come from what the optimiser recorded.
    """
    curves = arrays["replay/loss"].astype(np.float64) - arrays["replay/reference_loss"]
    return curves, trec.ema_coefficients(arrays["alphas"][:, 0].astype(np.float64))
