"""Settings of TREC's studies: an MLP language model on a Markov chain, many settings at once."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from jaxlab.experiments.base import RunConfig, configuration, option

__all__ = [
    "ChainConfig",
    "CollapseConfig",
    "CptConfig",
    "LawConfig",
    "NetworkConfig",
    "PlacementConfig",
    "SchedulesConfig",
    "StudyConfig",
    "StudyOptimizerConfig",
]

Schedule = Literal["d2z", "constant", "linear", "cosine", "step", "wsd", "inverse_sqrt", "cyclic"]
Tau = Annotated[float, Field(gt=0, le=1000)]


@configuration
class NetworkConfig:
    """The MLP language model."""

    embed_width: Annotated[int, option("Embedding width.", ge=1, le=65_536)] = 16
    hidden_width: Annotated[int, option("Width of the hidden layer.", ge=1, le=262_144)] = 128


@configuration
class StudyOptimizerConfig:
    """AdamW, and what the schedules share; a schedule without a parameter leaves it unused."""

    peak_lr: Annotated[float, option("Peak learning rate.", gt=0, le=10)] = 1e-2
    warmup_fraction: Annotated[float, option("Share of the run in warm-up.", ge=0, lt=1)] = 0.1
    final_ratio: Annotated[
        float, option("Final over peak learning rate of linear, cosine and cyclic.", ge=0, le=1)
    ] = 0.1
    step_ratio: Annotated[
        float, option("Learning rate after the drop of step over that before.", gt=0, le=1)
    ] = 0.01
    step_at: Annotated[float, option("Share of the run before that drop.", gt=0, lt=1)] = 0.7
    decay_fraction: Annotated[
        float, option("Share of the run in which wsd decays.", gt=0, le=1)
    ] = 0.2
    num_cycles: Annotated[int, option("Triangles of cyclic.", ge=1, le=1_000_000)] = 4
    b1: Annotated[float, option("Decay of the first moment.", ge=0, lt=1)] = 0.9
    b2: Annotated[float, option("Decay of the second moment.", ge=0, lt=1)] = 0.95
    eps: Annotated[float, option("AdamW's epsilon.", gt=0)] = 1e-8


@configuration
class ChainConfig:
    """The base data, a Markov chain, and the better data, its blend with another one."""

    vocab_size: Annotated[int, option("States of the chain.", ge=2, le=4096)] = 32
    chain_seed: Annotated[
        int, option("Seed of the base chain; the other has the next.", ge=0, le=2**63 - 2)
    ] = 0
    concentration: Annotated[
        float, option("Dirichlet concentration of the chains' rows.", ge=0.1, le=1e6)
    ] = 0.1
    blend: Annotated[
        float, option("Share of the other chain in the high-quality data.", gt=0, le=1)
    ] = 0.5


@configuration
class StudyConfig(RunConfig):
    """What all studies share.

    Attributes:
      binned: whether the study compares curves in bins.
    """

    binned: ClassVar[bool] = True

    method: Annotated[Literal["trec"], option("This method.")] = "trec"
    steps: Annotated[int, option("Training steps.", ge=10, le=10_000_000)] = 1000
    batch_size: Annotated[int, option("Windows in a batch.", ge=2, le=1_048_576)] = 128
    context: Annotated[int, option("Tokens that the model sees.", ge=1, le=4096)] = 6
    num_bins: Annotated[
        int, option("Equal bins of a curve; must divide the steps.", ge=4, le=100_000)
    ] = 20
    power: Annotated[float, option("Exponent p of the EMA coefficient.", gt=0, le=4)] = 0.5
    eval_batches: Annotated[
        int, option("Held-out batches of a final evaluation.", ge=1, le=100_000)
    ] = 32
    dtype: Annotated[
        Literal["float32", "bfloat16"], option("Type of the network's computation.")
    ] = "float32"
    model: Annotated[NetworkConfig, Field()] = NetworkConfig()
    optimizer: Annotated[StudyOptimizerConfig, Field()] = StudyOptimizerConfig()
    data: Annotated[ChainConfig, Field()] = ChainConfig()

    @model_validator(mode="after")
    def check(self) -> StudyConfig:
        """Bounds that involve several fields."""
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            values = getattr(self, field.name)
            if isinstance(values, tuple) and len(set(values)) != len(values):
                raise ValueError(f"{field.name}={list(values)}: must differ from each other")
        if self.replicates < 2:
            raise ValueError(
                f"replicates={self.replicates}: at least 2, since a curve's reference is another "
                "replicate's model"
            )
        lengths = self.all_steps()
        if self.binned and any(steps % self.num_bins for steps in lengths):
            each = ", ".join(map(str, lengths))
            raise ValueError(
                f"num_bins={self.num_bins}: must divide the steps of each of its runs: {each}"
            )
        for steps in lengths:
            if round(self.optimizer.warmup_fraction * steps) >= steps:
                raise ValueError(
                    f"optimizer.warmup_fraction={self.optimizer.warmup_fraction}: must leave "
                    f"steps after warm-up, of {steps}"
                )
        self._check_schedules()
        for name, tau, steps in self.all_taus():
            if tau * steps <= 1:
                raise ValueError(
                    f"{name}={tau}: must exceed the span of one step of {steps}, {1 / steps:.3g}"
                )
        return self

    def all_steps(self) -> tuple[int, ...]:
        """The lengths of the study's runs."""
        return (self.steps,)

    def all_taus(self) -> tuple[tuple[str, float, int], ...]:
        """The study's time scales, each with its field and the least steps it is used with."""
        return ()

    def all_schedules(self) -> tuple[str, ...]:
        """The study's schedules."""
        return ()

    def _check_schedules(self) -> None:
        chosen, names = self.optimizer, self.all_schedules()
        for steps in self.all_steps():
            warmup = round(chosen.warmup_fraction * steps)
            if "wsd" in names and (1 - chosen.decay_fraction) * steps < warmup:
                raise ValueError(
                    f"optimizer.decay_fraction={chosen.decay_fraction}: must not begin before "
                    f"warm-up ends, with optimizer.warmup_fraction={chosen.warmup_fraction}"
                )
            if "inverse_sqrt" in names and warmup < 1:
                raise ValueError(
                    f"optimizer.warmup_fraction={chosen.warmup_fraction}: must give at least one "
                    "step of warm-up with inverse_sqrt"
                )


