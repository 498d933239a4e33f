"""A GGUF file as if it came from the Hub: its names, its configuration, its layout.

Conversion to GGUF renames tensors, moves the configuration into metadata, and for the `llama`
architecture (Mistral's models among them) reorders the rows of the query and key projections, from
halves that are rotated against each other to neighbours that are. All of that is undone here.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlab.models.pretrained.gguf_files import GgufFile
from jaxlab.models.pretrained.tensors import GgufVocabulary, file_error, shown

__all__ = ["GgufSource", "llama3_scaling", "restore_halves"]

_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2_TOP_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_LAYER_NAMES = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
# GPT-2 stores the weights of its linear layers as [inputs, outputs].
_GPT2_TRANSPOSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
_SPECIAL_TOKENS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")


class GgufSource:
    """A `TensorSource` over a GGUF file of a Llama, Mistral, Qwen2, Qwen3 or GPT-2 model.

    Attributes:
      path: the file.
      config: as `config.json` would have it; `rope_theta` and `rope_scaling` on the top level.
      generation_config: the special tokens, as `generation_config.json` would have them.
      tokenizer: the vocabulary, or None where the file has none.
    """

    def __init__(self, path: os.PathLike[str] | str) -> None:
        """Reads the header and translates it.

        Raises:
          UserError: the file cannot be read, is damaged, is of another architecture, is one part
            of several, or lacks what a configuration needs.
        """
        self.path = Path(path)
        self._file = GgufFile(path)
        try:
            fields = _Fields(self._file.metadata)
            self._architecture = _architecture(fields)
            self._stored = _translated_names(self._file, self._architecture)
            self.tokenizer = _vocabulary(fields)
            self.config = _config(self._file, fields, self._architecture, set(self._stored))
        except ValueError as error:
            raise file_error(path, str(error)) from error
        self.config |= _special_tokens(self.tokenizer)
        self.generation_config = _generation_config(self.tokenizer)

    def keys(self) -> Sequence[str]:
        """Names of all tensors, in the order of the file."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        shape = self._file.tensors[self._stored[name]].shape
        return shape[::-1] if self._is_transposed(name) else shape

    def dtype(self, name: str) -> np.dtype:
        """Type that `read` returns."""
        return self._file.dtype(self._stored[name])

    def read(self, name: str) -> np.ndarray:
        """A tensor; float32 where it is quantised.

        Raises:
          KeyError: there is no such tensor.
          UserError: it has a type that is not supported, a scale that is not finite, or rows
            that do not divide into heads.
        """
        found = self._file.read(self._stored[name])
        if self._is_transposed(name):
            return found.T
        heads = self._num_reordered_heads(name)
        if heads is None:
            return found
        try:
            return restore_halves(found, heads)
        except ValueError as error:
            raise file_error(self.path, f"tensor {shown(name)}: {error}") from error

    def _is_transposed(self, name: str) -> bool:
        if self._architecture != "gpt2":
            return False
        match = _BLOCK.fullmatch(self._stored[name])
        return match is not None and match[2] in _GPT2_TRANSPOSED and match[3] == "weight"

    def _num_reordered_heads(self, name: str) -> int | None:
        if self._architecture != "llama":
            return None
        match = _BLOCK.fullmatch(self._stored[name])
        part = match[2] if match else None
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        return self.config[heads[part]] if part in heads else None


