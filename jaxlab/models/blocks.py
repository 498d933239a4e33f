"""The layers of `models.decoder`, and what they share with the loops that run them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlab.models.int8_weights import Int8Weight, int8_product, scale_name
from jaxlab.ops.attention import (
    attention_weights,
    blockwise_attention,
    causal_mask,
    dot_product_attention,
    segment_mask,
)
from jaxlab.ops.rotary import (
    RotaryScaling,
    RotaryTables,
    rotary_amplitude,
    rotary_frequencies,
    rotary_tables,
    rotate,
)
from jaxlab.parallel.mesh import split_examples

__all__ = [
    "ACTIVATIONS",
    "INIT_STDDEV",
    "Activation",
    "Block",
    "Norm",
    "Pattern",
    "Projection",
    "new_weight",
    "wide",
]

Activation = Literal["silu", "gelu", "gelu_tanh"]

INIT_STDDEV = 0.02
"""Standard deviation of weights at the start."""

_WHOLE = 4  # sequences of so many blocks attend as a whole

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": nn.silu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
}


class Pattern(NamedTuple):
    """Where the tokens of a whole sequence are and who may see whom, as every layer needs it.

    Attributes:
      positions: place of every token in its sequence; a batch axis of 1 stands for all rows.
      tables: for the rotary embedding of these positions; None where positions are learned.
      segment_ids: segment of every token, from 1, and 0 for padding; None for whole rows.
      mask: True where a query may attend to a key; None for the causal rule.
    """

    positions: Int[Array, "#batch seq"]
    tables: RotaryTables | None
    segment_ids: Int[Array, "batch seq"] | None
    mask: Bool[Array, "#batch 1 seq seq"] | None


class Projection(NamedTuple):
    """What a layer's attention is computed from.

    Attributes:
      normed: the layer's input after its norm.
      query: ready for inner products: after the norm of queries and the rotary embedding.
      key: likewise.
      value: values.
      unrotated_query: before the rotary embedding.
      unrotated_key: likewise.
    """

    normed: Float[Array, "batch seq width"]
    query: Float[Array, "batch seq heads head_dim"]
    key: Float[Array, "batch seq kv_heads head_dim"]
    value: Float[Array, "batch seq kv_heads head_dim"]
    unrotated_query: Float[Array, "batch seq heads head_dim"]
    unrotated_key: Float[Array, "batch seq kv_heads head_dim"]


def wide(dtype: Any) -> Any:
    """The type of norms, softmax and logits: float32, unless `dtype` is wider."""
    # NumPy's rule, since JAX's is switched off under strict promotion.
    return np.promote_types(dtype, np.float32)


class Norm(nn.Module):
    # Not flax's, which mixes types by promotion for any other dtype than float32.
    kind: Literal["rms", "layer"]
    epsilon: float
    axis: str
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        ones: Any = nn.with_logical_partitioning(nn.initializers.ones, (self.axis,))
        scale = self.param("scale", ones, x.shape[-1:], self.param_dtype)
        along_width = (1,) * (x.ndim - 1) + x.shape[-1:]
        x = x.astype(wide(self.dtype))
        if self.kind == "layer":
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        scaled = (
            x
            * jax.lax.rsqrt(mean_square + self.epsilon)
            * scale.astype(x.dtype).reshape(along_width)
        )
        if self.kind == "layer":
            zeros: Any = nn.with_logical_partitioning(nn.initializers.zeros, (self.axis,))
            bias = self.param("bias", zeros, x.shape[-1:], self.param_dtype)
            scaled = scaled + bias.astype(x.dtype).reshape(along_width)
        return scaled.astype(self.dtype)


class Block(nn.Module):
    """One pre-norm layer: attention and an MLP, each added to its input.

    Calling it attends within the given tokens. A loop with a key cache calls `project` (or
    `projection`), attends over its cache, and gives the outcome to `merge`; everything but the
    attention is shared. The attributes are those of `Decoder`, for one layer.
    """

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_width: int
    rope_theta: float
    norm_epsilon: float
    output_stddev: float
    dtype: Any
    rope_scaling: RotaryScaling | None = None
    norm: Literal["rms", "layer"] = "rms"
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    activation: Activation = "silu"
    window: int | None = None
    rotary: bool = True
    attention_block: int = 128
    param_dtype: Any = jnp.float32

    def setup(self) -> None:
        heads = (self.width, self.num_heads, self.head_dim)
        kv_heads = (self.width, self.num_kv_heads, self.head_dim)
        kv_axes = ("embed", "kv_heads", "head_dim")
        out = self.output_stddev
        self.attention_norm = self._norm("embed")
        self.query = self._weight("query", heads, ("embed", "heads", "head_dim"))
        self.key = self._weight("key", kv_heads, kv_axes)
        self.value = self._weight("value", kv_heads, kv_axes)
        self.attention_output = self._weight(
            "attention_output", heads[1:] + heads[:1], ("heads", "head_dim", "embed"), out
        )
        self.mlp_norm = self._norm("embed")
        if self.gated_mlp:
            self.gate = self._weight("gate", (self.width, self.hidden_width), ("embed", "mlp"))
        self.up = self._weight("up", (self.width, self.hidden_width), ("embed", "mlp"))
        self.down = self._weight("down", (self.hidden_width, self.width), ("mlp", "embed"), out)
        if self.qk_norm:
            self.query_norm = self._norm("head_dim")
            self.key_norm = self._norm("head_dim")
        # Biases are vectors, so that the usual masks of weight decay pass over them.
        query_size, kv_size = (n * self.head_dim for n in (self.num_heads, self.num_kv_heads))
        self.query_bias = self._bias(self.qkv_bias, "query_bias", query_size, "heads")
        self.key_bias = self._bias(self.qkv_bias, "key_bias", kv_size, "kv_heads")
        self.value_bias = self._bias(self.qkv_bias, "value_bias", kv_size, "kv_heads")
        self.attention_output_bias = self._bias(
            self.output_bias, "attention_output_bias", self.width, "embed"
        )
        gate_bias = self.mlp_bias and self.gated_mlp
        self.gate_bias = self._bias(gate_bias, "gate_bias", self.hidden_width, "mlp")
        self.up_bias = self._bias(self.mlp_bias, "up_bias", self.hidden_width, "mlp")
        self.down_bias = self._bias(self.mlp_bias, "down_bias", self.width, "embed")

    def _norm(self, axis: str) -> Norm:
        kind = self.norm if axis == "embed" else "rms"
        return Norm(kind, self.norm_epsilon, axis, self.dtype, self.param_dtype)

    def _weight(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        stddev: float = INIT_STDDEV,
    ) -> Array | Int8Weight:
        weight = new_weight(self, name, shape, axes, stddev)
        return weight if isinstance(weight, Int8Weight) else weight.astype(self.dtype)

    def _bias(self, present: bool, name: str, size: int, axis: str) -> Array | None:
        if not present:
            return None
        init: Any = nn.with_logical_partitioning(nn.initializers.zeros, (axis,))
        return self.param(name, init, (size,), self.param_dtype).astype(self.dtype)

    def tables(self, positions: Int[Array, "#batch seq"]) -> RotaryTables | None:
        """Of the rotary embedding, the same for every layer; None where positions are learned.

        Args:
          positions: place of every token in its sequence.
        """
        if not self.rotary:
            return None
        frequencies = rotary_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)
        return rotary_tables(positions, frequencies, rotary_amplitude(self.rope_scaling))

    def projection(
        self, x: Float[Array, "batch seq width"], tables: RotaryTables | None
    ) -> Projection:
        """Everything that the attention of a layer may be computed from.

        Args:
          x: residual stream.
          tables: of the tokens' positions; None where positions are learned.
        """
        normed = self.attention_norm(x)
        unrotated_query = _linear(normed, self.query, self.query_bias)
        unrotated_key = _linear(normed, self.key, self.key_bias)
        value = _linear(normed, self.value, self.value_bias)
        if self.qk_norm:
            unrotated_query = self.query_norm(unrotated_query)
            unrotated_key = self.key_norm(unrotated_key)
        query, key = unrotated_query, unrotated_key
        if tables is not None:
            query, key = rotate(query, tables), rotate(key, tables)
        return Projection(normed, query, key, value, unrotated_query, unrotated_key)

    def project(
        self, x: Float[Array, "batch seq width"], positions: Int[Array, "batch seq"]
    ) -> tuple[
        Float[Array, "batch seq heads head_dim"],
        Float[Array, "batch seq kv_heads head_dim"],
        Float[Array, "batch seq kv_heads head_dim"],
    ]:
        """Queries, keys and values of the tokens; positions are turned into the first two.

        Args:
          x: residual stream.
          positions: place of every token in its sequence.

        Returns:
          `(query, key, value)`, ready for `dot_product_attention` and for a cache.
        """
        found = self.projection(x, self.tables(positions))
        return found.query, found.key, found.value

    def merge(
        self,
        x: Float[Array, "batch seq width"],
        attended: Float[Array, "batch seq heads head_dim"],
    ) -> Float[Array, "batch seq width"]:
        """The layer's output from its input and what its queries have read.

        Args:
          x: residual stream, as given to `project`.
          attended: weighted means of the values, one for each query.
        """
        read = _linear(attended, self.attention_output, self.attention_output_bias, inputs=2)
        x = split_examples(x + read)
        normed = self.mlp_norm(x)
        activate = ACTIVATIONS[self.activation]
        hidden = _linear(normed, self.up, self.up_bias)
        if self.gated_mlp:
            hidden = activate(_linear(normed, self.gate, self.gate_bias)) * hidden
        else:
            hidden = activate(hidden)
        return split_examples(x + _linear(hidden, self.down, self.down_bias))

    def weights(
        self, x: Float[Array, "batch seq width"], pattern: Pattern
    ) -> Float[Array, "batch heads seq seq"]:
        """The attention weights of the layer over a whole sequence.

        Args:
          x: residual stream.
          pattern: where the tokens are.
        """
        found = self.projection(x, pattern.tables)
        return attention_weights(found.query, found.key, _mask(pattern, self.window))

    def __call__(
        self,
        x: Float[Array, "batch seq width"],
        pattern: Pattern,
        window: Int[Array, ""] | None = None,
    ) -> Float[Array, "batch seq width"]:
        """The layer over a whole sequence.

        Args:
          x: residual stream.
          pattern: where the tokens are.
          window: in place of the layer's own, where one program runs layers that differ in it.
        """
        found = self.projection(x, pattern.tables)
        width = self.window if window is None else window
        if x.shape[1] <= _WHOLE * self.attention_block or pattern.mask is not None:
            mask = _mask(pattern, width)
            attended = dot_product_attention(found.query, found.key, found.value, mask)
            return self.merge(x, attended)
        positions = jnp.broadcast_to(pattern.positions, x.shape[:2])
        segments = pattern.segment_ids
        attended = blockwise_attention(
            found.query,
            found.key.swapaxes(1, 2),
            found.value.swapaxes(1, 2),
            positions,
            positions,
            segment_ids=None if segments is None else (segments, segments),
            window=width,
            query_block=self.attention_block,
            key_block=self.attention_block,
        )
        return self.merge(x, attended)


def new_weight(
    module: Any, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], stddev: float
) -> Any:
    """A parameter of a module that has a `param_dtype`, normal at the start, with named axes.

    Returns:
      An array; of one that was given in 8 bits, an `Int8Weight` with the scales beside it.
    """
    # A plain parameter under a matrix product: nn.DenseGeneral initialises a flattened kernel,
    # which its own logical axes do not fit once a mesh is set.
    init: Any = nn.with_logical_partitioning(nn.initializers.normal(stddev), axes)
    weight = module.param(name, init, shape, module.param_dtype)
    if weight.dtype != jnp.int8:
        return weight
    return Int8Weight(weight, module.get_variable("params", scale_name(name)))


def _linear(
    x: Float[Array, "batch seq *inputs"],
    weight: Float[Array, "*inputs *outputs"] | Int8Weight,
    bias: Float[Array, " size"] | None = None,
    *,
    inputs: int = 1,
) -> Float[Array, "batch seq *outputs"]:
    # Matrices of rows, forward and so backward too: the gradient of a product over two axes
    # copies its operands transposed, which costs as much as the product.
    shape = weight.codes.shape if isinstance(weight, Int8Weight) else weight.shape
    size = math.prod(shape[:inputs])
    rows = x.reshape(-1, size)
    if isinstance(weight, Int8Weight):
        flat = Int8Weight(weight.codes.reshape(size, -1), weight.scale.reshape(-1))
        product = int8_product(rows, flat).astype(x.dtype)
    else:
        product = rows @ weight.reshape(size, -1)
    if bias is not None:
        product = product + bias[None, :]
    return product.reshape(*x.shape[:2], *shape[inputs:])


def _mask(pattern: Pattern, window: int | Array | None) -> Bool[Array, "#batch 1 seq seq"]:
    if pattern.mask is not None:
        if window is None:
            return pattern.mask
        return pattern.mask & causal_mask(pattern.positions, window=window)
    if pattern.segment_ids is None:
        return causal_mask(pattern.positions, window=window)
    positions = jnp.broadcast_to(pattern.positions, pattern.segment_ids.shape)
    return segment_mask(pattern.segment_ids, positions, window)
