"""From prompts to the state from which text is generated.

Prompts of different lengths become one padded batch, whose width is a power of two or a multiple
of the chunk, so that prompts of similar lengths share one compiled program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxlab.models.caches import dense_cache
from jaxlab.models.decoder import Decoder, decoder_block
from jaxlab.models.seam import CachedAttention, decode_step, init_states
from jaxlab.parallel.mesh import BATCH_AXES

__all__ = [
    "DENSE_CACHE",
    "Prefilled",
    "check_context",
    "check_vocabulary",
    "mesh_of",
    "pad_prompts",
    "place_rows",
    "prefill",
    "take_rows",
    "whole_everywhere",
]

T = TypeVar("T")

DENSE_CACHE = dense_cache()
"""The default attention; one object, since programs are compiled for each object."""

_SMALLEST_WIDTH = 16


class Prefilled(NamedTuple):
    """What is left of prompts.

    Attributes:
      caches: states of the layers; the first axis of every array is the batch.
      logits: of the token after each prompt, float32.
      lengths: tokens of each prompt.
      seen: which tokens each prompt has.
    """

    caches: tuple[Any, ...]
    logits: Float[Array, "batch vocab"]
    lengths: Int[Array, " batch"]
    seen: Bool[Array, "batch vocab"]


def pad_prompts(
    prompts: Sequence[Sequence[int]] | Integer[Array, "batch seq"] | np.ndarray,
    valid: Bool[Array, "batch seq"] | np.ndarray | None = None,
    *,
    vocab_size: int,
    chunk: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as one batch, filled up on the right.

    Args:
      prompts: tokens of each prompt; rows of an array may already have padding.
      valid: False for padding in an array, on either side.
      vocab_size: ids are below it.
      chunk: the width becomes a multiple of it; by default a power of two of at least 16.

    Returns:
      `(tokens, valid)`, int32 and bool `[batch, width]`.

    Raises:
      ValueError: there is no prompt, one is empty, or one has an id that is not in the vocabulary.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}: must be at least 1")
    rows = [np.asarray(row) for row in prompts]
    marks = [np.ones(row.shape, bool) for row in rows] if valid is None else list(valid)
    if not rows:
        raise ValueError("prompts: at least one is needed")
    if len(marks) != len(rows):
        raise ValueError(f"valid has {len(marks)} rows: these prompts need {len(rows)}")
    pairs = [(row, np.asarray(mark, bool)) for row, mark in zip(rows, marks, strict=True)]
    for index, (row, mark) in enumerate(pairs):
        _check_prompt(index, row, mark, vocab_size)
    width = _width(max(len(row) for row in rows), chunk)
    tokens, kept = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for index, (row, mark) in enumerate(pairs):
        tokens[index, : len(row)] = np.where(mark, row, 0)
        kept[index, : len(row)] = mark
    return tokens, kept


def check_context(
    valid: np.ndarray, max_new_tokens: int, *, model: Decoder, context: int | None
) -> None:
    """Whether prompts and what follows fit into the model's context.

    Args:
      valid: False for padding, `[batch, width]`.
      max_new_tokens: that follow a prompt.
      model: with learned positions there are no more than it has.
      context: positions that the model can use; None for no other limit.

    Raises:
      ValueError: they do not; the message says what would.
    """
    limits = [limit for limit in (context, model.num_positions) if limit is not None]
    if not limits:
        return
    limit, longest = min(limits), int(valid.sum(axis=1).max())
    if longest >= limit:
        raise ValueError(f"prompts: one has {longest} tokens; the model's context is {limit}")
    if longest + max_new_tokens > limit:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: must be at most {limit - longest} after a prompt of "
            f"{longest} tokens, in a context of {limit}"
        )


def check_vocabulary(model: Decoder, vocab_size: int | None, stop_ids: Sequence[int]) -> int:
    """How many ids may be chosen.

    Args:
      model: has so many at most.
      vocab_size: a lower limit; None for all of the model's.
      stop_ids: must be among them.

    Raises:
      ValueError: the limit or a stop token is out of range.
    """
    size = model.vocab_size if vocab_size is None else vocab_size
    if not 1 <= size <= model.vocab_size:
        raise ValueError(f"vocab_size={size}: must be from 1 to the model's {model.vocab_size}")
    for token in stop_ids:
        if not 0 <= token < size:
            raise ValueError(f"stop_ids={tuple(stop_ids)}: must be in [0, {size})")
    return size


def prefill(
    model: Decoder,
    params: Mapping[str, Any],
    tokens: Integer[Array, "batch width"] | np.ndarray,
    valid: Bool[Array, "batch width"] | np.ndarray | None = None,
    *,
    capacity: int,
    chunk: int | None = None,
    attention: CachedAttention = DENSE_CACHE,
    mesh: Mesh | None = None,
) -> Prefilled:
    """Runs the model over prompts.

    Args:
      model: the decoder.
      params: its canonical parameters.
      tokens: prompts.
      valid: False for padding, on either side or in between; all is valid by default. A prompt
        without a valid token gives logits that mean nothing.
      capacity: tokens that the caches hold: those of the prompts, padding included, and those
        that are to follow.
      chunk: tokens that the model takes at once, which bounds memory; all by default.
      attention: how layers attend over what came before.
      mesh: on which the parameters lie; None for one device.

    Raises:
      ValueError: the prompts are longer than the capacity, or the attention cannot do this.
    """
    batch, width = tokens.shape
    step = width if chunk is None else chunk
    filled = step * math.ceil(width / step)
    if filled > capacity:
        raise ValueError(f"capacity={capacity}: must be at least {filled}, the prompts' width")
    shape = (batch, width)
    given = np.ones(shape, bool) if valid is None else valid
    if given.shape != shape:
        raise ValueError(f"valid has shape {given.shape}: these tokens need {shape}")
    room = ((0, 0), (0, filled - width))
    xp: Any = np if isinstance(tokens, np.ndarray) and isinstance(given, np.ndarray) else jnp
    tokens, given = xp.pad(tokens, room), xp.pad(given, room)
    done = _empty(model, batch, capacity, attention=attention, mesh=mesh)
    for start in range(0, filled, step):
        part = slice(start, start + step)
        done = _prefill_chunk(
            model, params, done, tokens[:, part], given[:, part], attention=attention, mesh=mesh
        )
    return done


def mesh_of(params: Any) -> Mesh | None:
    """The mesh on which parameters lie; None if it is a single device."""
    for leaf in jax.tree.leaves(params):
        sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            assert isinstance(sharding.mesh, Mesh)
            return sharding.mesh
    return None


def take_rows(caches: T, rows: Int[Array, " rows"], batch: int) -> T:
    """The states of some sequences, in another order or several times.

    Args:
      caches: states of the layers.
      rows: which sequences.
      batch: how many sequences the states hold.

    Raises:
      ValueError: a state whose first axis is not the batch.
    """

    def take(leaf: Array) -> Array:
        if leaf.ndim < 1 or leaf.shape[0] != batch:
            raise ValueError(
                f"attention: a state of shape {leaf.shape} does not begin with the batch of {batch}"
            )
        return jnp.take(leaf, rows, axis=0)

    return jax.tree.map(take, caches)


def place_rows(caches: T, model: Decoder, mesh: Mesh | None) -> T:
    """Says where the states of the layers lie, the same before and after every step.

    Sequences are split over `data` and `fsdp` and heads over `model`, where these divide them.
    """
    if mesh is None:
        return caches
    parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    heads = decoder_block(model).num_kv_heads

    def place(leaf: Array) -> Array:
        rows = BATCH_AXES if leaf.ndim and leaf.shape[0] % parts == 0 else None
        by_head = leaf.ndim >= 3 and leaf.shape[1] == heads and heads % mesh.shape["model"] == 0
        spec = PartitionSpec(rows, "model") if by_head else PartitionSpec(rows)
        spec = spec if leaf.ndim else PartitionSpec()
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, caches)


def whole_everywhere(tree: T, mesh: Mesh | None) -> T:
    """Says that small arrays are whole on every device, so that each process can read them."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


