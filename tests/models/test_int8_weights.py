from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.models.caches import dense_cache
from jaxlab.models.decoder import Decoder, stack_layers
from jaxlab.models.int8_weights import Int8Weight, int8_product, quantize_weights
from jaxlab.models.pretrained.families import tensors_from_params
from jaxlab.models.seam import decode_step, init_states

CONFIG = {"model_type": "llama"}
QUICK = {"xla_backend_optimization_level": 0}  # compiling takes longer than running here
TOKENS: Any = np.random.default_rng(0).integers(0, 64, (2, 9)).astype(np.int32)


def make(**changes: Any) -> Decoder:
    sizes = {"vocab_size": 64, "width": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
    return Decoder(**{**sizes, "hidden_width": 48, **changes})


def draw(model: Decoder) -> Any:
    shapes: Any = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    normal = np.random.default_rng(1).normal
    return jax.tree.map(lambda x: normal(0.2, 0.3, x.shape).astype(np.float32), nn.unbox(shapes))


@pytest.mark.parametrize(("count", "axis"), [(1, 0), (5, 0), (5, 1)])
def test_product_is_within_its_bound(count, axis):
    rng = np.random.default_rng(count)
    rows = rng.normal(0, 1, (count, 24)).astype(np.float32)
    rows[-1, 3] = 40  # makes the other steps of its row coarse
    matrix = rng.normal(0, [1.0] * 6 + [0.0] + [100.0] * 3, (24, 10)).astype(np.float32)
    found = quantize_weights({"embedding" if axis else "up": matrix.T if axis else matrix})
    codes, scale = found.values()
    assert (codes.dtype, scale.dtype, scale.shape) == (np.int8, np.float32, (10,))
    exact = rows.astype(np.float64) @ matrix
    product = np.asarray(int8_product(rows, Int8Weight(codes, scale), axis))
    steps = np.abs(rows).max(axis=1, keepdims=True) / 127
    rounded = np.round(rows / steps) * steps
    bound = steps / 2 * np.abs(matrix).sum(axis=0) + np.asarray(scale) / 2 * np.abs(rounded).sum(
        axis=1, keepdims=True
    )
    error = np.abs(product - exact)
    assert (error <= bound * 1.001 + 1e-30)[:, np.arange(10) != 6].all()
    assert (product[:, 6] == 0).all(), "an output whose weights are all zero"
    assert error.max() > 0, "something was rounded"


def test_rows_of_zeros_and_of_nan():
    weight = Int8Weight(jnp.full((3, 2), 100, jnp.int8), jnp.ones(2, jnp.float32))
    rows = jnp.array([[0, 0, 0], [0, jnp.nan, 1], [1, 2, jnp.inf]], jnp.float32)
    found = np.asarray(int8_product(rows, weight))
    assert (found[0] == 0).all()
    assert np.isnan(found[1:]).all()


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_close_and_memory_is_a_quarter(tied):
    model = make(tie_embeddings=tied, qkv_bias=True)
    params = draw(model)
    rounded = quantize_weights(params)
    apply: Any = jax.jit(lambda p: model.apply({"params": p}, TOKENS), compiler_options=QUICK)
    exact, found = np.asarray(apply(params)), np.asarray(apply(rounded))
    # Rounding errors are independent: about 1 % of the spread, here at most 5 %.
    assert np.abs(found - exact).max() < 0.05 * exact.std()
    assert np.abs(found - exact).max() > 1e-4 * exact.std()
    before = sum(leaf.nbytes for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
    after = sum(leaf.nbytes for leaf in jax.tree.leaves(rounded) if leaf.dtype == np.int8)
    assert 4 * after == before


def test_decoding_with_a_cache_takes_them():
    model = make(num_positions=32)
    params = quantize_weights(draw(model))
    cache = dense_cache()
    places = np.tile(np.arange(TOKENS.shape[1], dtype=np.int32), (2, 1))

    def both(params, states):
        whole = model.apply({"params": params}, TOKENS)
        options: Any = {"attention": cache, "positions": places, "logits": "all"}
        return whole, decode_step(model, params, TOKENS, states, **options).logits

    states = init_states(model, cache, batch=2, capacity=TOKENS.shape[1])
    expected, found = jax.jit(both, compiler_options=QUICK)(params, states)
    # A number on the border of two may be rounded either way.
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 * float(np.std(expected)))


def test_what_is_not_possible():
    model = make()
    params = draw(model)
    rounded = quantize_weights(params)
    with pytest.raises(ValueError, match="embedding has type int8; allowed are floating-point"):
        quantize_weights(rounded)
    with pytest.raises(ValueError, match="layers are stacked"):
        quantize_weights(stack_layers(params))
    with pytest.raises(ValueError, match="embedding has type int8; allowed are floating-point"):
        tensors_from_params(rounded, model, CONFIG)
    with pytest.raises(ValueError, match="at most 133144"):
        jax.eval_shape(
            int8_product,
            jax.ShapeDtypeStruct((1, 133145), jnp.float32),
            Int8Weight(jnp.ones((133145, 1), jnp.int8), jnp.ones(1, jnp.float32)),
        )

    def loss(scale):
        rows = jnp.broadcast_to(scale[:, None], (1, 3))
        return int8_product(rows, Int8Weight(jnp.ones((3, 1), jnp.int8), scale))

    with pytest.raises(ValueError, match="int8 weights: rounding has no gradient"):
        jax.jvp(loss, (jnp.ones(1),), (jnp.ones(1),))
