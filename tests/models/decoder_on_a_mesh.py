"""Run by `test_families` in a process with eight CPU devices."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.models.caches import dense_cache
from jaxlab.models.decoder import Decoder
from jaxlab.models.pretrained.families import (
    decoder_from_config,
    params_from_tensors,
    tensors_from_params,
)
from jaxlab.models.seam import decode_step, init_states
from jaxlab.parallel.mesh import make_mesh

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Tensors(dict):
    """Arrays by name; what is read of them is counted."""

    def shape(self, name: str) -> tuple[int, ...]:
        return self[name].shape

    def read(self, name: str) -> np.ndarray:
        return self[name]


def tensors(model: Decoder) -> Tensors:
    """A checkpoint in which every part matters."""
    random = np.random.default_rng(0)
    shapes: Any = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), int)))
    params = jax.tree.map(
        lambda x: random.normal(0.5, 0.5, x.shape).astype(np.float32), shapes["params"]
    )
    return Tensors(tensors_from_params(params, model, CONFIG))


def logits(model: Decoder, params: Any, tokens: jax.Array) -> tuple[Any, Any]:
    """Of the whole rows, and of the same rows fed in two chunks."""
    attention = dense_cache()

    @jax.jit
    def whole(params, tokens):
        return model.apply({"params": params}, tokens)

    def step(params, tokens, states, positions):
        out = decode_step(
            model,
            params,
            tokens,
            states,
            attention=attention,
            positions=positions,
            logits="all",
        )
        return out.logits, out.states

    step = jax.jit(step)
    states: Any = init_states(model, attention, batch=tokens.shape[0], capacity=tokens.shape[1])
    rows = []
    for start, stop in ((0, 3), (3, 6)):
        positions = jnp.broadcast_to(jnp.arange(start, stop)[None, :], (len(tokens), stop - start))
        row, states = step(params, tokens[:, start:stop], states, positions)
        rows.append(np.asarray(row))
    return np.asarray(whole(params, tokens)), np.concatenate(rows, axis=1)


def main() -> None:
    """The mesh loads no parameter whole and computes what one device does."""
    assert jax.device_count() == 8
    model = decoder_from_config(CONFIG)
    source = tensors(model)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 32, (8, 6)), jnp.int32)
    alone = logits(model, params_from_tensors(source, model, CONFIG), tokens)
    np.testing.assert_allclose(alone[0], alone[1], atol=1e-5)
    mesh = make_mesh(2, 2, 2)
    params = params_from_tensors(source, model, CONFIG, mesh=mesh)
    for leaf in jax.tree.leaves(params):
        largest = max(shard.data.size for shard in leaf.addressable_shards) / leaf.size
        assert largest <= (0.5 if leaf.ndim == 1 else 0.25), leaf.shape
    for name, value in tensors_from_params(params, model, CONFIG).items():
        np.testing.assert_array_equal(value, source[name])
    with jax.set_mesh(mesh):
        many = logits(model, params, tokens)
    np.testing.assert_allclose(many[0], alone[0], atol=1e-5)
    np.testing.assert_allclose(many[1], alone[1], atol=1e-5)


if __name__ == "__main__":
    main()
