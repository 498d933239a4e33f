"""Language models with their tokenizers: from text to text.

The rooms of models and of data do not know each other; here a network, the tokenizer that its
files hold, and the loop that generates come together.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlab.data.chat_templates import encode_prompt, tokenizer_chat_template
from jaxlab.data.gguf_tokenizers import gguf_tokenizer
from jaxlab.data.incremental_decoding import StopStrings, incremental_decoder
from jaxlab.data.pretrained_tokenizers import (
    PretrainedTokenizer,
    check_vocabulary_size,
    stop_ids,
)
from jaxlab.data.tokenizer_folders import load_tokenizer
from jaxlab.errors import JaxlabError, UserError
from jaxlab.experiments.generate.config import TextSettings
from jaxlab.models.beam_search import BeamSettings, beam_search
from jaxlab.models.decoder import Decoder
from jaxlab.models.generation import Generated, GenerationSettings, stream
from jaxlab.models.int8_weights import quantize_weights
from jaxlab.models.pretrained.folders import open_source
from jaxlab.models.pretrained.loading import load_pretrained
from jaxlab.models.pretrained.locate import resolve
from jaxlab.models.pretrained.tensors import GgufVocabulary

__all__ = [
    "Completion",
    "LanguageModel",
    "ModelFiles",
    "Request",
    "check_context",
    "load_language_model",
    "open_model_files",
    "prepare",
]


class Completion(NamedTuple):
    """A text that follows a prompt, or what there is of it.

    Attributes:
      text: without what ended it.
      tokens: their ids, with those that ended it.
      log_probs: of each token under the model, in nats.
      ended_by: the stop string or token that ended it; None if none has.
    """

    text: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    ended_by: str | None


class ModelFiles(NamedTuple):
    """What a model's files say, before its parameters are read.

    Attributes:
      name: what the user called it.
      path: of the files.
      tokenizer: of the model.
      context: positions that the model can use; None if it is not said.
    """

    name: str
    path: Path
    tokenizer: PretrainedTokenizer
    context: int | None


class Request(NamedTuple):
    """A prompt in tokens.

    Attributes:
      tokens: of the prompt.
      stop_ids: tokens that end the text.
    """

    tokens: tuple[int, ...]
    stop_ids: tuple[int, ...]


def open_model_files(model: str | os.PathLike[str]) -> ModelFiles:
    """Finds a model's files, and reads its tokenizer.

    Args:
      model: see `models.pretrained.locate.resolve`.

    Raises:
      UserError: there is no such model, it has no tokenizer, or that is not the model's.
    """
    name = os.fspath(model)
    source = open_source(resolve(model))
    if source.tokenizer is None:
        raise UserError("model", name, "has no tokenizer; allowed: one with a tokenizer.json")
    if isinstance(source.tokenizer, GgufVocabulary):
        options = dataclasses.asdict(source.tokenizer)
        tokenizer = gguf_tokenizer(**options, name=os.fspath(source.path), field="model")
    else:
        tokenizer = load_tokenizer(source.tokenizer, field="model")
    if isinstance(size := source.config.get("vocab_size"), int):
        check_vocabulary_size(tokenizer.vocab_size, size, name=tokenizer.name, field="model")
    return ModelFiles(name, Path(source.path), tokenizer, _context(source.config))


def _context(config: Mapping[str, Any]) -> int | None:
    default = 1024 if config.get("model_type") == "gpt2" else None  # as its decoder has it
    for name in ("max_position_embeddings", "n_positions"):
        if isinstance(config.get(name), int):
            return config[name]
    return default


def prepare(files: ModelFiles, prompt: str, settings: TextSettings) -> Request:
    """The prompt as tokens, checked.

    Raises:
      UserError: the prompt is empty or too long, the model has no chat template or refuses the
        messages, or a stop token is not in the vocabulary.
    """
    tokenizer = files.tokenizer
    stops = stop_ids(tokenizer, settings.stop_tokens)
    try:
        if settings.chat:
            ids = _turns(tokenizer, prompt, settings.system)
        else:
            ids = tokenizer.encode(prompt, add_special_tokens=True)
    except ValueError:
        raise UserError("prompt", ascii(prompt)[1:-1], "must be UTF-8") from None
    if not len(ids):
        raise UserError("prompt", prompt, "is empty; allowed: some text")
    if files.context is not None:
        check_context(len(ids), settings.max_new_tokens, files.context)
    return Request(tuple(ids.tolist()), stops)


def _turns(tokenizer: PretrainedTokenizer, prompt: str, system: str | None) -> np.ndarray:
    """What the system and the user say, as tokens in the model's chat template."""
    template = tokenizer_chat_template(tokenizer, field="chat")
    roles = {"system": system, "user": prompt}
    turns = [{"role": role, "content": said} for role, said in roles.items() if said is not None]
    try:
        return encode_prompt(turns, tokenizer, template)
    except UserError as error:
        if error.field != "messages":
            raise
        raise UserError("prompt", "(in a chat)", f"{error.value} {error.allowed}") from None


