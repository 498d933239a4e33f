import functools
import re
from typing import Any

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

KEY = jax.random.key(0, impl="rbg")  # compiles faster than the default generator
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 6)).astype(np.int32)
POSITIONS = np.tile(np.arange(6, dtype=np.int32), (2, 1))
CAUSAL = np.tile(np.tril(np.ones((6, 6), bool)), (2, 1, 1, 1))
QUICK = {"xla_backend_optimization_level": 0}  # compiling takes longer than running here
AXES = {"vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "layers"}


def make(**changes) -> Decoder:
    sizes = {"vocab_size": 11, "width": 12, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return Decoder(**{**sizes, "head_dim": 4, "hidden_width": 10, **changes})


def shapes(model: Decoder) -> Any:
    return jax.eval_shape(model.init, KEY, TOKENS)["params"]


@pytest.fixture(scope="module")
def initial() -> Any:
    """Parameters of the size at which training starts, without compiling the initialisation."""
    draw = np.random.default_rng(0).normal

    def fill(leaf):
        values = draw(1, 0.1, leaf.shape) if leaf.ndim == 1 else draw(0, 0.02, leaf.shape)
        return values.astype(np.float32)

    return jax.tree.map(fill, nn.unbox(shapes(make())))


@pytest.fixture(scope="module")
def params(initial) -> Any:
    """Larger weights, with which every part matters to the logits."""
    return jax.tree.map(lambda leaf: leaf * np.float32(10) if leaf.ndim > 1 else leaf, initial)


@functools.cache
def forward(**changes) -> Any:
    """A jitted call, compiled once for all tests of one model."""
    model = make(**changes)
    return jax.jit(
        lambda params, *inputs: model.apply({"params": params}, *inputs), compiler_options=QUICK
    )


def logits_of(params, tokens=TOKENS, positions=POSITIONS, mask=CAUSAL) -> Any:
    return forward()(params, tokens, positions, mask)


@functools.cache
def loss_and_gradient(**changes) -> Any:
    model = make(**changes)

    def loss(params):
        logits: Any = model.apply({"params": params}, jnp.asarray(TOKENS))
        assert logits.dtype == jnp.float32
        return cross_entropy(logits[:, :-1], jnp.asarray(TOKENS[:, 1:]))

    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)


def assert_close_trees(actual, expected):
    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)

    jax.tree.map(compare, actual, expected)


def expected_count(vocab, width, layers, heads, kv_heads, head_dim, hidden, tied):
    attention = width * head_dim * (2 * heads + 2 * kv_heads)
    block = attention + 3 * width * hidden + 2 * width
    return layers * block + width + vocab * width * (1 if tied else 2)


def test_parameters_are_counted_exactly(initial):
    sizes = (11, 12, 2, 4, 2, 4, 10)
    tied = shapes(make(tie_embeddings=True))
    assert parameter_count(initial) == expected_count(*sizes, tied=False)
    assert parameter_count(tied) == expected_count(*sizes, tied=True)
    assert parameter_count(initial, embeddings=False) == parameter_count(initial) - 2 * 11 * 12
    assert parameter_count(tied, embeddings=False) == parameter_count(initial, embeddings=False)
    assert parameter_count(shapes(make(scan_layers=True))) == parameter_count(initial)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(tied))


def test_default_sizes_follow_from_the_width():
    model = Decoder(vocab_size=11, width=48, num_layers=1, num_heads=4)
    expected = expected_count(11, 48, 1, 4, 4, 12, 128, tied=False)
    assert parameter_count(shapes(model)) == expected


@pytest.mark.parametrize("scan", [False, True])
def test_every_parameter_names_its_axes(scan):
    def is_box(leaf):
        return isinstance(leaf, nn.LogicallyPartitioned)

    boxes = jax.tree.leaves(shapes(make(scan_layers=scan)), is_leaf=is_box)
    assert all(is_box(box) and len(box.names) == box.value.ndim for box in boxes)
    names = {name for box in boxes for name in box.names}
    assert names == (AXES if scan else AXES - {"layers"})


