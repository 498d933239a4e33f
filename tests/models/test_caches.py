import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.models.caches import (
    dense_cache,
    previous_query_probe,
    query_recorder,
    sliding_window_cache,
)
from jaxlab.models.seam import AttentionInputs, CachedAttention, CacheShape
from jaxlab.ops.attention import EMPTY, causal_mask, dot_product_attention

SHAPE = CacheShape(2, 24, 4, 2, 4, 8, None, jnp.float32)
LENGTH = 80
QUICK = {"xla_backend_optimization_level": 0}  # compiling takes longer than running here
RANDOM = np.random.default_rng(0)
QUERY = RANDOM.normal(size=(2, LENGTH, 4, 4)).astype(np.float32)
KEY, VALUE = RANDOM.normal(size=(2, 2, LENGTH, 2, 4)).astype(np.float32)


def inputs(start: int, stop: int, valid: Any = None) -> AttentionInputs:
    """A chunk of the fixed queries, keys and values."""
    part = slice(start, stop)
    query, key, value = (jnp.asarray(x[:, part]) for x in (QUERY, KEY, VALUE))
    positions = jnp.broadcast_to(jnp.arange(start, stop, dtype=jnp.int32)[None], query.shape[:2])
    hidden = jnp.zeros((*query.shape[:2], 8))
    return AttentionInputs(hidden, query, key, value, query, key, positions, valid, None, None, 0.5)


def run(attention: CachedAttention, sizes: list[int], window: int | None = None) -> Any:
    """What the tokens read, fed in chunks of these sizes, and the state after them."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(chunk, state):
        # Both are plain numbers, not arrays.
        chunk = chunk._replace(window=window, scale=0.5)
        out, state, _, _ = attention.attend(0, chunk, state, None)
        return out, state

    state = attention.init(0, SHAPE._replace(capacity=LENGTH, window=window))
    rows, start = [], 0
    for size in sizes:
        out, state = step(inputs(start, start + size), state)
        rows.append(out)
        start += size
    return np.concatenate(rows, axis=1), state


def reference(length: int, window: int | None = None) -> Any:
    positions = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    mask = causal_mask(jnp.asarray(positions), window=window)
    query, key, value = (jnp.asarray(x[:, :length]) for x in (QUERY, KEY, VALUE))
    return dot_product_attention(query, key, value, mask, scale=0.5)


@pytest.mark.parametrize("window", [None, 3])
def test_a_dense_cache_attends_over_all_that_came(window):
    out, state = run(dense_cache(), [3, 1, 40, 1], window)
    np.testing.assert_allclose(out, reference(45, window), atol=1e-5)
    np.testing.assert_array_equal(state.positions[0, :45], np.arange(45))
    assert (np.asarray(state.positions[:, 45:]) == EMPTY).all()
    np.testing.assert_array_equal(state.key[:, :, :45], KEY[:, :45].swapaxes(1, 2))


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("sizes", [[1] * 9, [2, 2, 1, 40, 1, 1]])
def test_a_ring_attends_as_far_as_its_window(sizes, spare):
    out, state = run(sliding_window_cache(spare), sizes, 5)
    total = sum(sizes)
    np.testing.assert_allclose(out, reference(total, 5), atol=1e-5)
    kept = sorted(int(x) for x in state.positions[0] if x != EMPTY)
    assert kept == list(range(max(total - 5 - spare, 0), total))


def test_padding_leaves_a_ring_as_it_is():
    ring = sliding_window_cache(2)
    _, state = run(ring, [9], 5)
    chunk = inputs(9, 10, valid=jnp.zeros((2, 1), bool))._replace(window=5)
    out, after, _, _ = ring.attend(0, chunk, state, None)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    np.testing.assert_array_equal(out, jnp.zeros_like(out))


def test_a_recorder_keeps_the_last_valid_queries():
    recorder = query_recorder(dense_cache(), 4)
    _, state = run(recorder, [2])
    assert state.recorded.tolist() == [2, 2]
    np.testing.assert_array_equal(state.queries[:, 2:], QUERY[:, :2])
    valid = np.ones((2, 5), bool)
    valid[0, [0, 2]] = False
    valid[1, 1:] = False
    _, state, _, _ = recorder.attend(0, inputs(2, 7, valid=jnp.asarray(valid)), state, None)
    assert state.recorded.tolist() == [4, 3]
    np.testing.assert_array_equal(state.queries[0], QUERY[0, [1, 3, 5, 6]])
    np.testing.assert_array_equal(state.queries[1, 1:], QUERY[1, :3])
    assert state.inner.length.tolist() == [5, 3]
    assert recorder.rollback is None


def test_a_probe_compares_queries_of_neighbouring_layers():
    probe = previous_query_probe(dense_cache())
    state = probe.init(0, SHAPE)
    first = inputs(0, 3)
    _, _, carry, stats = probe.attend(0, first, state, None)
    assert stats == {"inner": None}
    second = first._replace(query=first.query.at[:, :, 1].multiply(-2.0))
    _, _, carry, stats = probe.attend(1, second, state, carry)
    expected = np.ones((2, 3, 4))
    expected[:, :, 1] = -1
    np.testing.assert_allclose(stats["similarity"], expected, atol=1e-5)
    other = inputs(3, 6)
    _, _, _, stats = probe.attend(2, other, state, carry)
    lengths = np.linalg.norm(other.query, axis=-1) * np.linalg.norm(second.query, axis=-1)
    expected = np.sum(np.asarray(other.query) * np.asarray(second.query), axis=-1) / lengths
    np.testing.assert_allclose(stats["similarity"], expected, atol=1e-5)


def test_many_sequences_are_written_as_few_are():
    few, many = dense_cache(), dense_cache()
    state = many.init(0, SHAPE._replace(batch=20))
    chunk = inputs(0, 2)
    repeated = jax.tree.map(
        lambda x: jnp.tile(x, (10, *[1] * (x.ndim - 1))) if isinstance(x, jax.Array) else x, chunk
    )
    state = state._replace(length=jnp.arange(20, dtype=jnp.int32))
    out, state, _, _ = many.attend(0, repeated, state, None)
    alone = few.init(0, SHAPE)._replace(length=jnp.array([4, 5], jnp.int32))
    expected, alone, _, _ = few.attend(0, chunk, alone, None)
    np.testing.assert_allclose(out[4:6], expected, atol=1e-6)
    np.testing.assert_array_equal(state.key[4:6], alone.key)
    np.testing.assert_array_equal(state.positions[4:6], alone.positions)


def test_bfloat16_caches_take_wider_tokens():
    cache = dense_cache()
    state = cache.init(0, SHAPE._replace(dtype=jnp.bfloat16))
    out, state, _, _ = cache.attend(0, inputs(0, 3), state, None)
    assert state.key.dtype == jnp.bfloat16
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, reference(3), atol=0.03)


def test_sizes_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="spare=-1"):
        sliding_window_cache(-1)
    with pytest.raises(ValueError, match="count=0"):
        query_recorder(dense_cache(), 0)
    with pytest.raises(ValueError, match="a ring needs a window"):
        sliding_window_cache().init(3, SHAPE)
