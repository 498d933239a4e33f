"""Caches of keys and values, and wrappers that look at what passes by.

Each function returns a `CachedAttention`. Tokens lie in the order in which they came, padding
left out, so a prompt that was padded on either side leaves the same cache as one that was not.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlab.models.seam import AttentionInputs, CachedAttention, CacheShape
from jaxlab.ops.attention import EMPTY, blockwise_attention, causal_mask, head_major_attention

__all__ = [
    "CacheState",
    "RecorderState",
    "dense_cache",
    "previous_query_probe",
    "query_recorder",
    "sliding_window_cache",
]

_SHORT_CHUNK = 32  # up to here all scores of a chunk are small
_FEW_SEQUENCES = 16  # up to here one write for each costs less than a scatter


class CacheState(NamedTuple):
    """Keys and values of a layer.

    Attributes:
      key: head by head.
      value: likewise.
      positions: of the token in every slot; `EMPTY` where there is none.
      length: tokens of every sequence that were stored so far.
    """

    key: Float[Array, "batch kv_heads slots head_dim"]
    value: Float[Array, "batch kv_heads slots head_dim"]
    positions: Int[Array, "batch slots"]
    length: Int[Array, " batch"]


class RecorderState(NamedTuple):
    """State of `query_recorder`.

    Attributes:
      inner: state of the attention around which the recorder lies.
      queries: the last queries, the newest at the end.
      recorded: how many of them there are.
    """

    inner: Any
    queries: Float[Array, "batch count heads head_dim"]
    recorded: Int[Array, " batch"]


# Programs are compiled for each such object, so the same call gives the same one.
@functools.cache
def dense_cache() -> CachedAttention:
    """Every token stays; each sequence has its own length.

    Obeys windows and tree masks, and can be rolled back. A chunk that would end behind the
    capacity gives NaN, also one without a valid token: a full sequence is not to be stepped.
    """

    def attend(layer: int, inputs: AttentionInputs, state: CacheState, carry: Any) -> Any:
        del layer
        return *_dense_attend(inputs, state), carry, None

    return CachedAttention(
        lambda layer, shape: _empty(shape, shape.capacity),
        attend,
        lambda layer, state, length: _forget(state, length),
        lambda layer, state, length, path: _accept(state, length, path),
        tree_masks=True,
        windows=True,
    )


@jax.jit  # equal layers are traced once for all
def _dense_attend(inputs: AttentionInputs, state: CacheState) -> tuple[Array, CacheState]:
    start, chunk, slots = state.length, inputs.positions.shape[1], state.key.shape[2]
    if chunk > slots:
        raise ValueError(f"a chunk of {chunk} tokens: the cache has a capacity of {slots}")
    key, value, positions = _stored(inputs)
    state = CacheState(
        _write(state.key, key, start, 2),
        _write(state.value, value, start, 2),
        _write(state.positions, positions, start, 1),
        start + _count(inputs),
    )
    if inputs.tree_mask is None:
        out = _attend(inputs, state.key, state.value, state.positions)
    else:
        mask = _tree_mask(inputs, state.positions, start)
        out = head_major_attention(inputs.query, state.key, state.value, mask, scale=inputs.scale)
    # A write behind the end would be moved in front of it without a word.
    fits = (start + chunk <= slots)[:, None, None, None]
    return jnp.where(fits, out, jnp.full_like(out, jnp.nan)), state


@functools.cache
def sliding_window_cache(spare: int = 0) -> CachedAttention:
    """A ring of the tokens that a sliding window still reaches.

    Args:
      spare: how many tokens can be taken back by a rollback.
    """
    if spare < 0:
        raise ValueError(f"spare={spare}: must be at least 0")

    def init(layer: int, shape: CacheShape) -> CacheState:
        if shape.window is None:
            raise ValueError(f"sliding_window=None of layer {layer}: a ring needs a window")
        return _empty(shape, shape.window + spare)

    def attend(layer: int, inputs: AttentionInputs, state: CacheState, carry: Any) -> Any:
        del layer
        key, value, positions = _stored(inputs)
        if inputs.positions.shape[1] == 1:
            state = _turn(state, key, value, positions, _count(inputs))
            out = _attend(inputs, state.key, state.value, state.positions)
        else:
            joined = CacheState(
                jnp.concatenate([state.key, key.astype(state.key.dtype)], axis=2),
                jnp.concatenate([state.value, value.astype(state.value.dtype)], axis=2),
                jnp.concatenate([state.positions, positions], axis=1),
                state.length,
            )
            out = _attend(inputs, joined.key, joined.value, joined.positions)
            state = _newest(joined, state.key.shape[2], _count(inputs))
        return out, state, carry, None

    return CachedAttention(
        init,
        attend,
        (lambda layer, state, length: _forget(state, length)) if spare else None,
        windows=True,
    )


def query_recorder(inner: CachedAttention, count: int) -> CachedAttention:
    """Keeps the last queries, from which SnapKV and its kin choose what to keep of a prompt.

    They are those of all tokens that came: look at them after the prompt, before the first step.

    Args:
      inner: what computes the attention.
      count: how many queries to keep, at least 1.

    Returns:
      An attention whose state is a `RecorderState`.
    """
    if count < 1:
        raise ValueError(f"count={count}: must be at least 1")

    def init(layer: int, shape: CacheShape) -> RecorderState:
        queries = (shape.batch, count, shape.num_heads, shape.head_dim)
        return RecorderState(
            inner.init(layer, shape),
            jnp.zeros(queries, shape.dtype),
            jnp.zeros(shape.batch, jnp.int32),
        )

    def attend(layer: int, inputs: AttentionInputs, state: RecorderState, carry: Any) -> Any:
        out, new, carry, stats = inner.attend(layer, inputs, state.inner, carry)
        queries = _front(inputs.query.astype(state.queries.dtype), inputs.valid, 1)
        added = _count(inputs)
        joined = jnp.concatenate([state.queries, queries], axis=1)
        places = jnp.arange(count, dtype=jnp.int32)[None, :] + added[:, None]
        kept = jnp.take_along_axis(joined, places[:, :, None, None], axis=1)
        return (
            out,
            RecorderState(new, kept, jnp.minimum(state.recorded + added, count)),
            carry,
            stats,
        )

    return dataclasses.replace(inner, init=init, attend=attend, rollback=None, accept=None)


def previous_query_probe(inner: CachedAttention) -> CachedAttention:
    """Compares each layer's queries with those of the layer before.

    Args:
      inner: what computes the attention.

    Returns:
      An attention whose stats are `{"similarity": [batch chunk heads], "inner": ...}`: the cosine
      of the two queries, float32, and the stats of `inner`; without `similarity` in the first
      layer.
    """

    def attend(layer: int, inputs: AttentionInputs, state: Any, carry: Any) -> Any:
        inner_carry, before = (None, None) if carry is None else carry
        out, state, inner_carry, inner_stats = inner.attend(layer, inputs, state, inner_carry)
        stats = {"inner": inner_stats}
        if before is not None:
            stats["similarity"] = _cosine(inputs.query, before)
        return out, state, (inner_carry, inputs.query), stats

    return dataclasses.replace(inner, attend=attend)


def _empty(shape: CacheShape, slots: int) -> CacheState:
    array = (shape.batch, shape.num_kv_heads, slots, shape.head_dim)
    return CacheState(
        jnp.zeros(array, shape.dtype),
        jnp.zeros(array, shape.dtype),
        jnp.full((shape.batch, slots), EMPTY, jnp.int32),
        jnp.zeros(shape.batch, jnp.int32),
    )


def _count(inputs: AttentionInputs) -> Int[Array, " batch"]:
    """Valid tokens of the chunk."""
    if inputs.valid is None:
        return jnp.full(inputs.positions.shape[0], inputs.positions.shape[1], jnp.int32)
    return jnp.sum(inputs.valid, axis=1, dtype=jnp.int32)


def _front(x: Array, valid: Bool[Array, "batch chunk"] | None, axis: int) -> Array:
    """The chunk with its valid tokens first, in their order."""
    if valid is None or valid.shape[1] == 1:
        return x
    order = jnp.argsort(~valid, axis=1, stable=True)
    along = [1] * x.ndim
    along[0], along[axis] = order.shape
    return jnp.take_along_axis(x, order.reshape(along), axis=axis)


def _stored(inputs: AttentionInputs) -> tuple[Array, Array, Array]:
    """Keys and values head by head and positions, as a cache takes them: valid tokens first."""
    positions = inputs.positions
    if inputs.valid is not None:
        positions = jnp.where(inputs.valid, positions, jnp.full_like(positions, EMPTY))
    return (
        _front(inputs.key.swapaxes(1, 2), inputs.valid, 2),
        _front(inputs.value.swapaxes(1, 2), inputs.valid, 2),
        _front(positions, inputs.valid, 1),
    )


def _write(buffer: Array, new: Array, start: Int[Array, " batch"], axis: int) -> Array:
    """Puts each sequence's `new` behind its start, in place if the buffer is donated."""
    new = new.astype(buffer.dtype)
    if buffer.shape[0] > _FEW_SEQUENCES or not jax.sharding.get_abstract_mesh().empty:
        write = jax.vmap(
            lambda row, part, at: jax.lax.dynamic_update_slice_in_dim(row, part, at, axis - 1)
        )
        return write(buffer, new, start)
    zero = jnp.zeros((), start.dtype)
    for row in range(buffer.shape[0]):
        at = [zero] * buffer.ndim
        at[0], at[axis] = jnp.asarray(row, start.dtype), start[row]
        buffer = jax.lax.dynamic_update_slice(buffer, new[row : row + 1], at)
    return buffer


