import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.ops.attention import (
    EMPTY,
    attention_weights,
    blockwise_attention,
    causal_mask,
    dot_product_attention,
    segment_mask,
)

RANDOM = np.random.default_rng(0)
QUERY = jnp.asarray(RANDOM.normal(size=(2, 3, 4, 6)), jnp.float32)
KEY = jnp.asarray(RANDOM.normal(size=(2, 5, 2, 6)), jnp.float32)
VALUE = jnp.asarray(RANDOM.normal(size=(2, 5, 2, 7)), jnp.float32)
MASK = jnp.asarray((RANDOM.random((2, 1, 3, 5)) < 0.6) | (np.arange(5) == 0))

attend = jax.jit(dot_product_attention, static_argnames="scale")


def reference(query, key, value, mask, scale):
    """One query head at a time, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    output = np.zeros((*query.shape[:3], value.shape[3]))
    for b, q, h in np.ndindex(*query.shape[:3]):
        scores = np.exp(key[b, :, h // group] @ query[b, q, h] * scale) * np.asarray(mask[b, 0, q])
        output[b, q, h] = scores @ value[b, :, h // group] / scores.sum()
    return output


def test_grouped_heads_match_a_loop_over_heads():
    output = attend(QUERY, KEY, VALUE, MASK)
    np.testing.assert_allclose(output, reference(QUERY, KEY, VALUE, MASK, 6**-0.5), atol=1e-5)
    unmasked = attend(QUERY, KEY, VALUE, scale=0.3)
    everywhere = np.ones(MASK.shape)
    np.testing.assert_allclose(unmasked, reference(QUERY, KEY, VALUE, everywhere, 0.3), atol=1e-5)


def test_grouped_heads_equal_repeated_key_value_heads():
    repeated = attend(QUERY, jnp.repeat(KEY, 2, axis=2), jnp.repeat(VALUE, 2, axis=2), MASK)
    np.testing.assert_allclose(attend(QUERY, KEY, VALUE, MASK), repeated, atol=1e-6)


def test_equal_scores_average_the_admitted_values():
    output = attend(jnp.zeros_like(QUERY), KEY, VALUE, MASK)
    admitted = np.asarray(MASK[0, 0, 1])
    expected = np.asarray(VALUE[0])[admitted, 0].mean(axis=0)
    np.testing.assert_allclose(output[0, 1, 0], expected, atol=1e-6)


def test_a_query_without_keys_reads_zeros_and_has_finite_gradients():
    mask = MASK.at[0, 0, 1].set(False)

    def total(query, key, value):
        return jnp.sum(attend(query, key, value, mask))

    output = attend(QUERY, KEY, VALUE, mask)
    np.testing.assert_array_equal(output[0, 1], jnp.zeros_like(output[0, 1]))
    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(QUERY, KEY, VALUE)
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)
    np.testing.assert_array_equal(gradients[0][0, 1], jnp.zeros_like(QUERY[0, 1]))


def test_keys_that_are_masked_out_have_no_influence():
    hidden = ~MASK[:, 0, 0]
    changed = jnp.where(hidden[:, :, None, None], VALUE + 100.0, VALUE)
    output = attend(QUERY, KEY, changed, MASK)
    plain = attend(QUERY, KEY, VALUE, MASK)
    np.testing.assert_array_equal(output[:, 0], plain[:, 0])


def test_softmax_of_narrow_input_is_taken_in_float32():
    query, key, value = (x.astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE))
    output = attend(query, key, value, MASK)
    assert output.dtype == jnp.bfloat16
    # The weights lose at most 2^-8 of themselves on the way to the values, the output again.
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    expected = reference(query, key, value, MASK, 6**-0.5)
    bound = 2**-7 * np.abs(np.asarray(VALUE)).max()
    np.testing.assert_allclose(output.astype(jnp.float32), expected, atol=bound)


def test_scores_of_narrow_input_are_not_rounded():
    # Both scores are exact in float32; in bfloat16 257 and 256 would be the same number.
    query = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
    key = jnp.array([[256.0, 1.0], [256.0, 0.0]], jnp.bfloat16)[None, :, None, :]
    value = jnp.eye(2, dtype=jnp.bfloat16)[None, :, None, :]
    weights = attend(query, key, value, scale=1.0).astype(jnp.float32)
    np.testing.assert_allclose(weights[0, 0, 0, 0], 1 / (1 + np.exp(-1)), rtol=2**-7)


def test_wide_input_stays_wide():
    with jax.enable_x64(True):
        query, key, value = (jnp.asarray(np.asarray(x, np.float64)) for x in (QUERY, KEY, VALUE))
        output = attend(query, key, value, MASK)
        expected = reference(query, key, value, MASK, 6**-0.5)
        np.testing.assert_allclose(output, expected, rtol=1e-11, atol=1e-13)


def test_one_mask_serves_every_row_of_a_batch():
    shared = MASK[:1]
    repeated = jnp.broadcast_to(shared, MASK.shape)
    np.testing.assert_array_equal(
        attend(QUERY, KEY, VALUE, shared),
        attend(QUERY, KEY, VALUE, repeated),
    )


def test_jit_and_vmap_agree_with_the_plain_call():
    stacked = [jnp.stack([x, x[::-1]]) for x in (QUERY, KEY, VALUE, MASK)]
    mapped = jax.jit(jax.vmap(dot_product_attention))(*stacked)
    plain = attend(QUERY, KEY, VALUE, MASK)
    np.testing.assert_allclose(mapped, jnp.stack([plain, plain[::-1]]), atol=1e-6)


def test_the_causal_mask_admits_the_past_and_the_present():
    positions = jnp.broadcast_to(jnp.arange(4)[None, :], (2, 4))
    expected = np.broadcast_to(np.tril(np.ones((4, 4), bool)), (2, 1, 4, 4))
    np.testing.assert_array_equal(causal_mask(positions), expected)


def test_the_causal_mask_serves_a_cache_with_empty_slots():
    empty = jnp.iinfo(jnp.int32).max
    slots = jnp.array([[4, 1, 2, 3], [0, 1, empty, empty]])
    mask = causal_mask(jnp.array([[4], [1]]), slots)
    np.testing.assert_array_equal(
        mask[:, 0, 0], [[True, True, True, True], [True, True, False, False]]
    )


def test_the_segment_mask_admits_the_past_of_the_same_segment():
    segments = jnp.array([[1, 1, 2, 2, 2, 0], [1, 2, 3, 3, 0, 0]])
    positions = jnp.array([[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 0, 0]])
    expected = np.zeros((2, 1, 6, 6), bool)
    for row, begin, end in ((0, 0, 2), (0, 2, 5), (1, 0, 1), (1, 1, 2), (1, 2, 4)):
        expected[row, 0, begin:end, begin:end] = np.tril(np.ones((end - begin, end - begin)))
    np.testing.assert_array_equal(segment_mask(segments), expected)
    np.testing.assert_array_equal(jax.jit(segment_mask)(segments, positions), expected)
    mapped = jax.vmap(segment_mask)(segments[:, None], positions[:, None])
    np.testing.assert_array_equal(mapped[:, 0], expected)


def test_the_segment_mask_follows_positions_not_places():
    mask = segment_mask(jnp.array([[2, 1, 2]]), jnp.array([[1, 0, 0]]))
    np.testing.assert_array_equal(mask[0, 0], [[1, 0, 1], [0, 1, 0], [0, 0, 1]])


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        dot_product_attention(QUERY[:, :, :3], KEY, VALUE)
    with pytest.raises(ValueError, match="may differ in their last axis only"):
        dot_product_attention(QUERY, KEY, VALUE[:, :4])
    with pytest.raises(ValueError, match="same batch and head_dim"):
        dot_product_attention(QUERY[..., :4], KEY, VALUE)
    with pytest.raises(ValueError, match="batch length heads width"):
        dot_product_attention(QUERY[0], KEY, VALUE)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1, 3, 4\)"):
        dot_product_attention(QUERY, KEY, VALUE, MASK[..., :4])
    with pytest.raises(TypeError, match="float32"):
        dot_product_attention(QUERY, KEY, VALUE, MASK.astype(jnp.float32))


def test_a_window_hides_what_is_far_back():
    mask = causal_mask(jnp.array([[5, 9]]), jnp.array([[2, 3, 5, 8, 9, EMPTY]]), window=3)
    expected = [[0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0]]
    np.testing.assert_array_equal(mask[0, 0], np.array(expected, bool))
    segments = jnp.array([[1, 1, 1, 2]])
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(segment_mask(segments, window=2)[0, 0], np.array(expected, bool))


def test_weights_are_those_that_mix_the_values():
    mask = MASK.at[0, 0, 1].set(False)
    weights = attention_weights(QUERY, KEY, mask, scale=0.3)
    assert weights.shape == (2, 4, 3, 5)
    mixed = jnp.einsum("bhqk,bkhv->bqhv", weights, jnp.repeat(VALUE, 2, axis=2))
    np.testing.assert_allclose(mixed, attend(QUERY, KEY, VALUE, mask, scale=0.3), atol=1e-6)
    totals = np.ones((2, 4, 3))
    totals[0, :, 1] = 0
    np.testing.assert_allclose(weights.sum(axis=-1), totals, atol=1e-6)


def long_case():
    """Nine queries behind eleven keys in three segments, with padding and empty slots."""
    random = np.random.default_rng(1)
    query, key, value = (
        jnp.asarray(random.normal(size=shape), jnp.float32)
        for shape in ((2, 9, 4, 6), (2, 2, 11, 6), (2, 2, 11, 5))
    )
    queries = jnp.array([[-1, 0, 1, 2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 8, 9, 10, 11]])
    keys = jnp.array([[0, 1, 2, 3, 4, 5, 6, 7, *[EMPTY] * 3], [1, 2, 3, 0, *range(4, 11)]])
    query_segments = jnp.array([[0, 1, 1, 1, 1, 2, 2, 2, 2], [1] * 9])
    key_segments = jnp.array([[1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0], [0, *[1] * 10]])
    return query, key, value, queries, keys, (query_segments, key_segments)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_in_blocks_is_that_of_the_whole(window, packed):
    query, key, value, queries, keys, segments = long_case()
    mask = causal_mask(queries, keys, window)
    if packed:
        theirs = segments[1][:, None, None, :]
        mask = mask & (segments[0][:, None, :, None] == theirs) & (theirs > 0)

    def blocks(query, key, value):
        return blockwise_attention(
            query,
            key,
            value,
            queries,
            keys,
            segment_ids=segments if packed else None,
            window=window,
            query_block=4,
            key_block=3,
        )

    def whole(query, key, value):
        return dot_product_attention(query, key.swapaxes(1, 2), value.swapaxes(1, 2), mask)

    def compare(function):
        outcome, pull = jax.vjp(function, query, key, value)
        return outcome, *pull(jnp.cos(outcome))

    for found, expected in zip(
        jax.jit(lambda: compare(blocks))(), jax.jit(lambda: compare(whole))(), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not np.asarray(blocks(query, key, value))[0, 0].any()


def test_blocks_that_nobody_sees_are_skipped():
    query, key, value, queries, keys, _ = long_case()
    # A product with these would not be a number, even under a weight of zero.
    poisoned = value.at[:, :, 9:].set(jnp.nan)
    keys = keys.at[:, 9:].set(EMPTY)
    out = blockwise_attention(query, key, poisoned, queries, keys, query_block=4, key_block=3)
    assert np.isfinite(out).all()
    with pytest.raises(ValueError, match="key_block=0"):
        blockwise_attention(query, key, value, queries, keys, key_block=0)
