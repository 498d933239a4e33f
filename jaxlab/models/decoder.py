"""One causal language model for the families of open decoders.

Pre-norm blocks with grouped-query attention and an MLP. The defaults are Llama's: RMSNorm, rotary
positions, SwiGLU, no biases. Fields turn it into Qwen (biases or norms of queries and keys),
Mistral (sliding windows) or GPT-2 (LayerNorm, learned positions, an ungated MLP, biases);
`models.pretrained.families` reads them from published configurations. Sources: Touvron et al.,
"LLaMA", section 2.2; Ainslie et al., "GQA"; Jiang et al., "Mistral 7B"; Radford et al., "Language
Models are Unsupervised Multitask Learners", section 2.3 (also the scaled initialisation).

The parameters of layer `i` live under `layer_i`. That is the canonical form, whatever ran the
layers: `stack_layers` makes the one that `scan_layers=True` reads, `unstack_layers` undoes it.
Decoding with a cache is in `models.seam`, weights in 8 bits are in `models.int8_weights`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxlab.models.blocks import (
    ACTIVATIONS,
    INIT_STDDEV,
    Activation,
    Block,
    Norm,
    Pattern,
    new_weight,
    wide,
)
from jaxlab.models.int8_weights import Int8Weight, int8_product, int8_rows
from jaxlab.ops.rotary import RotaryScaling
from jaxlab.parallel.mesh import split_examples

__all__ = [
    "Decoder",
    "DecoderOutput",
    "decoder_block",
    "parameter_count",
    "stack_layers",
    "unstack_layers",
]

_VOCABULARY_TABLES = ("embedding", "unembedding", "position_embedding")
_EVERYTHING = 2**30  # a window wider than any sequence


class DecoderOutput(NamedTuple):
    """What `Decoder.outputs` gives.

    Attributes:
      logits: unnormalised log-probabilities, float32; None if they were not asked for.
      normed: what the logits are a linear function of: the last layer's output after the norm.
      hidden: the chosen residual streams, in the order of `hidden_layers`.
      attention: the chosen layers' attention weights, in the order of `attention_layers`.
    """

    logits: Float[Array, "batch seq vocab"] | None
    normed: Float[Array, "batch seq width"]
    hidden: tuple[Float[Array, "batch seq width"], ...]
    attention: tuple[Float[Array, "batch heads seq seq"], ...]


class Decoder(nn.Module):
    """A causal language model.

    Attributes:
      vocab_size: number of tokens.
      width: width of the residual stream.
      num_layers: number of blocks.
      num_heads: query heads.
      num_kv_heads: key-value heads, a divisor of `num_heads`, which is also the default.
      head_dim: width of a head; `width / num_heads` by default, but free; even if rotary.
      hidden_width: width of the MLP; by default 8/3 of `width`, rounded up to a multiple of 32,
        which gives a gated MLP about the parameters of an ungated one of four times `width`.
      rope_theta: base of the rotary frequencies.
      norm_epsilon: added to the mean square in the norms.
      tie_embeddings: whether the logits use the table that embeds the tokens.
      dtype: type of the computation. Norms, softmax and logits are computed in float32.
      scan_layers: run the layers as one compiled loop over stacked parameters: compiles once
        instead of `num_layers` times, and reads `stack_layers(params)`.
      remat: recompute each layer in the backward pass instead of storing its inner values.
      rope_scaling: extension of the rotary embedding to longer texts.
      norm: RMSNorm, or LayerNorm with a bias.
      qk_norm: whether an RMSNorm over `head_dim` precedes the rotary embedding.
      qkv_bias: whether queries, keys and values have biases.
      output_bias: whether the attention's output has one.
      mlp_bias: whether the projections of the MLP have biases.
      gated_mlp: whether the MLP is `down(activation(gate(x)) * up(x))`, not
        `down(activation(up(x)))`.
      activation: of the MLP; `gelu_tanh` is GELU's tanh form.
      sliding_window: how many positions a query sees, its own included: for all layers, or for
        each, where None is all.
      num_positions: size of a table of learned positions that takes the place of the rotary
        embedding; None for rotary.
      attention_block: sequences longer than four times this attend in blocks of so many queries
        and keys, so that memory does not grow with the square of the length.
      param_dtype: type of the parameters.

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
    rope_scaling: RotaryScaling | None = None
    norm: Literal["rms", "layer"] = "rms"
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    activation: Activation = "silu"
    sliding_window: int | tuple[int | None, ...] | None = None
    num_positions: int | None = None
    attention_block: int = 128
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        _check_sizes(self)
        super().__post_init__()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of every layer."""
        if isinstance(self.sliding_window, tuple):
            return self.sliding_window
        return (self.sliding_window,) * self.num_layers

    def setup(self) -> None:
        table = (self.vocab_size, self.width)
        self.embedding = new_weight(self, "embedding", table, ("vocab", "embed"), INIT_STDDEV)
        if self.num_positions is not None:
            shape = (self.num_positions, self.width)
            self.position_embedding = new_weight(
                self, "position_embedding", shape, (None, "embed"), INIT_STDDEV
            )
        # Inside a scan nothing can merge the recomputation with the first computation.
        block = nn.remat(Block, prevent_cse=not self.scan_layers) if self.remat else Block
        for index, name in enumerate(self._block_names()):
            setattr(self, name, block(**_block_sizes(self, index)))
        self.final_norm = Norm(self.norm, self.norm_epsilon, "embed", self.dtype, self.param_dtype)
        if not self.tie_embeddings:
            self.unembedding = new_weight(
                self, "unembedding", table[::-1], ("embed", "vocab"), INIT_STDDEV
            )

    def _block_names(self) -> list[str]:
        return ["layers"] if self.scan_layers else _layer_names(self.num_layers)

    def embed(
        self,
        tokens: Integer[Array, "batch seq"],
        positions: Int[Array, "#batch seq"] | None = None,
    ) -> Float[Array, "batch seq width"]:
        """The residual stream that enters the first layer.

        Args:
          tokens: in `[0, vocab_size)`; one at or above `vocab_size` gives NaN.
          positions: place of every token in its sequence; only learned positions need it.

        Raises:
          ValueError: positions are learned and none were given.
        """
        table = self.embedding
        if isinstance(table, Int8Weight):
            x = int8_rows(table, tokens).astype(self.dtype)
        else:
            x = jnp.take(table, tokens, axis=0).astype(self.dtype)
        if self.num_positions is not None:
            if positions is None:
                raise ValueError("positions=None: a model with learned positions needs them")
            x = x + jnp.take(self.position_embedding, positions, axis=0).astype(self.dtype)
        return split_examples(x)

    def normalize(self, x: Float[Array, "batch seq width"]) -> Float[Array, "batch seq width"]:
        """The final norm of the residual stream that leaves the last layer."""
        return self.final_norm(x)

    def read_out(self, normed: Float[Array, "batch seq width"]) -> Float[Array, "batch seq vocab"]:
        """Float32 logits from what `normalize` gives."""
        weight, axis = (self.embedding, 1) if self.tie_embeddings else (self.unembedding, 0)
        rows = normed.reshape(-1, self.width)
        if isinstance(weight, Int8Weight):
            logits = int8_product(rows, weight, axis)
        else:
            logits = jax.lax.dot_general(
                rows,
                weight.astype(self.dtype),
                (((1,), (axis,)), ((), ())),
                preferred_element_type=wide(self.dtype),
            )
        return logits.reshape(*normed.shape[:2], self.vocab_size)

    def unembed(self, x: Float[Array, "batch seq width"]) -> Float[Array, "batch seq vocab"]:
        """Float32 logits from the residual stream that leaves the last layer."""
        return self.read_out(self.normalize(x))

    def __call__(
        self,
        tokens: Integer[Array, "batch seq"],
        positions: Int[Array, "#batch seq"] | None = None,
        mask: Bool[Array, "#batch 1 seq seq"] | None = None,
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        valid: Bool[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of the token that follows each token.

        Args:
          tokens: in `[0, vocab_size)`; one at or above `vocab_size` gives NaN.
          positions: place of every token in its sequence; 0, 1, ... by default, counted from the
            first valid token. Rows that are packed with several segments should give them.
          mask: True where a query may attend to a key, in place of the causal rule; a sliding
            window narrows it further.
          segment_ids: segment of every token, from 1, and 0 for padding: a token sees its own
            segment only.
          valid: False for padding, on either side; its logits mean nothing.

        Returns:
          Unnormalised log-probabilities, float32.

        Raises:
          ValueError: a mask together with segments or with padding.
        """
        found = self.outputs(tokens, positions, mask, segment_ids=segment_ids, valid=valid)
        assert found.logits is not None
        return found.logits

    def outputs(
        self,
        tokens: Integer[Array, "batch seq"],
        positions: Int[Array, "#batch seq"] | None = None,
        mask: Bool[Array, "#batch 1 seq seq"] | None = None,
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        valid: Bool[Array, "batch seq"] | None = None,
        hidden_layers: Sequence[int] = (),
        attention_layers: Sequence[int] = (),
        logits: bool = True,
    ) -> DecoderOutput:
        """The logits and what happens on the way to them.

        Args:
          tokens: as for a call; so are `positions`, `mask`, `segment_ids` and `valid`.
          positions: place of every token in its sequence.
          mask: True where a query may attend to a key.
          segment_ids: segment of every token.
          valid: False for padding.
          hidden_layers: which residual streams to give: 0 enters the first layer, `i` leaves
            layer `i - 1`, `num_layers` enters the final norm.
          attention_layers: layers, from 0, whose attention weights to give.
          logits: whether to compute the logits.

        Returns:
          Logits, the normed state that they are read from, and what was chosen.

        Raises:
          ValueError: a mask together with segments or with padding, a layer that is not there,
            or layers asked of a scanned model.
        """
        _check_layers(self, "hidden_layers", hidden_layers, self.num_layers)
        _check_layers(self, "attention_layers", attention_layers, self.num_layers - 1)
        pattern = self.pattern(tokens, positions, mask, segment_ids=segment_ids, valid=valid)
        x = self.embed(tokens, pattern.positions)
        hidden, attention = {0: x}, {}
        if self.scan_layers:
            x = self.run_layers(x, pattern)
        else:
            for index in range(self.num_layers):
                if index in attention_layers:
                    attention[index] = getattr(self, f"layer_{index}").weights(x, pattern)
                x = self.run_layers(x, pattern, index, index + 1)
                hidden[index + 1] = x
        normed = self.normalize(x)
        return DecoderOutput(
            self.read_out(normed) if logits else None,
            normed,
            tuple(hidden[index] for index in hidden_layers),
            tuple(attention[index] for index in attention_layers),
        )

    def pattern(
        self,
        tokens: Integer[Array, "batch seq"],
        positions: Int[Array, "#batch seq"] | None = None,
        mask: Bool[Array, "#batch 1 seq seq"] | None = None,
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        valid: Bool[Array, "batch seq"] | None = None,
    ) -> Pattern:
        """What `run_layers` needs to know of the tokens; the arguments are those of a call."""
        if mask is not None and (segment_ids is not None or valid is not None):
            raise ValueError("mask: cannot be combined with segment_ids or valid; join them in it")
        if positions is None and valid is not None:
            positions = jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)
        elif positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        if valid is not None:
            numbers = jnp.ones_like(positions) if segment_ids is None else segment_ids
            segment_ids = jnp.where(valid, numbers, jnp.zeros_like(numbers))
        return Pattern(positions, decoder_block(self).tables(positions), segment_ids, mask)

    def run_layers(
        self,
        x: Float[Array, "batch seq width"],
        pattern: Pattern,
        start: int = 0,
        stop: int | None = None,
    ) -> Float[Array, "batch seq width"]:
        """The residual stream after some of the layers.

        Args:
          x: residual stream that enters layer `start`.
          pattern: from `pattern`.
          start: first layer to run.
          stop: layer before which to stop; all by default.

        Raises:
          ValueError: only some layers of a scanned model.
        """
        stop = self.num_layers if stop is None else stop
        if not self.scan_layers:
            for index in range(start, stop):
                x = getattr(self, f"layer_{index}")(x, pattern)
            return x
        if (start, stop) != (0, self.num_layers):
            raise ValueError(f"start={start}, stop={stop}: a scanned model runs all its layers")
        same = len(set(self.windows)) == 1
        windows = [_EVERYTHING if window is None else window for window in self.windows]
        loop = nn.scan(
            lambda block, carry, window: (block(carry, pattern, window), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.num_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = loop(self.layers, x, None if same else jnp.asarray(windows, jnp.int32))
        return x


def decoder_block(model: Decoder, layer: int = 0) -> Block:
    """A layer of a decoder as a module of its own.

    Args:
      model: its sizes are used, its parameters are not needed.
      layer: which one; layers differ in their sliding window only.

    Returns:
      A block for `block.apply({"params": params["layer_0"]}, x, positions, method="project")`
      and the like, with the canonical parameters of any layer.
    """
    return Block(**_block_sizes(model, layer), parent=None)


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


def _head_dim(model: Decoder) -> int:
    return model.width // model.num_heads if model.head_dim is None else model.head_dim


def _block_sizes(model: Decoder, layer: int) -> dict[str, Any]:
    hidden_width = model.hidden_width
    if hidden_width is None:
        hidden_width = 32 * math.ceil(8 * model.width / (3 * 32))
    shared = (
        "width num_heads rope_theta norm_epsilon dtype rope_scaling norm qk_norm qkv_bias "
        "output_bias mlp_bias gated_mlp activation attention_block param_dtype"
    )
    return {
        **{name: getattr(model, name) for name in shared.split()},
        "num_kv_heads": model.num_kv_heads or model.num_heads,
        "head_dim": _head_dim(model),
        "hidden_width": hidden_width,
        # Two projections a layer add to the stream: its variance stays about the same.
        "output_stddev": INIT_STDDEV / math.sqrt(2 * model.num_layers),
        "window": model.windows[layer],
        "rotary": model.num_positions is None,
    }


def _check_layers(model: Decoder, name: str, layers: Sequence[int], last: int) -> None:
    for layer in layers:
        if not 0 <= layer <= last:
            raise ValueError(f"{name}={tuple(layers)}: allowed are 0 to {last}")
    if layers and model.scan_layers:
        raise ValueError(f"{name}={tuple(layers)}: a scanned model keeps none; unstack its layers")


def _check_sizes(model: Decoder) -> None:
    names = ("vocab_size", "width", "num_layers", "num_heads", "attention_block")
    optional = ("num_kv_heads", "head_dim", "hidden_width", "num_positions")
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
    if model.num_positions is None and _head_dim(model) % 2:
        raise ValueError(f"head_dim={_head_dim(model)}: rotary positions need an even width")
    if model.rope_theta <= 0:
        raise ValueError(f"rope_theta={model.rope_theta}: must be positive")
    for name, allowed in (("activation", tuple(ACTIVATIONS)), ("norm", ("rms", "layer"))):
        if getattr(model, name) not in allowed:
            raise ValueError(f"{name}={getattr(model, name)!r}: allowed are {', '.join(allowed)}")
    windows = model.sliding_window
    if isinstance(windows, tuple) and len(windows) != model.num_layers:
        raise ValueError(f"sliding_window={windows}: needs num_layers={model.num_layers} entries")
    if any(window is not None and window < 1 for window in model.windows):
        raise ValueError(f"sliding_window={windows}: must be at least 1")