def _query_positions(inputs: AttentionInputs) -> Int[Array, "batch chunk"]:
    """Padding stands before everything, so it sees nothing."""
    if inputs.valid is None:
        return inputs.positions
    return jnp.where(inputs.valid, inputs.positions, jnp.full_like(inputs.positions, -1))


def _attend(inputs: AttentionInputs, key: Array, value: Array, positions: Array) -> Array:
    queries = _query_positions(inputs)
    if queries.shape[1] <= _SHORT_CHUNK:
        mask = causal_mask(queries, positions, inputs.window)
        return head_major_attention(inputs.query, key, value, mask, scale=inputs.scale)
    return blockwise_attention(
        inputs.query, key, value, queries, positions, window=inputs.window, scale=inputs.scale
    )


def _tree_mask(
    inputs: AttentionInputs, positions: Int[Array, "batch slots"], start: Int[Array, " batch"]
) -> Bool[Array, "batch 1 chunk slots"]:
    """Everything before the chunk, and within it what the tree says."""
    assert inputs.tree_mask is not None
    queries = _query_positions(inputs)
    tree = inputs.tree_mask & (queries >= 0)[:, :, None]
    if inputs.valid is not None:
        tree = tree & inputs.valid[:, None, :]
    slots = jnp.arange(positions.shape[1], dtype=jnp.int32)[None, :]
    before = (slots < start[:, None])[:, None, :] & (queries >= 0)[:, :, None]
    allowed = _write(before, _front(tree, inputs.valid, 2), start, 2)[:, None]
    if inputs.window is None:
        return allowed
    near = positions[:, None, None, :] > queries[:, None, :, None] - inputs.window
    return allowed & near