def check_context(length: int, max_new_tokens: int, context: int) -> None:
    """Whether a prompt and what follows fit into a model's context; all in tokens.

    Raises:
      UserError: they do not; the message says what would.
    """
    if length >= context:
        problem = f"the model's context is {context}; allowed: a shorter prompt"
        raise UserError("prompt", f"({length} tokens)", problem)
    if length + max_new_tokens > context:
        raise UserError(
            "max_new_tokens",
            max_new_tokens,
            f"must be at most {context - length} after a prompt of {length} tokens: the model's "
            f"context is {context}",
        )


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A decoder with its tokenizer.

    Attributes:
      files: what its files say.
      model: the network.
      params: its canonical parameters.
    """

    files: ModelFiles
    model: Decoder
    params: Mapping[str, Any]

    @property
    def tokenizer(self) -> PretrainedTokenizer:
        """The model's tokenizer."""
        return self.files.tokenizer

    def complete(self, prompt: str, **settings: Any) -> list[Completion]:
        """Texts that follow a prompt.

        Args:
          prompt: any text.
          **settings: fields of `TextSettings`.

        Returns:
          `num_samples` texts, or the best one of a beam search.

        Raises:
          UserError: the prompt or a setting does not fit the model.
          TypeError, ValueError: there is no such setting, or it is out of its range.
        """
        chosen = TextSettings(**settings)
        found: list[Completion] = []
        for completions in self.stream(prepare(self.files, prompt, chosen), chosen):
            found = completions  # each holds all that came before
        return found

    def stream(self, request: Request, settings: TextSettings) -> Iterator[list[Completion]]:
        """What there is of each text, again and again; a beam search gives its end only.

        A text only grows. To end early, stop iterating.

        Args:
          request: from `prepare`.
          settings: those that were given to `prepare`.

        Raises:
          JaxlabError: the logits held NaN or infinity.
        """
        number = 1 if settings.num_beams > 1 else settings.num_samples
        texts = [_Text(self.tokenizer, settings.stop) for _ in range(number)]
        try:
            for found in self._generated(request, settings):
                rows = zip(*(np.asarray(field)[0] for field in found[:4]), strict=True)
                for text, row in zip(texts, rows, strict=False):
                    text.take(*row)
                yield [text.completion() for text in texts]
                if all(text.ended for text in texts):
                    return
        except FloatingPointError as error:
            raise JaxlabError(f"model={self.files.name}: {error}") from error
        yield [text.finish() for text in texts]

    def _generated(self, request: Request, settings: TextSettings) -> Iterator[Generated]:
        options: Any = {"prefill_chunk": settings.prefill_chunk, "context": self.files.context}
        size = min(self.tokenizer.vocab_size, self.model.vocab_size)
        common: Any = {
            "max_new_tokens": settings.max_new_tokens,
            "stop_ids": request.stop_ids,
            "vocab_size": size,
        }
        prompts = [list(request.tokens)]
        if settings.num_beams > 1:
            beams = BeamSettings(
                num_beams=settings.num_beams, length_penalty=settings.length_penalty, **common
            )
            yield beam_search(self.model, self.params, prompts, settings=beams, **options)
            return
        law = GenerationSettings(
            num_samples=settings.num_samples,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            repetition_penalty=settings.repetition_penalty,
            **common,
        )
        yield from stream(
            self.model,
            self.params,
            prompts,
            jax.random.key(settings.seed),
            settings=law,
            tokens_per_dispatch=settings.tokens_per_dispatch,
            **options,
        )