def test_it_can_be_traced_under_a_mesh_with_rules(initial):
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rules = [(name, "model" if name in ("heads", "mlp") else None) for name in sorted(AXES)]
    for scan in (False, True):
        model = make(scan_layers=scan)
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
            variables = jax.eval_shape(lambda m=model: nn.unbox(m.init(KEY, jnp.asarray(TOKENS))))
            logits: Any = jax.eval_shape(model.apply, variables, TOKENS)
        assert logits.shape == (2, 6, 11)


def test_initial_weights_have_the_scaled_spread_and_differ_between_layers():
    model = Decoder(
        vocab_size=8, width=64, num_layers=8, num_heads=4, hidden_width=64, scan_layers=True
    )
    params: Any = nn.unbox(jax.jit(model.init, compiler_options=QUICK)(KEY, TOKENS))["params"]
    layers = params["layers"]
    # A standard deviation from 4,096 samples is off by 6 % with probability below 1e-7.
    for name in ("query", "key", "value", "gate", "up"):
        spread = jnp.std(layers[name].reshape(8, -1), axis=1)
        np.testing.assert_allclose(spread, 0.02, rtol=0.06)
    for name in ("attention_output", "down"):
        spread = jnp.std(layers[name].reshape(8, -1), axis=1)
        np.testing.assert_allclose(spread, 0.02 / 4, rtol=0.06)
    np.testing.assert_array_equal(layers["attention_norm"]["scale"], np.ones((8, 64)))
    assert jnp.max(jnp.abs(layers["query"][0] - layers["query"][1])) > 0.02


def test_a_later_token_leaves_earlier_logits_alone(params):
    tokens = TOKENS.copy()
    tokens[:, 4] = (tokens[:, 4] + 1) % 11
    logits, changed = logits_of(params), logits_of(params, tokens)
    np.testing.assert_array_equal(changed[:, :4], logits[:, :4])
    assert (np.abs(changed - logits).max(axis=2)[:, 4:] > 1e-3).all()


def test_an_earlier_token_reaches_later_logits(params):
    tokens = TOKENS.copy()
    tokens[:, 0] = (tokens[:, 0] + 1) % 11
    difference = np.abs(logits_of(params, tokens) - logits_of(params))
    assert (difference.max(axis=2) > 1e-4).all()


def test_positions_and_mask_are_causal_by_default(params):
    logits = forward()(params, TOKENS)
    np.testing.assert_allclose(logits, logits_of(params), atol=1e-5)


def test_only_differences_of_positions_matter(params):
    logits = logits_of(params)
    np.testing.assert_allclose(logits_of(params, positions=POSITIONS + 9), logits, atol=1e-3)
    assert np.abs(logits_of(params, positions=POSITIONS * 2) - logits).max() > 0.05


def test_a_mask_separates_packed_documents(params):
    tokens = np.tile(TOKENS[:, :3], (1, 2))
    positions = np.tile(POSITIONS[:, :3], (1, 2))
    segments = np.array([[0, 0, 0, 1, 1, 1]] * 2)
    same = segments[:, None, :, None] == segments[:, None, None, :]
    packed = logits_of(params, tokens, positions, CAUSAL & same)
    np.testing.assert_allclose(packed[:, 3:], packed[:, :3], atol=1e-4)
    joined = logits_of(params, tokens, positions, CAUSAL)
    assert np.abs(joined[:, 3:] - joined[:, :3]).max() > 0.01


def test_a_window_narrows_a_mask(params):
    near = forward(sliding_window=2)(params, TOKENS, POSITIONS, CAUSAL)
    band = CAUSAL & (np.arange(6)[None, :] > np.arange(6)[:, None] - 2)
    np.testing.assert_allclose(near, logits_of(params, mask=band), atol=1e-4)
    assert np.abs(near - logits_of(params)).max() > 0.01


