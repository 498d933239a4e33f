import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.ops.rotary import apply_rotary, rotary_frequencies

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 2, 8)), jnp.float32)
POSITIONS = jnp.array([[0, 1, 2], [5, 6, 40]])


def test_frequencies_fall_geometrically_from_one():
    frequencies = rotary_frequencies(8, theta=10000.0)
    np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_each_pair_turns_like_a_complex_number():
    frequencies = np.asarray(rotary_frequencies(8), np.float64)
    pairs = np.asarray(X[..., :4], np.float64) + 1j * np.asarray(X[..., 4:], np.float64)
    angles = np.asarray(POSITIONS)[..., None, None] * frequencies
    expected = pairs * np.exp(1j * angles)
    turned = apply_rotary(X, POSITIONS, rotary_frequencies(8))
    np.testing.assert_allclose(turned[..., :4], expected.real, atol=1e-5)
    np.testing.assert_allclose(turned[..., 4:], expected.imag, atol=1e-5)


def test_position_zero_changes_nothing_and_lengths_are_kept():
    turned = apply_rotary(X, POSITIONS, rotary_frequencies(8))
    np.testing.assert_array_equal(turned[0, 0], X[0, 0])
    np.testing.assert_allclose(
        jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(X, axis=-1), rtol=1e-5
    )


def test_scores_depend_on_the_difference_of_positions_only():
    frequencies = rotary_frequencies(8, theta=100.0)
    query, key = X[:, :, :1], X[:, :, 1:]

    def scores(shift):
        turned_query = apply_rotary(query, POSITIONS + shift, frequencies)
        turned_key = apply_rotary(key, POSITIONS + shift, frequencies)
        return jnp.einsum("bqhd,bkhd->bqk", turned_query, turned_key)

    np.testing.assert_allclose(scores(17), scores(0), atol=1e-4)
    moved = jnp.einsum(
        "bqhd,bkhd->bqk",
        apply_rotary(query, POSITIONS + 1, frequencies),
        apply_rotary(key, POSITIONS, frequencies),
    )
    assert jnp.max(jnp.abs(moved - scores(0))) > 0.1


def test_narrow_input_keeps_its_type_and_is_turned_in_float32():
    narrow = X.astype(jnp.bfloat16)
    turned = apply_rotary(narrow, POSITIONS, rotary_frequencies(8))
    wide = apply_rotary(narrow.astype(jnp.float32), POSITIONS, rotary_frequencies(8))
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned, wide.astype(jnp.bfloat16))


def test_wide_input_is_turned_exactly():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(1, 1, 1, 2))
        turned = apply_rotary(jnp.asarray(x), jnp.array([[3]], jnp.int32), rotary_frequencies(2))
        expected = (x[..., 0] + 1j * x[..., 1]) * np.exp(3j)
        np.testing.assert_allclose(turned[..., 0], expected.real, rtol=1e-13)
        np.testing.assert_allclose(turned[..., 1], expected.imag, rtol=1e-13)


@pytest.mark.parametrize("head_dim", [0, -2, 7])
def test_odd_or_empty_heads_are_refused(head_dim):
    with pytest.raises(ValueError, match=f"head_dim={head_dim}"):
        rotary_frequencies(head_dim)


def test_other_misuse_is_refused():
    with pytest.raises(ValueError, match="theta=0"):
        rotary_frequencies(4, theta=0.0)
    with pytest.raises(ValueError, match="2 frequencies for head_dim=8"):
        apply_rotary(X, POSITIONS, rotary_frequencies(4))
    with pytest.raises(ValueError, match=r"positions has shape \(1, 3\)"):
        apply_rotary(X, POSITIONS[:1], rotary_frequencies(8))
