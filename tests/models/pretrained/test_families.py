import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxlab.errors import UserError
from jaxlab.models.caches import dense_cache, sliding_window_cache
from jaxlab.models.decoder import Decoder
from jaxlab.models.pretrained.families import (
    decoder_from_config,
    params_from_tensors,
    tensor_map,
    tensors_from_params,
)
from jaxlab.models.seam import decode_step, init_states
from jaxlab.ops.rotary import LinearScaling, Llama3Scaling, YarnScaling
from tests.goldens import FOLDER

NAMES = [
    "gpt2",
    "llama-tied",
    "llama-untied",
    "llama3-rope",
    "mistral-window",
    "qwen2",
    "qwen2-yarn",
    "qwen3",
]
ROTARY = [name for name in NAMES if name != "gpt2"]
QUICK = {"xla_backend_optimization_level": 0}  # compiling takes longer than running here


class Tensors(dict):
    """Arrays by name as a checkpoint's tensors."""

    def shape(self, name):
        return self[name].shape

    def read(self, name):
        return self[name]


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    config = json.loads((FOLDER / "hf" / name / "config.json").read_text())
    return {**config, **changes}


@functools.cache
def tensors_of(name: str) -> Tensors:
    return Tensors(load_file(FOLDER / "hf" / name / "model.safetensors"))


@functools.cache
def expected_of(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / "hf" / name / "expected.npz") as file:
        return {key: file[key] for key in file.files}


@functools.cache
def loaded(name: str) -> tuple[Decoder, Any]:
    config = config_of(name)
    model = decoder_from_config(config)
    return model, params_from_tensors(tensors_of(name), model, config)