def _forget(state: CacheState, length: Int[Array, " batch"]) -> CacheState:
    kept = _orders(state.length, state.positions.shape[1]) < length[:, None]
    positions = jnp.where(kept, state.positions, jnp.full_like(state.positions, EMPTY))
    return state._replace(positions=positions, length=jnp.minimum(length, state.length))


def _orders(length: Int[Array, " batch"], slots: int) -> Int[Array, "batch slots"]:
    """The number, from 0, of the token that lies in each slot; below 0 where there is none."""
    newest = length[:, None] - 1
    return newest - (newest - jnp.arange(slots, dtype=jnp.int32)[None, :]) % slots


def _accept(
    state: CacheState, length: Int[Array, " batch"], path: Int[Array, "batch steps"]
) -> CacheState:
    chosen = length[:, None] + jnp.maximum(path, 0)
    key, value = (
        jnp.take_along_axis(x, chosen[:, None, :, None], axis=2) for x in (state.key, state.value)
    )
    found = jnp.take_along_axis(state.positions, chosen, axis=1)
    positions = jnp.where(path >= 0, found, jnp.full_like(found, EMPTY))
    return CacheState(
        _write(state.key, key, length, 2),
        _write(state.value, value, length, 2),
        _write(_forget(state, length).positions, positions, length, 1),
        length + jnp.sum(path >= 0, axis=1, dtype=jnp.int32),
    )


def _turn(
    state: CacheState, key: Array, value: Array, positions: Array, added: Int[Array, " batch"]
) -> CacheState:
    """The ring after one token, which takes the place of the oldest unless it is padding."""
    slot = state.length % state.key.shape[2]

    def put(buffer: Array, new: Array, axis: int) -> Array:
        at = slot.reshape(-1, *[1] * (buffer.ndim - 1))
        old = jnp.take_along_axis(buffer, at, axis=axis)
        kept = (added > 0).reshape(at.shape)
        return _write(buffer, jnp.where(kept, new.astype(buffer.dtype), old), slot, axis)

    return CacheState(
        put(state.key, key, 2),
        put(state.value, value, 2),
        put(state.positions, positions, 1),
        state.length + added,
    )


def _newest(joined: CacheState, slots: int, added: Int[Array, " batch"]) -> CacheState:
    """The ring after a chunk, from the ring before it with the chunk behind it."""
    length = joined.length + added
    places = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32)[None, :], (len(length), slots))
    fresh = _orders(length, slots) - joined.length[:, None]
    source = jnp.where(fresh >= 0, slots + fresh, places)
    key, value = (
        jnp.take_along_axis(x, source[:, None, :, None], axis=2) for x in (joined.key, joined.value)
    )
    return CacheState(key, value, jnp.take_along_axis(joined.positions, source, axis=1), length)


def _cosine(
    first: Float[Array, "batch chunk heads head_dim"],
    second: Float[Array, "batch chunk heads head_dim"],
) -> Float[Array, "batch chunk heads"]:
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    product = jnp.sum(first * second, axis=-1)
    norms = jnp.linalg.norm(first, axis=-1) * jnp.linalg.norm(second, axis=-1)
    return product / jnp.maximum(norms, 1e-8)
