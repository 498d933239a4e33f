"""Published decoders: from their configurations to `Decoder`, and between names of tensors.

Configurations are read in both dialects: `rope_theta` beside `rope_scaling`, as folders on the
Hub have them, and `rope_parameters`, as transformers 5 writes them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlab.errors import UserError
from jaxlab.models.blocks import Activation
from jaxlab.models.decoder import Decoder
from jaxlab.ops.rotary import LinearScaling, Llama3Scaling, RotaryScaling, YarnScaling
from jaxlab.parallel.rules import shardings_for

__all__ = [
    "ARCHITECTURES",
    "NamedTensors",
    "TensorPlace",
    "decoder_from_config",
    "params_from_tensors",
    "tensor_map",
    "tensors_from_params",
]

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
    "GPT2LMHeadModel": "gpt2",
}
"""Supported entry of `architectures` to its `model_type`."""

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_BUFFERS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|h\.\d+\.attn\.(masked_)?bias)")
_NAMED = 5  # problems that an error names


class NamedTensors(Protocol):
    """Tensors under the names of the Hub, read when they are asked for."""

    def keys(self) -> Iterable[str]:
        """Names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        ...

    def read(self, name: str) -> np.ndarray:
        """A tensor, maybe as a read-only view of a file."""
        ...


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """Where a parameter lies in the tensors of a checkpoint, and how it is laid out there.

    Attributes:
      name: of the tensor.
      shape: of the tensor.
      split: shape of the parameter's part of the tensor, with heads apart from their width.
      axes: the parameter's axes in terms of those of `split`.
      part: `(start, stop)` on the tensor's last axis, where several parameters share a tensor.
    """

    name: str
    shape: tuple[int, ...]
    split: tuple[int, ...]
    axes: tuple[int, ...]
    part: tuple[int, int] | None = None

    def parameter(self, tensor: np.ndarray) -> np.ndarray:
        """The parameter as a view of the tensor."""
        if self.part is not None:
            tensor = tensor[..., slice(*self.part)]
        return tensor.reshape(self.split).transpose(self.axes)

    def piece(self, parameter: np.ndarray) -> np.ndarray:
        """The inverse of `parameter`: the tensor, or its part."""
        back = parameter.transpose(np.argsort(self.axes))
        columns = [self.part[1] - self.part[0]] if self.part else list(self.shape[-1:])
        return back.reshape(*self.shape[:-1], *columns)


def decoder_from_config(
    config: Mapping[str, Any], *, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32
) -> Decoder:
    """The model that a `config.json` describes.

    Args:
      config: its content.
      dtype: type of the computation.
      param_dtype: type of the parameters.

    Raises:
      UserError: an architecture, an activation, a rotary scaling or a setting that is not
        supported, or a value that is missing or of the wrong kind.
    """
    family = _family(config)
    build = _gpt2 if family == "gpt2" else _llama_like
    settings = build(config, family)
    try:
        return Decoder(**settings, dtype=dtype, param_dtype=param_dtype)
    except ValueError as error:
        raise UserError("config", family, str(error)) from error


def tensor_map(model: Decoder, config: Mapping[str, Any]) -> dict[str, TensorPlace]:
    """Where each parameter lies in a checkpoint.

    Args:
      model: from `decoder_from_config`.
      config: names the family.

    Returns:
      Dotted path of a parameter, such as `layer_0.query`, to its place.
    """
    places = _gpt2_places if _family(config) == "gpt2" else _llama_like_places
    return dict(places(model, _shapes(model)))