def greedy(model: Decoder, params: Any, prompt: jax.Array, steps: int) -> jax.Array:
    """The prompt padded by four on the left and on the right, fed in two chunks, then decoded."""
    attention = dense_cache() if model.sliding_window is None else sliding_window_cache()
    length = prompt.shape[1]
    tokens = jnp.concatenate([jnp.pad(prompt, [(0, 0), pad]) for pad in ((4, 0), (0, 4))])
    places = jnp.arange(length + 4, dtype=jnp.int32)
    valid = jnp.stack([places >= 4, places < length])
    positions = jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)

    def feed(states, chunk):
        tokens, positions, valid = chunk
        out = decode_step(
            model,
            params,
            tokens,
            states,
            attention=attention,
            positions=positions,
            valid=valid,
        )
        assert out.logits is not None
        return out.states, jnp.argmax(out.logits[:, 0], axis=-1).astype(jnp.int32)

    def step(carry, place):
        states, token = carry
        at = jnp.full((2, 1), length, jnp.int32) + place
        return feed(states, (token[:, None], at, None)), token

    states = init_states(model, attention, batch=2, capacity=length + 4 + steps)
    chunks = [x.reshape(2, 2, -1).swapaxes(0, 1) for x in (tokens, positions, valid)]
    states, first = jax.lax.scan(feed, states, tuple(chunks))
    _, found = jax.lax.scan(step, (states, first[-1]), jnp.arange(steps, dtype=jnp.int32))
    return found.T


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_continuations_are_those_of_the_reference(name):
    model, params = loaded(name)
    expected = expected_of(name)
    ids, mask = expected["input_ids"].astype(np.int32), expected["attention_mask"].astype(np.int32)
    padding = int((1 - mask[1]).sum())
    # Third row: what the first row begins with, packed before what the second has after padding.
    packed = np.concatenate([ids[0, :padding], ids[1, padding:]])
    segments = np.stack([mask[0], mask[1], 1 + mask[1]])
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]
    steps = expected["greedy_ids"].shape[1] - expected["prompt_ids"].shape[1]

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params, tokens, segments, prompt):
        logits = model.apply({"params": params}, tokens, positions, segment_ids=segments)
        return logits, greedy(model, params, prompt, steps)

    prompt = expected["prompt_ids"].astype(np.int32)
    logits, found = run(params, np.stack([*ids, packed]), segments, prompt)
    reference = expected["logits"]
    assert np.abs(logits[0] - reference[0]).max() <= 2e-4
    assert np.abs(logits[1, padding:] - reference[1, padding:]).max() <= 2e-4
    assert np.abs(logits[2, :padding] - reference[0, :padding]).max() <= 2e-4
    assert np.abs(logits[2, padding:] - reference[1, padding:]).max() <= 2e-4
    np.testing.assert_array_equal(
        found, np.tile(expected["greedy_ids"][:, prompt.shape[1] :], (2, 1))
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_round_trip_keeps_every_bit(name):
    model, params = loaded(name)
    back = tensors_from_params(params, model, config_of(name))
    original = tensors_of(name)
    assert sorted(back) == sorted(original)
    for key, value in back.items():
        assert value.dtype == original[key].dtype
        np.testing.assert_array_equal(value, original[key])


@pytest.mark.parametrize("name", ROTARY)
def test_both_dialects_describe_the_same_model(name):
    config = config_of(name)
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    old = {**rope, "type": rope.pop("rope_type")}
    config["rope_scaling"] = None if old["type"] == "default" else old
    assert decoder_from_config(config) == decoder_from_config(config_of(name))


def test_scalings_of_positions_are_read_from_either_dialect():
    def scaling(**changes):
        config = config_of("llama-untied", rope_parameters=None, **changes)
        return decoder_from_config(config).rope_scaling

    assert scaling(rope_scaling={"type": "linear", "factor": 2}) == LinearScaling(2.0)
    llama = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    assert scaling(rope_scaling=llama) == Llama3Scaling(8.0, 64)
    yarn = {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 16}
    assert scaling(rope_scaling=yarn) == YarnScaling(4.0, 256, 16.0, 1.0, False)
    given = {**yarn, "attention_factor": 1.5}
    assert scaling(rope_scaling=given) == YarnScaling(4.0, 256, 16.0, 1.0, False, 1.5)
    both = scaling(rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 0.5})
    expected = (0.1 * np.log(4) + 1) / (0.05 * np.log(4) + 1)
    assert isinstance(both, YarnScaling)
    assert both.amplitude is not None
    np.testing.assert_allclose(both.amplitude, expected)
    implied = scaling(
        rope_scaling={"rope_type": "yarn", "factor": None}, original_max_position_embeddings=64
    )
    assert implied == YarnScaling(4.0, 64)


def test_settings_with_a_meaning_of_their_own_are_followed():
    model = decoder_from_config(config_of("llama-untied", head_dim=None, attention_bias=True))
    assert model.head_dim is None
    assert model.qkv_bias
    assert model.output_bias
    qwen = decoder_from_config(config_of("qwen2", sliding_window=8))
    assert qwen.windows == (None, None, None)
    changes = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert decoder_from_config(config_of("qwen2", **changes, layer_types=None)).windows == (
        None,
        8,
        8,
    )
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert decoder_from_config(config_of("qwen2", **changes, layer_types=kinds)).windows == (
        8,
        None,
        None,
    )
    assert decoder_from_config(config_of("mistral-window", sliding_window=None)).windows[0] is None
    assert decoder_from_config(config_of("gpt2", n_inner=32)).hidden_width == 32


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2", {"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM: .*Qwen3ForCausalLM"),
        ("qwen2", {"architectures": None, "model_type": "bloom"}, "model_type=bloom: .*mistral"),
        ("qwen2", {"hidden_act": "relu"}, "config.hidden_act=relu: .*silu"),
        ("gpt2", {"activation_function": ["silu"]}, "config.activation_function"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("qwen2", {"rope_parameters": {"rope_type": "longrope"}}, "longrope: .*yarn"),
        ("qwen2", {"rope_parameters": {"full_attention": {}}}, "one set of settings"),
        ("qwen2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("qwen2", {"rope_parameters": {"rope_type": "linear"}}, "config.factor=None"),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor=0.5"),
        ("qwen2", {"hidden_size": "48"}, "config.hidden_size=48: must be a whole number"),
        ("qwen2", {"num_hidden_layers": True}, "config.num_hidden_layers=True"),
        ("qwen2", {"rms_norm_eps": -1.0}, "config.rms_norm_eps=-1.0: must be a positive"),
        ("qwen2", {"num_key_value_heads": 4}, "num_kv_heads=4: must divide"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["x"] * 3},
            "=x: ",
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": 3},
            "layer_types=3: allowed is a list of 3 kinds",
        ),
    ],
)
def test_what_is_not_supported_is_named(name, changes, message):
    with pytest.raises(UserError, match=message):
        decoder_from_config(config_of(name, **changes))


