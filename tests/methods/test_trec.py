"""Training re-evaluation curves: coefficients, their recording, measured curves."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.methods import trec
from tests.goldens import F32, F64, golden

STEPS = 48


def random_alphas(seed: int, shape: tuple[int, ...] = (STEPS,)) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.0, 0.4, shape)


def product_form(alphas: np.ndarray) -> np.ndarray:
    """The coefficients straight from their definition."""
    return np.asarray([a * np.prod(1 - alphas[i + 1 :]) for i, a in enumerate(alphas)])


# --- Coefficients ---------------------------------------------------------------------------------


def test_coefficients_match_reference():
    data = golden("trec_ema_coefficients")
    for kind, ratio in zip(data["kinds"], data["final_ratio"], strict=True):
        key = f"{kind}_r{ratio}"
        lrs, c, c0 = data[f"lr_{key}"], data[f"c_{key}"], data[f"c0_{key}"]
        alphas = trec.adamw_alphas(lrs, float(data["weight_decay"]))
        got = trec.ema_coefficients(alphas, initial=True)
        assert got[0].dtype == np.float64
        np.testing.assert_allclose(got[0], c, **F64)
        np.testing.assert_allclose(got[1], c0, rtol=1e-10)
        np.testing.assert_allclose(
            trec.coefficients_from_schedule(lrs, data["weight_decay"]), c, **F64
        )
        for x64, dtype, tolerance in ((True, jnp.float64, F64), (False, jnp.float32, F32)):
            with jax.enable_x64(x64):
                got = trec.ema_coefficients(jnp.asarray(alphas, dtype), initial=True)
                assert got[0].dtype == got[1].dtype == dtype
                np.testing.assert_allclose(got[0], c, **tolerance)
                np.testing.assert_allclose(got[1], c0, **tolerance)


def test_timescale_and_weight_decay_match_reference():
    data = golden("trec_ema_coefficients")
    eta, num_steps = float(data["eta"]), int(data["T"])
    decay = trec.weight_decay_for_timescale(float(data["tau"]), eta, num_steps)
    np.testing.assert_allclose(decay, data["weight_decay"], rtol=1e-14)
    np.testing.assert_allclose(trec.adamw_timescale(eta, decay, num_steps), data["tau"], rtol=1e-14)
    in_graph = jax.jit(lambda tau: trec.weight_decay_for_timescale(tau, eta, num_steps))(0.2)
    np.testing.assert_allclose(in_graph, data["weight_decay"], rtol=1e-6)


def test_constant_alpha():
    alpha, steps = 0.03, np.arange(1, 101)
    c, c0 = trec.ema_coefficients(np.full(100, alpha), initial=True)
    np.testing.assert_allclose(c, alpha * (1 - alpha) ** (100 - steps), rtol=1e-12)
    np.testing.assert_allclose(c.sum(), 1 - (1 - alpha) ** 100, rtol=1e-12)
    np.testing.assert_allclose(c0, (1 - alpha) ** 100, rtol=1e-12)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), zeros=st.sets(st.integers(0, STEPS - 1)))
def test_coefficients_are_a_convex_combination(seed, zeros):
    alphas = random_alphas(seed)
    alphas[list(zeros)] = 0.0
    c, c0 = trec.ema_coefficients(alphas, initial=True)
    assert (c >= 0).all()
    assert c0 >= 0
    assert abs(c.sum() + c0 - 1) < 1e-12
    np.testing.assert_allclose(c, product_form(alphas), rtol=1e-11, atol=1e-300)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(0, STEPS))
def test_phases_chain(seed, cut):
    alphas = random_alphas(seed)
    whole, whole_c0 = trec.ema_coefficients(alphas, initial=True)
    first, first_c0 = trec.ema_coefficients(alphas[:cut], initial=True)
    second, second_c0 = trec.ema_coefficients(alphas[cut:], initial=True)
    np.testing.assert_allclose(whole, np.concatenate([first * second_c0, second]), rtol=1e-11)
    np.testing.assert_allclose(whole_c0, first_c0 * second_c0, rtol=1e-11)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_neighbour_ratio(seed):
    alphas = random_alphas(seed) + 1e-3
    c = trec.ema_coefficients(alphas)
    np.testing.assert_allclose(
        c[1:] / c[:-1], alphas[1:] / (alphas[:-1] * (1 - alphas[1:])), rtol=1e-11
    )


def test_ratio_at_a_step_drop():
    lrs = trec.schedule_values("step", 100, 0.01, final_ratio=0.1, step_at=0.7)
    c = trec.coefficients_from_schedule(lrs, 5.0)
    np.testing.assert_allclose(c[70] / c[69], 0.1 / (1 - 0.1 * 0.05), rtol=1e-12)


def test_only_the_product_of_rate_and_decay_matters():
    lrs = trec.schedule_values("cosine", 100, 0.01, 10)
    c = trec.coefficients_from_schedule(lrs, 4.0)
    np.testing.assert_array_equal(trec.coefficients_from_schedule(2 * lrs, 2.0), c)
    assert not np.allclose(trec.coefficients_from_schedule(2 * lrs, 4.0), c)


def test_refining_time_halves_the_coefficients():
    coarse, fine = (
        trec.coefficients_from_schedule(
            trec.schedule_values("d2z", num_steps, 0.01),
            trec.weight_decay_for_timescale(0.2, 0.01, num_steps),
        )
        for num_steps in (1000, 2000)
    )
    # Relative difference O(alpha); the last steps, where the rate vanishes, are left out.
    np.testing.assert_allclose(2 * fine[1::2][:-20], coarse[:-20], rtol=0.03)


class CoefficientVariantsTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True)  # pyright: ignore
    @parameterized.parameters((0,), (1,))
    def test_graph_agrees_with_host(self, seed):
        alphas = random_alphas(seed)
        run = self.variant(lambda a: trec.ema_coefficients(a, initial=True))
        c, c0 = run(jnp.asarray(alphas, jnp.float32))
        expected, expected_c0 = trec.ema_coefficients(alphas, initial=True)
        np.testing.assert_allclose(c, expected, **F32)
        np.testing.assert_allclose(c0, expected_c0, **F32)
        predict = self.variant(lambda c, m: trec.predict_trec(c, m=m))
        np.testing.assert_allclose(
            predict(c, jnp.float32(1.5)), trec.predict_trec(expected, m=1.5), **F32
        )


def test_batches_and_vmap():
    alphas = random_alphas(3, (2, 5, STEPS))
    rows = np.stack([[product_form(row) for row in block] for block in alphas])
    np.testing.assert_allclose(trec.ema_coefficients(alphas), rows, rtol=1e-11)
    in_graph = jnp.asarray(alphas, jnp.float32)
    batched = trec.ema_coefficients(in_graph)
    np.testing.assert_allclose(batched, rows, **F32)
    mapped = jax.jit(jax.vmap(jax.vmap(trec.ema_coefficients)))(in_graph)
    np.testing.assert_allclose(mapped, batched, rtol=1e-6)


def test_half_precision_is_computed_in_float32():
    c = trec.ema_coefficients(jnp.full((300,), 2.0**-8, jnp.bfloat16))
    assert c.dtype == jnp.float32
    np.testing.assert_allclose(c, trec.ema_coefficients(np.full(300, 2.0**-8)), rtol=1e-5)


def test_gradient_of_coefficients():
    with jax.enable_x64(True):
        alphas = jnp.asarray(random_alphas(5, (7,)) + 0.01)
        jacobian = jax.jacobian(trec.ema_coefficients)(alphas)
        c = np.asarray(trec.ema_coefficients(alphas))
        # dc_i/dalpha_i = c_i/alpha_i; dc_i/dalpha_j = -c_i/(1 - alpha_j) for j > i; else 0.
        expected = np.triu(-c[:, None] / (1 - np.asarray(alphas)), 1) + np.diag(c / alphas)
        np.testing.assert_allclose(jacobian, expected, rtol=1e-10, atol=1e-14)


def test_long_runs_keep_their_digits_on_the_host():
    num_steps = 1_000_000
    c, c0 = trec.ema_coefficients(np.full(num_steps, 1e-5), initial=True)
    assert abs(c.sum() + c0 - 1) < 1e-12
    np.testing.assert_allclose(c0, np.exp(num_steps * np.log1p(-1e-5)), rtol=1e-9)


@pytest.mark.parametrize(
    ("alphas", "message"),
    [
        ([0.1, 0.2, 1.0], r"alphas=1\.0 at step 3: lr \* weight_decay must lie in \[0, 1\)"),
        ([0.1, -0.2, 2.0], r"alphas=-0\.2 at step 2"),
        ([np.nan, 0.2], r"alphas=nan at step 1"),
        ([[0.1, 0.1], [0.1, 1.5]], r"alphas=1\.5 at step 2 of curve \(1,\)"),
        (0.1, r"alphas=0\.1: must be an array with the steps"),
    ],
)
def test_bad_alphas_name_the_step(alphas, message):
    with pytest.raises(ValueError, match=message):
        trec.ema_coefficients(alphas)


def test_bad_rates_name_the_step():
    with pytest.raises(ValueError, match=r"lrs=-1\.0 at step 2: .*not be negative"):
        trec.adamw_alphas([0.1, -1.0], 0.1)
    with pytest.raises(ValueError, match=r"weight_decay=-0\.1 at step 1: must not be negative"):
        trec.adamw_alphas([0.1, 0.1], -0.1)
    with pytest.raises(ValueError, match=r"alphas=1\.5 at step 2"):
        trec.adamw_alphas([0.1, 0.5], 3.0)
    with pytest.raises(ValueError, match=r"tau=0\.0: must be positive"):
        trec.weight_decay_for_timescale(0.0, 0.1, 10)
    with pytest.raises(ValueError, match=r"weight_decay=0\.0: must be positive"):
        trec.adamw_timescale(0.1, 0.0, 10)


def test_independent_weight_decay():
    lrs = trec.schedule_values("d2z", 10, 0.1)
    alphas = trec.adamw_alphas(lrs, 0.03, decay_scaled_by_lr=False)
    np.testing.assert_array_equal(alphas, np.full(10, 0.03))
    # Each update is scaled by its learning rate, and then decays at the same pace.
    c = trec.coefficients_from_schedule(lrs, 0.03, decay_scaled_by_lr=False)
    expected = lrs * 0.97 ** np.arange(9, -1, -1.0)
    np.testing.assert_allclose(c / c.sum(), expected / expected.sum(), rtol=1e-12)
    np.testing.assert_allclose(c.sum(), 1 - 0.97**10, rtol=1e-12)
    c = trec.coefficients_from_schedule(np.full(10, 0.1), 0.03, decay_scaled_by_lr=False)
    np.testing.assert_allclose(c, trec.ema_coefficients(np.full(10, 0.03)), rtol=1e-12)


def test_without_weight_decay_rates_are_the_weights():
    lrs = trec.schedule_values("cosine", 20, 0.1, 2)
    with pytest.warns(UserWarning, match="weight_decay=0: .*normalised learning rates"):
        c = trec.coefficients_from_schedule(lrs, 0.0)
    np.testing.assert_allclose(c, lrs / lrs.sum(), rtol=1e-14)
    # It is the limit of small weight decay, up to scale.
    limit = trec.coefficients_from_schedule(lrs, 1e-9)
    np.testing.assert_allclose(limit / limit.sum(), c, rtol=1e-8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = jax.jit(trec.coefficients_from_schedule)
        lrs32 = jnp.asarray(lrs, jnp.float32)
        np.testing.assert_allclose(run(lrs32, jnp.float32(0.0)), c, rtol=1e-5)
        expected = trec.coefficients_from_schedule(lrs, 0.5)
        np.testing.assert_allclose(run(lrs32, jnp.float32(0.5)), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="lrs=0 at every step"):
        trec.coefficients_from_schedule(np.zeros(5), 0.1)


# --- AdamW ----------------------------------------------------------------------------------------


def test_momentum_coefficients_match_reference():
    data = golden("trec_adamw_reconstruction")
    b1 = float(data["b1"])
    got = trec.momentum_coefficients(data["c"], b1=b1)
    np.testing.assert_allclose(got, data["c_momentum"], rtol=1e-12)
    for x64, dtype, rtol in ((True, jnp.float64, 1e-12), (False, jnp.float32, 2e-5)):
        with jax.enable_x64(x64):
            in_graph = jax.jit(functools.partial(trec.momentum_coefficients, b1=b1))
            got = in_graph(jnp.asarray(data["c"], dtype))
            assert got.dtype == dtype
            np.testing.assert_allclose(got, data["c_momentum"], rtol=rtol)
    np.testing.assert_array_equal(trec.momentum_coefficients(data["c"], b1=0.0), data["c"])
    with pytest.raises(ValueError, match=r"b1=1\.0: must lie in \[0, 1\)"):
        trec.momentum_coefficients(data["c"], b1=1.0)
    with pytest.raises(ValueError, match=r"c of shape \(2, 3\)"):
        trec.momentum_coefficients(np.ones((2, 3)))


def test_coefficients_rebuild_the_final_weights_of_reference():
    data = golden("trec_adamw_reconstruction")
    decay = float(data["weight_decay"])
    c, c0 = trec.ema_coefficients(trec.adamw_alphas(data["lr"], decay), initial=True)
    np.testing.assert_allclose(c, data["c"], rtol=1e-12)
    np.testing.assert_allclose(c0, data["c0"], rtol=1e-12)
    rebuilt = c0 * data["theta0"] - c @ data["adam_updates"] / decay
    np.testing.assert_allclose(rebuilt, data["theta_T"], atol=1e-12)


def run_optimizer(
    optimizer: optax.GradientTransformation, theta: jax.Array, grads: jax.Array
) -> tuple[jax.Array, jax.Array, Any]:
    """Final weights, every update and the final state."""

    @jax.jit
    def run(theta, grads):
        def step(carry, grad):
            theta, state = carry
            with jax.numpy_dtype_promotion("standard"):
                updates, state = optimizer.update(grad, state, theta)
            return (optax.apply_updates(theta, updates), state), updates

        (final, state), updates = jax.lax.scan(step, (theta, optimizer.init(theta)), grads)
        return final, updates, state

    return run(theta, grads)


@pytest.mark.parametrize(
    ("x64", "dtype", "atol"), [(True, jnp.float64, 1e-12), (False, jnp.float32, 1e-5)]
)
def test_coefficients_rebuild_the_final_weights_of_optax(x64, dtype, atol):
    data = golden("trec_adamw_reconstruction")
    num_steps, decay = len(data["lr"]), float(data["weight_decay"])
    options: dict[str, Any] = {name: float(data[name]) for name in ("b1", "b2", "eps")}
    with jax.enable_x64(x64):
        theta0, grads = (jnp.asarray(data[name], dtype) for name in ("theta0", "grads"))
        lrs = jnp.asarray(data["lr"], dtype)

        def schedule(count):
            return lrs[count]

        adamw = optax.adamw(schedule, weight_decay=decay, **options)
        traced = optax.chain(
            optax.scale_by_adam(**options),
            optax.add_decayed_weights(decay),
            optax.scale_by_learning_rate(schedule),
            trec.trace_ema(schedule, decay, num_steps),
        )
        theta_adamw, _, _ = run_optimizer(adamw, theta0, grads)
        theta_traced, _, state = run_optimizer(traced, theta0, grads)
        _, adam, _ = run_optimizer(optax.scale_by_adam(**options), theta0, grads)
        np.testing.assert_array_equal(theta_adamw, theta_traced)
        np.testing.assert_allclose(theta_adamw, data["theta_T"], atol=atol)
        c, c0 = trec.ema_coefficients(
            trec.adamw_alphas(np.asarray(lrs, np.float64), decay), initial=True
        )
        rebuilt = c0 * np.asarray(theta0) - c @ np.asarray(adam) / decay
        np.testing.assert_allclose(rebuilt, theta_adamw, atol=atol)

        from_state, from_state_c0 = trec.ema_from_opt_state(state, initial=True)
        assert from_state.dtype == np.float64
        # The state keeps the alphas in float32.
        np.testing.assert_allclose(from_state, data["c"], rtol=1e-5)
        np.testing.assert_allclose(from_state_c0, data["c0"], rtol=1e-5)


# --- The trace in the optimiser's state -----------------------------------------------------------


def take_steps(optimizer: optax.GradientTransformation, count: int) -> Any:
    state = optimizer.init(jnp.ones(3))
    for _ in range(count):
        _, state = optimizer.update(jnp.ones(3), state)
    return state


@pytest.mark.parametrize("kind", ["function", "optax", "array", "constant"])
def test_trace_records_every_kind_of_schedule(kind):
    schedule: Any
    schedule, lrs = {
        "function": (trec.make_schedule("d2z", 6, 0.1, 2), trec.schedule_values("d2z", 6, 0.1, 2)),
        "optax": (optax.linear_schedule(0.1, 0.0, 5), np.linspace(0.1, 0, 6)),
        "array": (np.linspace(0.1, 0.3, 6), np.linspace(0.1, 0.3, 6)),
        "constant": (0.2, np.full(6, 0.2)),
    }[kind]
    trace = trec.trace_ema(schedule, 2.0, 6)
    state = take_steps(optax.chain(optax.identity(), trace), 6)
    (found,) = (x for x in state if isinstance(x, trec.TraceEmaState))
    assert found.count == 6
    assert found.alphas.dtype == jnp.float32
    np.testing.assert_allclose(found.alphas, 2 * lrs, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(
        trec.ema_from_opt_state(state), trec.ema_coefficients(2 * lrs), rtol=1e-5, atol=1e-8
    )


def test_trace_passes_updates_through():
    trace = trec.trace_ema(0.1, 0.1, 3)
    updates = {"w": jnp.arange(3.0), "b": jnp.float32(2.0)}
    got, _ = trace.update(updates, trace.init(updates))
    chex.assert_trees_all_equal(got, updates)


def test_partial_trace():
    lrs = trec.schedule_values("cosine", 8, 0.1)
    state = take_steps(trec.trace_ema(lrs, 3.0, 8), 5)
    expected, expected_c0 = trec.ema_coefficients(3 * lrs[:5], initial=True)
    c, c0 = trec.ema_from_opt_state({"nested": (None, [state])}, initial=True)
    assert c.shape == (5,)
    np.testing.assert_allclose(c, expected, rtol=1e-5)
    np.testing.assert_allclose(c0, expected_c0, rtol=1e-5)
    in_graph = jax.jit(trec.ema_from_opt_state)(state)
    assert in_graph.shape == (8,)
    np.testing.assert_allclose(in_graph, np.pad(expected, (0, 3)), rtol=1e-5)
    unused = take_steps(trec.trace_ema(0.1, 1.0, 4), 0)
    fresh, fresh_c0 = trec.ema_from_opt_state(unused, initial=True)
    assert fresh.shape == (0,)
    assert fresh_c0 == 1.0


def test_trace_over_a_sweep():
    lrs = np.stack([trec.schedule_values(name, 6, 0.1) for name in ("d2z", "constant", "cosine")])
    decays = np.asarray([1.0, 2.0, 4.0])

    @jax.jit
    @jax.vmap
    def train(lrs, decay):
        optimizer = optax.chain(optax.scale(1.0), trec.trace_ema(lrs, decay, 6))

        def step(state, _):
            return optimizer.update(jnp.ones(2), state)[1], None

        return jax.lax.scan(step, optimizer.init(jnp.ones(2)), length=6)[0]

    state = train(jnp.asarray(lrs, jnp.float32), jnp.asarray(decays, jnp.float32))
    expected = trec.ema_coefficients(trec.adamw_alphas(lrs, decays[:, None]))
    np.testing.assert_allclose(trec.ema_from_opt_state(state), expected, rtol=1e-5, atol=1e-8)
    mapped = jax.vmap(trec.ema_from_opt_state)(state)
    np.testing.assert_allclose(mapped, expected, **F32)


def test_trace_misuse():
    state = trec.trace_ema(0.1, 0.1, 3).init({})
    with pytest.raises(ValueError, match=r"holds 0 TraceEmaState: .*append trace_ema"):
        trec.ema_from_opt_state(optax.EmptyState())
    with pytest.raises(ValueError, match="opt_state holds 2 TraceEmaState"):
        trec.ema_from_opt_state((state, state))
    with pytest.raises(ValueError, match=r"num_steps=0: must be at least 1"):
        trec.trace_ema(0.1, 0.1, 0)
    with pytest.raises(ValueError, match=r"schedule of shape \(4,\): .*shape \(3,\)"):
        trec.trace_ema(np.ones(4), 0.1, 3)
    late = take_steps(trec.trace_ema(0.1, 0.1, 3), 4)
    with pytest.raises(ValueError, match=r"taken \[4\] steps: .*at most num_steps=3"):
        trec.ema_from_opt_state(late)
    assert np.isnan(jax.jit(trec.ema_from_opt_state)(late)).all()
    mixed = trec.TraceEmaState(jnp.asarray([1, 2]), jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"taken \[1, 2\] steps"):
        trec.ema_from_opt_state(mixed)


# --- Measuring ------------------------------------------------------------------------------------


def batch_of(index: jax.Array) -> jax.Array:
    """Cheap to compile, and different at every step."""
    return jnp.sin(jnp.arange(12.0).reshape(4, 3) + jnp.asarray(index, jnp.float32))


def quadratic_loss(params: jax.Array, batch: jax.Array) -> jax.Array:
    return 0.5 * jnp.mean((params[None] - batch) ** 2)


def test_replay_is_bit_identical_and_step_exact():
    params = jnp.asarray([0.1, 0.2, 0.3])

    def random_batch(index):
        return jax.random.normal(jax.random.fold_in(jax.random.key(7), index), (4, 3))

    def train_step(carry, index):
        batch = random_batch(index)
        return carry, (batch, quadratic_loss(params, batch))

    _, (batches, losses) = jax.jit(
        lambda: jax.lax.scan(train_step, jnp.float32(0), jnp.arange(10, dtype=jnp.int32))
    )()
    replayed = jax.jit(lambda: jax.lax.map(random_batch, jnp.arange(10, dtype=jnp.int32)))()
    np.testing.assert_array_equal(replayed, batches)
    curve = jax.jit(lambda p: trec.compute_trec(quadratic_loss, p, random_batch, 10))(params)
    assert curve.dtype == jnp.float32
    np.testing.assert_allclose(curve, losses, rtol=1e-6)


def test_chunks_and_reference():
    params, reference = jnp.asarray([0.1, 0.2, 0.3]), jnp.asarray([-0.5, 0.0, 0.5])
    curves = [
        trec.compute_trec(quadratic_loss, params, batch_of, 10, chunk=chunk) for chunk in (1, 4, 16)
    ]
    for curve in curves[1:]:
        np.testing.assert_allclose(curve, curves[0], rtol=1e-6)
    base = trec.compute_trec(quadratic_loss, reference, batch_of, 10)
    difference = trec.compute_trec(
        quadratic_loss, params, batch_of, 10, reference_params=reference, chunk=5
    )
    np.testing.assert_allclose(difference, curves[0] - base, rtol=1e-5, atol=1e-7)
    one = trec.reevaluation_loss(quadratic_loss, params, batch_of(jnp.int32(3)), reference)
    np.testing.assert_allclose(one, difference[3], rtol=1e-5)


def test_sweep_of_weights():
    weights = jnp.asarray([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    mapped = jax.vmap(lambda w: trec.compute_trec(quadratic_loss, w, batch_of, 6))(weights)
    for row, w in zip(mapped, weights, strict=True):
        expected = [quadratic_loss(w, batch_of(jnp.int32(i))) for i in range(6)]
        np.testing.assert_allclose(row, jnp.stack(expected), rtol=1e-6)


def test_losses_of_half_precision_are_subtracted_in_float32():
    def loss(params, batch):
        return (params * batch).astype(jnp.bfloat16)

    got = trec.reevaluation_loss(loss, jnp.float32(257.0), jnp.float32(1.0), jnp.float32(1.0))
    assert got.dtype == jnp.float32
    assert got == 255.0  # 257 rounds to 256 in bfloat16


def test_untrained_weights_give_a_flat_curve():
    # 64 normals a step: the mean loss has s.e. 0.5 * sqrt(2 / 64) = 0.088 a step, 0.0125 a bin of
    # 50 steps. False alarm below 1e-4: 4 bins within 4.6 s.e. of 0.5.
    def batch_fn(index):
        return jax.random.normal(jax.random.fold_in(jax.random.key(1), index), (8, 8))

    curve = trec.compute_trec(quadratic_loss, jnp.zeros(8), batch_fn, 200, chunk=50)
    mean, stderr = trec.bin_curve(curve, 4)
    np.testing.assert_allclose(mean, 0.5, atol=4.6 * 0.0125)
    np.testing.assert_allclose(stderr, 0.0125, rtol=0.5)


def test_quadratic_model_follows_its_coefficients():
    # theta_t = (1 - alpha_t) theta_{t-1} + alpha_t xi_t on the loss |theta - xi_t|^2 / 2d gives
    # E L_re(t) = (1 + sum c^2 - 2 c_t) / 2 for standard normal xi: exactly p = 1, m = 0. The
    # noise of one step is about sqrt((1 + sum c^2) / 2d) = 0.011 at d = 4000, of the difference
    # to a reference about 0.003; the bounds are over 5 standard deviations for 300 steps.
    num_steps, width = 300, 4000
    alphas = trec.adamw_alphas(trec.schedule_values("d2z", num_steps, 0.05, 30), 1.0)
    c = trec.ema_coefficients(alphas)
    samples = jax.random.normal(jax.random.key(0), (2, num_steps, width))
    theta, reference = np.einsum("t,stw->sw", c, np.asarray(samples, np.float64))
    curve = trec.compute_trec(
        quadratic_loss,
        jnp.asarray(theta, jnp.float32),
        lambda index: samples[0, index][None],
        num_steps,
        chunk=50,
    )
    np.testing.assert_allclose(curve, 0.5 * (1 + np.sum(c**2) - 2 * c), atol=0.065)
    difference = trec.compute_trec(
        quadratic_loss,
        jnp.asarray(theta, jnp.float32),
        lambda index: samples[0, index][None],
        num_steps,
        reference_params=jnp.asarray(reference, jnp.float32),
        chunk=50,
    )
    # Per step the difference has variance about 2 sum c^2 / d.
    noise = np.sqrt(2 * np.sum(c**2) / width)
    np.testing.assert_allclose(difference, -c, atol=6 * noise)
    mean, _ = trec.bin_curve(np.asarray(difference), 50)
    predicted, _ = trec.bin_curve(trec.predict_trec(c, m=0.0, p=1.0), 50)
    assert trec.pearson(mean, predicted) > 0.95


def test_compute_trec_misuse():
    with pytest.raises(ValueError, match=r"num_steps=0: must be at least 1"):
        trec.compute_trec(quadratic_loss, jnp.zeros(3), batch_of, 0)
    with pytest.raises(ValueError, match=r"chunk=0: must be at least 1"):
        trec.compute_trec(quadratic_loss, jnp.zeros(3), batch_of, 4, chunk=0)
    with pytest.raises(ValueError, match=r"loss_fn returned shape \(4, 3\): .*scalar"):
        trec.compute_trec(lambda params, batch: batch, jnp.zeros(3), batch_of, 4)


def test_bin_curve():
    x = np.random.default_rng(0).normal(size=(2, 12))
    mean, stderr = trec.bin_curve(x, 3)
    for row in range(2):
        for k in range(3):
            part = x[row, 4 * k : 4 * k + 4]
            np.testing.assert_allclose(mean[row, k], part.mean())
            np.testing.assert_allclose(stderr[row, k], part.std(ddof=1) / 2)
    in_graph = jax.jit(lambda x: trec.bin_curve(x, 3))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(in_graph[0], mean, rtol=1e-5)
    np.testing.assert_allclose(in_graph[1], stderr, rtol=1e-5)
    single, zero = trec.bin_curve(x, 12)
    np.testing.assert_array_equal(single, x)
    np.testing.assert_array_equal(zero, np.zeros_like(x))


@pytest.mark.parametrize("num_bins", [5, 24, 0, -1])
@pytest.mark.parametrize("kind", [np.ones, jnp.ones])
def test_bins_must_divide_the_steps(num_bins, kind):
    with pytest.raises(ValueError, match=rf"num_bins={num_bins}: must be a divisor of the 12"):
        trec.bin_curve(kind(12), num_bins)


def test_pearson():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(5, 20)), rng.normal(size=20)
    expected = [np.corrcoef(row, b)[0, 1] for row in a]
    np.testing.assert_allclose(trec.pearson(a, b), expected, rtol=1e-12)
    single = trec.pearson(a[0].tolist(), b)
    assert isinstance(single, float)
    got = jax.jit(trec.pearson)(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    # Deviations whose squares underflow in float32.
    tiny = jnp.asarray(a * 1e-25, jnp.float32)
    got = trec.pearson(tiny, jnp.asarray(b, jnp.float32))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    assert np.isnan(trec.pearson(jnp.ones(4), jnp.arange(4.0)))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.floats(1e-3, 1e3),
    offset=st.floats(-10, 10),
)
def test_pearson_ignores_scale_and_offset(seed, scale, offset):
    a, b = np.random.default_rng(seed).normal(size=(2, STEPS))
    r = trec.pearson(a, b)
    assert -1 <= r <= 1
    np.testing.assert_allclose(trec.pearson(scale * a + offset, b), r, atol=1e-10)
    np.testing.assert_allclose(trec.pearson(-a, b), -r, atol=1e-12)


def test_pearson_misuse():
    with pytest.raises(ValueError, match="a has 3 steps and b has 4: must be equal"):
        trec.pearson(np.arange(3), np.arange(4))
    with pytest.raises(ValueError, match="b is constant: correlation is undefined"):
        trec.pearson(np.arange(3), np.full(3, 0.1))
    with pytest.raises(ValueError, match="a is not finite everywhere"):
        trec.pearson([1.0, np.inf, 2.0], np.arange(3))


def test_valley():
    curve = np.asarray([[3.0, 1.0, 1.0, 2.0], [0.0, 1.0, 1.0, 2.0]])
    np.testing.assert_array_equal(trec.valley(curve), [0.5, 0.25])
    assert trec.valley(curve[0]) == 0.5
    np.testing.assert_allclose(jax.jit(trec.valley)(jnp.asarray(curve)), [0.5, 0.25])
    # A bin stands for the mean fraction of its steps.
    steps = np.arange(1, 13) / 12
    np.testing.assert_allclose(trec.valley(curve[0], num_steps=12), steps[3:6].mean())
    with pytest.raises(ValueError, match=r"num_steps=10: must be a multiple of the .* length 4"):
        trec.valley(curve[0], num_steps=10)


def test_every_public_name_exists():
    for name in trec.__all__:
        assert hasattr(trec, name)
