"""Settings of G-NLL's studies."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from jaxlab.experiments.base import RunConfig, configuration, option

__all__ = [
    "CONFIGS",
    "ClosedBookConfig",
    "JudgeConfig",
    "NetworkConfig",
    "PretrainedConfig",
    "QuestionsConfig",
    "StressConfig",
    "StudyConfig",
    "TreeConfig",
    "WorldConfig",
]


@configuration
class TreeConfig:
    """Random Markov chains, whose sequences are all enumerated."""

    num_chains: Annotated[int, option("Chains for each seed and deviation.", ge=2, le=10_000)] = 60
    vocab_size: Annotated[int, option("Tokens, the end included.", ge=2, le=16)] = 4
    max_length: Annotated[int, option("Tokens of a sequence, at most.", ge=1, le=12)] = 6
    logit_stds: Annotated[
        tuple[Annotated[float, Field(gt=0, le=100)], ...],
        option("Standard deviations of the chains' logits: flat to peaked.", min_length=1),
    ] = (0.5, 1.0, 2.0, 3.0, 5.0)
    peaked_from: Annotated[
        float, option("Chains of this deviation or more count as peaked.", gt=0, le=100)
    ] = 3.0
    beam_width: Annotated[int, option("Width of the beam search.", ge=2, le=64)] = 4
    repetitions: Annotated[
        int, option("Repeated draws that measure a sampler's error.", ge=2, le=10_000)
    ] = 64

    @model_validator(mode="after")
    def check(self) -> TreeConfig:
        """Bounds that involve several fields."""
        if self.num_sequences() > 300_000:
            raise ValueError(
                f"tree.max_length={self.max_length}: must leave at most 300000 sequences of "
                f"tree.vocab_size={self.vocab_size} tokens, not {self.num_sequences()}"
            )
        if max(self.logit_stds) < self.peaked_from:
            raise ValueError(
                f"tree.peaked_from={self.peaked_from}: must be at most the largest of "
                f"tree.logit_stds, {max(self.logit_stds)}"
            )
        if len(set(self.logit_stds)) < len(self.logit_stds):
            raise ValueError(f"tree.logit_stds={list(self.logit_stds)}: must differ")
        return self

    def num_sequences(self) -> int:
        """How many sequences a chain has."""
        words = self.vocab_size - 1
        return sum(words**length for length in range(self.max_length + 1))


@configuration
class WorldConfig:
    """The made-up entities that are asked for."""

    num_entities: Annotated[int, option("Entities, each with one question.", ge=20, le=100_000)] = (
        400
    )
    num_candidates: Annotated[int, option("Possible answers of an entity.", ge=2, le=64)] = 5
    num_words: Annotated[int, option("Words that answers are made of.", ge=2, le=10_000)] = 24
    num_phrasings: Annotated[
        int, option("Phrasings that may precede an answer.", ge=1, le=10_000)
    ] = 5
    exponent: Annotated[
        float, option("How much more often frequent entities are asked for (Zipf).", ge=0, le=10)
    ] = 0.7

    @model_validator(mode="after")
    def check(self) -> WorldConfig:
        """Bounds that involve several fields."""
        if self.num_candidates > self.num_words:
            raise ValueError(
                f"world.num_candidates={self.num_candidates}: must be at most world.num_words="
                f"{self.num_words}"
            )
        return self


@configuration
class NetworkConfig:
    """The decoder that learns the answers."""

    width: Annotated[int, option("Width of the residual stream.", ge=4, le=65_536)] = 48
    num_layers: Annotated[int, option("Blocks.", ge=1, le=1000)] = 2
    num_heads: Annotated[int, option("Query heads; must divide the width.", ge=1, le=1024)] = 4

    @model_validator(mode="after")
    def check(self) -> NetworkConfig:
        """Bounds that involve several fields."""
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"network.num_heads={self.num_heads}: twice it must divide network.width="
                f"{self.width}"
            )
        return self


@configuration
class ClosedBookConfig(RunConfig):
    """What the studies with trained models share."""

    method: Annotated[Literal["gnll"], option("This method.")] = "gnll"
    replicates: Annotated[
        int,
        option("How often the study is repeated with other seeds.", role="extent", ge=1, le=4096),
    ] = 6
    steps: Annotated[int, option("Training steps.", ge=10, le=10_000_000)] = 500
    batch_size: Annotated[int, option("Questions in a batch.", ge=1, le=1_048_576)] = 256
    peak_lr: Annotated[float, option("Adam's learning rate; it decays to 0.", gt=0, le=10)] = 4e-3
    num_samples: Annotated[
        int, option("Answers that are drawn for each question.", ge=2, le=1000)
    ] = 10
    world: Annotated[WorldConfig, Field()] = WorldConfig()
    network: Annotated[NetworkConfig, Field()] = NetworkConfig()


@configuration
class StudyConfig(ClosedBookConfig):
    """Exact trees, and closed-book questions to trained models."""

    variant: Annotated[Literal["study"], option("Exact trees and trained models.")] = "study"
    tree: Annotated[TreeConfig, Field()] = TreeConfig()


@configuration
class StressConfig(ClosedBookConfig):
    """Where G-NLL should not be used: right answers that can be phrased in many ways."""

    variant: Annotated[Literal["stress"], option("Many phrasings of right answers.")] = "stress"
    world: Annotated[WorldConfig, Field()] = WorldConfig(num_phrasings=16)


@configuration
class JudgeConfig:
    """What decides whether an answer is right, and whether two answers mean the same."""

    kind: Annotated[
        Literal["f1", "exact", "openai"],
        option(
            "What says whether an answer is right: F1 of its words, equal text, or a language "
            "model behind an OpenAI-compatible address."
        ),
    ] = "f1"
    f1_above: Annotated[float, option("With f1: right above this.", ge=0, lt=1)] = 0.5
    meanings: Annotated[
        Literal["equal", "openai"],
        option(
            "What says whether answers mean the same: equal text but for case, accents and "
            "articles, or that language model, pair by pair."
        ),
    ] = "equal"
    base_url: Annotated[
        str | None,
        option("With openai: the address, such as http://localhost:8000/v1.", role="execution"),
    ] = None
    model: Annotated[str | None, option("With openai: the judge's name.", min_length=1)] = None
    api_key_variable: Annotated[
        str,
        option("With openai: the environment variable that holds the key.", role="execution"),
    ] = "OPENAI_API_KEY"
    unclear: Annotated[
        Literal["stop", "wrong"],
        option(
            "With openai: whether a reply that is no answer, twice, stops the run, or counts as "
            "wrong (of meanings: as equal text)."
        ),
    ] = "stop"
    max_tokens: Annotated[
        int | None,
        option(
            "With openai: tokens of a reply, at most; more for models that think before they "
            "answer; null: no limit.",
            role="execution",
            ge=1,
            le=1_000_000,
        ),
    ] = 16
    timeout: Annotated[
        float, option("With openai: seconds for one reply.", role="execution", gt=0, le=3600)
    ] = 60.0
    cache: Annotated[
        str | None,
        option(
            "With openai: file of the judge's recorded replies; null: the user's cache folder.",
            role="execution",
            min_length=1,
        ),
    ] = None
    offline: Annotated[
        bool, option("With openai: use recorded replies only.", role="execution")
    ] = False

    @model_validator(mode="after")
    def check(self) -> JudgeConfig:
        """Fields that need each other, and secrets, which would be written into the run's files."""
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", self.api_key_variable):
            raise ValueError(
                "judge.api_key_variable=(not shown): allowed: the name of an environment variable, "
                "not the key that it holds"
            )
        if self.base_url is not None and _holds_more_than_an_address(self.base_url):
            raise ValueError(
                "judge.base_url=(not shown): holds a user, a password or a query, which would be "
                "written into the run's files; allowed: the address alone, with the key in the "
                f"environment variable {self.api_key_variable}"
            )
        if "openai" in (self.kind, self.meanings):
            for name in ("base_url", "model"):
                if getattr(self, name) is None:
                    raise ValueError(f"judge.{name}=null: needed for a judge of kind openai")
        return self


