"""Coefficients of averaged weights, of repeated batches and of every kind of weight decay."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.methods import trec
from tests.goldens import F32, F64

STEPS = 40


def random_alphas(seed: int, shape: tuple[int, ...] = (STEPS,)) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.0, 0.4, shape)


# --- Averages of weights --------------------------------------------------------------------------


def test_average_of_weights_matches_simulation():
    rng = np.random.default_rng(0)
    alphas, x, theta = random_alphas(0), rng.normal(size=(STEPS, 3)), rng.normal(size=3)
    weights = rng.dirichlet(np.ones(STEPS + 1))
    average = weights[0] * theta
    initial = theta
    for alpha, update, weight in zip(alphas, x, weights[1:], strict=True):
        theta = (1 - alpha) * theta + alpha * update
        average = average + weight * theta
    c, c0 = trec.ema_coefficients(alphas, averaging=weights, initial=True)
    assert isinstance(c0, float)
    np.testing.assert_allclose(c0 * initial + c @ x, average, rtol=1e-12)
    np.testing.assert_allclose(c.sum() + c0, 1, rtol=1e-12)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_average_of_weights_averages_the_coefficients(seed):
    alphas = random_alphas(seed)
    weights = np.random.default_rng(seed + 1).dirichlet(np.ones(STEPS))
    expected, expected_c0 = np.zeros(STEPS), 0.0
    for step, weight in enumerate(weights, start=1):
        c, c0 = trec.ema_coefficients(alphas[:step], initial=True)
        expected[:step] += weight * c
        expected_c0 += weight * c0
    c, c0 = trec.ema_coefficients(alphas, averaging=weights, initial=True)
    np.testing.assert_allclose(c, expected, rtol=1e-12)
    np.testing.assert_allclose(c0, expected_c0, rtol=1e-12)


@pytest.mark.parametrize("debias", [True, False])
def test_average_matches_optax_ema_of_an_adamw_run(debias):
    decay, wd, num_steps = 0.9, 0.5, 30
    with jax.enable_x64(True):
        schedule = trec.make_schedule("cosine", num_steps, 0.1, 3, 0.1)
        adamw = optax.adamw(schedule, weight_decay=wd)
        adam = optax.scale_by_adam()
        ema = optax.ema(decay, debias=debias)
        theta0 = jnp.asarray([0.3, -1.0, 2.0])

        def step(carry, index):
            theta, adamw_state, adam_state, ema_state = carry
            grad = jnp.sin(theta + index)
            with jax.numpy_dtype_promotion("standard"):
                change, adamw_state = adamw.update(grad, adamw_state, theta)
                u, adam_state = adam.update(grad, adam_state)
                theta = optax.apply_updates(theta, change)
                average, ema_state = ema.update(theta, ema_state)
            return (theta, adamw_state, adam_state, ema_state), (u, average)

        start = theta0, adamw.init(theta0), adam.init(theta0), ema.init(theta0)
        _, (u, averages) = jax.jit(
            lambda carry: jax.lax.scan(step, carry, jnp.arange(num_steps, dtype=jnp.float64))
        )(start)
        u, average = np.asarray(u), np.asarray(averages[-1])
    lrs = trec.schedule_values("cosine", num_steps, 0.1, 3, 0.1)
    weights = trec.exponential_averaging(num_steps, decay)
    if not debias:  # starts at zero and is not corrected
        weights = weights * (1 - decay**num_steps)
    alphas = trec.adamw_alphas(lrs, wd)
    c, c0 = trec.ema_coefficients(alphas, averaging=weights, initial=True)
    np.testing.assert_allclose(c0 * np.asarray(theta0) - c @ u / wd, average, rtol=1e-11)
    # The average looks further back than the final weights.
    steps = np.arange(num_steps)
    assert steps @ c / c.sum() < steps @ trec.ema_coefficients(alphas) / (1 - c0)


def test_averaging_in_the_graph_and_over_batches():
    alphas = random_alphas(2, (2, 3, STEPS))
    weights = trec.exponential_averaging(STEPS, 0.8, from_initial=True)
    rows = [trec.ema_coefficients(row, averaging=weights) for row in alphas.reshape(-1, STEPS)]
    expected = np.reshape(rows, alphas.shape)
    c, c0 = trec.ema_coefficients(alphas, averaging=weights, initial=True)
    np.testing.assert_allclose(c, expected, **F64)
    np.testing.assert_allclose(c.sum(-1) + c0, 1, rtol=1e-12)
    run = jax.jit(lambda a, w: trec.ema_coefficients(a, averaging=w, initial=True))
    c, c0 = run(jnp.asarray(alphas, jnp.float32), jnp.asarray(weights, jnp.float32))
    np.testing.assert_allclose(c, expected, **F32)
    np.testing.assert_allclose(c.sum(-1) + c0, 1, rtol=1e-5)


def test_exponential_averaging():
    np.testing.assert_allclose(trec.exponential_averaging(3, 0.5), np.array([1, 2, 4]) / 7)
    from_initial = trec.exponential_averaging(3, 0.5, from_initial=True)
    np.testing.assert_allclose(from_initial, [0.125, 0.125, 0.25, 0.5])
    np.testing.assert_array_equal(trec.exponential_averaging(3, 0.0), [0, 0, 1])
    alphas = random_alphas(1)
    np.testing.assert_allclose(
        trec.ema_coefficients(alphas, averaging=trec.exponential_averaging(STEPS, 0.0)),
        trec.ema_coefficients(alphas),
        rtol=1e-12,
    )
    with pytest.raises(ValueError, match=r"decay=1\.0: must lie in \[0, 1\)"):
        trec.exponential_averaging(3, 1.0)
    with pytest.raises(ValueError, match=r"num_steps=0: must be at least 1"):
        trec.exponential_averaging(0, 0.5)


def test_averaging_misuse():
    with pytest.raises(ValueError, match=r"averaging of shape \(3,\): .* each of the 40 steps"):
        trec.ema_coefficients(random_alphas(0), averaging=np.ones(3))
    with pytest.raises(ValueError, match=r"averaging=-1\.0 at step 2: must not be negative"):
        trec.ema_coefficients([0.1, 0.1], averaging=[0.1, -1.0])


# --- Weight decay of every kind -------------------------------------------------------------------


def simulate(lrs: np.ndarray, alphas: np.ndarray, u: np.ndarray, theta: np.ndarray) -> np.ndarray:
    for lr, alpha, update in zip(lrs, alphas, u, strict=True):
        theta = (1 - alpha) * theta - lr * update
    return theta


@pytest.mark.parametrize("kind", ["scaled", "independent", "changing", "none"])
def test_update_coefficients_rebuild_the_final_weights(kind):
    rng = np.random.default_rng(3)
    lrs = trec.schedule_values("cosine", STEPS, 0.2, 4, 0.1)
    decay = np.where(np.arange(STEPS) < 25, 0.5, 0.0 if kind == "changing" else 0.5)
    alphas = {
        "scaled": lrs * 0.5,
        "independent": np.full(STEPS, 0.07),
        "changing": lrs * decay,
        "none": np.zeros(STEPS),
    }[kind]
    u, theta0 = rng.normal(size=(STEPS, 2)), rng.normal(size=2)
    c, c0 = trec.update_coefficients(lrs, alphas, initial=True)
    np.testing.assert_allclose(c.sum(), 1 if kind == "none" else 1 - c0, rtol=1e-12)
    factor = simulate(lrs, alphas, np.ones((STEPS, 1)), np.zeros(1))[0] / c.sum()
    final = simulate(lrs, alphas, u, theta0)
    np.testing.assert_allclose(c0 * theta0 + factor * (c @ u), final, rtol=1e-11)
    if kind == "scaled":
        np.testing.assert_allclose(c, trec.ema_coefficients(alphas), rtol=1e-12)
        np.testing.assert_allclose(factor, -2, rtol=1e-12)


@pytest.mark.parametrize("scaled", [True, False])
def test_small_weight_decay_approaches_none(scaled):
    lrs = trec.schedule_values("d2z", STEPS, 0.1, 4)
    weights = trec.exponential_averaging(STEPS, 0.9)
    for averaging in (None, weights):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            none = trec.coefficients_from_schedule(
                lrs, 0.0, decay_scaled_by_lr=scaled, averaging=averaging
            )
        small = trec.coefficients_from_schedule(
            lrs, 1e-9, decay_scaled_by_lr=scaled, averaging=averaging
        )
        np.testing.assert_allclose(none.sum(), 1, rtol=1e-12)
        np.testing.assert_allclose(small / small.sum(), none, rtol=1e-6)


def test_update_coefficients_misuse():
    with pytest.raises(ValueError, match="lrs has 2 steps and alphas has 3: must be equal"):
        trec.update_coefficients([0.1, 0.1], [0.1, 0.1, 0.1])
    with pytest.raises(ValueError, match="lrs=0 at every step"):
        trec.update_coefficients([0.0, 0.0], [0.1, 0.1])
    with pytest.raises(ValueError, match=r"alphas=1\.5 at step 2"):
        trec.update_coefficients([0.1, 0.1], [0.1, 1.5])


def test_timescale_of_independent_weight_decay():
    decay = trec.weight_decay_for_timescale(0.2, 0.1, 50, decay_scaled_by_lr=False)
    assert decay == pytest.approx(0.1)
    assert trec.adamw_timescale(0.1, decay, 50, decay_scaled_by_lr=False) == pytest.approx(0.2)


def test_recommended_timescale():
    taus = [trec.recommended_timescale(tpp) for tpp in (20.0, 82.0, 234.0)]
    np.testing.assert_allclose(taus, [0.224, 0.106, 0.061], atol=6e-4)
    np.testing.assert_allclose(
        trec.recommended_timescale(np.array([20.0, 82.0])), taus[:2], rtol=1e-14
    )
    with pytest.raises(ValueError, match=r"tpp=0: must be positive"):
        trec.recommended_timescale(0)


def test_effective_tokens_per_parameter():
    assert [trec.effective_tpp(20.0, e) for e in (1, 4, 8, 32)] == [20.0, 5.0, 2.5, 0.625]
    assert trec.effective_tpp(20.0, 8, top_k=2) == 5.0
    with pytest.raises(ValueError, match=r"top_k=3: must lie in \[1, num_experts=2\]"):
        trec.effective_tpp(20.0, 2, top_k=3)
    with pytest.raises(ValueError, match=r"num_experts=0: must be positive"):
        trec.effective_tpp(20.0, 0)


# --- Batches seen several times -------------------------------------------------------------------


def test_repeats_add_up():
    c = np.random.default_rng(4).random((3, 12))
    ids = np.random.default_rng(5).integers(0, 4, 12)
    expected = np.stack([c[:, ids == k].sum(-1) for k in range(5)], -1)
    np.testing.assert_allclose(trec.sum_repeats(c, ids, 5), expected, rtol=1e-14)
    np.testing.assert_allclose(trec.sum_repeats(c[0], ids), expected[0, :4], rtol=1e-14)
    c32 = jnp.asarray(c, jnp.float32)
    np.testing.assert_allclose(trec.sum_repeats(c32, ids, 5), expected, rtol=1e-6)
    run = jax.jit(lambda c, ids: trec.sum_repeats(c, ids, 5))
    np.testing.assert_allclose(run(c32, jnp.asarray(ids)), expected, rtol=1e-6)
    beyond = jnp.asarray(np.where(ids == 3, 9, ids))
    np.testing.assert_allclose(run(c32, beyond)[:, 3:], 0.0)
    with pytest.raises(ValueError, match="num_batches=None: must be given"):
        jax.jit(trec.sum_repeats)(c32, jnp.asarray(ids))


def test_repeats_are_what_a_quadratic_model_remembers():
    # Every batch pulls towards itself: weights move by alpha (x - theta).
    rng = np.random.default_rng(6)
    x, ids = rng.normal(size=(5, 7)), np.tile(np.arange(5), 4)
    alphas = trec.adamw_alphas(trec.schedule_values("d2z", 20, 0.5), 0.4)
    theta = np.zeros(7)
    for alpha, batch in zip(alphas, ids, strict=True):
        theta += alpha * (x[batch] - theta)
    c = trec.sum_repeats(trec.ema_coefficients(alphas), ids)
    np.testing.assert_allclose(c @ x, theta, rtol=1e-12)


def test_repeats_misuse():
    with pytest.raises(ValueError, match=r"batch_ids of shape \(2,\) .*shape \(3,\)"):
        trec.sum_repeats([0.1, 0.2, 0.3], [0, 1])
    with pytest.raises(ValueError, match=r"type float64: must be integers"):
        trec.sum_repeats([0.1, 0.2], np.array([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"from -1 to 3: must lie in \[0, num_batches=3\)"):
        trec.sum_repeats([0.1, 0.2], [-1, 3], 3)