@functools.partial(jax.jit, static_argnames=("model", "batch", "capacity", "attention", "mesh"))
def _empty(
    model: Decoder, batch: int, capacity: int, *, attention: CachedAttention, mesh: Mesh | None
) -> Prefilled:
    caches = init_states(model, attention, batch=batch, capacity=capacity)
    shape = (batch, model.vocab_size)
    rest = jnp.zeros(shape, jnp.float32), jnp.zeros(batch, jnp.int32), jnp.zeros(shape, bool)
    return Prefilled(place_rows(caches, model, mesh), *whole_everywhere(rest, mesh))


@functools.partial(
    jax.jit, static_argnames=("model", "attention", "mesh"), donate_argnames=("done",)
)
def _prefill_chunk(
    model: Decoder,
    params: Mapping[str, Any],
    done: Prefilled,
    tokens: Integer[Array, "batch chunk"],
    valid: Bool[Array, "batch chunk"],
    *,
    attention: CachedAttention,
    mesh: Mesh | None,
) -> Prefilled:
    positions = done.lengths[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    out = decode_step(
        model,
        params,
        tokens,
        done.caches,
        attention=attention,
        positions=jnp.maximum(positions, 0),
        valid=valid,
    )
    assert out.logits is not None
    present = jnp.any(valid, axis=1)[:, None]
    rows = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    rest = (
        jnp.where(present, out.logits[:, 0].astype(jnp.float32), done.logits),
        done.lengths + jnp.sum(valid, axis=1, dtype=jnp.int32),
        done.seen.at[rows, tokens].max(valid),
    )
    return Prefilled(place_rows(out.states, model, mesh), *whole_everywhere(rest, mesh))


def _check_prompt(index: int, row: np.ndarray, mark: np.ndarray, vocab_size: int) -> None:
    if row.shape != mark.shape or row.ndim != 1:
        shapes = f"{row.shape} and {mark.shape}"
        raise ValueError(f"prompts[{index}] and its row of valid have shapes {shapes}: need [seq]")
    if not mark.any():
        raise ValueError(f"prompts[{index}]: is empty; allowed: at least one token")
    if row.dtype.kind not in "iu":
        raise ValueError(f"prompts[{index}] has type {row.dtype}: must be whole numbers")
    wrong = row[mark & ((row < 0) | (row >= vocab_size))]
    if wrong.size:
        raise ValueError(f"prompts[{index}] has id {wrong[0]}: must be in [0, {vocab_size})")


def _width(longest: int, chunk: int | None) -> int:
    if chunk is not None:
        return chunk * math.ceil(longest / chunk)
    return max(_SMALLEST_WIDTH, 1 << (longest - 1).bit_length())