def load_language_model(
    model: str | os.PathLike[str] | ModelFiles,
    *,
    dtype: str = "float32",
    mesh: Mesh | None = None,
) -> LanguageModel:
    """Reads a model and its tokenizer.

    Args:
      model: a name such as `smollm2-135m`, a folder, a GGUF file, or a model on the Hugging Face
        Hub; or what `open_model_files` gave.
      dtype: `float32` or `bfloat16`, of weights and computation; or `int8`, of the weights, with
        a computation in float32 (see `models.int8_weights`).
      mesh: over which to split the parameters; not with `int8`.

    Raises:
      UserError: there is no such model, its files are damaged or of an unknown kind, or its
        tokenizer is missing or not its own.
    """
    if dtype not in ("float32", "bfloat16", "int8"):
        raise UserError("dtype", dtype, "allowed: float32, bfloat16, int8")
    if dtype == "int8" and mesh is not None and mesh.size > 1:
        raise UserError("dtype", dtype, "allowed on several devices: float32, bfloat16")
    files = model if isinstance(model, ModelFiles) else open_model_files(model)
    kind = jnp.dtype("float32" if dtype == "int8" else dtype)
    found = load_pretrained(files.path, mesh=mesh, dtype=kind, param_dtype=kind)
    size = found.model.vocab_size
    check_vocabulary_size(files.tokenizer.vocab_size, size, name=files.tokenizer.name)
    params = quantize_weights(found.params) if dtype == "int8" else found.params
    return LanguageModel(files, found.model, params)


class _Text:
    """One text while it is generated."""

    def __init__(self, tokenizer: PretrainedTokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._decoder = incremental_decoder(tokenizer, skip_special_tokens=True)
        self._stops = StopStrings(stop)
        self._state = self._decoder.start()
        self._text = self._held = ""
        self._ended_by: str | None = None
        self._tokens: list[int] = []
        self._log_probs: list[float] = []

    @property
    def ended(self) -> bool:
        return self._ended_by is not None

    def take(
        self, tokens: np.ndarray, length: np.ndarray, log_probs: np.ndarray, finished: np.ndarray
    ) -> None:
        """Takes what is new of all that was generated so far."""
        for place in range(len(self._tokens), int(length)):
            if self.ended:
                return
            token = int(tokens[place])
            self._tokens.append(token)
            self._log_probs.append(float(log_probs[place]))
            if finished and place == length - 1:
                self.finish()
                self._ended_by = self._ended_by or self._tokenizer.token(token) or str(token)
            else:
                piece, self._state = self._decoder.step(self._state, token)
                self._show(piece)

    def finish(self) -> Completion:
        """Gives out what was held back, since nothing follows."""
        if not self.ended:
            self._show(self._decoder.finish(self._state))
            self._state = self._decoder.start()
        if not self.ended:
            self._text, self._held = self._text + self._held, ""
        return self.completion()

    def completion(self) -> Completion:
        return Completion(self._text, tuple(self._tokens), tuple(self._log_probs), self._ended_by)

    def _show(self, piece: str) -> None:
        text, self._held, self._ended_by = self._stops.step(self._held, piece)
        self._text += text