def params_from_tensors(
    source: NamedTensors,
    model: Decoder,
    config: Mapping[str, Any],
    *,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """Parameters of a decoder from a checkpoint's tensors, one by one.

    Args:
      source: the tensors. Buffers that hold no weights are passed over, and so is the second copy
        of tied embeddings.
      model: from `decoder_from_config`; its `param_dtype` is that of the result.
      config: names the family.
      mesh: over which to split the parameters as they are read; None for the default device.

    Returns:
      Canonical parameters, unboxed.

    Raises:
      UserError: tensors are missing, unknown or misshapen, hold no floating-point numbers, or
        cannot be split over the mesh.
    """
    places = tensor_map(model, config)
    prefix = _check_names(source, places, model)
    shardings = _shardings(model, mesh)
    params: dict[str, Any] = {}
    for path, place in places.items():
        found = place.parameter(source.read(place.name.removeprefix(prefix)))
        if not jnp.issubdtype(found.dtype, jnp.floating):
            problem = f"has type {found.dtype}; allowed are floating-point types"
            raise UserError("model", place.name, problem)
        _put(params, path, _placed(found, model.param_dtype, shardings[path]))
    return params


def tensors_from_params(
    params: Mapping[str, Any], model: Decoder, config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The inverse of `params_from_tensors`, bit for bit.

    Args:
      params: canonical parameters.
      model: from `decoder_from_config`.
      config: names the family.

    Returns:
      Tensors by name, in the type of the parameters.

    Raises:
      ValueError: the parameters are int8 weights, which lie apart from their scales.
    """
    pieces: dict[str, list[tuple[int, np.ndarray]]] = {}
    for path, place in tensor_map(model, config).items():
        leaf: Any = params
        for key in path.split("."):
            leaf = leaf[key]
        if leaf.dtype == jnp.int8:
            raise ValueError(f"params: {path} has type int8; allowed are floating-point types")
        start = place.part[0] if place.part else 0
        pieces.setdefault(place.name, []).append((start, place.piece(np.asarray(leaf))))
    return {
        name: np.concatenate([piece for _, piece in sorted(found, key=lambda x: x[0])], axis=-1)
        for name, found in pieces.items()
    }


def _placed(found: np.ndarray, dtype: Any, sharding: Any) -> jax.Array:
    if sharding is None:
        return jnp.asarray(np.array(found, dtype, order="C"))
    return jax.make_array_from_callback(
        found.shape, sharding, lambda index: np.array(found[index], dtype, order="C")
    )


def _put(params: dict[str, Any], path: str, leaf: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        params = params.setdefault(key, {})
    params[last] = leaf


def _boxed(model: Decoder) -> Any:
    """Shapes of the parameters; since layers are alike, one is traced for all."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    small = model.clone(num_layers=1, sliding_window=None)
    params = dict(jax.eval_shape(small.init, jax.random.key(0), tokens)["params"])
    layer = params.pop("layer_0")
    return params | {f"layer_{index}": layer for index in range(model.num_layers)}


def _named(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in _named(nn.unbox(_boxed(model))).items()}


def _shardings(model: Decoder, mesh: Mesh | None) -> dict[str, Any]:
    boxed = _boxed(model)
    shapes = nn.unbox(boxed)
    if mesh is None:
        return dict.fromkeys(_named(shapes))
    return _named(shardings_for(shapes, nn.get_partition_spec(boxed), mesh))


def _check_names(source: NamedTensors, places: Mapping[str, TensorPlace], model: Decoder) -> str:
    """Raises unless exactly the wanted tensors are there; what their names lack in front."""
    wanted = {place.name: place.shape for place in places.values()}
    present = set(source.keys())
    prefix = f"{places['embedding'].name.split('.')[0]}."
    # Checkpoints of a body without its head, and the first GPT-2, have shorter names.
    if not any(name.startswith(prefix) for name in present):
        wanted = {name.removeprefix(prefix): shape for name, shape in wanted.items()}
    else:
        prefix = ""
    ignored = {name for name in present if _BUFFERS.fullmatch(name)}
    if model.tie_embeddings:
        ignored.add("lm_head.weight")
    problems = [f"{name} is missing" for name in wanted if name not in present]
    problems += [f"{name} is unknown" for name in sorted(present - set(wanted) - ignored)]
    problems += [
        f"{name} has shape {tuple(source.shape(name))}, not {shape}"
        for name, shape in wanted.items()
        if name in present and tuple(source.shape(name)) != shape
    ]
    if problems:
        more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        where = getattr(source, "path", "its tensors")
        raise UserError("model", where, "; ".join(problems[:_NAMED]) + more)
    return prefix


def _llama_like_places(
    model: Decoder, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, TensorPlace]]:
    layer_names = {
        "attention_norm.scale": "input_layernorm.weight",
        "query": "self_attn.q_proj.weight",
        "key": "self_attn.k_proj.weight",
        "value": "self_attn.v_proj.weight",
        "attention_output": "self_attn.o_proj.weight",
        "query_bias": "self_attn.q_proj.bias",
        "key_bias": "self_attn.k_proj.bias",
        "value_bias": "self_attn.v_proj.bias",
        "attention_output_bias": "self_attn.o_proj.bias",
        "query_norm.scale": "self_attn.q_norm.weight",
        "key_norm.scale": "self_attn.k_norm.weight",
        "mlp_norm.scale": "post_attention_layernorm.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
        "gate_bias": "mlp.gate_proj.bias",
        "up_bias": "mlp.up_proj.bias",
        "down_bias": "mlp.down_proj.bias",
    }
    top_names = {
        "embedding": "model.embed_tokens.weight",
        "final_norm.scale": "model.norm.weight",
        "unembedding": "lm_head.weight",
    }
    for path, shape in shapes.items():
        layer, _, rest = path.partition(".")
        if path == "embedding":
            yield path, _as_it_is(top_names[path], shape)
        elif path in top_names:
            yield path, _outputs_first(top_names[path], shape)
        else:
            name = f"model.layers.{layer.removeprefix('layer_')}.{layer_names[rest]}"
            yield path, _outputs_first(name, shape, 2 if rest == "attention_output" else 1)


def _gpt2_places(
    model: Decoder, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, TensorPlace]]:
    layer_names = {
        "attention_norm.scale": "ln_1.weight",
        "attention_norm.bias": "ln_1.bias",
        "attention_output": "attn.c_proj.weight",
        "attention_output_bias": "attn.c_proj.bias",
        "mlp_norm.scale": "ln_2.weight",
        "mlp_norm.bias": "ln_2.bias",
        "up": "mlp.c_fc.weight",
        "up_bias": "mlp.c_fc.bias",
        "down": "mlp.c_proj.weight",
        "down_bias": "mlp.c_proj.bias",
    }
    top_names = {
        "embedding": "transformer.wte.weight",
        "position_embedding": "transformer.wpe.weight",
        "final_norm.scale": "transformer.ln_f.weight",
        "final_norm.bias": "transformer.ln_f.bias",
    }
    thirds = ("query", "key", "value")
    for path, shape in shapes.items():
        layer, _, rest = path.partition(".")
        prefix = f"transformer.h.{layer.removeprefix('layer_')}"
        kind, _, bias = rest.partition("_")
        if path in top_names:
            yield path, _as_it_is(top_names[path], shape)
        elif path == "unembedding":
            yield path, _outputs_first("lm_head.weight", shape)
        elif kind in thirds:
            start, size = thirds.index(kind) * model.width, model.width
            name = f"{prefix}.attn.c_attn.{'bias' if bias else 'weight'}"
            whole = (*shape[: 0 if bias else 1], 3 * size)
            axes = tuple(range(len(shape)))
            yield path, TensorPlace(name, whole, shape, axes, (start, start + size))
        else:
            inputs = 2 if rest == "attention_output" else 1
            flat = shape if len(shape) == 1 else _flat(shape, inputs)
            axes = tuple(range(len(shape)))
            yield path, TensorPlace(f"{prefix}.{layer_names[rest]}", flat, shape, axes)