@configuration
class SchedulesConfig(StudyConfig):
    """Measured and predicted curves of all schedules."""

    variant: Annotated[Literal["schedules"], option("This study.")] = "schedules"
    schedules: Annotated[
        tuple[Schedule, ...], option("Learning-rate schedules.", min_length=1, max_length=8)
    ] = ("d2z", "linear", "cosine", "constant", "step", "wsd", "inverse_sqrt", "cyclic")
    taus: Annotated[
        tuple[Tau, ...], option("AdamW's time scales.", min_length=1, max_length=100)
    ] = (0.05, 0.2, 0.8)

    def all_taus(self) -> tuple[tuple[str, float, int], ...]:
        """The study's time scales; see `StudyConfig`."""
        return tuple(("taus", tau, self.steps) for tau in self.taus)

    def all_schedules(self) -> tuple[str, ...]:
        """The study's schedules."""
        return self.schedules


@configuration
class CollapseConfig(StudyConfig):
    """Whether curves coincide at one time scale, however it is reached."""

    variant: Annotated[Literal["collapse"], option("This study.")] = "collapse"
    tau: Annotated[float, option("Time scale that settings share.", gt=0, le=1000)] = 0.2
    other_taus: Annotated[
        tuple[Tau, ...], option("Time scales to tell it from.", min_length=1, max_length=100)
    ] = (0.05, 0.8)

    @model_validator(mode="after")
    def check_halving(self) -> CollapseConfig:
        """Half the batch needs an even one; half the steps need the bins to divide them."""
        if self.batch_size % 2:
            raise ValueError(f"batch_size={self.batch_size}: must be even, since it is halved")
        if self.tau in self.other_taus:
            raise ValueError(f"other_taus={self.tau}: must differ from tau")
        return self

    def all_steps(self) -> tuple[int, ...]:
        """The lengths of the study's runs: tokens are kept when the batch changes."""
        return (self.steps, 2 * self.steps, self.steps // 2)

    def all_taus(self) -> tuple[tuple[str, float, int], ...]:
        """The study's time scales; see `StudyConfig`."""
        others = (("other_taus", tau, self.steps) for tau in self.other_taus)
        return ("tau", self.tau, self.steps // 2), *others


@configuration
class LawConfig(StudyConfig):
    """The law of the training-fraction exponent, fitted on a small model, used on a larger one."""

    variant: Annotated[Literal["law"], option("This study.")] = "law"
    taus: Annotated[
        tuple[Tau, ...], option("Time scales of the fit.", min_length=2, max_length=100)
    ] = (0.1, 0.2, 0.4, 0.8)
    lengths: Annotated[
        tuple[Annotated[int, Field(ge=10, le=10_000_000)], ...],
        option("Steps of the fit's runs.", min_length=2, max_length=20),
    ] = (500, 1000, 2000)
    steps: Annotated[int, option("Steps of the larger model.", ge=10, le=10_000_000)] = 1500
    larger_width: Annotated[
        int, option("Width of the larger model's hidden layer.", ge=1, le=262_144)
    ] = 256
    transfer_taus: Annotated[
        tuple[Tau, ...], option("Time scales of the larger model.", min_length=1, max_length=100)
    ] = (0.15, 0.3, 0.6)
    other_schedules: Annotated[
        tuple[Schedule, ...],
        option("Schedules of the larger model beside d2z, at the middle time scale."),
    ] = ("cosine", "step", "wsd")

    @model_validator(mode="after")
    def check_others(self) -> LawConfig:
        """The law is fitted under d2z, so that is no other schedule."""
        if "d2z" in self.other_schedules:
            raise ValueError("other_schedules=d2z: must be other schedules than d2z")
        return self

    def all_steps(self) -> tuple[int, ...]:
        """The lengths of the study's runs."""
        return (self.steps, *self.lengths)

    def all_taus(self) -> tuple[tuple[str, float, int], ...]:
        """The study's time scales; see `StudyConfig`."""
        return (
            *(("taus", tau, min(self.lengths)) for tau in self.taus),
            *(("transfer_taus", tau, self.steps) for tau in self.transfer_taus),
        )

    def all_schedules(self) -> tuple[str, ...]:
        """The study's schedules."""
        return ("d2z", *self.other_schedules)


@configuration
class _SegmentsConfig(StudyConfig):
    """Studies that put good data into one part of the run."""

    binned: ClassVar[bool] = False

    num_segments: Annotated[
        int, option("Parts of the run, each of which gets the good data once.", ge=2, le=1000)
    ] = 10
    tau: Annotated[float, option("AdamW's time scale.", gt=0, le=1000)] = 0.2
    m: Annotated[
        float | None,
        option("Training-fraction exponent of the prediction; null: the law.", ge=0, le=12),
    ] = None

    @model_validator(mode="after")
    def check_segments(self) -> _SegmentsConfig:
        """Segments are equal."""
        if self.steps % self.num_segments:
            raise ValueError(f"num_segments={self.num_segments}: must divide steps={self.steps}")
        return self

    def all_taus(self) -> tuple[tuple[str, float, int], ...]:
        """The study's time scales; see `StudyConfig`."""
        return (("tau", self.tau, self.steps),)


@configuration
class PlacementConfig(_SegmentsConfig):
    """Where good data helps most, measured and predicted."""

    variant: Annotated[Literal["placement"], option("This study.")] = "placement"
    schedules: Annotated[
        tuple[Schedule, ...], option("Learning-rate schedules.", min_length=1, max_length=8)
    ] = ("d2z", "step", "wsd")

    @model_validator(mode="after")
    def check_drop(self) -> PlacementConfig:
        """The segment before the drop has to end with it."""
        place = self.optimizer.step_at * self.num_segments
        if "step" in self.schedules and not (
            abs(place - round(place)) < 1e-9 and 0 < round(place) < self.num_segments
        ):
            raise ValueError(
                f"optimizer.step_at={self.optimizer.step_at}: must be the end of one of the "
                f"num_segments={self.num_segments} segments, with schedule step"
            )
        return self

    def all_schedules(self) -> tuple[str, ...]:
        """The study's schedules."""
        return self.schedules


@configuration
class CptConfig(_SegmentsConfig):
    """Where good data helps most in continued pre-training."""

    variant: Annotated[Literal["cpt"], option("This study.")] = "cpt"
    steps: Annotated[int, option("Steps of continued pre-training.", ge=10, le=10_000_000)] = 400
    pretrain_steps: Annotated[
        int, option("Steps of pre-training, linear decay.", ge=10, le=10_000_000)
    ] = 1000
    pretrain_tau: Annotated[
        float, option("Time scale of pre-training, of its own length.", gt=0, le=1000)
    ] = 0.2

    def all_steps(self) -> tuple[int, ...]:
        """The lengths of the two phases."""
        return self.steps, self.pretrain_steps

    def all_taus(self) -> tuple[tuple[str, float, int], ...]:
        """The study's time scales; see `StudyConfig`."""
        return (
            ("tau", self.tau, self.steps),
            ("pretrain_tau", self.pretrain_tau, self.pretrain_steps),
        )
