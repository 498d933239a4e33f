"""Softmax attention with grouped query heads, and its masks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

__all__ = ["causal_mask", "dot_product_attention", "segment_mask"]


def causal_mask(
    query_positions: Int[Array, "batch queries"],
    key_positions: Int[Array, "batch keys"] | None = None,
) -> Bool[Array, "batch 1 queries keys"]:
    """Which keys each query may see: those at its own position or before it.

    Positions, not lengths, so that one rule serves training, a prompt and a key cache: a cache
    slot that is still empty gets a position behind every query.

    Args:
      query_positions: place of every query, in tokens.
      key_positions: place of every key; those of the queries by default.

    Returns:
      True where a query may attend to a key; the axis of length 1 stands for the heads.

    >>> causal_mask(jnp.array([[0, 1, 2]]))[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    if key_positions is None:
        key_positions = query_positions
    return key_positions[:, None, None, :] <= query_positions[:, None, :, None]


def segment_mask(
    segment_ids: Int[Array, "batch seq"], positions: Int[Array, "batch seq"] | None = None
) -> Bool[Array, "batch 1 seq seq"]:
    """The causal mask of rows that hold several segments, none of which sees another.

    Args:
      segment_ids: number of each token's segment, from 1; 0 for padding, which neither sees nor
        is seen.
      positions: place of every token in its segment, or in anything else that orders the tokens
        of a segment; by default the place in the row.

    Returns:
      True where a query may attend to a key; the axis of length 1 stands for the heads.

    >>> segment_mask(jnp.array([[1, 1, 2, 0]]))[0, 0].astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """
    if positions is None:
        places = jnp.arange(segment_ids.shape[1], dtype=segment_ids.dtype)
        positions = jnp.broadcast_to(places[None, :], segment_ids.shape)
    query, key = segment_ids[:, None, :, None], segment_ids[:, None, None, :]
    return causal_mask(positions) & (query == key) & (key > 0)


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

    Sources: Vaswani et al. 2017, section 3.2.1; Ainslie et al. 2023 (grouped queries).
    """
    _check_shapes(query, key, value, mask)
    batch, queries, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    # Own code rather than jax.nn.dot_product_attention, which rounds the softmax of float64
    # arrays to float32 and averages all values where the mask admits no key.
    # NumPy's rule, since JAX's is switched off under strict promotion.
    compute_dtype = np.promote_types(query.dtype, np.float32)
    grouped = query.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key, preferred_element_type=compute_dtype)
    scores = scores * jnp.asarray(head_dim**-0.5 if scale is None else scale, compute_dtype)
    if mask is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        admitted = mask[:, :, None, :, :]
        # A finite floor keeps rows without any key, and their gradients, free of NaN.
        floor = jnp.asarray(jnp.finfo(compute_dtype).min, compute_dtype)
        weights = jax.nn.softmax(jnp.where(admitted, scores, floor), axis=-1)
        weights = jnp.where(admitted, weights, jnp.zeros_like(weights))
    mixed = jnp.einsum(
        "bhgqk,bkhv->bqhgv",
        weights.astype(value.dtype),
        value,
        preferred_element_type=compute_dtype,
    )
    return mixed.reshape(batch, queries, heads, value.shape[-1]).astype(query.dtype)


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