def test_scanned_layers_equal_unrolled_ones(params):
    scanned = forward(scan_layers=True)(stack_layers(params), TOKENS, POSITIONS, CAUSAL)
    np.testing.assert_allclose(scanned, logits_of(params), atol=1e-4)


def test_recomputed_and_scanned_layers_have_the_same_gradient(params):
    value, gradient = loss_and_gradient()(params)
    scanned_value, scanned = loss_and_gradient(remat=True, scan_layers=True)(stack_layers(params))
    np.testing.assert_allclose(scanned_value, value, rtol=1e-5)
    assert_close_trees(unstack_layers(scanned), gradient)


def test_only_recomputation_marks_layers_for_it(params):
    def marks(params, **changes):
        model = make(**changes)
        program = str(jax.make_jaxpr(model.apply)({"params": params}, TOKENS))
        return len(re.findall(r"\b(?:checkpoint|remat2?)\[", program))

    assert marks(params, remat=True) == 2
    assert marks(stack_layers(params), remat=True, scan_layers=True) == 1
    assert marks(params) == 0


def test_stacking_fits_the_scanned_model_and_is_undone_by_unstacking(initial):
    stacked = stack_layers(initial)
    expected = jax.tree.map(jnp.shape, nn.unbox(shapes(make(scan_layers=True))))
    assert jax.tree.map(jnp.shape, stacked) == expected
    restored = unstack_layers(stacked)
    assert sorted(restored) == sorted(initial)
    jax.tree.map(np.testing.assert_array_equal, restored, initial)


def test_bfloat16_computation_has_float32_logits_and_finite_gradients(initial):
    shallow = {name: initial[name] for name in initial if name != "layer_1"}
    value, gradient = loss_and_gradient(num_layers=1, dtype=jnp.bfloat16)(shallow)
    np.testing.assert_allclose(value, np.log(11), atol=0.05)
    for leaf in jax.tree.leaves(gradient):
        assert leaf.dtype == jnp.float32
        assert np.isfinite(leaf).all()
        assert np.any(np.asarray(leaf) != 0)


def test_bfloat16_logits_are_close_and_not_rounded(params):
    logits, exact = forward(dtype=jnp.bfloat16)(params, TOKENS), logits_of(params)
    assert 0 < np.abs(logits - exact).max() < 0.05 * np.abs(exact).max()
    assert (logits != logits.astype(jnp.bfloat16).astype(jnp.float32)).any()


def test_tied_logits_read_the_embedding_table(params):
    assert "unembedding" not in shapes(make(tie_embeddings=True))
    tied = {name: value for name, value in params.items() if name != "unembedding"}
    logits = forward(tie_embeddings=True)(tied, TOKENS, POSITIONS, CAUSAL)
    untied = {**params, "unembedding": params["embedding"].T}
    np.testing.assert_allclose(logits, logits_of(untied), atol=1e-4)


def test_grouped_heads_equal_a_model_with_repeated_heads(params):
    repeated = {
        name: {**entry, **{key: np.repeat(entry[key], 2, axis=1) for key in ("key", "value")}}
        if name.startswith("layer_")
        else entry
        for name, entry in params.items()
    }
    logits = forward(num_kv_heads=None)(repeated, TOKENS, POSITIONS, CAUSAL)
    np.testing.assert_allclose(logits, logits_of(params), atol=1e-4)


