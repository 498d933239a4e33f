"""Settings of the TREC experiment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxlab.experiments.base import RunConfig, configuration, option
from jaxlab.experiments.trec.study_config import (
    CollapseConfig,
    CptConfig,
    LawConfig,
    PlacementConfig,
    SchedulesConfig,
)
from jaxlab.experiments.trec.tool_config import MeasureConfig, PlanConfig, RecipesConfig

__all__ = ["CONFIGS", "Config", "DataConfig", "ModelConfig", "OptimizerConfig"]

# Sparser rows leave a chain of fewer states without paths between its states for some seeds.
_SPARSE, _MANY_STATES = 0.1, 32


@configuration
class ModelConfig:
    """The network: a Llama-style decoder (`variant=text`) or an MLP language model (`mlp`)."""

    width: Annotated[int, option("Residual width of the decoder.", ge=2, le=65_536)] = 64
    num_layers: Annotated[int, option("Layers of the decoder.", ge=1, le=1024)] = 2
    num_heads: Annotated[int, option("Query heads of the decoder.", ge=1, le=1024)] = 4
    num_kv_heads: Annotated[int, option("Key and value heads of the decoder.", ge=1, le=1024)] = 2
    embed_width: Annotated[int, option("Embedding width of the MLP model.", ge=1, le=65_536)] = 16
    hidden_width: Annotated[
        int | None,
        option(
            "Width inside the MLP; default 8/3 of the decoder's width, 128 for the MLP model.",
            ge=1,
            le=262_144,
        ),
    ] = None


@configuration
class OptimizerConfig:
    """AdamW and its schedule."""

    peak_lr: Annotated[float, option("Peak learning rate.", traced=True, gt=0, le=10)] = 3e-3
    schedule: Annotated[
        Literal["d2z", "constant", "linear", "cosine", "step", "wsd", "inverse_sqrt", "cyclic"],
        option("Learning-rate schedule after warm-up; d2z decays linearly to zero.", traced=True),
    ] = "d2z"
    warmup_fraction: Annotated[
        float, option("Share of the run spent in warm-up.", traced=True, ge=0, lt=1)
    ] = 0.1
    final_ratio: Annotated[
        float, option("Final over peak learning rate.", traced=True, ge=0, le=1)
    ] = 0.0
    step_at: Annotated[
        float, option("Share of the run before the drop of schedule=step.", traced=True, gt=0, lt=1)
    ] = 0.7
    decay_fraction: Annotated[
        float, option("Share of the run in which schedule=wsd decays.", traced=True, gt=0, le=1)
    ] = 0.2
    num_cycles: Annotated[
        int, option("Triangles of schedule=cyclic.", traced=True, ge=1, le=1_000_000)
    ] = 4
    tau: Annotated[
        float,
        option(
            "AdamW's time scale 1/(peak_lr * weight_decay * steps), as a share of the run.",
            traced=True,
            gt=0,
        ),
    ] = 0.2
    b1: Annotated[float, option("Decay of the first moment.", ge=0, lt=1)] = 0.9
    b2: Annotated[float, option("Decay of the second moment.", ge=0, lt=1)] = 0.95
    eps: Annotated[float, option("AdamW's epsilon.", gt=0)] = 1e-8
    clip_norm: Annotated[
        float | None, option("Largest global gradient norm; null for no clipping.", gt=0)
    ] = 1.0


@configuration
class DataConfig:
    """What the model reads."""

    path: Annotated[
        str | None,
        option(
            "File or folder to train on (text, JSONL, Parquet); null: the library's text.",
            min_length=1,
        ),
    ] = None
    field: Annotated[str, option("Field of JSONL and column of Parquet.", min_length=1)] = "text"
    pattern: Annotated[str, option("Which files of a folder.", min_length=1)] = "**/*"
    tokenizer: Annotated[
        str, option("byte, or a tokenizer.json of a byte-level BPE.", min_length=1)
    ] = "byte"
    skip_bad: Annotated[
        bool, option("Pass over lines and files that cannot be read, and count them.")
    ] = False
    max_bytes: Annotated[
        int,
        option("Bytes of text to use, of the library's sources and topics.", ge=10_000, le=10**12),
    ] = 8_000_000
    validation_fraction: Annotated[
        float, option("Share of the documents kept for validation.", gt=0, lt=1)
    ] = 0.05
    vocab_size: Annotated[int, option("States of the Markov chain.", ge=2, le=4096)] = 32
    chain_seed: Annotated[
        int, option("Seed of the Markov chain's transitions.", ge=0, le=2**63 - 1)
    ] = 0
    concentration: Annotated[
        float, option("Dirichlet concentration of the chain's rows.", ge=0.01, le=1e6)
    ] = 0.1


@configuration
class Config(RunConfig):
    """Trains with AdamW, re-evaluates the training batches, predicts that curve."""

    method: Annotated[Literal["trec"], option("This method.")] = "trec"
    variant: Annotated[
        Literal["text", "mlp"],
        option("text: a byte decoder on the standard library; mlp: an MLP on a Markov chain."),
    ] = "text"
    steps: Annotated[int, option("Training steps.", ge=2, le=10_000_000)] = 600
    batch_size: Annotated[int, option("Sequences in a batch.", ge=1, le=1_048_576)] = 16
    context: Annotated[int, option("Tokens that the model sees.", ge=1, le=1_048_576)] = 64
    num_bins: Annotated[
        int, option("Equal bins of the curve; must divide steps.", ge=4, le=100_000)
    ] = 20
    power: Annotated[float, option("Exponent p of the EMA coefficient.", gt=0, le=4)] = 0.5
    reference: Annotated[
        Literal["next", "none"],
        option(
            "Subtract the loss of the next model of the same half of the seeds, or none (paper)."
        ),
    ] = "next"
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        option("Type of the network's computation; parameters and optimiser stay float32."),
    ] = "float32"
    remat: Annotated[
        bool, option("Recompute layers in the backward pass to save memory.", role="execution")
    ] = False
    accumulate: Annotated[
        int,
        option(
            "Parts of a batch that are computed one after another to save memory.",
            role="execution",
            ge=1,
            le=1_048_576,
        ),
    ] = 1
    eval_every: Annotated[int, option("Steps between validations.", ge=1, le=10_000_000)] = 100
    eval_batches: Annotated[int, option("Batches of one validation.", ge=1, le=100_000)] = 8
    model: Annotated[ModelConfig, Field()] = ModelConfig()
    optimizer: Annotated[OptimizerConfig, Field()] = OptimizerConfig()
    data: Annotated[DataConfig, Field()] = DataConfig()

    @model_validator(mode="after")
    def check(self) -> Config:
        """Bounds that involve several fields."""
        if self.steps % self.num_bins:
            if self.num_bins == type(self).num_bins:  # then steps was typed
                raise ValueError(
                    f"steps={self.steps}: must be a multiple of num_bins={self.num_bins}"
                )
            raise ValueError(f"num_bins={self.num_bins}: must divide steps={self.steps}")
        if self.reference == "next" and self.replicates < 2:
            raise ValueError(
                f"replicates={self.replicates}: at least 2 with reference=next, whose reference "
                "is the next replicate's model; or set reference=none"
            )
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate={self.accumulate}: must divide batch_size={self.batch_size}"
            )
        self._check_optimizer()
        self._check_model()
        return self

    def _check_optimizer(self) -> None:
        chosen = self.optimizer
        if chosen.schedule == "d2z" and chosen.final_ratio:
            raise ValueError(
                f"optimizer.final_ratio={chosen.final_ratio}: must be 0 with schedule=d2z; "
                "use schedule=linear"
            )
        warmup_steps = round(chosen.warmup_fraction * self.steps)
        if chosen.schedule == "inverse_sqrt" and warmup_steps < 1:
            raise ValueError(
                f"optimizer.warmup_fraction={chosen.warmup_fraction}: must give at least one step "
                "of warm-up with schedule=inverse_sqrt"
            )
        if warmup_steps >= self.steps:
            raise ValueError(
                f"optimizer.warmup_fraction={chosen.warmup_fraction}: must leave steps after "
                f"warm-up, of steps={self.steps}"
            )
        if chosen.schedule == "wsd" and (1 - chosen.decay_fraction) * self.steps < warmup_steps:
            raise ValueError(
                f"optimizer.decay_fraction={chosen.decay_fraction}: must not begin before "
                f"warm-up ends, with optimizer.warmup_fraction={chosen.warmup_fraction}"
            )
        if chosen.tau * self.steps <= 1:
            raise ValueError(
                f"optimizer.tau={chosen.tau}: must exceed 1/steps, the span of one step "
                f"({1 / self.steps:.3g})"
            )

    def _check_model(self) -> None:
        model = self.model
        if self.variant == "mlp":
            self._check_chain()
            return
        if model.width % (2 * model.num_heads):
            raise ValueError(
                f"model.width={model.width}: must be a multiple of 2 * model.num_heads="
                f"{2 * model.num_heads}, for rotary positions"
            )
        if model.num_heads % model.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads={model.num_kv_heads}: must divide model.num_heads="
                f"{model.num_heads}"
            )

    def _check_chain(self) -> None:
        data = self.data
        if data.concentration < _SPARSE and data.vocab_size < _MANY_STATES:
            raise ValueError(
                f"data.concentration={data.concentration}: at least {_SPARSE} with fewer than "
                f"{_MANY_STATES} states (data.vocab_size={data.vocab_size}), whose chain could "
                "fall apart"
            )


CONFIGS: dict[str, type[RunConfig]] = {
    "text": Config,
    "mlp": Config,
    "schedules": SchedulesConfig,
    "collapse": CollapseConfig,
    "law": LawConfig,
    "placement": PlacementConfig,
    "cpt": CptConfig,
    "recipes": RecipesConfig,
    "plan": PlanConfig,
    "measure": MeasureConfig,
}
"""The class of each study's settings."""
