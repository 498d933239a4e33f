"""A causal language model in the style of Llama.

Pre-norm blocks with RMSNorm, rotary positions, grouped-query attention and SwiGLU, without
biases. Sources: Touvron et al., "LLaMA", section 2.2; Ainslie et al., "GQA"; Radford et al.,
"Language Models are Unsupervised Multitask Learners", section 2.3 (scaled initialisation).

The parameters of layer `i` live under `layer_i`. That is the canonical form, whatever ran the
layers: `stack_layers` makes the one that `scan_layers=True` reads, `unstack_layers` undoes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxlab.ops.attention import causal_mask, dot_product_attention
from jaxlab.ops.rotary import apply_rotary, rotary_frequencies
from jaxlab.parallel.mesh import split_examples

__all__ = [
    "Block",
    "Decoder",
    "decoder_block",
    "parameter_count",
    "stack_layers",
    "unstack_layers",
]

_INIT_STDDEV = 0.02
_VOCABULARY_TABLES = ("embedding", "unembedding")


def _wide(dtype: Any) -> Any:
    """The type of norms, softmax and logits: float32, unless `dtype` is wider."""
    # NumPy's rule, since JAX's is switched off under strict promotion.
    return np.promote_types(dtype, np.float32)


class _RmsNorm(nn.Module):
    # Not flax's, which mixes types by promotion for any other dtype than float32.
    epsilon: float
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "batch seq width"]) -> Float[Array, "batch seq width"]:
        ones: Any = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        scale = self.param("scale", ones, x.shape[-1:], jnp.float32)
        x = x.astype(_wide(self.dtype))
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        scaled = (
            x * jax.lax.rsqrt(mean_square + self.epsilon) * scale.astype(x.dtype)[None, None, :]
        )
        return scaled.astype(self.dtype)


class Block(nn.Module):
    """One pre-norm layer: attention and a gated MLP, each added to its input.

    Calling it attends within the given tokens. A loop with a key cache calls `project`, attends
    over its cache, and gives the outcome to `merge`; everything but the attention is shared.

    Attributes:
      width: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key-value heads, a divisor of `num_heads`.
      head_dim: width of a head.
      hidden_width: width of the gated MLP.
      rope_theta: base of the rotary frequencies.
      norm_epsilon: added to the mean square in the norms.
      output_stddev: standard deviation of the two output projections at the start.
      dtype: type of the computation.
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

    def setup(self) -> None:
        heads = (self.width, self.num_heads, self.head_dim)
        kv_heads = (self.width, self.num_kv_heads, self.head_dim)
        kv_axes = ("embed", "kv_heads", "head_dim")
        out = self.output_stddev
        self.attention_norm = _RmsNorm(self.norm_epsilon, self.dtype)
        self.query = self._weight("query", heads, ("embed", "heads", "head_dim"))
        self.key = self._weight("key", kv_heads, kv_axes)
        self.value = self._weight("value", kv_heads, kv_axes)
        self.attention_output = self._weight(
            "attention_output", heads[1:] + heads[:1], ("heads", "head_dim", "embed"), out
        )
        self.mlp_norm = _RmsNorm(self.norm_epsilon, self.dtype)
        self.gate = self._weight("gate", (self.width, self.hidden_width), ("embed", "mlp"))
        self.up = self._weight("up", (self.width, self.hidden_width), ("embed", "mlp"))
        self.down = self._weight("down", (self.hidden_width, self.width), ("mlp", "embed"), out)

    def _weight(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        stddev: float = _INIT_STDDEV,
    ) -> Array:
        return _weight(self, name, shape, axes, stddev).astype(self.dtype)

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
        normed = self.attention_norm(x)
        query, key, value = (
            jnp.einsum("bsw,whd->bshd", normed, weight)
            for weight in (self.query, self.key, self.value)
        )
        frequencies = rotary_frequencies(self.head_dim, self.rope_theta)
        query = apply_rotary(query, positions, frequencies)
        return query, apply_rotary(key, positions, frequencies), value

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
        x = split_examples(x + jnp.einsum("bshd,hdw->bsw", attended, self.attention_output))
        normed = self.mlp_norm(x)
        gate = nn.silu(jnp.einsum("bsw,wm->bsm", normed, self.gate))
        hidden = gate * jnp.einsum("bsw,wm->bsm", normed, self.up)
        return split_examples(x + jnp.einsum("bsm,mw->bsw", hidden, self.down))

    def __call__(
        self,
        x: Float[Array, "batch seq width"],
        positions: Int[Array, "batch seq"],
        mask: Bool[Array, "#batch 1 seq seq"],
    ) -> Float[Array, "batch seq width"]:
        """The layer over a whole sequence.

        Args:
          x: residual stream.
          positions: place of every token in its sequence.
          mask: True where a query may attend to a key.
        """
        query, key, value = self.project(x, positions)
        return self.merge(x, dot_product_attention(query, key, value, mask))


