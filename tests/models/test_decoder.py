import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxlab.models.decoder import (
    Decoder,
    decoder_block,
    parameter_count,
    stack_layers,
    unstack_layers,
)
from jaxlab.ops.attention import causal_mask, dot_product_attention
from jaxlab.ops.losses import cross_entropy


@pytest.fixture(autouse=True)
def strict_types_and_ranks():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


TOKENS = jax.random.randint(jax.random.key(1), (2, 6), 0, 11)
AXES = {"vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "layers"}


def make(**changes):
    sizes = {"vocab_size": 11, "width": 12, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return Decoder(**{**sizes, "head_dim": 4, "hidden_width": 10, **changes})


@functools.cache
def parameters(**changes):
    model = make(**changes)
    return nn.unbox(jax.jit(model.init)(jax.random.key(0), TOKENS))["params"]


def larger(params):
    """Weights large enough for every part to matter to the logits."""
    return jax.tree.map(lambda leaf: leaf * 10.0, params)


def apply(model, params, *args, **kwargs):
    return model.apply({"params": params}, *args, **kwargs)


def loss(model, params):
    return cross_entropy(apply(model, params, TOKENS)[:, :-1], TOKENS[:, 1:])


def expected_count(vocab, width, layers, heads, kv_heads, head_dim, hidden, tied):
    attention = width * head_dim * (2 * heads + 2 * kv_heads)
    block = attention + 3 * width * hidden + 2 * width
    return layers * block + width + vocab * width * (1 if tied else 2)


def test_parameters_are_counted_exactly():
    sizes = (11, 12, 2, 4, 2, 4, 10)
    untied, tied = parameters(), parameters(tie_embeddings=True)
    assert parameter_count(untied) == expected_count(*sizes, tied=False)
    assert parameter_count(tied) == expected_count(*sizes, tied=True)
    assert parameter_count(untied) - parameter_count(tied) == 11 * 12
    assert parameter_count(untied, embeddings=False) == parameter_count(untied) - 2 * 11 * 12
    assert parameter_count(tied, embeddings=False) == parameter_count(untied, embeddings=False)
    assert parameter_count(stack_layers(untied)) == parameter_count(untied)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(untied))


def test_default_sizes_follow_from_the_width():
    model = Decoder(vocab_size=11, width=48, num_layers=1, num_heads=4)
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    assert parameter_count(shapes) == expected_count(11, 48, 1, 4, 4, 12, 128, tied=False)


def test_every_parameter_names_its_axes():
    for scan in (False, True):
        boxed = jax.eval_shape(make(scan_layers=scan).init, jax.random.key(0), TOKENS)["params"]
        is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731
        leaves = jax.tree.leaves(boxed, is_leaf=is_box)
        assert all(is_box(leaf) and len(leaf.names) == leaf.value.ndim for leaf in leaves)
        names = {name for leaf in leaves for name in leaf.names}
        assert names == (AXES if scan else AXES - {"layers"})


def test_it_runs_under_a_mesh_with_rules():
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rules = [(name, "model" if name in ("heads", "mlp") else None) for name in sorted(AXES)]
    model = make(num_layers=1)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        variables = jax.jit(lambda key: nn.unbox(model.init(key, TOKENS)))(jax.random.key(0))
        logits = jax.jit(model.apply)(variables, TOKENS)
    np.testing.assert_allclose(logits, model.apply(variables, TOKENS), atol=1e-6)


def test_initial_weights_have_the_scaled_spread():
    model = Decoder(vocab_size=64, width=64, num_layers=8, num_heads=4, hidden_width=64)
    block = decoder_block(model)
    x, positions = jnp.zeros((1, 1, 64)), jnp.zeros((1, 1), jnp.int32)
    mask = causal_mask(positions)
    params = nn.unbox(jax.jit(block.init)(jax.random.key(0), x, positions, mask))["params"]
    # The standard deviation of 4,096 normal samples is off by 6 % with probability below 1e-7.
    for name in ("query", "key", "value", "gate", "up"):
        np.testing.assert_allclose(jnp.std(params[name]), 0.02, rtol=0.06)
    for name in ("attention_output", "down"):
        np.testing.assert_allclose(jnp.std(params[name]), 0.02 / 4, rtol=0.06)
    np.testing.assert_array_equal(params["attention_norm"]["scale"], jnp.ones(64))


def test_a_later_token_leaves_earlier_logits_alone():
    model, params = make(), larger(parameters())
    logits = apply(model, params, TOKENS)
    changed = apply(model, params, TOKENS.at[:, 4].add(1) % 11)
    np.testing.assert_array_equal(changed[:, :4], logits[:, :4])
    assert (jnp.max(jnp.abs(changed - logits), axis=2)[:, 4:] > 1e-3).all()


def test_an_earlier_token_reaches_later_logits():
    model, params = make(), larger(parameters())
    logits = apply(model, params, TOKENS)
    changed = apply(model, params, TOKENS.at[:, 0].add(1) % 11)
    assert (jnp.max(jnp.abs(changed - logits), axis=2) > 1e-4).all()


def test_only_differences_of_positions_matter():
    model, params = make(), larger(parameters())
    positions = jnp.broadcast_to(jnp.arange(6)[None, :], TOKENS.shape)
    logits = apply(model, params, TOKENS)
    moved = apply(model, params, TOKENS, positions + 9)
    np.testing.assert_allclose(moved, logits, atol=1e-3)
    stretched = apply(model, params, TOKENS, positions * 2)
    assert jnp.max(jnp.abs(stretched - logits)) > 0.05


def test_a_mask_of_ones_own_separates_packed_documents():
    model, params = make(), larger(parameters())
    positions = jnp.array([[0, 1, 2, 0, 1, 2]] * 2)
    segments = jnp.array([[0, 0, 0, 1, 1, 1]] * 2)
    same = segments[:, None, :, None] == segments[:, None, None, :]
    packed = apply(model, params, TOKENS, positions, causal_mask(positions) & same)
    np.testing.assert_allclose(packed[:, 3:], apply(model, params, TOKENS[:, 3:]), atol=1e-4)


def test_scanned_layers_equal_unrolled_ones():
    params = larger(parameters())
    stacked = stack_layers(params)
    value, gradient = jax.jit(jax.value_and_grad(functools.partial(loss, make())))(params)
    scanned = jax.jit(jax.value_and_grad(functools.partial(loss, make(scan_layers=True))))
    scanned_value, scanned_gradient = scanned(stacked)
    np.testing.assert_allclose(scanned_value, value, rtol=1e-6)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5),
        unstack_layers(scanned_gradient),
        gradient,
    )


