import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.ops.rotary import (
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
    apply_rotary,
    rotary_amplitude,
    rotary_frequencies,
    rotary_tables,
    rotate,
)
from tests.goldens import golden

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
    with pytest.raises(ValueError, match=r"theta=1.0: must be above 1 with YaRN"):
        rotary_frequencies(4, 1.0, YarnScaling(2.0, 64))
    with pytest.raises(ValueError, match="2 frequencies for head_dim=8"):
        apply_rotary(X, POSITIONS, rotary_frequencies(4))
    with pytest.raises(ValueError, match=r"positions has shape \(1, 3\)"):
        apply_rotary(X, POSITIONS[:1], rotary_frequencies(8))


@pytest.mark.parametrize(
    ("name", "head_dim", "theta", "scaling"),
    [
        ("llama-3.1-8b", 128, 5e5, Llama3Scaling(8.0, 8192)),
        ("llama-3.2-1b", 64, 5e5, Llama3Scaling(32.0, 8192)),
        ("qwen2.5-7b", 128, 1e6, None),
        ("qwen2.5-7b-yarn4", 128, 1e6, YarnScaling(4.0, 32768)),
        ("r1-distill-qwen-7b", 128, 1e4, None),
    ],
)
def test_published_models_have_their_frequencies(name, head_dim, theta, scaling):
    tables = golden("freekv_rope_tables")
    found = rotary_frequencies(head_dim, theta, scaling)
    np.testing.assert_allclose(found, tables[f"{name}/inv_freq"], rtol=1e-6)
    np.testing.assert_allclose(rotary_amplitude(scaling), tables[f"{name}/attention_scaling"])


def test_linear_scaling_divides_positions():
    frequencies = rotary_frequencies(8, scaling=LinearScaling(4.0))
    slowed = apply_rotary(X, POSITIONS * 4, frequencies)
    np.testing.assert_allclose(slowed, apply_rotary(X, POSITIONS, rotary_frequencies(8)), atol=1e-5)


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    plain = np.asarray(rotary_frequencies(32, 1e4))
    scaled = np.asarray(rotary_frequencies(32, 1e4, Llama3Scaling(8.0, 512, 1.0, 4.0)))
    waves = 2 * np.pi / plain
    np.testing.assert_allclose(scaled[waves < 128], plain[waves < 128], rtol=1e-6)
    np.testing.assert_allclose(scaled[waves > 512], plain[waves > 512] / 8, rtol=1e-6)
    middle = (waves > 128) & (waves < 512)
    assert middle.any()
    assert (scaled[middle] < plain[middle]).all()
    assert (scaled[middle] > plain[middle] / 8).all()


def test_yarn_rounds_its_ramp_to_pairs_unless_told_otherwise():
    plain = np.asarray(rotary_frequencies(128, 1e6), np.float64)
    # The pairs, as real numbers, that turn 32 times and once over 32768 positions.
    ends = 64 * np.log(32768 / (2 * np.pi * np.array([32, 1]))) / np.log(1e6)
    rounded = np.array([np.floor(ends[0]), np.ceil(ends[1])])
    assert (np.abs(ends - rounded) > 0.1).all()
    for truncate, (first, last) in ((True, rounded), (False, ends)):
        found = rotary_frequencies(128, 1e6, YarnScaling(4.0, 32768, truncate=truncate))
        stretched = np.interp(np.arange(64), [first, last], [0.0, 1.0])
        expected = plain * (1 - stretched) + plain / 4 * stretched
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_an_amplitude_scales_what_is_turned():
    frequencies = rotary_frequencies(8)
    louder = rotate(X, rotary_tables(POSITIONS, frequencies, 1.5))
    np.testing.assert_allclose(louder, 1.5 * apply_rotary(X, POSITIONS, frequencies), atol=1e-5)
    assert rotary_amplitude(YarnScaling(4.0, 64, amplitude=0.7)) == 0.7
    assert rotary_amplitude(YarnScaling(1.0, 64)) == 1.0


def test_one_row_of_tables_serves_a_batch():
    frequencies = rotary_frequencies(8)
    shared = rotate(X, rotary_tables(POSITIONS[:1], frequencies))
    repeated = apply_rotary(X, jnp.tile(POSITIONS[:1], (2, 1)), frequencies)
    np.testing.assert_array_equal(shared, repeated)


def test_scalings_that_shrink_are_refused():
    with pytest.raises(ValueError, match=r"factor=0.5: must be at least 1"):
        LinearScaling(0.5)
    with pytest.raises(ValueError, match="original_length=0"):
        Llama3Scaling(2.0, 0)
    with pytest.raises(ValueError, match=r"high_frequency_factor=1.0: must be above"):
        Llama3Scaling(2.0, 64, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"beta_fast=1.0: must be above beta_slow=1.0"):
        YarnScaling(2.0, 64, beta_fast=1.0)