def restore_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of the Hub.

    In a GGUF file of the `llama` architecture, rows `2 i` and `2 i + 1` of a head are rotated
    against each other; on the Hub these are rows `i` and `i + head_dim / 2`.

    Args:
      rows: `[num_heads * head_dim, ...]` in the order of the file.
      num_heads: query heads or key-value heads.

    Returns:
      A copy in the order of the Hub.

    Raises:
      ValueError: the rows do not divide into heads of even width.

    >>> restore_halves(np.array([0, 1, 2, 3, 10, 11, 12, 13]), 2)
    array([ 0,  2,  1,  3, 10, 12, 11, 13])
    """
    if rows.shape[0] % (2 * num_heads):
        raise ValueError(f"rows={rows.shape[0]}: must divide into {num_heads} heads of even width")
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(rows.shape)


class _Fields:
    """Metadata by key, with the type that is needed."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def text(self, key: str) -> str | None:
        return self._checked(key, str, "a text")

    def flag(self, key: str) -> bool | None:
        return self._checked(key, bool, "true or false")

    def texts(self, key: str) -> tuple[str, ...]:
        return self._checked(key, tuple, "a list of texts") or ()

    def numbers(self, key: str) -> list[Any]:
        found = self._checked(key, np.ndarray, "a list of numbers")
        return [] if found is None else found.tolist()

    def whole(self, key: str, least: int = 1) -> int | None:
        value = self._metadata.get(key)
        if isinstance(value, np.ndarray):  # one for every layer
            distinct = set(value.tolist())
            value = distinct.pop() if len(distinct) == 1 else "a list of different numbers"
        if value is None or (type(value) is int and least <= value < 1 << 31):
            return value
        raise ValueError(f"metadata {key}={shown(value)}: must be a whole number from {least}")

    def positive(self, key: str) -> float | None:
        value = self._metadata.get(key)
        if value is None or (type(value) in (int, float) and 0 < value < math.inf):
            return value
        raise ValueError(f"metadata {key}={shown(value)}: must be a positive number")

    def needed(self, key: str) -> int:
        value = self.whole(key)
        if value is None:
            raise ValueError(f"has no metadata {key}")
        return value

    def _checked(self, key: str, kind: type, words: str) -> Any:
        value = self._metadata.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise ValueError(f"metadata {key}={shown(value)}: must be {words}")


def _architecture(fields: _Fields) -> str:
    name = fields.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise ValueError(
            f"has the architecture {shown(name)}; supported are {', '.join(_ARCHITECTURES)}"
            " (llama includes Mistral)"
        )
    parts = fields.whole("split.count", least=0) or 1
    if parts > 1:
        raise ValueError(f"is one of {parts} parts; merge them with llama.cpp's gguf-split first")
    return name


def _translated_names(file: GgufFile, architecture: str) -> dict[str, str]:
    """Name on the Hub to name in the file."""
    gpt2 = architecture == "gpt2"
    top = _GPT2_TOP_NAMES if gpt2 else _TOP_NAMES
    layer = _GPT2_LAYER_NAMES if gpt2 else _LAYER_NAMES
    prefix = "transformer.h" if gpt2 else "model.layers"
    names = {}
    for stored in file.tensors:
        if stored == _ROPE_FACTORS and not gpt2:
            continue
        match = _BLOCK.fullmatch(stored)
        base, _, kind = stored.rpartition(".")
        if match and match[2] in layer:
            names[f"{prefix}.{int(match[1])}.{layer[match[2]]}.{match[3]}"] = stored
        elif base in top and kind in ("weight", "bias"):
            names[f"{top[base]}.{kind}"] = stored
        else:
            raise ValueError(
                f"holds the tensor {shown(stored)}, which {architecture} models do not have here"
            )
    if gpt2 and _is_copy(file, "output.weight", "token_embd.weight"):
        del names["lm_head.weight"]
    return names


def _is_copy(file: GgufFile, name: str, other: str) -> bool:
    """Whether both are stored with the same values, as older conversions of GPT-2 do."""
    one, two = file.tensors.get(name), file.tensors.get(other)
    if one is None or two is None or (one.kind, one.shape) != (two.kind, two.shape):
        return False
    return np.array_equal(file.read(name), file.read(other))


def _config(file: GgufFile, fields: _Fields, architecture: str, names: set[str]) -> dict[str, Any]:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError("has no table token_embd.weight of two axes")
    layers = fields.needed(f"{architecture}.block_count")
    present = {match[1] for name in file.tensors if (match := _BLOCK.fullmatch(name))}
    if present != {str(index) for index in range(min(layers, len(present) + 1))}:
        raise ValueError(f"holds {len(present)} layers, but {architecture}.block_count is {layers}")
    config = {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "lm_head.weight" not in names,
    }
    if architecture == "gpt2":
        return config | _gpt2_config(fields, layers)
    return config | _llama_like_config(file, fields, architecture, layers)


