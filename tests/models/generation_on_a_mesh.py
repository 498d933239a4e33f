"""Run by `test_generation` in a process with eight CPU devices."""

from __future__ import annotations

import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

from jaxlab.models.beam_search import BeamSettings, beam_search
from jaxlab.models.decoder import Decoder
from jaxlab.models.generation import Generated, GenerationSettings, generate, stream
from jaxlab.models.prefill import mesh_of, pad_prompts, prefill
from jaxlab.parallel.mesh import make_mesh
from jaxlab.parallel.rules import shardings_for

COMPILATIONS: list[str] = []
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [3], [7, 7]]


def note_compilation(event: str, duration_secs: float, **_: str | int) -> None:
    if "backend_compile" in event:
        COMPILATIONS.append(event)


def main() -> None:
    model = Decoder(
        vocab_size=32, width=8, num_layers=1, num_heads=4, num_kv_heads=2, hidden_width=16
    )
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    draw = np.random.default_rng(0).normal
    params = jax.tree.map(
        lambda leaf: jnp.asarray(draw(0, 0.4, leaf.shape), jnp.float32), nn.unbox(boxed)
    )
    mesh = make_mesh(data=2, fsdp=2, model=2)
    split = jax.device_put(
        params, shardings_for(nn.unbox(boxed), nn.get_partition_spec(boxed), mesh)
    )
    assert mesh_of(split) == mesh
    prompts_are_read_alike(model, params, split, mesh)
    texts_are_alike(model, params, split)


def prompts_are_read_alike(model: Decoder, params: Any, split: Any, mesh: Any) -> None:
    padded = pad_prompts(PROMPTS, vocab_size=32, chunk=4)
    one = prefill(model, params, *padded, capacity=14, chunk=4)
    many = prefill(model, split, *padded, capacity=14, chunk=4, mesh=mesh)
    np.testing.assert_allclose(many.logits, one.logits, atol=1e-5, rtol=0)
    keys = many.caches[0].key
    assert {shard.data.shape for shard in keys.addressable_shards} == {(1, 1, 14, 2)}


def texts_are_alike(model: Decoder, params: Any, split: Any) -> None:
    key = jax.random.key(3)
    options: Any = {
        "settings": GenerationSettings(max_new_tokens=6, temperature=1.0),
        "prefill_chunk": 4,
    }
    one = generate(model, params, PROMPTS, key, **options)
    parts = stream(model, split, PROMPTS, key, tokens_per_dispatch=2, **options)
    found = [(part, len(COMPILATIONS)) for part in parts]
    assert len({compiled for _, compiled in found[1:]}) == 1
    same(found[-1][0], one)
    # One prompt and three beams, which the devices cannot share.
    beams = BeamSettings(num_beams=3, max_new_tokens=4, stop_ids=(5,))
    same(
        beam_search(model, split, PROMPTS[:1], settings=beams),
        beam_search(model, params, PROMPTS[:1], settings=beams),
    )


def same(many: Generated, one: Generated) -> None:
    np.testing.assert_array_equal(many.tokens, one.tokens)
    np.testing.assert_allclose(many.log_probs, one.log_probs, atol=1e-5, rtol=0)


if __name__ == "__main__":
    warnings.simplefilter("error")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.monitoring.register_event_duration_secs_listener(note_compilation)
    main()
