"""Settings of the tool that generates text."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from jaxlab.experiments.base import CommandConfig, configuration, option

__all__ = ["CONFIGS", "GenerateConfig", "TextSettings"]

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_samples")


def _as_list(value: Any) -> Any:
    """A single text stands for a list of one."""
    return (value,) if isinstance(value, str) else value


_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


def _unescaped(texts: tuple[str, ...]) -> tuple[str, ...]:
    r"""A command line cannot well spell the end of a line: `\n`, `\t` and `\\` stand for it.

    >>> _unescaped((r"a\n", r"\\n", r"\d"))
    ('a\n', '\\n', '\\d')
    """
    return tuple(re.sub(r"\\[nt\\]", lambda found: _ESCAPES[found.group()], text) for text in texts)


_one_or_many = BeforeValidator(_as_list)


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """How a text is generated.

    Attributes:
      max_new_tokens: tokens, at most.
      temperature: as in `models.generation.GenerationSettings`; so are the next five.
      top_k: how many of the most probable tokens may be drawn; 0 for all.
      top_p: probability of those that may be drawn.
      min_p: least probability in terms of the largest.
      repetition_penalty: divides the logits of tokens that were there.
      num_samples: texts to draw.
      num_beams: texts that a beam search follows; 1 for none.
      length_penalty: of the beam search; see `models.beam_search.BeamSettings`.
      stop: strings at which to end; they are left out.
      stop_tokens: tokens at which to end, by id or as the vocabulary spells them, beside those
        that the model's files name.
      chat: put the prompt into the model's chat template, as what a user says.
      system: what the system says first, in a chat; None leaves it to the template.
      seed: of the draws.
      prefill_chunk: tokens of the prompt that are read at once; None for all.
      tokens_per_dispatch: tokens between two pieces of text.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    num_samples: int = 1
    num_beams: int = 1
    length_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[str | int, ...] = ()
    chat: bool = False
    system: str | None = None
    seed: int = 0
    prefill_chunk: int | None = None
    tokens_per_dispatch: int = 4

    def __post_init__(self) -> None:
        for name in ("stop", "stop_tokens"):
            given = getattr(self, name)
            texts = (given,) if isinstance(given, str) else tuple(given)
            object.__setattr__(self, name, texts)
            if "" in texts:
                raise ValueError(f"{name}=: must have at least 1 character")
        if self.system is not None and not self.chat:
            raise ValueError(f"system={self.system}: needs chat=true")
        if self.num_beams == 1 and self.length_penalty:
            raise ValueError(f"length_penalty={self.length_penalty}: needs num_beams above 1")
        changed = [name for name in _SAMPLING if getattr(self, name) != getattr(type(self), name)]
        if self.num_beams > 1 and changed:
            chosen = f"{changed[0]}={getattr(self, changed[0])}"
            allowed = f"must be 1 with {chosen}, which is for sampling"
            raise ValueError(f"num_beams={self.num_beams}: {allowed}")
        idle = [name for name in changed if name != "repetition_penalty"]
        if self.temperature == 0 and idle:
            raise ValueError(f"{idle[0]}={getattr(self, idle[0])}: needs temperature above 0")


@configuration
class GenerateConfig(CommandConfig):
    """Continue a prompt, or answer it."""

    method: Annotated[Literal["generate"], option("This tool.")] = "generate"
    variant: Annotated[Literal["text"], option("This tool.")] = "text"
    model: Annotated[
        str,
        option(
            "A name such as smollm2-135m, a folder, a GGUF file, a run's folder, or a model on the "
            "Hugging Face Hub.",
            min_length=1,
        ),
    ] = "smollm2-135m"
    prompt: Annotated[
        str | None, option("Text to go on from; - reads standard input.", min_length=1)
    ] = None
    chat: Annotated[
        bool, option("The prompt is what a user says: put it into the model's chat template.")
    ] = False
    system: Annotated[
        str | None, option("With chat=true: what the system says first; null: the template's.")
    ] = None
    max_new_tokens: Annotated[int, option("Tokens of the text, at most.", ge=1, le=10_000_000)] = (
        256
    )
    temperature: Annotated[
        float, option("Of the draws; 0 takes the most probable token.", ge=0, le=1000)
    ] = 0.0
    top_k: Annotated[
        int, option("Draw from the most probable so many tokens; 0: all.", ge=0, le=10_000_000)
    ] = 0
    top_p: Annotated[
        float, option("Draw from the most probable tokens of this probability.", gt=0, le=1)
    ] = 1.0
    min_p: Annotated[
        float, option("Draw from tokens this many times as probable as the first.", ge=0, le=1)
    ] = 0.0
    repetition_penalty: Annotated[
        float, option("Divides the logits of tokens that were there; 1: none.", gt=0, le=1000)
    ] = 1.0
    num_samples: Annotated[int, option("Texts to draw.", ge=1, le=65_536)] = 1
    num_beams: Annotated[
        int, option("Beam search: texts that are followed; 1: none.", ge=1, le=65_536)
    ] = 1
    length_penalty: Annotated[
        float, option("Beams are ranked by log-probability over length to this.", ge=-100, le=100)
    ] = 0.0
    stop: Annotated[
        tuple[str, ...],
        option(
            "Text, or list of texts [a,b], at which to end; it is left out. \\n is the end of a "
            "line."
        ),
        _one_or_many,
        AfterValidator(_unescaped),
    ] = ()
    stop_tokens: Annotated[
        tuple[str, ...],
        option("Token, or list of tokens [a,b], at which to end, beside the model's own."),
        _one_or_many,
    ] = ()
    seed: Annotated[int, option("Seed of the draws.", ge=0, le=2**31 - 1)] = 0
    dtype: Annotated[
        Literal["float32", "bfloat16", "int8"],
        option("Type of weights and computation; int8: of weights, on one device."),
    ] = "float32"
    prefill_chunk: Annotated[
        int | None,
        option(
            "Tokens of the prompt to read at once; null: all.",
            role="execution",
            ge=1,
            le=10_000_000,
        ),
    ] = None
    tokens_per_dispatch: Annotated[
        int,
        option("Tokens between two pieces of shown text.", role="execution", ge=1, le=1_000_000),
    ] = 4
    log_probs: Annotated[
        bool, option("Then print the tokens with their log-probabilities.", role="execution")
    ] = False
    output: Annotated[
        str | None,
        option(
            "A file for texts, tokens and log-probabilities, one line of JSON for each text.",
            role="execution",
            min_length=1,
        ),
    ] = None

    @model_validator(mode="after")
    def check(self) -> GenerateConfig:
        """Fields that exclude each other."""
        self.text_settings()
        return self

    def text_settings(self) -> TextSettings:
        """Those of the fields that say how the text is generated."""
        names = [field.name for field in dataclasses.fields(TextSettings)]
        return TextSettings(**{name: getattr(self, name) for name in names})


CONFIGS = {"text": GenerateConfig}