def _as_it_is(name: str, shape: tuple[int, ...]) -> TensorPlace:
    return TensorPlace(name, shape, shape, tuple(range(len(shape))))


def _flat(shape: tuple[int, ...], inputs: int) -> tuple[int, ...]:
    return math.prod(shape[:inputs]), math.prod(shape[inputs:])


def _outputs_first(name: str, shape: tuple[int, ...], inputs: int = 1) -> TensorPlace:
    """A linear layer as PyTorch keeps it, `[outputs, inputs]`; vectors are as they are."""
    if len(shape) == 1:
        return _as_it_is(name, shape)
    outputs = len(shape) - inputs
    axes = (*range(outputs, len(shape)), *range(outputs))
    return TensorPlace(name, _flat(shape, inputs)[::-1], (*shape[inputs:], *shape[:inputs]), axes)


def _family(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if isinstance(named, list | tuple) and named:
        family = ARCHITECTURES.get(named[0]) if isinstance(named[0], str) else None
        if family is None:
            raise _unsupported("architectures", named[0], ARCHITECTURES)
        return family
    family = config.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES.values():
        raise _unsupported("model_type", family, ARCHITECTURES.values())
    return family


def _llama_like(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    width, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    layers = _whole(config, "num_hidden_layers")
    head_dim = config.get("head_dim", 128 if family == "qwen3" else None)
    theta, scaling = _rotary(config)
    bias = bool(config.get("attention_bias", False))
    return {
        "vocab_size": _whole(config, "vocab_size"),
        "width": width,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": _whole(config, "num_key_value_heads", heads),
        "head_dim": None if head_dim is None else _whole(config, "head_dim", head_dim),
        "hidden_width": _whole(config, "intermediate_size"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_epsilon": _positive(config, "rms_norm_eps", 1e-6),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "activation": _activation(config, "hidden_act", "silu"),
        "qk_norm": family == "qwen3",
        "qkv_bias": family == "qwen2" or (family != "mistral" and bias),
        "output_bias": family in ("llama", "qwen3") and bias,
        "mlp_bias": family == "llama" and bool(config.get("mlp_bias", False)),
        "sliding_window": _windows(config, family, layers),
    }


def _gpt2(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    del family
    for name, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if bool(config.get(name, usual)) != usual:
            raise _unsupported(name, config[name], [usual])
    if config.get("add_cross_attention", False):
        raise _unsupported("add_cross_attention", True, [False])
    width = _whole(config, "n_embd")
    inner = config.get("n_inner")
    return {
        "vocab_size": _whole(config, "vocab_size"),
        "width": width,
        "num_layers": _whole(config, "n_layer"),
        "num_heads": _whole(config, "n_head"),
        "hidden_width": 4 * width if inner is None else _whole(config, "n_inner"),
        "norm_epsilon": _positive(config, "layer_norm_epsilon", 1e-5),
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
        "activation": _activation(config, "activation_function", "gelu_new"),
        "norm": "layer",
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "gated_mlp": False,
        "num_positions": _whole(config, "n_positions", 1024),
    }


def _windows(
    config: Mapping[str, Any], family: str, layers: int
) -> int | tuple[int | None, ...] | None:
    if family == "mistral":
        if config.get("sliding_window", 4096) is None:
            return None
        return _whole(config, "sliding_window", 4096)
    if family == "llama" or not config.get("use_sliding_window", False):
        return None
    if config.get("sliding_window", 4096) is None:
        return None
    window = _whole(config, "sliding_window", 4096)
    kinds = config.get("layer_types")
    if kinds is None:
        full = _whole(config, "max_window_layers", 28)
        return tuple(None if layer < full else window for layer in range(layers))
    places: Mapping[str, int | None] = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise UserError("config.layer_types", kinds, f"allowed is a list of {layers} kinds")
    for kind in kinds:
        if kind not in list(places):  # which may not be a text at all
            raise _unsupported("layer_types", kind, places)
    return tuple(places[kind] for kind in kinds)


def _rotary(config: Mapping[str, Any]) -> tuple[float, RotaryScaling | None]:
    """Base of the frequencies and their scaling, from either dialect."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    found = config.get(field) or {}
    if not isinstance(found, Mapping) or any(isinstance(x, Mapping) for x in found.values()):
        raise UserError(f"config.{field}", found, "allowed is one set of settings for all layers")
    theta = _positive({**config, **found}, "rope_theta", 10000.0)
    partial = found.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise _unsupported("partial_rotary_factor", partial, [1.0])
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise _unsupported(f"{field}.rope_type", kind, _ROPE_TYPES)
    if kind == "yarn" and theta <= 1:
        raise UserError("config.rope_theta", theta, "must be above 1 with yarn")
    try:
        return theta, _scaling(config, found, kind)
    except ValueError as error:
        raise UserError(f"config.{field}", dict(found), str(error)) from error


def _scaling(
    config: Mapping[str, Any], found: Mapping[str, Any], kind: str
) -> RotaryScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_positive(found, "factor"))
    # A length on the top level comes first, then the scaling's own, then the longest context.
    length = "original_max_position_embeddings"
    known = {length: config.get("max_position_embeddings")}
    for settings in (found, config):
        known |= {length: settings[length]} if settings.get(length) else {}
    original = _whole(known, length)
    if kind == "llama3":
        return Llama3Scaling(
            _positive(found, "factor"),
            original,
            _positive(found, "low_freq_factor", 1.0),
            _positive(found, "high_freq_factor", 4.0),
        )
    if found.get("factor") is None:
        found = {**found, "factor": _whole(config, "max_position_embeddings") / original}
    factor = _positive(found, "factor")
    return YarnScaling(
        factor,
        original,
        _positive(found, "beta_fast", 32.0),
        _positive(found, "beta_slow", 1.0),
        bool(found.get("truncate", True)),
        _yarn_amplitude(found, factor),
    )


def _yarn_amplitude(found: Mapping[str, Any], factor: float) -> float | None:
    if found.get("attention_factor") is not None:
        return _positive(found, "attention_factor")
    if not found.get("mscale") or not found.get("mscale_all_dim"):
        return None
    grown = [
        0.1 * _positive(found, name) * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim")
    ]
    return grown[0] / grown[1]


def _activation(config: Mapping[str, Any], name: str, default: str) -> Activation:
    found = config.get(name, default)
    if found not in list(_ACTIVATIONS):
        raise _unsupported(name, found, _ACTIVATIONS)
    return _ACTIVATIONS[found]


def _whole(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise UserError(f"config.{name}", value, "must be a whole number of at least 1")
    return value


def _positive(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"config.{name}", value, "must be a positive number")
    return float(value)


def _unsupported(name: str, value: object, allowed: Any) -> UserError:
    words = ", ".join(str(entry) for entry in allowed)
    return UserError(f"config.{name}", value, f"not supported; supported are {words}")
