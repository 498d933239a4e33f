"""Softmax attention with grouped query heads, and its masks.

Sources: Vaswani et al. 2017, section 3.2.1; Ainslie et al. 2023 (grouped queries); Jiang et al.
2023, section 2 (sliding window); Milakov and Gimelshein 2018 (softmax in blocks).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

__all__ = [
    "EMPTY",
    "attention_weights",
    "blockwise_attention",
    "causal_mask",
    "dot_product_attention",
    "head_major_attention",
    "segment_mask",
]

EMPTY = np.iinfo(np.int32).max
"""Position of a cache slot that holds no key: behind every query."""


def causal_mask(
    query_positions: Int[Array, "batch queries"],
    key_positions: Int[Array, "batch keys"] | None = None,
    window: int | Int[Array, ""] | None = None,
) -> Bool[Array, "batch 1 queries keys"]:
    """Which keys each query may see: those at its own position or before it.

    Positions, not lengths, so that one rule serves training, a prompt and a key cache: a cache
    slot that is still empty gets a position behind every query.

    Args:
      query_positions: place of every query, in tokens.
      key_positions: place of every key; those of the queries by default.
      window: how many positions a query sees, its own included; all before it by default.

    Returns:
      True where a query may attend to a key; the axis of length 1 stands for the heads.

    >>> causal_mask(jnp.array([[0, 1, 2]]))[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    >>> causal_mask(jnp.array([[0, 1, 2]]), window=2)[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    if key_positions is None:
        key_positions = query_positions
    query, key = query_positions[:, None, :, None], key_positions[:, None, None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def segment_mask(
    segment_ids: Int[Array, "batch seq"],
    positions: Int[Array, "batch seq"] | None = None,
    window: int | Int[Array, ""] | None = None,
) -> Bool[Array, "batch 1 seq seq"]:
    """The causal mask of rows that hold several segments, none of which sees another.

    Args:
      segment_ids: number of each token's segment, from 1; 0 for padding, which neither sees nor
        is seen.
      positions: place of every token in its segment, or in anything else that orders the tokens
        of a segment; by default the place in the row.
      window: how many positions a query sees, its own included; all before it by default.

    Returns:
      True where a query may attend to a key; the axis of length 1 stands for the heads.

    >>> segment_mask(jnp.array([[1, 1, 2, 0]]))[0, 0].astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """
    if positions is None:
        places = jnp.arange(segment_ids.shape[1], dtype=segment_ids.dtype)
        positions = jnp.broadcast_to(places[None, :], segment_ids.shape)
    query, key = segment_ids[:, None, :, None], segment_ids[:, None, None, :]
    return causal_mask(positions, window=window) & (query == key) & (key > 0)


def dot_product_attention(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads value_dim"],
    mask: Bool[Array, "#batch 1 queries keys"] | None = None,
    *,
    scale: float | None = None,
) -> Float[Array, "batch queries heads value_dim"]:
    """Scaled dot-product attention in which groups of query heads share a key-value head.

    Query head `h` reads key-value head `h // (heads / kv_heads)`. Scores, softmax and sums are
    float32 whatever the narrower type of the arrays (float64 for float64 arrays).

    Args:
      query: queries.
      key: keys; `kv_heads` must divide `heads`.
      value: values.
      mask: True where a query may attend to a key; everywhere by default.
      scale: factor of the inner products; `1 / sqrt(head_dim)` by default.

    Returns:
      Weighted means of the values, in the type of the queries; zeros for a query whose mask
      admits no key.

    Raises:
      ValueError: the shapes do not fit together.
      TypeError: the mask is not boolean.
    """
    _check_shapes(query, key, value, mask)
    return head_major_attention(query, key.swapaxes(1, 2), value.swapaxes(1, 2), mask, scale=scale)


def head_major_attention(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys value_dim"],
    mask: Bool[Array, "#batch 1 queries keys"] | None = None,
    *,
    scale: float | None = None,
) -> Float[Array, "batch queries heads value_dim"]:
    """`dot_product_attention` over keys and values that lie head by head, as caches keep them.

    Args:
      query: queries.
      key: keys.
      value: values.
      mask: True where a query may attend to a key; everywhere by default.
      scale: factor of the inner products; `1 / sqrt(head_dim)` by default.

    Returns:
      As `dot_product_attention`.
    """
    batch, queries, heads, _ = query.shape
    weights = _weights(query, key, mask, scale)
    mixed = _mix(weights, value).reshape(batch, -1, queries, heads // key.shape[1], value.shape[3])
    return _by_query(mixed).astype(query.dtype)


def attention_weights(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    mask: Bool[Array, "#batch 1 queries keys"] | None = None,
    *,
    scale: float | None = None,
) -> Float[Array, "batch heads queries keys"]:
    """The weights that `dot_product_attention` gives to the values.

    Args:
      query: queries.
      key: keys.
      mask: True where a query may attend to a key; everywhere by default.
      scale: factor of the inner products; `1 / sqrt(head_dim)` by default.

    Returns:
      Float32 or wider; each row sums to 1, or is zero where the mask admits no key.

    Raises:
      ValueError, TypeError: as `dot_product_attention`.
    """
    _check_shapes(query, key, key, mask)
    batch, queries, heads, _ = query.shape
    weights = _weights(query, key.swapaxes(1, 2), mask, scale)
    split = weights.reshape(batch, key.shape[2], queries, heads // key.shape[2], key.shape[1])
    return split.swapaxes(2, 3).reshape(batch, heads, queries, key.shape[1])


def blockwise_attention(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys value_dim"],
    query_positions: Int[Array, "batch queries"],
    key_positions: Int[Array, "batch keys"],
    *,
    segment_ids: tuple[Int[Array, "batch queries"], Int[Array, "batch keys"]] | None = None,
    window: int | Int[Array, ""] | None = None,
    scale: float | None = None,
    query_block: int = 256,
    key_block: int = 256,
) -> Float[Array, "batch queries heads value_dim"]:
    """Causal attention whose memory is that of one block of queries and keys.

    Blocks of keys that no query of a block may see are skipped. The result is that of
    `dot_product_attention` under `causal_mask` (and `segment_mask`) up to rounding. In a backward
    pass each block of queries is computed again.

    Args:
      query: queries.
      key: keys, head by head.
      value: values, likewise.
      query_positions: place of every query; one below 0 sees nothing.
      key_positions: place of every key, at least 0; `EMPTY` hides it.
      segment_ids: number of each query's and each key's segment, from 1; 0 for padding. None
        for one segment.
      window: how many positions a query sees, its own included; all before it by default.
      scale: factor of the inner products; `1 / sqrt(head_dim)` by default.
      query_block: queries in a block, at least 1.
      key_block: keys in a block, at least 1.

    Returns:
      As `dot_product_attention`.
    """
    if query_block < 1 or key_block < 1:
        raise ValueError(f"query_block={query_block}, key_block={key_block}: must be at least 1")
    queries, rows = query.shape[1], min(query_block, query.shape[1])
    columns = min(key_block, key.shape[2])
    query_segments, key_segments = segment_ids or (None, None)
    keys = _Keys(
        _blocks(key, columns, 2),
        _blocks(value, columns, 2),
        _blocks(key_positions, columns, 1, EMPTY),
        None if key_segments is None else _blocks(key_segments, columns, 1),
    )

    @jax.checkpoint
    def one_block(block: _Queries) -> Array:
        return _online_softmax(block, keys, window, scale)

    blocks = _Queries(
        _blocks(query, rows, 1),
        _blocks(query_positions, rows, 1, -1),
        None if query_segments is None else _blocks(query_segments, rows, 1),
    )
    mixed = jnp.moveaxis(jax.lax.map(one_block, blocks), 0, 1)
    return mixed.reshape(query.shape[0], -1, *mixed.shape[3:])[:, :queries]


def _by_kv_head(
    query: Float[Array, "batch queries heads head_dim"], kv_heads: int
) -> Float[Array, "batch kv_heads rows head_dim"]:
    """Queries in rows below the key-value head that they read: query by query, then by group."""
    batch, queries, heads, head_dim = query.shape
    grouped = query.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    return grouped.swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim)


def _by_query(
    mixed: Float[Array, "batch kv_heads queries group value_dim"],
) -> Float[Array, "batch queries heads value_dim"]:
    batch, _, queries, _, width = mixed.shape
    return mixed.swapaxes(1, 2).reshape(batch, queries, -1, width)


def _scores(rows: Array, key: Array, scale: float | None) -> Array:
    # NumPy's rule, since JAX's is switched off under strict promotion.
    compute_dtype = np.promote_types(rows.dtype, np.float32)
    products = jnp.einsum("bhrd,bhkd->bhrk", rows, key, preferred_element_type=compute_dtype)
    return products * jnp.asarray(rows.shape[-1] ** -0.5 if scale is None else scale, compute_dtype)


def _weights(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    mask: Bool[Array, "#batch 1 queries keys"] | None,
    scale: float | None,
) -> Float[Array, "batch kv_heads rows keys"]:
    # Own code rather than jax.nn.dot_product_attention, which rounds the softmax of float64
    # arrays to float32 and averages all values where the mask admits no key.
    scores = _scores(_by_kv_head(query, key.shape[1]), key, scale)
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    admitted = _by_row(mask, query.shape[2] // key.shape[1])
    # A finite floor keeps rows without any key, and their gradients, free of NaN.
    floor = jnp.asarray(jnp.finfo(scores.dtype).min, scores.dtype)
    weights = jax.nn.softmax(jnp.where(admitted, scores, floor), axis=-1)
    return jnp.where(admitted, weights, jnp.zeros_like(weights))


def _by_row(
    mask: Bool[Array, "batch 1 queries keys"], group: int
) -> Bool[Array, "batch 1 rows keys"]:
    """The mask of rows as `_by_kv_head` orders them."""
    batch, _, queries, keys = mask.shape
    repeated = jnp.broadcast_to(mask[:, :, :, None, :], (batch, 1, queries, group, keys))
    return repeated.reshape(batch, 1, -1, keys)


def _mix(weights: Array, value: Array) -> Array:
    return jnp.einsum(
        "bhrk,bhkv->bhrv",
        weights.astype(value.dtype),
        value,
        preferred_element_type=weights.dtype,
    )


class _Queries(NamedTuple):
    """One block of queries, or all of them along a new first axis."""

    query: Float[Array, "*block batch queries heads head_dim"]
    positions: Int[Array, "*block batch queries"]
    segments: Int[Array, "*block batch queries"] | None


class _Keys(NamedTuple):
    """One block of keys, or all of them along a new first axis."""

    key: Float[Array, "*block batch kv_heads keys head_dim"]
    value: Float[Array, "*block batch kv_heads keys value_dim"]
    positions: Int[Array, "*block batch keys"]
    segments: Int[Array, "*block batch keys"] | None


def _blocks(x: Array, size: int, axis: int, fill: int = 0) -> Array:
    """`x` padded to whole blocks along an axis, and the blocks along a new first axis."""
    missing = -x.shape[axis] % size
    if missing:
        padding = [(0, missing if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, padding, constant_values=fill)
    split = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(split, axis, 0)


def _online_softmax(
    queries: _Queries, keys: _Keys, window: int | Array | None, scale: float | None
) -> Float[Array, "batch queries heads value_dim"]:
    """One block of queries over all blocks of keys that it may see."""
    batch, count, heads, _ = queries.query.shape
    kv_heads = keys.key.shape[2]
    rows = _by_kv_head(queries.query, kv_heads)
    dtype = np.promote_types(rows.dtype, np.float32)
    floor = jnp.asarray(jnp.finfo(dtype).min, dtype)

    def add(carry: Any, block: _Keys) -> tuple[Any, None]:
        mask = causal_mask(queries.positions, block.positions, window)
        if queries.segments is not None and block.segments is not None:
            theirs = block.segments[:, None, None, :]
            mask = mask & (queries.segments[:, None, :, None] == theirs) & (theirs > 0)

        def seen(carry: Any) -> Any:
            largest, total, mixed = carry
            admitted = _by_row(mask, heads // kv_heads)
            scores = jnp.where(admitted, _scores(rows, block.key, scale), floor)
            # The shift cancels in the result, so it needs no gradient.
            peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
            new = jnp.maximum(largest, peak)
            weights = jnp.where(admitted, jnp.exp(scores - new), jnp.zeros_like(scores))
            shrink = jnp.exp(largest - new)
            total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
            return new, total, mixed * shrink + _mix(weights, block.value)

        return jax.lax.cond(jnp.any(mask), seen, lambda carry: carry, carry), None

    column = (batch, kv_heads, rows.shape[2], 1)
    zeros = jnp.zeros(column, dtype)
    start = (jnp.full(column, floor), zeros, jnp.zeros((*column[:3], keys.value.shape[4]), dtype))
    (_, total, mixed), _ = jax.lax.scan(add, start, keys)
    mixed = mixed / jnp.where(total > 0, total, jnp.ones_like(total))
    split = mixed.reshape(batch, kv_heads, count, heads // kv_heads, mixed.shape[3])
    return _by_query(split).astype(queries.query.dtype)


def _check_shapes(query: Array, key: Array, value: Array, mask: Array | None) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"{shapes}: each must be [batch length heads width]")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"{shapes}: key and value may differ in their last axis only")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"{shapes}: query and key must have the same batch and head_dim")
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"{query.shape[2]} query heads cannot share {key.shape[2]} key-value heads: "
            "the second number must divide the first"
        )
    if mask is None:
        return
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask has type {mask.dtype}: it must be boolean, True where allowed")
    allowed = [(n, 1, query.shape[1], key.shape[1]) for n in (1, query.shape[0])]
    if mask.shape not in allowed:
        raise ValueError(f"mask has shape {mask.shape}; {shapes} need {allowed[1]} (or batch 1)")
