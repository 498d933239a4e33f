"""Beam search by a decoder: the most probable texts that a bounded search finds.

Prompts are read once; then all beams of all prompts are rows of one compiled loop, and the states
of the layers follow the beams that go on.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxlab.models.decoder import Decoder
from jaxlab.models.generation import Generated, Prompts
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
)
from jaxlab.models.seam import CachedAttention, decode_step
from jaxlab.ops.sampling import beam_step

__all__ = ["BeamSettings", "beam_search"]


@dataclasses.dataclass(frozen=True)
class BeamSettings:
    """What is known when the program is compiled.

    Attributes:
      num_beams: texts that are followed for each prompt.
      max_new_tokens: tokens after each prompt, at most.
      length_penalty: texts are ranked by the sum of their log-probabilities over their length to
        this power.
      stop_ids: tokens that end a text.
      vocab_size: ids at or above it are never chosen, and have no share of any probability; None
        for all of the model's.

    Raises:
      ValueError: at construction, for a value out of its range.
    """

    num_beams: int = 4
    max_new_tokens: int = 128
    length_penalty: float = 0.0
    stop_ids: tuple[int, ...] = ()
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_beams", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty={self.length_penalty}: must be finite")


class _Beams(NamedTuple):
    """The beams of all prompts, best first."""

    caches: tuple[Any, ...]
    step: Int[Array, ""]
    scores: Float[Array, "batch beams"]
    lengths: Int[Array, "batch beams"]
    finished: Bool[Array, "batch beams"]
    tokens: Int[Array, "batch beams new"]
    log_probs: Float[Array, "batch beams new"]


def beam_search(
    model: Decoder,
    params: Mapping[str, Any],
    prompts: Prompts,
    *,
    settings: BeamSettings = BeamSettings(),
    valid: Bool[Array, "batch seq"] | np.ndarray | None = None,
    attention: CachedAttention = DENSE_CACHE,
    prefill_chunk: int | None = None,
    context: int | None = None,
) -> Generated:
    """The best texts that follow prompts.

    Args:
      model: the decoder.
      params: its canonical parameters, on one device or on a mesh.
      prompts: tokens of each prompt.
      settings: how many beams and tokens.
      valid: False for padding of an array of prompts, on either side.
      attention: how layers attend over what came before; its states begin with the batch.
        Programs are compiled for each such object: make it once.
      prefill_chunk: tokens of the prompts that the model takes at once; all by default.
      context: positions that the model can use; None for no limit but its learned positions.

    Returns:
      `[batch, num_beams, max_new_tokens]`, best first. Where there are fewer texts than beams, the
      last have length 0.

    Raises:
      ValueError: prompts or settings that do not fit the model; before anything is compiled.
      FloatingPointError: the logits held NaN or infinity.
    """
    vocab = check_vocabulary(model, settings.vocab_size, settings.stop_ids)
    tokens, kept = pad_prompts(prompts, valid, vocab_size=vocab, chunk=prefill_chunk)
    check_context(kept, settings.max_new_tokens, model=model, context=context)
    mesh = mesh_of(params)
    done = prefill(
        model,
        params,
        tokens,
        kept,
        capacity=tokens.shape[1] + settings.max_new_tokens,
        chunk=prefill_chunk,
        attention=attention,
        mesh=mesh,
    )
    found = _search(model, params, done, settings=settings, attention=attention, mesh=mesh)
    found = jax.device_get(found)
    if (found.tokens < 0).any():
        prompt, step = (int(x[0]) for x in np.nonzero((found.tokens < 0).any(axis=1)))
        raise FloatingPointError(
            f"logits of new token {step} of prompt {prompt} hold NaN or infinity: damaged "
            "parameters, or values too large for their type"
        )
    return found


@functools.partial(jax.jit, static_argnames=("model", "settings", "attention", "mesh"))
def _search(
    model: Decoder,
    params: Mapping[str, Any],
    done: Prefilled,
    *,
    settings: BeamSettings,
    attention: CachedAttention,
    mesh: Mesh | None,
) -> Generated:
    batch, beams = len(done.lengths), settings.num_beams
    rows = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), beams)
    prompt_lengths = done.lengths[rows]
    first = jnp.arange(beams)[None, :] == 0
    shape = (batch, beams, settings.max_new_tokens)
    state = _Beams(
        take_rows(done.caches, rows, batch),
        step=jnp.zeros((), jnp.int32),
        scores=jnp.broadcast_to(jnp.where(first, 0.0, -jnp.inf), shape[:2]),
        lengths=jnp.zeros(shape[:2], jnp.int32),
        finished=jnp.zeros(shape[:2], bool),
        tokens=jnp.zeros(shape, jnp.int32),
        log_probs=jnp.zeros(shape, jnp.float32),
    )

    def goes_on(state: _Beams) -> Bool[Array, ""]:
        open_beams = ~state.finished & (state.scores > -jnp.inf)
        return (state.step < settings.max_new_tokens) & jnp.any(open_beams)

    def advance(state: _Beams) -> _Beams:
        newest = jax.lax.dynamic_index_in_dim(state.tokens, state.step - 1, axis=2)
        out = decode_step(
            model,
            params,
            newest.reshape(batch * beams, 1),
            state.caches,
            attention=attention,
            positions=(prompt_lengths + state.step - 1)[:, None],
            valid=~state.finished.reshape(-1, 1),
        )
        assert out.logits is not None
        return _extend(state._replace(caches=out.states), out.logits[:, 0], settings)

    state = _extend(state, done.logits[rows], settings)
    state = state._replace(caches=place_rows(state.caches, model, mesh))
    state = jax.lax.while_loop(goes_on, advance, state)
    exists = ~(state.scores == -jnp.inf)[..., None]
    return Generated(
        jnp.where(exists, state.tokens, 0),
        jnp.where(exists[..., 0], state.lengths, 0),
        jnp.where(exists, state.log_probs, -jnp.inf),
        state.finished,
    )


def _extend(state: _Beams, logits: Float[Array, "rows vocab"], settings: BeamSettings) -> _Beams:
    """The best beams with one more token, and the states that belong to them."""
    batch, beams = state.scores.shape
    size = settings.vocab_size or logits.shape[1]
    law = logits[:, :size].reshape(batch, beams, size)
    found = beam_step(
        state.scores,
        law,
        state.lengths,
        state.finished,
        # Without stop tokens no beam is marked as finished, and then this one means nothing.
        end_tokens=settings.stop_ids or (0,),
        length_penalty=settings.length_penalty,
    )

    def of_parents(x: Array) -> Array:
        index = found.parents.reshape(batch, beams, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, axis=1)

    ended = of_parents(state.finished)
    ids = jnp.maximum(found.tokens, 0)[..., None]
    chosen = jnp.take_along_axis(of_parents(jax.nn.log_softmax(law, axis=-1)), ids, axis=-1)
    columns = (
        (state.tokens, jnp.where(ended, 0, found.tokens)),
        (state.log_probs, jnp.where(ended, 0, chosen[..., 0])),
    )
    tokens, log_probs = (
        jax.lax.dynamic_update_index_in_dim(of_parents(buffer), column, state.step, axis=2)
        for buffer, column in columns
    )
    first_row = jnp.arange(batch, dtype=jnp.int32)[:, None] * beams
    rows = (first_row + found.parents).reshape(-1)
    return _Beams(
        take_rows(state.caches, rows, batch * beams),
        state.step + 1,
        found.scores,
        found.lengths,
        found.finished if settings.stop_ids else state.finished,
        tokens,
        log_probs,
    )