def test_stacking_is_undone_by_unstacking_and_fits_the_scanned_model():
    params = parameters()
    stacked = stack_layers(params)
    shapes = jax.eval_shape(make(scan_layers=True).init, jax.random.key(0), TOKENS)
    expected = jax.tree.map(jnp.shape, nn.unbox(shapes)["params"])
    assert jax.tree.map(jnp.shape, stacked) == expected
    restored = unstack_layers(stacked)
    assert list(map(str, sorted(restored))) == sorted(params)
    jax.tree.map(np.testing.assert_array_equal, restored, params)


def test_scanned_layers_start_from_different_weights():
    params = parameters(scan_layers=True)
    first, second = params["layers"]["query"]
    assert jnp.max(jnp.abs(first - second)) > 0.01


@pytest.mark.parametrize("scan", [False, True])
def test_recomputing_layers_changes_no_gradient(scan):
    params = larger(stack_layers(parameters()) if scan else parameters())
    plain, again = (
        jax.jit(jax.grad(functools.partial(loss, make(scan_layers=scan, remat=remat))))(params)
        for remat in (False, True)
    )
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(compare, again, plain)


def test_bfloat16_computation_gives_float32_logits_and_finite_gradients():
    params = parameters(tie_embeddings=True)
    model = make(tie_embeddings=True, dtype=jnp.bfloat16)
    gradient = jax.jit(jax.grad(functools.partial(loss, model)))(params)
    logits = apply(model, params, TOKENS)
    assert logits.dtype == jnp.float32
    for leaf in jax.tree.leaves(gradient):
        assert leaf.dtype == jnp.float32
        assert jnp.isfinite(leaf).all()
        assert jnp.any(leaf != 0)
    exact = apply(make(tie_embeddings=True), params, TOKENS)
    np.testing.assert_allclose(logits, exact, atol=0.02 * float(jnp.max(jnp.abs(exact))))