def _gpt2_config(fields: _Fields, layers: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": fields.needed("gpt2.embedding_length"),
        "n_head": fields.needed("gpt2.attention.head_count"),
        "n_layer": layers,
        "n_positions": fields.needed("gpt2.context_length"),
        "n_inner": fields.whole("gpt2.feed_forward_length"),
        "layer_norm_epsilon": fields.positive("gpt2.attention.layer_norm_epsilon") or 1e-5,
        "activation_function": "gelu_new",
    }


def _llama_like_config(
    file: GgufFile, fields: _Fields, architecture: str, layers: int
) -> dict[str, Any]:
    def key(name: str) -> str:
        return f"{architecture}.{name}"

    width = fields.needed(key("embedding_length"))
    heads = fields.needed(key("attention.head_count"))
    head_dim = fields.whole(key("attention.key_length")) or width // heads
    for name in ("attention.value_length", "rope.dimension_count"):
        if (fields.whole(key(name)) or head_dim) != head_dim:
            raise ValueError(
                f"metadata {key(name)}={fields.whole(key(name))}: only {head_dim}, the width of a"
                " head, is supported"
            )
    kv_heads = fields.whole(key("attention.head_count_kv")) or heads
    for name, count in (("blk.0.attn_q.weight", heads), ("blk.0.attn_k.weight", kv_heads)):
        rows = file.tensors[name].shape[0] if name in file.tensors else count * head_dim
        if rows != count * head_dim or head_dim % 2:
            raise ValueError(f"tensor {name} has {rows} rows for {count} heads of {head_dim}")
    window = fields.whole(key("attention.sliding_window"), least=0) or None
    model = "mistral" if architecture == "llama" and window else architecture
    theta = fields.positive(key("rope.freq_base")) or 10000.0
    config = {
        "model_type": model,
        "architectures": [f"{model.capitalize()}ForCausalLM"],
        "hidden_size": width,
        "intermediate_size": fields.needed(key("feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.needed(key("context_length")),
        "rms_norm_eps": fields.positive(key("attention.layer_norm_rms_epsilon")) or 1e-6,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, fields, architecture, theta),
    }
    if architecture in ("qwen2", "qwen3"):
        config["use_sliding_window"] = False  # whatever the file says, nobody attends so
    elif window:
        config["sliding_window"] = window
    if architecture in ("llama", "qwen3") and model != "mistral":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if model == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return config


def _rope_scaling(
    file: GgufFile, fields: _Fields, architecture: str, theta: float
) -> dict[str, Any] | None:
    prefix = f"{architecture}.rope.scaling"
    kind = fields.text(f"{prefix}.type") or "none"
    factor = fields.positive(f"{prefix}.factor")
    if factor is None:
        factor = fields.positive(f"{architecture}.rope.scale_linear")
        kind = "linear" if factor not in (None, 1.0) and kind == "none" else kind
    if _ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise ValueError(f"has both {_ROPE_FACTORS} and {prefix}.type={shown(kind)}")
        return llama3_scaling(file.read(_ROPE_FACTORS), theta)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"metadata {prefix}.type={shown(kind)}: supported are none, linear, yarn")
    if factor is None:
        raise ValueError(f"has no metadata {prefix}.factor")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.needed(
            f"{prefix}.original_context_length"
        )
        for name in ("beta_fast", "beta_slow"):
            value = fields.positive(f"{prefix}.yarn_{name}")
            if value is not None:
                scaling[name] = value
        multiplier = fields.positive(f"{prefix}.attn_factor")
        if multiplier is not None:
            scaling["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1)
    return scaling


def llama3_scaling(factors: np.ndarray, theta: float) -> dict[str, Any] | None:
    """The `rope_scaling` of Llama 3.1 behind the divisors of its rotary frequencies.

    The divisors are 1 for short wavelengths, `factor` for long ones, and in between
    `1 / ((1 - s) / factor + s)`, where `s` is linear in the frequency. A file keeps only the
    divisors, which do not fix the scale of the other numbers: `low_freq_factor` is 1 here.

    Args:
      factors: divisor of each frequency, fastest first, `[head_dim / 2]`.
      theta: base of the frequencies.

    Returns:
      A dict with `rope_type="llama3"`, or None where all divisors are 1.

    Raises:
      ValueError: they do not follow that rule.

    Source: Grattafiori et al., "The Llama 3 Herd of Models"; the rule is in its published code.
    """
    divisors = np.asarray(factors, np.float64).reshape(-1)
    if np.array_equal(divisors, np.ones_like(divisors)):
        return None
    frequencies = theta ** (-np.arange(divisors.size) / divisors.size)
    with np.errstate(all="ignore"):
        found = _fitted_llama3(divisors, frequencies)
        if found and np.allclose(_llama3_divisors(found, frequencies), divisors, rtol=1e-4, atol=0):
            return found
    raise ValueError(f"tensor {_ROPE_FACTORS} does not follow the scaling of Llama 3.1")


def _fitted_llama3(divisors: np.ndarray, frequencies: np.ndarray) -> dict[str, Any] | None:
    """The numbers behind the divisors between 1 and the largest; two of these are needed."""
    factor = float(divisors.max())
    inner = (divisors > 1) & (divisors < factor)
    if inner.sum() < 2:
        return None
    smooth = (1 / divisors[inner] - 1 / factor) / (1 - 1 / factor)
    inverse_length = frequencies[inner] / (2 * math.pi)
    centred = inverse_length - inverse_length.mean()
    slope = float(centred @ smooth / (centred @ centred))
    shift = float(slope * inverse_length.mean() - smooth.mean())
    if not (0 < slope < 1e12 and shift > 1e-6):
        return None
    high = 1 + 1 / shift
    high = float(round(high)) if abs(high - round(high)) <= 1e-3 * high else high
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": round(slope * (high - 1)),
    }


