import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.models.caches import dense_cache, sliding_window_cache
from jaxlab.models.decoder import Decoder
from jaxlab.models.seam import (
    CachedAttention,
    accept,
    by_layer,
    decode_step,
    init_states,
    rollback,
)
from jaxlab.ops.rotary import apply_rotary, rotary_frequencies

LENGTH = 10
TOKENS: Any = np.random.default_rng(0).integers(0, 19, (2, LENGTH)).astype(np.int32)
QUICK = {"xla_backend_optimization_level": 0}  # compiling takes longer than running here
MODEL = Decoder(
    vocab_size=19,
    width=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    hidden_width=10,
    qk_norm=True,
    qkv_bias=True,
    sliding_window=(None, 4),
)
DENSE = dense_cache()
MIXED = by_layer([dense_cache(), sliding_window_cache()])
WHOLE = MODEL.clone(sliding_window=None)


@functools.cache
def weights() -> Any:
    shapes: Any = jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS)["params"]
    draw = np.random.default_rng(1).normal
    return jax.tree.map(lambda x: draw(0.3, 0.5, x.shape).astype(np.float32), nn.unbox(shapes))


@functools.cache
def full() -> np.ndarray:
    forward: Any = jax.jit(MODEL.apply, compiler_options=QUICK)
    return np.asarray(forward({"params": weights()}, TOKENS))


@functools.cache
def stepper(attention: CachedAttention, model: Any = MODEL, **settings: Any) -> Any:
    """A jitted step; compiled once for all tests that make the same."""

    def step(params, tokens, states, positions, valid=None, tree_mask=None):
        return decode_step(
            model,
            params,
            tokens,
            states,
            attention=attention,
            positions=positions,
            valid=valid,
            tree_mask=tree_mask,
            **{"logits": "all", **settings},
        )

    return jax.jit(step, compiler_options=QUICK)


def places(start: int, stop: int) -> Any:
    return np.tile(np.arange(start, stop, dtype=np.int32), (2, 1))


def feed(attention: CachedAttention, sizes: list[int], model: Any = MODEL) -> Any:
    """Logits and states after the rows were fed in chunks of these sizes."""
    states: Any = init_states(model, attention, batch=2, capacity=LENGTH + 6)
    rows, start = [], 0
    for size in sizes:
        stop = start + size
        out = stepper(attention, model)(
            weights(), TOKENS[:, start:stop], states, places(start, stop)
        )
        states, start = out.states, stop
        rows.append(out.logits)
    return np.concatenate(rows, axis=1), states


@pytest.mark.parametrize("attention", [DENSE, MIXED])
@pytest.mark.parametrize("sizes", [[10], [1] * 10, [5, 1, 1, 1, 1, 1]])
def test_any_cut_into_chunks_gives_the_logits_of_the_whole(attention, sizes):
    logits, _ = feed(attention, sizes)
    np.testing.assert_allclose(logits, full(), atol=1e-4)


def test_padding_leaves_no_trace():
    # Five tokens each, padded on the left, on the right and in between, then one more.
    tokens = np.zeros((3, 8), np.int32)
    valid = np.array([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 5 + [0] * 3, [0, 1, 1, 0, 1, 1, 0, 1]], bool)
    for row in range(3):
        tokens[row, valid[row]] = TOKENS[0, :5]
    positions = np.maximum(np.cumsum(valid, axis=1, dtype=np.int32) - 1, 0)
    for attention in (DENSE, MIXED):
        states: Any = init_states(MODEL, attention, batch=3, capacity=LENGTH)
        last = stepper(attention, logits="last")
        out = last(weights(), tokens, states, positions, valid)
        np.testing.assert_allclose(out.logits[:, 0], np.tile(full()[0, 4], (3, 1)), atol=1e-4)
        # The second row has ended: it stays as it is while the others go on.
        active = np.array([[True], [False], [True]])
        for place in (5, 6):
            step = np.full((3, 1), TOKENS[0, place], np.int32)
            at = np.full((3, 1), place, np.int32)
            out = last(weights(), step, out.states, at, active)
            np.testing.assert_allclose(
                out.logits[::2, 0], np.tile(full()[0, place], (2, 1)), atol=1e-4
            )
        assert np.isfinite(out.logits).all()
        assert out.states[0].length.tolist() == [7, 5, 7]
        step, at = np.full((3, 1), TOKENS[0, 5], np.int32), np.full((3, 1), 5, np.int32)
        out = last(weights(), step, out.states, at, ~active)
        np.testing.assert_allclose(out.logits[1, 0], full()[0, 5], atol=1e-4)


