import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.ops.losses import cross_entropy, cross_entropy_per_token

LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)), jnp.float32)
TARGETS = jnp.array([[0, 4, 2], [1, 1, 3]])
MASK = jnp.array([[True, False, True], [False, False, True]])

EXAMPLE = (LOGITS, TARGETS, MASK)

mean_loss, token_losses = jax.jit(cross_entropy), jax.jit(cross_entropy_per_token)


def reference(logits, targets):
    exponentials = np.exp(np.asarray(logits, np.float64))
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    return -np.log(np.take_along_axis(probabilities, np.asarray(targets)[..., None], -1)[..., 0])


def test_these_tests_run_under_strict_types_and_ranks():
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.add(jnp.ones(2), jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.add(jnp.ones((2, 2)), jnp.ones(2))


def test_each_token_costs_its_negative_log_probability():
    losses = token_losses(LOGITS, TARGETS)
    np.testing.assert_allclose(losses, reference(LOGITS, TARGETS), rtol=1e-5)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    np.testing.assert_allclose(mean_loss(jnp.zeros((4, 7)), jnp.arange(4)), np.log(7), rtol=1e-6)


def test_a_constant_added_to_the_logits_changes_nothing_even_at_large_values():
    logits = jnp.round(LOGITS * 8) / 8  # exact in float32 next to 1e4
    np.testing.assert_allclose(
        mean_loss(logits + 1e4, TARGETS), mean_loss(logits, TARGETS), rtol=1e-3
    )


def test_the_mean_runs_over_the_mask_only():
    expected = reference(LOGITS, TARGETS)[np.asarray(MASK)].mean()
    np.testing.assert_allclose(mean_loss(LOGITS, TARGETS, MASK), expected, rtol=1e-5)
    np.testing.assert_allclose(
        mean_loss(LOGITS, TARGETS, MASK.astype(jnp.float32)), expected, rtol=1e-5
    )
    everywhere = jnp.ones_like(MASK)
    np.testing.assert_allclose(
        mean_loss(LOGITS, TARGETS, everywhere), reference(LOGITS, TARGETS).mean(), rtol=1e-5
    )


def test_weights_make_a_weighted_mean():
    weights = jnp.array([[0.5, 0.0, 2.0], [0.0, 1.0, 0.0]])
    expected = np.average(reference(LOGITS, TARGETS), weights=np.asarray(weights))
    np.testing.assert_allclose(mean_loss(LOGITS, TARGETS, weights), expected, rtol=1e-5)


def test_an_empty_mask_gives_zero_and_a_zero_gradient():
    value, gradient = jax.jit(jax.value_and_grad(cross_entropy))(
        LOGITS, TARGETS, jnp.zeros_like(MASK)
    )
    assert value == 0
    np.testing.assert_array_equal(gradient, jnp.zeros_like(LOGITS))


def test_masked_targets_may_be_out_of_range():
    ignored = jnp.where(MASK, TARGETS, jnp.full_like(TARGETS, -100))
    beyond = jnp.where(MASK, TARGETS, jnp.full_like(TARGETS, 99))
    expected = mean_loss(LOGITS, TARGETS, MASK)
    assert mean_loss(LOGITS, ignored, MASK) == expected
    assert mean_loss(LOGITS, beyond, MASK) == expected
    with jax.debug_nans(True):
        np.testing.assert_allclose(cross_entropy(LOGITS, beyond, MASK), expected, rtol=1e-6)


def test_the_gradient_is_the_softmax_minus_the_target():
    gradient = jax.jit(jax.grad(cross_entropy))(LOGITS, TARGETS)
    expected = (jax.nn.softmax(LOGITS) - jax.nn.one_hot(TARGETS, 5)) / TARGETS.size
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_the_gradient_has_derivatives_of_its_own():
    direction = jnp.cos(LOGITS * 3)

    def plain(logits):
        chosen = jnp.take_along_axis(logits, TARGETS[..., None], axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1, keepdims=True) - chosen)

    def along(loss):
        return jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (direction,)))(LOGITS)

    for found, expected in zip(
        along(lambda x: cross_entropy(x, TARGETS)), along(plain), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_logits_and_their_gradient_need_one_array():
    x, table, targets = jnp.ones((64, 4)), jnp.ones((4, 4096)), jnp.zeros(64, jnp.int32)
    gradient = jax.jit(jax.grad(lambda x, table: cross_entropy(x @ table, targets), (0, 1)))
    memory = gradient.lower(x, table).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1.5 * (4 * 64 * 4096)


def test_narrow_logits_are_summed_in_float32():
    logits = LOGITS.astype(jnp.bfloat16)
    loss = mean_loss(logits, TARGETS)
    assert loss.dtype == jnp.float32
    assert loss == mean_loss(logits.astype(jnp.float32), TARGETS)


def test_wide_logits_stay_wide():
    with jax.enable_x64(True):
        logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)))
        targets = jnp.arange(4, dtype=jnp.int32)
        losses = token_losses(logits, targets)
        np.testing.assert_allclose(losses, reference(logits, targets), rtol=1e-13)


def test_jit_and_vmap_agree_with_the_plain_call():
    plain = [mean_loss(*row) for row in zip(*map(np.asarray, EXAMPLE), strict=True)]
    mapped = jax.jit(jax.vmap(cross_entropy))(*EXAMPLE)
    np.testing.assert_allclose(mapped, plain, rtol=1e-6)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"targets has shape \(2, 2\)"):
        cross_entropy(LOGITS, TARGETS[:, :2])
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1\)"):
        cross_entropy(LOGITS, TARGETS, MASK[:, :1])
