from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlab.errors import UserError
from jaxlab.models.pretrained.gguf_source import GgufSource, llama3_scaling, restore_halves
from tests.models.pretrained.gguf_writer import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    VOCAB,
    WIDTH,
    llama_metadata,
    llama_tensors,
    stored,
    write_gguf,
)


def source(folder: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> GgufSource:
    return GgufSource(write_gguf(folder / "model.gguf", metadata, tensors))


def values(tensor: tuple[str, tuple[int, ...], bytes]) -> np.ndarray:
    return np.frombuffer(tensor[2], "<f4").reshape(tensor[1])


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """What conversion does: row i and row i + head_dim / 2 of a head become neighbours."""
    head_dim = rows.shape[0] // heads
    order = [
        head * head_dim + half * (head_dim // 2) + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def test_llama_has_the_names_and_the_config_of_the_hub(tmp_path: Path):
    tensors = llama_tensors()
    found = source(tmp_path, llama_metadata(), tensors)
    layer = [
        *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        *("self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj"),
        "mlp.down_proj",
    ]
    assert found.keys() == [
        "model.embed_tokens.weight",
        *(f"model.layers.{index}.{name}.weight" for index in range(2) for name in layer),
        "model.norm.weight",
    ]
    assert found.config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    for name, hub in (("ffn_down", "mlp.down_proj"), ("attn_v", "self_attn.v_proj")):
        key = f"model.layers.1.{hub}.weight"
        expected = values(tensors[f"blk.1.{name}.weight"])
        np.testing.assert_array_equal(found.read(key), expected)
        assert (found.shape(key), found.dtype(key)) == (expected.shape, np.float32)


def test_llama_queries_and_keys_are_put_back_in_order(tmp_path: Path):
    rng = np.random.default_rng(3)
    hub = {
        "q_proj": rng.standard_normal((HEADS * HEAD_DIM, WIDTH), np.float32),
        "k_proj": rng.standard_normal((KV_HEADS * HEAD_DIM, WIDTH), np.float32),
    }
    bias = rng.standard_normal(HEADS * HEAD_DIM, np.float32)
    tensors = llama_tensors() | {
        "blk.1.attn_q.weight": stored(neighbours(hub["q_proj"], HEADS)),
        "blk.1.attn_k.weight": stored(neighbours(hub["k_proj"], KV_HEADS)),
        "blk.1.attn_q.bias": stored(neighbours(bias, HEADS)),
    }
    found = source(tmp_path, llama_metadata(), tensors)
    for name, expected in hub.items():
        actual = found.read(f"model.layers.1.self_attn.{name}.weight")
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(found.read("model.layers.1.self_attn.q_proj.bias"), bias)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_keeps_its_order(tmp_path: Path, architecture: str):
    tensors = llama_tensors()
    extra = {
        "blk.0.attn_q.bias": stored(np.arange(32.0)),
        "blk.0.attn_q_norm.weight": stored(np.arange(8.0)),
        "output.weight": stored(np.ones((VOCAB, WIDTH))),
    }
    found = source(tmp_path, llama_metadata(architecture), tensors | extra)
    np.testing.assert_array_equal(
        found.read("model.layers.0.self_attn.q_proj.weight"), values(tensors["blk.0.attn_q.weight"])
    )
    np.testing.assert_array_equal(
        found.read("model.layers.0.self_attn.q_proj.bias"), np.arange(32.0)
    )
    np.testing.assert_array_equal(found.read("model.layers.0.self_attn.q_norm.weight"), range(8))
    np.testing.assert_array_equal(found.read("lm_head.weight"), np.ones((VOCAB, WIDTH)))
    assert found.config["model_type"] == architecture
    assert found.config["tie_word_embeddings"] is False
    assert found.config["use_sliding_window"] is False


def test_mistral_is_a_llama_with_a_window(tmp_path: Path):
    found = source(tmp_path, llama_metadata(llama__attention__sliding_window=16), llama_tensors())
    assert (found.config["model_type"], found.config["sliding_window"]) == ("mistral", 16)
    assert found.config["architectures"] == ["MistralForCausalLM"]


def gpt2(**more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, 8),
        "position_embd.weight": (16, 8),
        "blk.0.attn_norm.weight": (8,),
        "blk.0.attn_norm.bias": (8,),
        "blk.0.attn_qkv.weight": (24, 8),
        "blk.0.attn_qkv.bias": (24,),
        "blk.0.attn_output.weight": (8, 8),
        "blk.0.attn_output.bias": (8,),
        "blk.0.ffn_norm.weight": (8,),
        "blk.0.ffn_norm.bias": (8,),
        "blk.0.ffn_up.weight": (32, 8),
        "blk.0.ffn_up.bias": (32,),
        "blk.0.ffn_down.weight": (8, 32),
        "blk.0.ffn_down.bias": (8,),
        "output_norm.weight": (8,),
        "output_norm.bias": (8,),
    }
    metadata = {
        "general.architecture": "gpt2",
        "gpt2.block_count": 1,
        "gpt2.context_length": 16,
        "gpt2.embedding_length": 8,
        "gpt2.feed_forward_length": 32,
        "gpt2.attention.head_count": 2,
        "gpt2.attention.layer_norm_epsilon": 1e-5,
    }
    tensors = {name: stored(rng.standard_normal(shape)) for name, shape in shapes.items()}
    return metadata, tensors | more


def test_gpt2_turns_its_linear_layers_round(tmp_path: Path):
    metadata, tensors = gpt2()
    found = source(tmp_path, metadata, tensors)
    for name, hub, shape in (
        ("attn_qkv", "attn.c_attn", (8, 24)),
        ("attn_output", "attn.c_proj", (8, 8)),
        ("ffn_up", "mlp.c_fc", (8, 32)),
        ("ffn_down", "mlp.c_proj", (32, 8)),
    ):
        key = f"transformer.h.0.{hub}.weight"
        assert found.shape(key) == shape
        np.testing.assert_array_equal(found.read(key), values(tensors[f"blk.0.{name}.weight"]).T)
    for name, hub in (("ffn_norm.bias", "ln_2.bias"), ("attn_qkv.bias", "attn.c_attn.bias")):
        expected = values(tensors[f"blk.0.{name}"])
        np.testing.assert_array_equal(found.read(f"transformer.h.0.{hub}"), expected)
    assert found.shape("transformer.wpe.weight") == (16, 8)
    assert found.config == {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": VOCAB,
        "n_embd": 8,
        "n_head": 2,
        "n_layer": 1,
        "n_positions": 16,
        "n_inner": 32,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }
    assert found.tokenizer is None
    assert found.generation_config == {}


def test_gpt2_output_that_repeats_the_embedding_is_tied(tmp_path: Path):
    metadata, tensors = gpt2()
    copy = tensors | {"output.weight": tensors["token_embd.weight"]}
    assert "lm_head.weight" not in list(source(tmp_path, metadata, copy).keys())
    other = tensors | {"output.weight": stored(values(tensors["token_embd.weight"]) + 1)}
    found = source(tmp_path, metadata, other)
    assert "lm_head.weight" in list(found.keys())
    assert found.config["tie_word_embeddings"] is False


def test_vocabulary_is_handed_over_as_it_stands(tmp_path: Path):
    metadata = llama_metadata(tokenizer__ggml__add_bos_token=False)
    metadata |= {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    metadata["tokenizer.ggml.scores"] = [float(-index) for index in range(VOCAB)]
    found = source(tmp_path, metadata, llama_tensors())
    vocabulary = found.tokenizer
    assert vocabulary is not None
    assert (vocabulary.model, vocabulary.pre) == ("gpt2", "smollm")
    assert vocabulary.tokens == tuple(f"t{index}" for index in range(VOCAB))
    assert vocabulary.merges == ("t 1", "t 2")
    assert vocabulary.token_types == (3, *[1] * (VOCAB - 1))
    assert vocabulary.scores[:3] == (0.0, -1.0, -2.0)
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.more_stop_ids) == (1, 2, (5,))
    assert (vocabulary.unk_id, vocabulary.pad_id) == (None, None)
    assert (vocabulary.add_bos, vocabulary.add_space_prefix) == (False, None)
    assert vocabulary.chat_template == "{{ messages }}"
    # Both what ends a text and what ends an answer.
    assert found.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 5]}


