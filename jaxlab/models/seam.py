"""Where decoding methods meet the decoder: attention with a state.

A decoding method replaces what a layer's queries read: a plain cache, a window, a selection of
pages, a compressed prompt. It is a `CachedAttention`, a bundle of pure functions, and everything
else of a layer is the decoder's. `decode_step` runs all layers over a chunk of one or more
tokens, so that prompts, decoding and trees of drafts are one function. Caches that the methods
build on are in `models.caches`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxlab.models.blocks import Block, Projection
from jaxlab.models.decoder import Decoder, decoder_block
from jaxlab.ops.rotary import RotaryTables

__all__ = [
    "AttentionInputs",
    "CacheShape",
    "CachedAttention",
    "DecodeOutput",
    "accept",
    "by_layer",
    "decode_step",
    "init_states",
    "rollback",
]


class AttentionInputs(NamedTuple):
    """What a layer hands to its attention.

    Attributes:
      hidden: the layer's input after its norm.
      query: after the norm of queries and the rotary embedding; head `h` reads key-value head
        `h // (heads / kv_heads)`.
      key: likewise.
      value: values.
      unrotated_query: before the rotary embedding.
      unrotated_key: likewise.
      positions: place of every token in its sequence.
      valid: False for padding, which must leave no trace in the state; None where all is valid.
      tree_mask: True where a token of the chunk (second axis) may see another (third axis);
        it sees all tokens before the chunk. None for a chunk in which each token sees those at
        its position and before.
      window: how many positions a query sees, its own included; None for all.
      scale: factor of the inner products.
    """

    hidden: Float[Array, "batch chunk width"]
    query: Float[Array, "batch chunk heads head_dim"]
    key: Float[Array, "batch chunk kv_heads head_dim"]
    value: Float[Array, "batch chunk kv_heads head_dim"]
    unrotated_query: Float[Array, "batch chunk heads head_dim"]
    unrotated_key: Float[Array, "batch chunk kv_heads head_dim"]
    positions: Int[Array, "batch chunk"]
    valid: Bool[Array, "batch chunk"] | None
    tree_mask: Bool[Array, "batch chunk chunk"] | None
    window: int | None
    scale: float


class CacheShape(NamedTuple):
    """Sizes from which a layer's state is made.

    Attributes:
      batch: sequences.
      capacity: tokens of a sequence that have to fit, padding of chunks included.
      num_heads: query heads.
      num_kv_heads: key-value heads.
      head_dim: width of a head.
      width: width of the residual stream.
      window: the layer's sliding window; None for all positions.
      dtype: type of keys and values.
    """

    batch: int
    capacity: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int
    window: int | None
    dtype: Any


@dataclasses.dataclass(frozen=True)
class CachedAttention:
    """A way to attend over what came before, as pure functions.

    Attributes:
      init: `(layer, shape) -> state`, the empty state of a layer, any pytree of arrays.
      attend: `(layer, inputs, state, carry) -> (out, state, carry, stats)`: `out` is
        `[batch chunk heads head_dim]` in the type of the queries; `carry` is a pytree that goes
        from layer to layer within one step and is None when the first layer is entered; `stats`
        is any pytree of arrays, or None.
      rollback: `(layer, state, length) -> state`: forgets every token of a sequence but the first
        `length [batch]`; None where that cannot be done.
      accept: `(layer, state, length, path) -> state`: of the tokens behind the first
        `length [batch]` keeps those at the offsets `path [batch, steps]`, in this order, and
        forgets the others; an offset below 0 keeps nothing. None where that cannot be done.
      tree_masks: whether `inputs.tree_mask` is obeyed.
      windows: whether `inputs.window` is obeyed.
      chunks: whether a chunk may hold several tokens.
    """

    init: Callable[[int, CacheShape], Any]
    attend: Callable[[int, AttentionInputs, Any, Any], tuple[Array, Any, Any, Any]]
    rollback: Callable[[int, Any, Array], Any] | None = None
    accept: Callable[[int, Any, Array, Array], Any] | None = None
    tree_masks: bool = False
    windows: bool = False
    chunks: bool = True


class DecodeOutput(NamedTuple):
    """What `decode_step` gives.

    Attributes:
      logits: float32, for every token of the chunk or for each sequence's last valid one; None
        if they were not asked for.
      normed: what the logits are a linear function of, for the same tokens (for all without
        logits).
      hidden: the chosen residual streams of the whole chunk, in the order of `hidden_layers`.
      states: the layers' states after the chunk.
      stats: what each layer's attention reports.
    """

    logits: Float[Array, "batch tokens vocab"] | None
    normed: Float[Array, "batch tokens width"]
    hidden: tuple[Float[Array, "batch chunk width"], ...]
    states: tuple[Any, ...]
    stats: tuple[Any, ...]


def init_states(
    model: Decoder,
    attention: CachedAttention,
    *,
    batch: int,
    capacity: int,
    dtype: Any = None,
) -> tuple[Any, ...]:
    """Empty states of all layers.

    Args:
      model: whose sizes are used.
      attention: whose states to make.
      batch: sequences.
      capacity: tokens of a sequence that have to fit, padding of chunks included.
      dtype: type of keys and values; that of the model's computation by default.

    Raises:
      ValueError: a size below 1, or a window that the attention does not know.
    """
    for name, size in (("batch", batch), ("capacity", capacity)):
        if size < 1:
            raise ValueError(f"{name}={size}: must be at least 1")
    for layer, window in enumerate(model.windows):
        _check_window(attention, layer, window)
    block = decoder_block(model)
    shape = CacheShape(
        batch,
        capacity,
        block.num_heads,
        block.num_kv_heads,
        block.head_dim,
        block.width,
        None,
        model.dtype if dtype is None else dtype,
    )
    return tuple(
        attention.init(layer, shape._replace(window=window))
        for layer, window in enumerate(model.windows)
    )


def decode_step(
    model: Decoder,
    params: Mapping[str, Any],
    tokens: Integer[Array, "batch chunk"],
    states: Sequence[Any],
    *,
    attention: CachedAttention,
    positions: Int[Array, "batch chunk"],
    valid: Bool[Array, "batch chunk"] | None = None,
    tree_mask: Bool[Array, "batch chunk chunk"] | None = None,
    logits: Literal["all", "last", "none"] = "last",
    hidden_layers: Sequence[int] = (),
) -> DecodeOutput:
    """Runs a chunk of tokens through all layers: a prompt or a part of it, one token, or a tree.

    To be called in a jitted function that donates `states`, so that caches change in place.

    Args:
      model: the decoder.
      params: its canonical parameters.
      tokens: the next tokens of every sequence.
      states: from `init_states` or an earlier step.
      attention: the method that made the states.
      positions: place of every token in its sequence, from 0, padding not counted.
      valid: False for padding, on either side or in between; a sequence without any valid token
        stays as it is. All is valid by default.
      tree_mask: True where a token of the chunk (second axis) may see another (third axis), for
        drafts that branch; in order of position by default.
      logits: for all tokens, for the last valid one of each sequence, or none.
      hidden_layers: which residual streams to give: 0 enters the first layer, `i` leaves layer
        `i - 1`, `num_layers` enters the final norm.

    Returns:
      Logits, states and whatever else was asked for.

    Raises:
      ValueError: the attention cannot do what is asked, the model is scanned, or shapes differ.
    """
    arrays = {"tokens": tokens, "positions": positions, "valid": valid, "tree_mask": tree_mask}
    _check_step(model, attention, states, arrays, hidden_layers)
    if logits not in ("all", "last", "none"):
        raise ValueError(f"logits={logits!r}: allowed are all, last, none")

    def apply(*inputs: Any, method: str) -> Any:
        return model.apply({"params": params}, *inputs, method=method)

    x: Any = apply(tokens, positions, method="embed")
    tables = decoder_block(model).tables(positions)
    carry: Any = None
    hidden: list[Any] = [x]
    new_states: list[Any] = []
    stats: list[Any] = []
    for layer, state in enumerate(states):
        block, weights = decoder_block(model, layer), params[f"layer_{layer}"]
        found = _projection(block, weights, x, tables)
        inputs = AttentionInputs(
            hidden=found.normed,
            query=found.query,
            key=found.key,
            value=found.value,
            unrotated_query=found.unrotated_query,
            unrotated_key=found.unrotated_key,
            positions=positions,
            valid=valid,
            tree_mask=tree_mask,
            window=block.window,
            scale=block.head_dim**-0.5,
        )
        out, state, carry, stat = attention.attend(layer, inputs, state, carry)
        x = _merge(block, weights, x, out)
        hidden.append(x)
        new_states.append(state)
        stats.append(stat)
    if logits == "last":
        x = _last(x, valid)
    normed = apply(x, method="normalize")
    return DecodeOutput(
        None if logits == "none" else apply(normed, method="read_out"),
        normed,
        tuple(hidden[index] for index in hidden_layers),
        tuple(new_states),
        tuple(stats),
    )


def rollback(
    attention: CachedAttention, states: Sequence[Any], length: Int[Array, " batch"]
) -> tuple[Any, ...]:
    """The states as they were when each sequence had its first `length` tokens.

    Args:
      attention: the method that made the states.
      states: from `decode_step`.
      length: tokens to keep, at most those that are there.

    Raises:
      ValueError: the attention cannot forget.
    """
    if attention.rollback is None:
        raise ValueError("attention: its state cannot be rolled back")
    forget = attention.rollback
    return tuple(forget(layer, state, length) for layer, state in enumerate(states))


def accept(
    attention: CachedAttention,
    states: Sequence[Any],
    length: Int[Array, " batch"],
    path: Int[Array, "batch steps"],
) -> tuple[Any, ...]:
    """The states after a tree of drafts of which one path was accepted.

    Args:
      attention: the method that made the states.
      states: from the `decode_step` over the tree.
      length: tokens of every sequence before the tree.
      path: places of the accepted tokens among the valid ones of the chunk, in order; -1 behind
        them.

    Raises:
      ValueError: the attention cannot move what it has stored.
    """
    if attention.accept is None:
        raise ValueError("attention: its state cannot keep one path of a tree")
    keep = attention.accept
    return tuple(keep(layer, state, length, path) for layer, state in enumerate(states))


def by_layer(attentions: Sequence[CachedAttention]) -> CachedAttention:
    """One method for every layer.

    Args:
      attentions: as many as the model has layers; those of neighbours share `carry`.

    Returns:
      What all of them can do together.
    """
    chosen = tuple(attentions)

    def init(layer: int, shape: CacheShape) -> Any:
        if layer >= len(chosen):
            raise ValueError(f"{len(chosen)} attentions: there is none for layer {layer}")
        _check_window(chosen[layer], layer, shape.window)
        return chosen[layer].init(layer, shape)

    def each(name: str) -> Any:
        functions = [getattr(attention, name) for attention in chosen]
        return None if None in functions else lambda layer, *rest: functions[layer](layer, *rest)

    return CachedAttention(
        init,
        lambda layer, *rest: chosen[layer].attend(layer, *rest),
        each("rollback"),
        each("accept"),
        tree_masks=all(attention.tree_masks for attention in chosen),
        windows=True,
        chunks=all(attention.chunks for attention in chosen),
    )


# Equal layers are traced and lowered once for all; the compiler puts them in place.
@functools.partial(jax.jit, static_argnames="block")
def _projection(
    block: Block, params: Any, x: Float[Array, "batch chunk width"], tables: RotaryTables | None
) -> Projection:
    found: Any = block.apply({"params": params}, x, tables, method="projection")
    return found


@functools.partial(jax.jit, static_argnames="block")
def _merge(
    block: Block,
    params: Any,
    x: Float[Array, "batch chunk width"],
    attended: Float[Array, "batch chunk heads head_dim"],
) -> Float[Array, "batch chunk width"]:
    found: Any = block.apply({"params": params}, x, attended, method="merge")
    return found


def _last(
    x: Float[Array, "batch chunk width"], valid: Bool[Array, "batch chunk"] | None
) -> Float[Array, "batch 1 width"]:
    """Each sequence's last valid token."""
    if valid is None or x.shape[1] == 1:
        return x[:, -1:]
    places = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    last = jnp.max(jnp.where(valid, places, jnp.zeros_like(places)), axis=1)
    return jnp.take_along_axis(x, last[:, None, None], axis=1)