def test_a_loop_with_a_key_cache_gives_the_same_logits(params):
    model, block = make(), decoder_block(make())

    @jax.jit
    def step(params, tokens, place, caches, slots):
        """One token through every layer; `slots` holds the position in each cache slot."""
        positions = jnp.broadcast_to(place, (2, 1))
        slots = slots.at[:, place].set(place)
        x: Any = model.apply({"params": params}, tokens, method="embed")
        filled = []
        for layer, (keys, values) in enumerate(caches):
            weights = {"params": params[f"layer_{layer}"]}
            projected: Any = block.apply(weights, x, positions, method="project")
            query, key, value = projected
            keys, values = keys.at[:, place].set(key[:, 0]), values.at[:, place].set(value[:, 0])
            attended = dot_product_attention(query, keys, values, causal_mask(positions, slots))
            x = block.apply(weights, x, attended, method="merge")
            filled.append((keys, values))
        logits = model.apply({"params": params}, x, method="unembed")
        return logits, filled, slots

    empty = jnp.zeros((2, 6, 2, 4))
    caches, slots = [(empty, empty)] * 2, jnp.full((2, 6), jnp.iinfo(jnp.int32).max)
    logits = []
    for place in range(6):
        tokens = jnp.asarray(TOKENS[:, place : place + 1])
        row, caches, slots = step(params, tokens, jnp.int32(place), caches, slots)
        logits.append(row)
    np.testing.assert_allclose(np.concatenate(logits, axis=1), logits_of(params), atol=1e-4)


def test_a_few_steps_of_descent_lower_the_loss(initial):
    params, step = initial, loss_and_gradient()
    first, _ = step(params)
    np.testing.assert_allclose(first, np.log(11), atol=0.05)
    for _ in range(20):
        _, gradient = step(params)
        params = jax.tree.map(lambda leaf, slope: leaf - 0.3 * slope, params, gradient)
    assert step(params)[0] < 0.9 * first


GPT2: dict[str, Any] = {
    "norm": "layer",
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "gated_mlp": False,
    "activation": "gelu_tanh",
    "num_positions": 9,
}


def run(model: Decoder, params: Any, *inputs: Any, **settings: Any) -> Any:
    """One call without compiling."""
    return model.apply({"params": params}, *inputs, **settings)


def filled(model: Decoder) -> Any:
    """Parameters in which every one matters."""
    draw = np.random.default_rng(2).normal
    return jax.tree.map(
        lambda leaf: draw(0.3, 0.4, leaf.shape).astype(np.float32), nn.unbox(shapes(model))
    )


def test_segments_in_a_row_equal_rows_of_their_own(params):
    packed = np.concatenate([TOKENS[0, :4], TOKENS[1, :2]])[None]
    segments = np.array([[1, 1, 1, 1, 2, 2]], np.int32)
    positions = np.array([[0, 1, 2, 3, 0, 1]], np.int32)
    logits = run(make(), params, packed, positions, segment_ids=segments)
    expected = logits_of(params)
    np.testing.assert_allclose(logits[0, :4], expected[0, :4], atol=1e-4)
    np.testing.assert_allclose(logits[0, 4:], expected[1, :2], atol=1e-4)


@pytest.mark.parametrize("changes", [{}, GPT2])
def test_padding_on_either_side_changes_nothing(changes):
    model = make(**changes)
    params = filled(model)
    padded = np.zeros((2, 8), np.int32)
    valid = np.zeros((2, 8), bool)
    valid[0, 2:], valid[1, :6] = True, True
    padded[valid] = TOKENS.ravel()
    logits = run(model, params, padded, valid=valid)
    expected = run(model, params, TOKENS)
    np.testing.assert_allclose(np.asarray(logits)[valid].reshape(2, 6, -1), expected, atol=1e-4)
    assert np.isfinite(logits).all()


def test_every_kind_of_parameter_names_its_axes_and_biases_are_vectors():
    for changes in (GPT2, {"qk_norm": True, "qkv_bias": True, "mlp_bias": True}):
        boxed = shapes(make(**changes))
        named: Any = jax.tree_util.tree_leaves_with_path(
            boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
        )
        for path, box in named:
            name = jax.tree_util.keystr(path, simple=True)
            assert len(box.names) == box.value.ndim, name
            assert set(box.names) <= AXES | {None}, name
            assert not name.endswith(("bias", "scale")) or box.value.ndim == 1, name


