from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.models.mlp_lm import MlpLanguageModel

KEY = jax.random.key(0, impl="rbg")  # compiles faster than the default generator
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (8, 6)), jnp.int32)


@pytest.fixture(scope="module")
def params():
    return nn.unbox(jax.jit(MlpLanguageModel().init)(KEY, TOKENS))["params"]


def logits_of(params, tokens=TOKENS, **changes) -> Any:
    return MlpLanguageModel(**changes).apply({"params": params}, tokens)


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_the_default_model_has_17056_parameters(params):
    assert count(params) == 17_056
    wider = jax.eval_shape(MlpLanguageModel(hidden_width=256).init, KEY, TOKENS)
    assert count(wider) == 33_568


def test_logits_follow_from_the_formula(params):
    exact = {name: np.asarray(value, np.float64) for name, value in params.items()}
    joined = exact["embedding"][np.asarray(TOKENS)].reshape(8, -1)
    hidden = joined @ exact["hidden_kernel"] + exact["hidden_bias"]
    hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
    expected = hidden @ exact["output_kernel"] + exact["output_bias"]
    logits = logits_of(params)
    assert logits.shape == (8, 32)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_every_place_of_the_window_matters(params):
    logits = logits_of(params)
    for place in range(6):
        changed = logits_of(params, TOKENS.at[:, place].add(1) % 32)
        assert (jnp.max(jnp.abs(changed - logits), axis=1) > 1e-3).all()


def test_bfloat16_logits_are_close_and_float32(params):
    logits, exact = logits_of(params, dtype=jnp.bfloat16), logits_of(params)
    assert logits.dtype == jnp.float32
    assert 0 < jnp.max(jnp.abs(logits - exact)) < 0.02 * jnp.max(jnp.abs(exact))


def test_every_parameter_names_its_axes():
    boxed: Any = jax.eval_shape(MlpLanguageModel().init, KEY, TOKENS)["params"]
    names = {name: box.names for name, box in boxed.items()}
    assert names == {
        "embedding": ("vocab", "embed"),
        "hidden_kernel": ("embed", "mlp"),
        "hidden_bias": ("mlp",),
        "output_kernel": ("mlp", None),
        "output_bias": (None,),
    }


def test_replicates_can_be_mapped(params):
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2.0 * leaf]), params)
    mapped = jax.jit(jax.vmap(logits_of))(stacked)
    np.testing.assert_allclose(mapped[0], logits_of(params), atol=1e-5)
    assert jnp.max(jnp.abs(mapped[1] - mapped[0])) > 0.1


def test_another_window_is_refused(params):
    with pytest.raises(ValueError, match=r"must be \[batch, 6\]"):
        logits_of(params, TOKENS[:, :5])