def llama3_divisors(
    size: int, theta: float, factor: float, low: float, high: float, length: int
) -> np.ndarray:
    """The published rule, one frequency after another."""
    divisors = []
    for i in range(size):
        wavelength = 2 * math.pi * theta ** (i / size)
        if wavelength < length / high:
            divisors.append(1.0)
        elif wavelength > length / low:
            divisors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(
    ("size", "theta", "factor", "low", "high", "length"),
    [
        (64, 5e5, 8.0, 1.0, 4.0, 8192),
        (32, 5e5, 32.0, 1.0, 4.0, 8192),
        (32, 1e4, 4.0, 1.0, 8.0, 512),
    ],
)
def test_llama3_scaling_is_found_behind_its_divisors(
    size: int, theta: float, factor: float, low: float, high: float, length: int
):
    found = llama3_scaling(llama3_divisors(size, theta, factor, low, high, length), theta)
    assert found == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


def test_llama3_scaling_with_another_low_factor_gives_the_same_divisors():
    divisors = llama3_divisors(64, 5e5, 8.0, 2.0, 8.0, 8192)
    found = llama3_scaling(divisors, 5e5)
    assert found is not None
    again = llama3_divisors(
        64,
        5e5,
        found["factor"],
        found["low_freq_factor"],
        found["high_freq_factor"],
        found["original_max_position_embeddings"],
    )
    np.testing.assert_allclose(again, divisors, rtol=1e-4)