def _holds_more_than_an_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:  # no address at all, which the client says
        return "@" in url
    return "@" in parts.netloc or bool(parts.query or parts.fragment)


Topic = Literal[
    "arithmetic", "calendar", "letters", "numerals", "computing", "capitals", "elements"
]


@configuration
class QuestionsConfig:
    """What is asked."""

    path: Annotated[
        str | None,
        option(
            "Your questions, a file of JSON lines with question and answers; null: facts.",
            min_length=1,
        ),
    ] = None
    topics: Annotated[tuple[Topic, ...], option("What the facts are about.", min_length=1)] = (
        "arithmetic",
        "calendar",
        "capitals",
        "elements",
    )
    num_questions: Annotated[
        int | None,
        option(
            "How many questions; null: all of your file, or up to 240 facts.", ge=2, le=1_000_000
        ),
    ] = None
    num_examples: Annotated[
        int, option("Answered questions that every prompt begins with.", ge=0, le=64)
    ] = 5

    @model_validator(mode="after")
    def check(self) -> QuestionsConfig:
        """No topic twice."""
        if len(set(self.topics)) < len(self.topics):
            raise ValueError(f"data.topics={list(self.topics)}: must differ from each other")
        return self


@configuration
class PretrainedConfig(RunConfig):
    """Short questions to a pretrained model."""

    keeps_results: ClassVar[bool] = False  # the questions or the model may have changed

    method: Annotated[Literal["gnll"], option("This method.")] = "gnll"
    variant: Annotated[Literal["model"], option("A pretrained model.")] = "model"
    replicates: Annotated[
        int,
        option(
            "How often answers are drawn, with other seeds; questions and greedy answers stay.",
            role="extent",
            ge=1,
            le=4096,
        ),
    ] = 1
    model: Annotated[
        str,
        option(
            "A name such as smollm2-135m, a folder, a GGUF file, or a model on the Hugging Face "
            "Hub.",
            min_length=1,
        ),
    ] = "smollm2-135m"
    data: Annotated[QuestionsConfig, Field()] = QuestionsConfig()
    num_samples: Annotated[
        int, option("Answers that are drawn for each question.", ge=2, le=1000)
    ] = 10
    num_beams: Annotated[
        int, option("Also the best answer of a beam search of this width; 1: none.", ge=1, le=1024)
    ] = 1
    max_new_tokens: Annotated[int, option("Tokens of an answer, at most.", ge=1, le=100_000)] = 24
    dtype: Annotated[Literal["float32", "bfloat16"], option("Type of weights and computation.")] = (
        "float32"
    )
    resamples: Annotated[
        int, option("Resamples of the bootstrap over questions.", ge=100, le=1_000_000)
    ] = 2000
    judge: Annotated[JudgeConfig, Field()] = JudgeConfig()


CONFIGS = {"study": StudyConfig, "stress": StressConfig, "model": PretrainedConfig}
"""The class of each study."""
