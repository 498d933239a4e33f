"""Generation of text by a decoder: greedy or sampled, many rows at once, one program for all steps.

`generate` does all of it; `stream` gives what there is after every few tokens. Both are made of
`prefill`, `start` and `decode`, which are pure and compiled: `start` draws the first token from
what the prompts have left, and `decode` is one loop whose number of steps is an argument, so that
nothing is compiled between steps, nor between prompts that are padded to the same width.
Beam search is in `models.beam_search`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray

from jaxlab.models.decoder import Decoder
from jaxlab.models.prefill import (
    DENSE_CACHE,
    Prefilled,
    check_context,
    check_vocabulary,
    mesh_of,
    pad_prompts,
    place_rows,
    prefill,
    take_rows,
    whole_everywhere,
)
from jaxlab.models.seam import CachedAttention, decode_step
from jaxlab.ops.sampling import sample, sampling_log_probs

__all__ = [
    "Generated",
    "GenerationSettings",
    "GenerationState",
    "Prompts",
    "decode",
    "generate",
    "start",
    "stream",
]

Prompts = Sequence[Sequence[int]] | Integer[Array, "batch seq"] | np.ndarray
"""Tokens of each prompt, of any lengths, or a padded array."""


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """What is known when the programs are compiled.

    Attributes:
      max_new_tokens: tokens after each prompt, at most.
      num_samples: texts for each prompt.
      temperature: 0 takes the most probable token.
      top_k: see `ops.sampling.top_k_mask`; 0 for all tokens.
      top_p: see `ops.sampling.top_p_mask`; 1 for all tokens.
      min_p: see `ops.sampling.min_p_mask`; 0 for all tokens.
      repetition_penalty: see `ops.sampling.penalize_seen`, over prompt and text; 1 for none.
      stop_ids: tokens that end a text.
      vocab_size: ids at or above it are never chosen, and have no share of any probability; None
        for all of the model's.
      sampling_log_probs: whether to compute `Generated.sampling_log_probs`.

    Raises:
      ValueError: at construction, for a value out of its range.
    """

    max_new_tokens: int = 128
    num_samples: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    sampling_log_probs: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("num_samples", 1), ("top_k", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be from 0 to 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: must be at least 0, and finite")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: must be above 0")


class Generated(NamedTuple):
    """Texts; `generate` gives them as NumPy arrays.

    Attributes:
      tokens: what was generated, with the token that ended a text; 0 behind the end.
      lengths: how many tokens that is.
      log_probs: of each token under the softmax of the model's logits, without penalties,
        temperature and filters, in nats; 0 behind the end.
      finished: whether a text ended with one of the `stop_ids`.
      sampling_log_probs: of each token under the law that it was drawn from; None if it was not
        asked for.
    """

    tokens: Int[Array, "batch samples new"]
    lengths: Int[Array, "batch samples"]
    log_probs: Float[Array, "batch samples new"]
    finished: Bool[Array, "batch samples"]
    sampling_log_probs: Float[Array, "batch samples new"] | None = None


class GenerationState(NamedTuple):
    """Where the generation stands; the samples of a prompt are neighbouring rows.

    Attributes:
      caches: states of the layers, without the newest token.
      step: how many tokens were chosen in every row that goes on.
      tokens: chosen so far; -1 where the logits gave no law.
      lengths: tokens of each text.
      log_probs: see `Generated`.
      sampling_log_probs: likewise.
      finished: texts that have ended.
      broken: texts whose logits gave no law.
      prompt_lengths: tokens of each row's prompt.
      keys: of the random numbers of each row.
      seen: which tokens prompt and text have; None without a repetition penalty.
    """

    caches: tuple[Any, ...]
    step: Int[Array, ""]
    tokens: Int[Array, "rows new"]
    lengths: Int[Array, " rows"]
    log_probs: Float[Array, "rows new"]
    sampling_log_probs: Float[Array, "rows new"] | None
    finished: Bool[Array, " rows"]
    broken: Bool[Array, " rows"]
    prompt_lengths: Int[Array, " rows"]
    keys: PRNGKeyArray
    seen: Bool[Array, "rows vocab"] | None


def generate(
    model: Decoder,
    params: Mapping[str, Any],
    prompts: Prompts,
    key: PRNGKeyArray | None = None,
    *,
    settings: GenerationSettings = GenerationSettings(),
    valid: Bool[Array, "batch seq"] | np.ndarray | None = None,
    attention: CachedAttention = DENSE_CACHE,
    prefill_chunk: int | None = None,
    context: int | None = None,
) -> Generated:
    """Texts that follow prompts.

    The prompts are read once, whatever the number of samples. A text depends on its own prompt,
    key and number among the samples only, not on what else is in the batch.

    Args:
      model: the decoder.
      params: its canonical parameters, on one device or on a mesh.
      prompts: tokens of each prompt.
      key: of the random numbers; one for each prompt, or one from which prompt `i` takes
        `fold_in(key, i)`. Greedy generation needs none.
      settings: how many tokens, and how they are chosen.
      valid: False for padding of an array of prompts, on either side.
      attention: how layers attend over what came before. Programs are compiled for each such
        object: make it once.
      prefill_chunk: tokens of the prompts that the model takes at once; all by default.
      context: positions that the model can use; None for no limit but its learned positions.

    Returns:
      `[batch, num_samples, max_new_tokens]`.

    Raises:
      ValueError: prompts or settings that do not fit the model; before anything is compiled.
      FloatingPointError: the logits held NaN or infinity.
    """
    mesh = mesh_of(params)
    state = _begin(
        model, params, prompts, key, settings, valid, attention, prefill_chunk, context, mesh
    )
    steps = settings.max_new_tokens - 1
    if steps:
        options: Any = {"settings": settings, "attention": attention, "mesh": mesh}
        state = decode(model, params, state, np.int32(steps), **options)
    return _fetch(state, settings)


def stream(
    model: Decoder,
    params: Mapping[str, Any],
    prompts: Prompts,
    key: PRNGKeyArray | None = None,
    *,
    settings: GenerationSettings = GenerationSettings(),
    valid: Bool[Array, "batch seq"] | np.ndarray | None = None,
    attention: CachedAttention = DENSE_CACHE,
    prefill_chunk: int | None = None,
    context: int | None = None,
    tokens_per_dispatch: int = 4,
) -> Iterator[Generated]:
    """What there is of the texts, again and again: after the first token, then after every few.

    The tokens are those of `generate`, and so are the programs. To end early, stop iterating.

    Args:
      model: as for `generate`; so are the arguments that follow.
      params: canonical parameters.
      prompts: tokens of each prompt.
      key: of the random numbers.
      settings: how many tokens, and how they are chosen.
      valid: False for padding.
      attention: how layers attend over what came before.
      prefill_chunk: tokens of the prompts that the model takes at once.
      context: positions that the model can use.
      tokens_per_dispatch: tokens of each text that are generated before the host sees them.

    Yields:
      All tokens so far.

    Raises:
      ValueError, FloatingPointError: as `generate`.
    """
    if tokens_per_dispatch < 1:
        raise ValueError(f"tokens_per_dispatch={tokens_per_dispatch}: must be at least 1")
    mesh = mesh_of(params)
    state = _begin(
        model, params, prompts, key, settings, valid, attention, prefill_chunk, context, mesh
    )
    options: Any = {"settings": settings, "attention": attention, "mesh": mesh}
    while True:
        found = _fetch(state, settings)
        yield found
        if found.finished.all() or found.lengths.max() == settings.max_new_tokens:
            return
        state = decode(model, params, state, np.int32(tokens_per_dispatch), **options)


def _begin(
    model: Decoder,
    params: Mapping[str, Any],
    prompts: Prompts,
    key: PRNGKeyArray | None,
    settings: GenerationSettings,
    valid: Bool[Array, "batch seq"] | np.ndarray | None,
    attention: CachedAttention,
    chunk: int | None,
    context: int | None,
    mesh: Mesh | None,
) -> GenerationState:
    """Checks everything, then reads the prompts and chooses the first token."""
    vocab = check_vocabulary(model, settings.vocab_size, settings.stop_ids)
    tokens, kept = pad_prompts(prompts, valid, vocab_size=vocab, chunk=chunk)
    check_context(kept, settings.max_new_tokens, model=model, context=context)
    keys = _row_keys(key, len(tokens), settings)
    done = prefill(
        model,
        params,
        tokens,
        kept,
        capacity=tokens.shape[1] + settings.max_new_tokens,
        chunk=chunk,
        attention=attention,
        mesh=mesh,
    )
    return start(model, done, keys, settings=settings, mesh=mesh)


def _row_keys(key: PRNGKeyArray | None, batch: int, settings: GenerationSettings) -> PRNGKeyArray:
    """One key for each prompt."""
    if key is None:
        if settings.temperature > 0:
            raise ValueError(f"key=None: temperature={settings.temperature} needs random numbers")
        key = jax.random.key(0)
    if key.shape not in ((), (batch,)):
        raise ValueError(f"key has shape {key.shape}: needs one key, or one for each of {batch}")
    if key.shape:
        return key
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch, dtype=jnp.uint32))


def start(
    model: Decoder,
    done: Prefilled,
    keys: PRNGKeyArray,
    *,
    settings: GenerationSettings,
    mesh: Mesh | None = None,
) -> GenerationState:
    """Chooses the first token of every text.

    Args:
      model: the decoder.
      done: from `prefill`, with capacity for `max_new_tokens` more; not to be used again.
      keys: one for each prompt.
      settings: how tokens are chosen.
      mesh: as given to `prefill`.

    Raises:
      ValueError: a state of the attention does not begin with the batch.
    """
    begin = _start_one if settings.num_samples == 1 else _start_many
    rest = done._replace(caches=())
    return begin(model, done.caches, rest, keys, settings=settings, mesh=mesh)


def _start(
    model: Decoder,
    caches: tuple[Any, ...],
    done: Prefilled,
    keys: PRNGKeyArray,
    *,
    settings: GenerationSettings,
    mesh: Mesh | None,
) -> GenerationState:
    batch, samples = len(done.lengths), settings.num_samples
    rows = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), samples)
    if samples > 1:
        caches = take_rows(caches, rows, batch)
    number = jnp.tile(jnp.arange(samples, dtype=jnp.uint32), batch)
    shape = (batch * samples, settings.max_new_tokens)
    state = GenerationState(
        caches=place_rows(caches, model, mesh),
        step=jnp.zeros((), jnp.int32),
        tokens=jnp.zeros(shape, jnp.int32),
        lengths=jnp.zeros(shape[0], jnp.int32),
        log_probs=jnp.zeros(shape, jnp.float32),
        sampling_log_probs=jnp.zeros(shape, jnp.float32) if settings.sampling_log_probs else None,
        finished=jnp.zeros(shape[0], bool),
        broken=jnp.zeros(shape[0], bool),
        prompt_lengths=done.lengths[rows],
        keys=jax.vmap(jax.random.fold_in)(keys[rows], number),
        seen=None if settings.repetition_penalty == 1 else done.seen[rows],
    )
    return _whole(_choose(state, done.logits[rows], settings), mesh)


_STATIC = ("model", "settings", "mesh")
# With several samples the caches outgrow the buffers that could be given back.
_start_one = jax.jit(_start, static_argnames=_STATIC, donate_argnames=("caches",))
_start_many = jax.jit(_start, static_argnames=_STATIC)


@functools.partial(jax.jit, static_argnames=(*_STATIC, "attention"), donate_argnames=("state",))
def decode(
    model: Decoder,
    params: Mapping[str, Any],
    state: GenerationState,
    steps: Int[Array, ""] | int,
    *,
    settings: GenerationSettings,
    attention: CachedAttention = DENSE_CACHE,
    mesh: Mesh | None = None,
) -> GenerationState:
    """Generates some more tokens; ends early when no text goes on.

    Args:
      model: the decoder.
      params: its canonical parameters.
      state: from `start` or an earlier call; not to be used again.
      steps: how many tokens; may be traced. No text gets more than `max_new_tokens`.
      settings: as given to `start`.
      attention: as given to `prefill`.
      mesh: as given to `prefill`.
    """
    last = jnp.minimum(state.step + jnp.asarray(steps, jnp.int32), settings.max_new_tokens)

    def goes_on(state: GenerationState) -> Bool[Array, ""]:
        return (state.step < last) & jnp.any(_active(state))

    def advance(state: GenerationState) -> GenerationState:
        newest = jax.lax.dynamic_index_in_dim(state.tokens, state.step - 1, axis=1)
        out = decode_step(
            model,
            params,
            newest,
            state.caches,
            attention=attention,
            positions=(state.prompt_lengths + state.step - 1)[:, None],
            valid=_active(state)[:, None],
        )
        assert out.logits is not None
        return _choose(state._replace(caches=out.states), out.logits[:, 0], settings)

    state = jax.lax.while_loop(goes_on, advance, state)
    return _whole(state._replace(caches=place_rows(state.caches, model, mesh)), mesh)


def _active(state: GenerationState) -> Bool[Array, " rows"]:
    return ~(state.finished | state.broken)


def _whole(state: GenerationState, mesh: Mesh | None) -> GenerationState:
    rest = state._replace(caches=())
    return whole_everywhere(rest, mesh)._replace(caches=state.caches)


def _choose(
    state: GenerationState, logits: Float[Array, "rows vocab"], settings: GenerationSettings
) -> GenerationState:
    """The state with one more token."""
    size = settings.vocab_size or logits.shape[1]
    logits = logits[:, :size]
    law: dict[str, Any] = {
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "min_p": settings.min_p,
        "repetition_penalty": settings.repetition_penalty,
    }
    keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.step)
    seen = None if state.seen is None else state.seen[:, :size]
    chosen = jax.vmap(lambda key, row, known: sample(key, row, seen=known, **law))(
        keys, logits, seen
    )
    active = _active(state)
    broken = active & (chosen.tokens < 0)
    token = jnp.where(active, chosen.tokens, 0)
    stops = jnp.any(token[:, None] == jnp.asarray(settings.stop_ids, jnp.int32)[None, :], axis=1)
    ids = jnp.maximum(token, 0)
    log_prob = jnp.where(active, chosen.log_probs, 0)
    drawn = state.sampling_log_probs
    if drawn is not None:
        log_law = sampling_log_probs(logits, seen=seen, **law)
        of_token = jnp.take_along_axis(log_law, ids[:, None], axis=1)[:, 0]
        drawn = _put(drawn, jnp.where(active, of_token, 0), state.step)
    if state.seen is not None:
        rows = jnp.arange(len(token), dtype=jnp.int32)
        seen = state.seen.at[rows, ids].max(active)
    return state._replace(
        step=state.step + 1,
        tokens=_put(state.tokens, token, state.step),
        lengths=state.lengths + (active & ~broken).astype(jnp.int32),
        log_probs=_put(state.log_probs, log_prob, state.step),
        sampling_log_probs=drawn,
        finished=state.finished | (active & stops),
        broken=state.broken | broken,
        seen=seen,
    )


def _put(buffer: Array, column: Array, step: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_index_in_dim(buffer, column, step, axis=1)


def _fetch(state: GenerationState, settings: GenerationSettings) -> Generated:
    """The texts on the host, in one transfer.

    Raises:
      FloatingPointError: logits gave no law.
    """
    found = Generated(
        state.tokens, state.lengths, state.log_probs, state.finished, state.sampling_log_probs
    )
    found, broken = jax.device_get((found, state.broken))
    if broken.any():
        row = int(np.argmax(broken))
        prompt, number = divmod(row, settings.num_samples)
        raise FloatingPointError(
            f"logits of new token {found.lengths[row]} of prompt {prompt}, sample {number}, hold "
            "NaN or infinity: damaged parameters, or values too large for their type"
        )
    return jax.tree.map(lambda x: x.reshape(-1, settings.num_samples, *x.shape[1:]), found)