def test_the_map_names_a_tensor_for_every_parameter():
    config = config_of("gpt2")
    places = tensor_map(decoder_from_config(config), config)
    assert places["layer_2.key"].name == "transformer.h.2.attn.c_attn.weight"
    assert places["layer_2.key"].part == (48, 96)
    config = config_of("qwen3")
    place = tensor_map(decoder_from_config(config), config)["layer_1.attention_output"]
    assert (place.name, place.shape) == ("model.layers.1.self_attn.o_proj.weight", (48, 96))
    assert place.parameter(np.zeros(place.shape)).shape == (6, 16, 48)


def test_wrong_tensors_are_named_together():
    config = config_of("llama-untied")
    model = decoder_from_config(config)
    tensors = Tensors(tensors_of("llama-untied"))
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.gate_proj.weight"] = np.zeros((3, 4), np.float32)
    tensors |= {f"new.{index}": np.zeros(1, np.float32) for index in range(4)}
    with pytest.raises(UserError) as caught:
        params_from_tensors(tensors, model, config)
    message = str(caught.value)
    assert "model.norm.weight is missing; new.0 is unknown; new.1" in message
    assert message.endswith("; and 1 more")
    tensors = Tensors({**tensors_of("llama-untied"), "lm_head.weight": np.zeros((4, 4))})
    with pytest.raises(UserError, match=r"lm_head.weight has shape \(4, 4\), not \(97, 48\)"):
        params_from_tensors(tensors, model, config)
    whole = {name: np.zeros(x.shape, np.int8) for name, x in tensors_of("llama-untied").items()}
    with pytest.raises(UserError, match="has type int8"):
        params_from_tensors(Tensors(whole), model, config)


def test_buffers_copies_and_short_names_are_no_mistakes():
    config = config_of("gpt2")
    model, params = loaded("gpt2")
    tensors = Tensors(
        {key.removeprefix("transformer."): value for key, value in tensors_of("gpt2").items()}
    )
    tensors |= {"h.0.attn.bias": np.ones((1, 1, 4, 4)), "h.0.attn.masked_bias": np.ones(())}
    tensors |= {"lm_head.weight": tensors["wte.weight"]}
    found = params_from_tensors(tensors, model, config)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    tensors = Tensors(tensors_of("llama-tied"))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    params_from_tensors(tensors, loaded("llama-tied")[0], config_of("llama-tied"))


def test_narrow_weights_stay_as_they_are():
    config = config_of("qwen2")
    narrow = Tensors({k: v.astype(ml_dtypes.bfloat16) for k, v in tensors_of("qwen2").items()})
    model = decoder_from_config(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    params = params_from_tensors(narrow, model, config)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))
    for name, value in tensors_from_params(params, model, config).items():
        np.testing.assert_array_equal(value.view(np.uint16), narrow[name].view(np.uint16))
    wide = params_from_tensors(narrow, decoder_from_config(config), config)
    np.testing.assert_array_equal(wide["embedding"], narrow["model.embed_tokens.weight"])


def test_eight_devices_load_their_parts_and_compute_the_same(cache_folder):
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.decoder_on_a_mesh"],
        cwd=Path(__file__).parents[3],
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache_folder),
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