def test_windows_differ_between_layers_also_in_a_scan(params):
    windows = {"sliding_window": (None, 2)}
    logits = forward(**windows)(params, TOKENS)
    scanned = forward(**windows, scan_layers=True)(stack_layers(params), TOKENS)
    np.testing.assert_allclose(scanned, logits, atol=1e-4)
    near = forward(sliding_window=2)(params, TOKENS)
    assert np.abs(near - logits)[:, 2:].max() > 0.01
    assert np.abs(logits - logits_of(params))[:, 2:].max() > 0.01
    mask = CAUSAL & (POSITIONS[:, None, :, None] - POSITIONS[:, None, None, :] < 2)
    np.testing.assert_allclose(near, logits_of(params, mask=mask), atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 3}])
def test_long_sequences_attend_in_blocks(params, changes):
    whole = loss_and_gradient(**changes)(params)
    blocks = loss_and_gradient(**changes, attention_block=1)(params)
    np.testing.assert_allclose(blocks[0], whole[0], rtol=1e-5)
    assert_close_trees(blocks[1], whole[1])


def test_layers_can_be_run_apart(params):
    model = make()
    whole = run(model, params, TOKENS, hidden_layers=(0, 1, 2), logits=False, method="outputs")
    assert whole.logits is None
    pattern = run(model, params, TOKENS, method="pattern")
    middle = run(model, params, whole.hidden[0], pattern, 0, 1, method="run_layers")
    np.testing.assert_allclose(middle, whole.hidden[1], atol=1e-5)
    last = run(model, params, middle, pattern, 1, method="run_layers")
    logits = run(model, params, last, method="unembed")
    np.testing.assert_allclose(logits, logits_of(params), atol=1e-4)
    logits = run(model, params, whole.normed, method="read_out")
    np.testing.assert_allclose(logits, logits_of(params), atol=1e-4)


def test_narrow_parameters_are_used_as_they_are():
    model = make(param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, **GPT2)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(shapes(model)))
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), filled(model))
    logits: Any = jax.eval_shape(model.apply, {"params": narrow}, TOKENS)
    assert logits.dtype == jnp.float32


def test_requests_that_contradict_each_other_are_refused(params):
    def check(message, model, params, *inputs, **settings):
        with pytest.raises(ValueError, match=message):
            run(model, params, *inputs, **settings)

    check("mask: cannot be", make(), params, TOKENS, mask=CAUSAL, valid=np.ones((2, 6), bool))
    ask = {"method": "outputs"}
    model = make()
    check(r"hidden_layers=\(3,\): .* 0 to 2", model, params, TOKENS, hidden_layers=(3,), **ask)
    check(
        r"attention_layers=\(2,\): .* 0 to 1", model, params, TOKENS, attention_layers=(2,), **ask
    )
    scanned, stacked = make(scan_layers=True), stack_layers(params)
    check("a scanned model keeps none", scanned, stacked, TOKENS, hidden_layers=(0,), **ask)
    x = np.zeros((2, 6, 12), np.float32)
    check("runs all its layers", scanned, stacked, x, None, 1, method="run_layers")
    learned = make(**GPT2)
    check("learned positions needs them", learned, filled(learned), TOKENS, method="embed")


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
        ({"activation": "relu"}, "activation='relu': allowed are silu, gelu, gelu_tanh"),
        ({"norm": "batch"}, "norm='batch'"),
        ({"sliding_window": (2,)}, "needs num_layers=2 entries"),
        ({"sliding_window": 0}, "sliding_window=0: must be at least 1"),
        ({"attention_block": 0}, "attention_block=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_at_construction(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_trees_of_the_wrong_form_are_refused(initial):
    gap = {name: value for name, value in initial.items() if name != "layer_0"}
    with pytest.raises(ValueError, match="without a gap"):
        stack_layers(gap)
    with pytest.raises(ValueError, match="without a gap"):
        stack_layers({"embedding": initial["embedding"]})
    with pytest.raises(ValueError, match="need one named layers"):
        unstack_layers(initial)
