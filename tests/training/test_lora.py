"""Adapters: nothing at first, what is trained afterwards, and back from a file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.errors import StorageError, UserError
from jaxlab.training.lora import (
    init_lora,
    load_lora,
    lora_axes,
    lora_parameter_count,
    merge_lora,
    save_lora,
    save_params,
)


def params_of(seed=0, dtype=jnp.float32):
    shapes = {
        "layer_0": {
            "query": (8, 2, 4),
            "value": (8, 1, 4),
            "attention_output": (2, 4, 8),
            "norm": (8,),
        },
        "embedding": (16, 8),
    }
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    return jax.tree.map(
        lambda shape: jax.random.normal(next(keys), shape, jnp.float32).astype(dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def trained(adapters):
    return jax.tree.map(lambda x: x + jnp.ones_like(x), adapters)


def test_fresh_adapters_change_nothing():
    params = params_of()
    adapters = init_lora(jax.random.key(1), params, rank=2)
    assert set(adapters) == {"layer_0.query", "layer_0.value"}
    merged = merge_lora(params, adapters, alpha=4.0)
    jax.tree.map(np.testing.assert_array_equal, merged, params)


def test_a_merge_adds_the_scaled_product():
    params = params_of()
    targets = [r"\.query$", r"attention_output"]
    adapters = trained(init_lora(jax.random.key(1), params, rank=2, targets=targets))
    merged = merge_lora(params, adapters, alpha=6.0)
    for name, inputs in (("query", 1), ("attention_output", 2)):
        before, after = params["layer_0"][name], merged["layer_0"][name]
        a, b = (np.asarray(adapters[f"layer_0.{name}"][x]) for x in "ab")
        assert a.shape == (*before.shape[:inputs], 2)
        assert b.shape == (2, *before.shape[inputs:])
        flat = a.reshape(-1, 2) @ b.reshape(2, -1)
        expected = np.asarray(before) + 3.0 * flat.reshape(before.shape)
        np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(merged["layer_0"]["value"], params["layer_0"]["value"])
    assert lora_parameter_count(adapters) == 2 * (8 + 8 + 8 + 8)


def test_applying_and_merging_agree_on_a_projection():
    """x (W + s A B) = x W + s (x A) B."""
    params = params_of()
    adapters = trained(init_lora(jax.random.key(1), params, rank=3))
    x = jax.random.normal(jax.random.key(2), (5, 8), jnp.float32)
    merged = merge_lora(params, adapters, alpha=3.0)["layer_0"]["query"]
    adapter = adapters["layer_0.query"]
    low = jnp.einsum("xr,rhd->xhd", x @ adapter["a"], adapter["b"])
    expected = jnp.einsum("xw,whd->xhd", x, params["layer_0"]["query"]) + low
    np.testing.assert_allclose(jnp.einsum("xw,whd->xhd", x, merged), expected, rtol=1e-4, atol=1e-4)


def test_only_adapters_are_trained():
    params = params_of()
    adapters = init_lora(jax.random.key(1), params, rank=2)

    def loss(adapters):
        merged = merge_lora(params, adapters, alpha=2.0)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(merged))

    grads = jax.jit(jax.grad(loss))(adapters)
    assert all(float(jnp.abs(g["b"]).max()) > 0 for g in grads.values())
    assert all(float(jnp.abs(g["a"]).max()) == 0 for g in grads.values())  # B is zero


def test_half_precision_keeps_its_type():
    params = params_of(dtype=jnp.bfloat16)
    adapters = trained(init_lora(jax.random.key(1), params, rank=2))
    assert adapters["layer_0.query"]["a"].dtype == jnp.bfloat16
    assert merge_lora(params, adapters, alpha=1.0)["layer_0"]["query"].dtype == jnp.bfloat16


def test_axes_follow_the_parameters():
    axes = {
        "layer_0": {
            "query": ("embed", "heads", "head_dim"),
            "value": ("embed", "kv_heads", "head_dim"),
            "attention_output": ("heads", "head_dim", "embed"),
            "norm": ("embed",),
        },
        "embedding": ("vocab", "embed"),
    }
    adapters = init_lora(jax.random.key(0), params_of(), rank=2, targets=["query", "output"])
    assert lora_axes(axes, adapters) == {
        "layer_0.attention_output": {"a": ("heads", "head_dim", None), "b": (None, "embed")},
        "layer_0.query": {"a": ("embed", None), "b": (None, "heads", "head_dim")},
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank=0: must be at least 1"),
        ({"rank": 5}, r"rank=5: exceeds the smaller side of layer_0.value"),
        ({"rank": 1, "targets": ["nope"]}, "targets='nope' matches none of embedding, "),
        ({"rank": 1, "targets": ["norm"]}, "norm of shape .* is no projection"),
    ],
)
def test_misuse_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        init_lora(jax.random.key(0), params_of(), **arguments)


def test_unknown_adapters_are_named():
    adapters = init_lora(jax.random.key(0), params_of(), rank=1)
    with pytest.raises(ValueError, match=r"do not exist: layer_9\.query"):
        merge_lora(params_of(), {"layer_9.query": adapters["layer_0.query"]}, alpha=1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_brings_them_back_exactly(tmp_path, dtype):
    adapters = trained(init_lora(jax.random.key(1), params_of(dtype=jnp.dtype(dtype)), rank=2))
    save_lora(tmp_path / "lora.safetensors", adapters, alpha=16.0)
    back, alpha = load_lora(tmp_path / "lora.safetensors")
    assert alpha == 16.0
    jax.tree.map(np.testing.assert_array_equal, back, adapters)
    assert [path.name for path in tmp_path.iterdir()] == ["lora.safetensors"]


def test_merged_parameters_go_out(tmp_path):
    from safetensors.numpy import load_file

    save_params(tmp_path / "merged.safetensors", params_of())
    back = load_file(tmp_path / "merged.safetensors")
    np.testing.assert_array_equal(back["layer_0.query"], params_of()["layer_0"]["query"])


def test_damaged_files_are_one_line(tmp_path):
    file = tmp_path / "lora.safetensors"
    save_lora(file, init_lora(jax.random.key(1), params_of(), rank=2), alpha=1.0)
    whole = file.read_bytes()
    for damage in (b"", whole[:7], whole[:50], whole[:-3], b"\xff" * 100):
        file.write_bytes(damage)
        with pytest.raises(UserError, match=r"^lora=.*: cannot be read") as caught:
            load_lora(file)
        assert "\n" not in str(caught.value)
    save_params(file, params_of())
    with pytest.raises(UserError, match="which is no adapter"):
        load_lora(file)
    with pytest.raises(UserError, match="cannot be read"):
        load_lora(tmp_path / "missing.safetensors")
    with pytest.raises(StorageError, match="cannot write"):
        save_params(tmp_path / "no" / "folder", params_of())
