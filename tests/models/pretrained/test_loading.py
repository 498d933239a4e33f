from __future__ import annotations

import errno
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.errors import StorageError, UserError
from jaxlab.models.decoder import stack_layers
from jaxlab.models.pretrained import loading
from jaxlab.models.pretrained.families import (
    decoder_from_config,
    tensor_map,
    tensors_from_params,
)
from jaxlab.models.pretrained.folders import open_source
from jaxlab.models.pretrained.loading import load_pretrained, save_pretrained
from jaxlab.parallel.mesh import make_mesh
from tests.models.pretrained.gguf_writer import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    WIDTH,
    llama_metadata,
    llama_shapes,
    stored,
    write_gguf,
)
from tests.models.pretrained.test_gguf_source import neighbours

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def random_model(config: dict[str, Any]) -> tuple[Any, Any]:
    model = decoder_from_config(config)
    rng = np.random.default_rng(0)
    params: dict[str, Any] = {}
    for path, place in tensor_map(model, config).items():
        shape = tuple(place.split[axis] for axis in place.axes)
        *parents, last = path.split(".")
        inner = functools.reduce(lambda tree, key: tree.setdefault(key, {}), parents, params)
        inner[last] = jnp.asarray(rng.standard_normal(shape, np.float32))
    return model, params


def same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any, Any]:
    model, params = random_model(LLAMA)
    save_pretrained(tmp_path / "model", params, model, LLAMA)
    return tmp_path / "model", model, params


def test_what_is_saved_is_loaded_again(saved: tuple[Path, Any, Any]):
    folder, model, params = saved
    found = load_pretrained(folder)
    same(found.params, params)
    assert found.model == model
    assert found.config == LLAMA | {"torch_dtype": "float32"}
    assert (found.path, found.tokenizer, found.generation_config) == (folder, None, {})
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", "model.safetensors"]


def test_gguf_file_and_folder_are_the_same_model(saved: tuple[Path, Any, Any], tmp_path: Path):
    folder, _, params = saved
    source = open_source(folder)
    hub = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
        **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
        **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    }
    tensors = {}
    for name in llama_shapes():
        *layer, part, _ = name.split(".")
        prefix = f"model.layers.{layer[1]}." if layer else ""
        found = source.read(f"{prefix}{hub[part]}.weight")
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part)
        tensors[name] = stored(found if heads is None else neighbours(found, heads))
    found = load_pretrained(write_gguf(tmp_path / "same.gguf", llama_metadata(), tensors))
    same(found.params, params)
    assert found.model == load_pretrained(folder).model


def test_types_of_computation_and_parameters(saved: tuple[Path, Any, Any], tmp_path: Path):
    folder, _, params = saved
    found = load_pretrained(folder, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    same(found.params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    assert (found.model.dtype, found.model.param_dtype) == (jnp.bfloat16, jnp.bfloat16)
    other_dialect = {**found.config, "dtype": "float32"}
    save_pretrained(tmp_path / "half", found.params, found.model, other_dialect)
    config = load_pretrained(tmp_path / "half").config
    assert config == LLAMA | {"torch_dtype": "bfloat16"}


def test_parameters_are_placed_on_a_mesh(saved: tuple[Path, Any, Any]):
    folder, _, params = saved
    mesh = make_mesh(devices=jax.devices()[:1])
    found = load_pretrained(folder, mesh=mesh)
    same(found.params, params)
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(found.params))


def test_stacked_layers_are_saved_one_by_one(saved: tuple[Path, Any, Any], tmp_path: Path):
    _, model, params = saved
    scanned = model.clone(scan_layers=True)
    save_pretrained(tmp_path / "two", stack_layers(params), scanned, LLAMA, max_shard_bytes=20_000)
    same(load_pretrained(tmp_path / "two").params, params)
    assert (tmp_path / "two" / "model.safetensors.index.json").exists()


def test_tokenizer_and_generation_config_travel_along(saved: tuple[Path, Any, Any], tmp_path: Path):
    _, model, params = saved
    texts = {"tokenizer.json": "{}", "chat_template.jinja": "é"}
    save_pretrained(
        *(tmp_path / "a", params, model, LLAMA),
        tokenizer=texts,
        generation_config={"eos_token_id": [1, 2]},
    )
    first = load_pretrained(tmp_path / "a")
    assert first.tokenizer == tmp_path / "a"
    assert first.generation_config == {"eos_token_id": [1, 2]}
    save_pretrained(tmp_path / "b", params, model, LLAMA, tokenizer=tmp_path / "a")
    for name, text in texts.items():
        assert (tmp_path / "b" / name).read_text(encoding="utf-8") == text
    with pytest.raises(UserError, match=r"tokenizer=\.\./x: is no file of a tokenizer"):
        save_pretrained(tmp_path / "c", params, model, LLAMA, tokenizer={"../x": ""})
    with pytest.raises(UserError, match="holds no files of a tokenizer"):
        save_pretrained(tmp_path / "c", params, model, LLAMA, tokenizer=tmp_path)


def test_an_earlier_save_is_replaced_and_nothing_else(saved: tuple[Path, Any, Any], tmp_path: Path):
    folder, model, params = saved
    (folder / "tokenizer.json").write_text("{}")
    twice = jax.tree.map(lambda leaf: 2 * leaf, params)
    save_pretrained(folder, twice, model, LLAMA)
    same(load_pretrained(folder).params, twice)
    assert not (folder / "tokenizer.json").exists()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds notes\.txt; allowed: a folder that is new, empty"):
        save_pretrained(folder, params, model, LLAMA)
    with pytest.raises(UserError, match="is no folder"):
        save_pretrained(folder / "notes.txt", params, model, LLAMA)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_save_that_fails_leaves_the_earlier_one(
    saved: tuple[Path, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, model, params = saved

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loading, "_write_json", full)
    with pytest.raises(StorageError, match=r"cannot write .*model: No space left on device"):
        save_pretrained(folder, jax.tree.map(jnp.zeros_like, params), model, LLAMA)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    same(load_pretrained(folder).params, params)


def test_a_config_that_is_not_supported_names_the_folder(saved: tuple[Path, Any, Any]):
    folder, *_ = saved
    (folder / "config.json").write_text(json.dumps(LLAMA | {"hidden_act": "tanh"}))
    with pytest.raises(UserError, match=f"model={folder}: config.hidden_act=tanh: ") as caught:
        load_pretrained(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("num_hidden_layers", 10**9, 21),
        ("vocab_size", 2**40, 2**31),
        ("head_dim", 2**70, 2**31),
        ("sliding_window", 2**31, 2**31),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_built(
    saved: tuple[Path, Any, Any], name: str, value: int, limit: int
):
    folder, *_ = saved
    (folder / "config.json").write_text(json.dumps(LLAMA | {name: value}))
    with pytest.raises(UserError, match=f"config.{name}={value}: must be below {limit}$"):
        load_pretrained(folder)


def test_tensors_that_are_missing_name_the_folder(saved: tuple[Path, Any, Any]):
    folder, model, params = saved
    tensors = tensors_from_params(params, model, LLAMA)
    del tensors["model.norm.weight"]
    loading.save_safetensors(folder, tensors)
    with pytest.raises(UserError, match=r"model=.*model.norm.weight is missing"):
        load_pretrained(folder)


def test_names_are_resolved_without_jax():
    code = (
        "import sys, jaxlab.models.pretrained.locate, jaxlab.models.pretrained.folders;"
        "assert not {'jax', 'flax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