def test_a_tree_is_as_good_as_each_of_its_paths():
    # Behind four tokens, a root with two children, the second of which has a child.
    root, left, right, leaf = TOKENS[:, 4], TOKENS[:, 9], TOKENS[:, 5], TOKENS[:, 6]
    tree = np.stack([root, left, right, leaf], axis=1)
    sees = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    depth = np.tile(np.array([4, 5, 5, 6], np.int32), (2, 1))
    _, states = feed(DENSE, [4])
    step = stepper(DENSE)
    out = step(weights(), tree, states, depth, None, np.tile(sees, (2, 1, 1)))
    np.testing.assert_allclose(out.logits[:, [0, 2, 3]], full()[:, 4:7], atol=1e-4)
    other = TOKENS.copy()
    other[:, 5] = left
    forward: Any = jax.jit(MODEL.apply, compiler_options=QUICK)
    branch = np.asarray(forward({"params": weights()}, other))
    np.testing.assert_allclose(out.logits[:, 1], branch[:, 5], atol=1e-4)
    # The first sequence keeps the longer path, the second the root alone.
    path = jnp.array([[0, 2, 3], [0, -1, -1]], jnp.int32)
    length = jnp.array([4, 4], jnp.int32)
    states = accept(DENSE, out.states, length, path)
    assert states[0].length.tolist() == [7, 5]
    at = np.array([[7], [5]], np.int32)
    after = step(weights(), np.take_along_axis(TOKENS, at, axis=1), states, at)
    expected = np.stack([full()[0, 7], full()[1, 5]])
    np.testing.assert_allclose(after.logits[:, 0], expected, atol=1e-4)


def test_padding_in_a_tree_is_not_seen():
    _, states = feed(DENSE, [4])
    tokens = np.stack([TOKENS[:, 4], TOKENS[:, 9], TOKENS[:, 5]], axis=1)
    valid = np.tile(np.array([True, False, True]), (2, 1))
    positions = np.tile(np.array([4, 5, 5], np.int32), (2, 1))
    sees = np.tile(np.tril(np.ones((3, 3), bool)), (2, 1, 1))
    out = stepper(DENSE)(weights(), tokens, states, positions, valid, sees)
    np.testing.assert_allclose(out.logits[:, 2], full()[:, 5], atol=1e-4)
    assert out.states[0].length.tolist() == [6, 6]


def test_a_rollback_undoes_steps_for_each_sequence():
    spare = by_layer([dense_cache(), sliding_window_cache(spare=3)])
    for attention in (DENSE, spare):
        _, states = feed(attention, [5, 1, 1, 1])
        length = jnp.array([5, 7], jnp.int32)
        states = rollback(attention, states, length)
        assert states[1].length.tolist() == [5, 7]
        for chunk in (1, 2):
            at = np.asarray(length)[:, None] + np.arange(chunk, dtype=np.int32)
            out = stepper(attention)(weights(), np.take_along_axis(TOKENS, at, axis=1), states, at)
            expected = np.take_along_axis(full(), at[:, :, None], axis=1)
            np.testing.assert_allclose(out.logits, expected, atol=1e-4)


def test_more_than_fits_is_not_a_number():
    _, states = feed(DENSE, [10])
    length = jnp.array([10, 16], jnp.int32)
    full_states = tuple(state._replace(length=length) for state in states)
    out = stepper(DENSE)(weights(), TOKENS[:, :1], full_states, places(10, 11))
    assert np.isfinite(out.logits[0]).all()
    assert np.isnan(out.logits[1]).all()


def test_what_is_asked_for_is_given():
    states: Any = init_states(MODEL, DENSE, batch=2, capacity=LENGTH)
    step = stepper(DENSE, logits="none", hidden_layers=(2, 0))
    out = step(weights(), TOKENS, states, places(0, LENGTH))
    assert out.logits is None
    whole: Any = MODEL.apply(
        {"params": weights()},
        TOKENS,
        hidden_layers=(0, 2),
        attention_layers=(1,),
        method="outputs",
    )
    np.testing.assert_allclose(out.normed, whole.normed, atol=1e-4)
    np.testing.assert_allclose(out.hidden[1], whole.hidden[0], atol=1e-6)
    np.testing.assert_allclose(out.hidden[0], whole.hidden[1], atol=1e-4)
    rows = whole.attention[0]
    assert rows.shape == (2, 4, LENGTH, LENGTH)
    np.testing.assert_allclose(rows.sum(axis=-1), 1, atol=1e-5)
    assert (np.asarray(rows)[:, :, np.arange(10)[:, None] - np.arange(10) >= 4] == 0).all()