def test_tied_logits_read_the_embedding_table():
    params = parameters(tie_embeddings=True)
    assert "unembedding" not in params
    untied = {**params, "unembedding": params["embedding"].T}
    np.testing.assert_allclose(
        apply(make(tie_embeddings=True), params, TOKENS), apply(make(), untied, TOKENS), atol=1e-6
    )


def test_grouped_heads_equal_a_model_with_repeated_heads():
    params = larger(parameters())
    repeated = {
        name: {**entry, **{key: jnp.repeat(entry[key], 2, axis=1) for key in ("key", "value")}}
        if name.startswith("layer_")
        else entry
        for name, entry in params.items()
    }
    np.testing.assert_allclose(
        apply(make(num_kv_heads=None), repeated, TOKENS), apply(make(), params, TOKENS), atol=1e-4
    )


def test_a_loop_with_a_key_cache_gives_the_same_logits():
    model, params = make(), larger(parameters())
    block = decoder_block(model)
    caches = [[] for _ in range(model.num_layers)]
    logits = []
    for step in range(TOKENS.shape[1]):
        positions = jnp.full((2, 1), step, jnp.int32)
        x = apply(model, params, TOKENS[:, step : step + 1], method="embed")
        for layer, cache in enumerate(caches):
            weights = params[f"layer_{layer}"]
            query, key, value = apply(block, weights, x, positions, method="project")
            cache.append((key, value))
            keys, values = (jnp.concatenate(parts, axis=1) for parts in zip(*cache, strict=True))
            attended = dot_product_attention(query, keys, values)
            x = apply(block, weights, x, attended, method="merge")
        logits.append(apply(model, params, x, method="unembed"))
    np.testing.assert_allclose(
        jnp.concatenate(logits, axis=1), apply(model, params, TOKENS), atol=1e-4
    )


def test_a_few_steps_of_descent_lower_the_loss():
    model, params = make(), parameters()
    step = jax.jit(jax.value_and_grad(functools.partial(loss, model)))
    first, _ = step(params)
    np.testing.assert_allclose(first, np.log(11), atol=0.05)
    for _ in range(20):
        _, gradient = step(params)
        params = jax.tree.map(lambda leaf, slope: leaf - 0.3 * slope, params, gradient)
    assert step(params)[0] < 0.9 * first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3: must divide num_heads=4"),
        ({"head_dim": 5}, "head_dim=5"),
        ({"head_dim": None, "width": 10}, "must divide width=10"),
        ({"head_dim": None, "width": 20}, "head_dim=5"),
        ({"num_layers": 0}, "num_layers=0: must be at least 1"),
        ({"hidden_width": -1}, "hidden_width=-1"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"rope_theta": 0.0}, "rope_theta=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_at_construction(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_trees_of_the_wrong_form_are_refused():
    params = parameters()
    gap = {name: value for name, value in params.items() if name != "layer_0"}
    with pytest.raises(ValueError, match="without a gap"):
        stack_layers(gap)
    with pytest.raises(ValueError, match="without a gap"):
        stack_layers({"embedding": params["embedding"]})
    with pytest.raises(ValueError, match="need one named layers"):
        unstack_layers(params)