def _llama3_divisors(scaling: Mapping[str, Any], frequencies: np.ndarray) -> np.ndarray:
    length = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (length * frequencies / (2 * math.pi) - low) / (high - low)
    smooth = np.clip(smooth, 0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _vocabulary(fields: _Fields) -> GgufVocabulary | None:
    prefix = "tokenizer.ggml"
    tokens = fields.texts(f"{prefix}.tokens")
    model = fields.text(f"{prefix}.model")
    if not tokens or model is None:
        return None
    scores = fields.numbers(f"{prefix}.scores")
    types = fields.numbers(f"{prefix}.token_type")
    for name, values in (("scores", scores), ("token_type", types)):
        if len(values) not in (0, len(tokens)):
            raise ValueError(
                f"metadata {prefix}.{name} has {len(values)} entries for {len(tokens)} tokens"
            )
    ids = {}
    for name in _SPECIAL_TOKENS:
        ids[name] = fields.whole(f"{prefix}.{name}_token_id", least=0)
        if (ids[name] or 0) >= len(tokens):
            raise ValueError(
                f"metadata {prefix}.{name}_token_id={ids[name]}: there are {len(tokens)} tokens"
            )
    stops = [ids[name] for name in ("eot", "eom") if ids[name] not in (None, ids["eos"])]
    return GgufVocabulary(
        model=model,
        tokens=tokens,
        merges=fields.texts(f"{prefix}.merges"),
        scores=tuple(float(score) for score in scores),
        token_types=tuple(int(kind) for kind in types),
        pre=fields.text(f"{prefix}.pre") or "default",
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        unk_id=ids["unknown"],
        pad_id=ids["padding"],
        more_stop_ids=tuple(dict.fromkeys(stops)),
        add_bos=fields.flag(f"{prefix}.add_bos_token"),
        add_eos=fields.flag(f"{prefix}.add_eos_token"),
        add_space_prefix=fields.flag(f"{prefix}.add_space_prefix"),
        chat_template=fields.text("tokenizer.chat_template"),
    )


def _special_tokens(vocabulary: GgufVocabulary | None) -> dict[str, Any]:
    if vocabulary is None:
        return {}
    return {
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": vocabulary.pad_id,
    }


def _generation_config(vocabulary: GgufVocabulary | None) -> dict[str, Any]:
    """As `_special_tokens`, but with all tokens that end an answer."""
    found = {k: v for k, v in _special_tokens(vocabulary).items() if v is not None}
    if vocabulary and vocabulary.more_stop_ids:
        ends = () if vocabulary.eos_id is None else (vocabulary.eos_id,)
        found["eos_token_id"] = [*ends, *vocabulary.more_stop_ids]
    return found