@pytest.mark.parametrize(
    "divisors",
    [[1, 3, 2, 8], [1, 2, np.nan, 8], [1, 2, 4, np.inf], [0, 1, 2, 4], [1, 1, 2, 2], [1, -1, 2, 3]],
)
def test_other_divisors_are_refused(divisors: list[float]):
    with pytest.raises(ValueError, match=r"rope_freqs.weight does not follow"):
        llama3_scaling(np.array(divisors, np.float32), 1e4)


def test_rope_scaling_of_every_kind(tmp_path: Path):
    def scaling(tensors: dict[str, Any], **more: Any) -> Any:
        metadata = llama_metadata("qwen2", **{f"qwen2__rope__{k}": v for k, v in more.items()})
        return source(tmp_path, metadata, llama_tensors() | tensors).config["rope_scaling"]

    assert scaling({}) is None
    assert scaling({}, scaling__type="none") is None
    assert scaling({}, scaling__type="linear", scaling__factor=2.0) == {
        "rope_type": "linear",
        "factor": 2.0,
    }
    assert scaling({}, scale_linear=4.0) == {"rope_type": "linear", "factor": 4.0}
    yarn = {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 64}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert scaling({}, **yarn) == expected
    assert scaling({}, **yarn, scaling__attn_factor=2.0, scaling__yarn_beta_fast=16.0) == {
        **expected,
        "attention_factor": 2.0 * (0.1 * math.log(4.0) + 1),
        "beta_fast": 16.0,
    }
    assert scaling({"rope_freqs.weight": stored(np.ones(4))}) is None
    with pytest.raises(UserError, match=r"scaling.type=longrope: supported are none, linear, yarn"):
        scaling({}, scaling__type="longrope", scaling__factor=2.0)
    with pytest.raises(UserError, match=r"no metadata qwen2.rope.scaling.factor"):
        scaling({}, scaling__type="yarn")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "bert"}, "architecture bert; supported are llama, qwen2"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.block_count": 3}, "holds 2 layers, but llama.block_count is 3"),
        ({"llama.block_count": 2**31 - 1}, "holds 2 layers"),
        ({"llama.block_count": 0}, "llama.block_count=0: must be a whole number from 1"),
        ({"llama.block_count": "two"}, "llama.block_count=two: must be a whole number"),
        ({"llama.embedding_length": None}, "no metadata llama.embedding_length"),
        ({"llama.attention.head_count": 8}, "attn_k.weight has 16 rows for 2 heads of 4"),
        ({"llama.attention.key_length": 16}, "attn_q.weight has 32 rows for 4 heads of 16"),
        ({"llama.attention.value_length": 4}, "value_length=4: only 8"),
        ({"llama.rope.dimension_count": 4}, "dimension_count=4: only 8"),
        ({"llama.rope.freq_base": -1.0}, "freq_base=-1.0: must be a positive"),
        (
            {"llama.attention.layer_norm_rms_epsilon": float("nan")},
            "epsilon=nan: must be",
        ),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type has 2 entries for 11 tokens"),
        ({"tokenizer.ggml.eos_token_id": VOCAB}, "eos_token_id=11: there are 11 tokens"),
        ({"tokenizer.ggml.tokens": "all"}, "tokens=all: must be a list of texts"),
    ],
)
def test_metadata_that_do_not_fit_are_one_line(tmp_path: Path, change: dict[str, Any], words: str):
    metadata = llama_metadata() | change
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(UserError, match=words) as caught:
        source(tmp_path, metadata, llama_tensors())
    assert "\n" not in str(caught.value)


def test_layers_with_a_gap_or_with_experts_are_refused(tmp_path: Path):
    tensors = {name.replace("blk.1", "blk.2"): t for name, t in llama_tensors().items()}
    with pytest.raises(UserError, match="holds 2 layers"):
        source(tmp_path, llama_metadata(), tensors)
    experts = llama_tensors() | {"blk.0.ffn_gate_inp.weight": stored(np.ones((2, WIDTH)))}
    with pytest.raises(UserError, match=r"blk.0.ffn_gate_inp.weight, which llama models"):
        source(tmp_path, llama_metadata(), experts)


def test_rows_that_do_not_divide_name_the_tensor(tmp_path: Path):
    tensors = llama_tensors() | {"blk.1.attn_k.weight": stored(np.ones((6, WIDTH)))}
    found = source(tmp_path, llama_metadata(), tensors)
    with pytest.raises(UserError, match=r"k_proj.weight: rows=6: must divide into 2 heads"):
        found.read("model.layers.1.self_attn.k_proj.weight")


def test_restore_halves_refuses_an_odd_width():
    with pytest.raises(ValueError, match=r"rows=6: must divide into 2 heads of even width"):
        restore_halves(np.zeros(6), 2)