def _check_window(attention: CachedAttention, layer: int, window: int | None) -> None:
    if window is not None and not attention.windows:
        raise ValueError(f"sliding_window={window} of layer {layer}: not supported by attention")


def _check_step(
    model: Decoder,
    attention: CachedAttention,
    states: Sequence[Any],
    arrays: Mapping[str, Any],
    hidden_layers: Sequence[int],
) -> None:
    batch, chunk = arrays["tokens"].shape
    shapes = {"tree_mask": (batch, chunk, chunk)}
    for name, array in arrays.items():
        expected = shapes.get(name, (batch, chunk))
        if array is not None and array.shape != expected:
            raise ValueError(f"{name} has shape {array.shape}: these tokens need {expected}")
    if model.scan_layers:
        raise ValueError("scan_layers=True: decoding runs layer by layer; unstack the parameters")
    if len(states) != model.num_layers:
        raise ValueError(f"{len(states)} states: the model has num_layers={model.num_layers}")
    if arrays["tree_mask"] is not None and not attention.tree_masks:
        raise ValueError("tree_mask: not supported by attention")
    if chunk > 1 and not attention.chunks:
        raise ValueError(f"a chunk of {chunk} tokens: attention takes one at a time")
    for layer, window in enumerate(model.windows):
        _check_window(attention, layer, window)
    for layer in hidden_layers:
        if not 0 <= layer <= model.num_layers:
            raise ValueError(f"hidden_layers: {layer} is not in 0 to {model.num_layers}")