class Decoder(nn.Module):
    """A Llama-style causal language model.

    Attributes:
      vocab_size: number of tokens.
      width: width of the residual stream.
      num_layers: number of blocks.
      num_heads: query heads.
      num_kv_heads: key-value heads, a divisor of `num_heads`, which is also the default.
      head_dim: width of a head, even; `width / num_heads` by default, but free.
      hidden_width: width of the gated MLP; by default 8/3 of `width`, rounded up to a multiple
        of 32, which gives it about the parameters of an ungated MLP of four times `width`.
      rope_theta: base of the rotary frequencies.
      norm_epsilon: added to the mean square in the norms.
      tie_embeddings: whether the logits use the table that embeds the tokens.
      dtype: type of the computation. Parameters are float32; norms, softmax and logits are
        computed in float32.
      scan_layers: run the layers as one compiled loop over stacked parameters: compiles once
        instead of `num_layers` times, and reads `stack_layers(params)`.
      remat: recompute each layer in the backward pass instead of storing its inner values.

    Raises:
      ValueError: at construction, for sizes that do not fit together.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    hidden_width: int | None = None
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    dtype: Any = jnp.float32
    scan_layers: bool = False
    remat: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self)
        super().__post_init__()

    def setup(self) -> None:
        table = (self.vocab_size, self.width)
        self.embedding = _weight(self, "embedding", table, ("vocab", "embed"), _INIT_STDDEV)
        # Inside a scan nothing can merge the recomputation with the first computation.
        block = nn.remat(Block, prevent_cse=not self.scan_layers) if self.remat else Block
        for name in ["layers"] if self.scan_layers else _layer_names(self.num_layers):
            setattr(self, name, block(**_block_sizes(self)))
        self.final_norm = _RmsNorm(self.norm_epsilon, self.dtype)
        if not self.tie_embeddings:
            self.unembedding = _weight(
                self, "unembedding", table[::-1], ("embed", "vocab"), _INIT_STDDEV
            )

    def embed(self, tokens: Integer[Array, "batch seq"]) -> Float[Array, "batch seq width"]:
        """The residual stream that enters the first layer.

        Args:
          tokens: in `[0, vocab_size)`; one at or above `vocab_size` gives NaN.
        """
        return split_examples(jnp.take(self.embedding, tokens, axis=0).astype(self.dtype))

    def unembed(self, x: Float[Array, "batch seq width"]) -> Float[Array, "batch seq vocab"]:
        """Float32 logits from the residual stream that leaves the last layer."""
        weight = self.embedding.T if self.tie_embeddings else self.unembedding
        return jnp.einsum(
            "bsw,wv->bsv",
            self.final_norm(x),
            weight.astype(self.dtype),
            preferred_element_type=_wide(self.dtype),
        )

    def __call__(
        self,
        tokens: Integer[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        mask: Bool[Array, "#batch 1 seq seq"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of the token that follows each token.

        Args:
          tokens: in `[0, vocab_size)`; one at or above `vocab_size` gives NaN.
          positions: place of every token in its sequence; 0, 1, ... by default.
          mask: True where a query may attend to a key; by default at its own position or before.

        Returns:
          Unnormalised log-probabilities, float32.
        """
        if positions is None:
            steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
            positions = jnp.broadcast_to(steps[None, :], tokens.shape)
        if mask is None:
            mask = causal_mask(positions)
        x = self.embed(tokens)
        if not self.scan_layers:
            for name in _layer_names(self.num_layers):
                x = getattr(self, name)(x, positions, mask)
            return self.unembed(x)
        loop = nn.scan(
            lambda block, carry: (block(carry, positions, mask), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.num_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = loop(self.layers, x)
        return self.unembed(x)


def decoder_block(model: Decoder) -> Block:
    """The layer of a decoder as a module of its own.

    Args:
      model: its sizes are used, its parameters are not needed.

    Returns:
      A block for `block.apply({"params": params["layer_0"]}, x, positions, method="project")`
      and the like, with the canonical parameters of any layer.
    """
    return Block(**_block_sizes(model), parent=None)


def stack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters for `scan_layers=True` from the canonical ones.

    Args:
      params: unboxed parameters with `layer_0`, `layer_1`, ...; other entries are passed on.

    Returns:
      The same with one entry `layers`, whose leaves have a new first axis, the layer.

    Raises:
      ValueError: there is no `layer_0`, or a layer is missing.
    """
    present = {name for name in params if name.startswith("layer_")}
    names = _layer_names(len(present))
    if not present or present != set(names):
        raise ValueError(f"layers {sorted(present)}: need layer_0, layer_1, ... without a gap")
    rest = {name: value for name, value in params.items() if name not in present}
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[name] for name in names))
    return {**rest, "layers": layers}


def unstack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Canonical parameters from those of `scan_layers=True`; the inverse of `stack_layers`.

    Args:
      params: unboxed parameters with `layers`; other entries are passed on.

    Returns:
      The same with `layer_0`, `layer_1`, ... in place of `layers`.

    Raises:
      ValueError: there is no `layers`.
    """
    if "layers" not in params:
        raise ValueError(f"entries {sorted(params)}: need one named layers")
    rest = {name: value for name, value in params.items() if name != "layers"}
    stacked = params["layers"]
    names = _layer_names(jax.tree.leaves(stacked)[0].shape[0])
    layers = {
        name: jax.tree.map(lambda leaf, i=index: leaf[i], stacked)
        for index, name in enumerate(names)
    }
    return {**rest, **layers}


def parameter_count(params: Any, embeddings: bool = True) -> int:
    """Number of scalars in a parameter tree.

    Args:
      params: arrays or their abstract shapes, boxed or not.
      embeddings: whether the tables named `embedding` and `unembedding` count.

    >>> tree = {"embedding": jnp.zeros((5, 2)), "layer_0": {"gate": jnp.zeros((2, 3))}}
    >>> parameter_count(tree), parameter_count(tree, embeddings=False)
    (16, 6)
    """
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = {getattr(entry, "key", None) for entry in path}
        if embeddings or names.isdisjoint(_VOCABULARY_TABLES):
            total += math.prod(leaf.shape)
    return total


def _layer_names(num_layers: int) -> list[str]:
    return [f"layer_{index}" for index in range(num_layers)]


def _weight(
    module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str, ...], stddev: float
) -> Array:
    # A plain parameter under an einsum: nn.DenseGeneral initialises a flattened kernel, which
    # its own logical axes do not fit once a mesh is set.
    init: Any = nn.with_logical_partitioning(nn.initializers.normal(stddev), axes)
    return module.param(name, init, shape, jnp.float32)


def _head_dim(model: Decoder) -> int:
    return model.width // model.num_heads if model.head_dim is None else model.head_dim


def _block_sizes(model: Decoder) -> dict[str, Any]:
    hidden_width = model.hidden_width
    if hidden_width is None:
        hidden_width = 32 * math.ceil(8 * model.width / (3 * 32))
    return {
        "width": model.width,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads or model.num_heads,
        "head_dim": _head_dim(model),
        "hidden_width": hidden_width,
        "rope_theta": model.rope_theta,
        "norm_epsilon": model.norm_epsilon,
        # Two projections a layer add to the stream: its variance stays about the same.
        "output_stddev": _INIT_STDDEV / math.sqrt(2 * model.num_layers),
        "dtype": model.dtype,
    }


def _check_sizes(model: Decoder) -> None:
    names = ("vocab_size", "width", "num_layers", "num_heads")
    optional = ("num_kv_heads", "head_dim", "hidden_width")
    for name in names + tuple(name for name in optional if getattr(model, name) is not None):
        if getattr(model, name) < 1:
            raise ValueError(f"{name}={getattr(model, name)}: must be at least 1")
    if model.num_kv_heads is not None and model.num_heads % model.num_kv_heads:
        raise ValueError(
            f"num_kv_heads={model.num_kv_heads}: must divide num_heads={model.num_heads}"
        )
    if model.head_dim is None and model.width % model.num_heads:
        raise ValueError(
            f"num_heads={model.num_heads}: must divide width={model.width}, or give head_dim"
        )
    if _head_dim(model) % 2:
        raise ValueError(f"head_dim={_head_dim(model)}: rotary positions need an even width")
    if model.rope_theta <= 0:
        raise ValueError(f"rope_theta={model.rope_theta}: must be positive")