def test_the_inputs_of_an_attention_are_what_they_are_called():
    seer = CachedAttention(
        lambda layer, shape: None,
        lambda layer, inputs, state, carry: (jnp.zeros_like(inputs.query), state, carry, inputs),
        windows=True,
    )
    out = decode_step(
        *(MODEL, weights(), jnp.asarray(TOKENS[:, :3]), (None, None)),
        attention=seer,
        positions=jnp.asarray(places(3, 6)),
        hidden_layers=(0,),
    )
    found, layer = out.stats[0], weights()["layer_0"]

    def norm(x, scale):
        return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-5) * scale

    hidden = norm(np.asarray(out.hidden[0]), layer["attention_norm"]["scale"][None, None])
    np.testing.assert_allclose(found.hidden, hidden, atol=1e-5)
    for name in ("query", "key", "value"):
        plain = np.einsum("bsw,whd->bshd", hidden, layer[name])
        plain = plain + layer[f"{name}_bias"].reshape(-1, 4)
        if name != "value":
            plain = norm(plain, layer[f"{name}_norm"]["scale"][None, None, None])
            unrotated = getattr(found, f"unrotated_{name}")
            np.testing.assert_allclose(unrotated, plain, atol=1e-4)
            plain = apply_rotary(unrotated, found.positions, rotary_frequencies(4))
        np.testing.assert_allclose(getattr(found, name), plain, atol=1e-4)


def test_a_carry_goes_down_the_layers_and_stats_come_back():
    def attend(layer, inputs, state, carry):
        assert (carry is None) == (layer == 0)
        seen = inputs.scale if carry is None else carry + 1
        return jnp.zeros_like(inputs.query), state, seen, {"carry": seen, "window": inputs.window}

    counter = CachedAttention(lambda layer, shape: shape.window, attend, windows=True)
    states: Any = init_states(MODEL, counter, batch=2, capacity=3)
    assert states == (None, 4)
    out = decode_step(
        MODEL,
        weights(),
        jnp.asarray(TOKENS[:, :1]),
        states,
        attention=counter,
        positions=jnp.zeros((2, 1), jnp.int32),
    )
    assert out.stats == ({"carry": 0.5, "window": None}, {"carry": 1.5, "window": 4})


def test_caches_change_in_place_when_donated():
    states: Any = init_states(MODEL, DENSE, batch=2, capacity=LENGTH)

    def step(params, tokens, states, positions):
        out = decode_step(MODEL, params, tokens, states, attention=DENSE, positions=positions)
        return out.logits, out.states

    donating = jax.jit(step, donate_argnums=2, compiler_options=QUICK)
    before = states[0].key.unsafe_buffer_pointer()
    _, states = donating(weights(), TOKENS[:, :1], states, places(0, 1))
    assert states[0].key.unsafe_buffer_pointer() == before


def test_what_an_attention_cannot_do_is_refused_before_compiling():
    def check(message, attention=DENSE, model=WHOLE, states=None, **inputs):
        empty: Any = init_states(WHOLE, DENSE, batch=2, capacity=4) if states is None else states
        given = {"positions": places(0, 2), **inputs}
        with pytest.raises(ValueError, match=message):
            decode_step(model, weights(), TOKENS[:, :2], empty, attention=attention, **given)

    plain = dataclasses.replace(DENSE, tree_masks=False, windows=False)
    check("tree_mask: not supported", plain, tree_mask=np.ones((2, 2, 2), bool))
    check("a chunk of 2 tokens", dataclasses.replace(DENSE, chunks=False))
    check("sliding_window=4 of layer 1: not supported", plain, MODEL)
    check("scan_layers=True", model=WHOLE.clone(scan_layers=True))
    check("1 states: the model has num_layers=2", states=[None])
    check(r"positions has shape \(2, 3\)", positions=places(0, 3))
    check("logits='some'", logits="some")
    check("hidden_layers: 3 is not in 0 to 2", hidden_layers=(3,))
    check("capacity of 1", states=init_states(WHOLE, DENSE, batch=2, capacity=1))
    with pytest.raises(ValueError, match="sliding_window=4 of layer 1"):
        init_states(MODEL, plain, batch=2, capacity=4)
    with pytest.raises(ValueError, match="sliding_window=4 of layer 1"):
        init_states(MODEL, by_layer([DENSE, plain]), batch=2, capacity=4)
    with pytest.raises(ValueError, match="capacity=0"):
        init_states(MODEL, DENSE, batch=2, capacity=0)
    with pytest.raises(ValueError, match="cannot be rolled back"):
        rollback(MIXED, (), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="cannot keep one path"):
        accept(MIXED, (), jnp.zeros(2, jnp.int32), jnp.zeros((2, 1), jnp.int32))
