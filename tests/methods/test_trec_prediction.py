"""Training re-evaluation curves: predicted, fitted, in closed form, and used for placement."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.methods import trec
from tests.goldens import F32, F64, golden

STEPS = 48


def d2z_coefficients(tau: float, num_steps: int, warmup_steps: int = 0) -> np.ndarray:
    lrs = trec.schedule_values("d2z", num_steps, 0.01, warmup_steps)
    decay = trec.weight_decay_for_timescale(tau, 0.01, num_steps)
    return trec.coefficients_from_schedule(lrs, decay)


# --- Predicting -----------------------------------------------------------------------------------


def test_prediction_matches_reference():
    data = golden("trec_prediction")
    num_bins = int(data["n_bins"])
    binned_measured, _ = trec.bin_curve(data["measured"], num_bins)
    np.testing.assert_allclose(binned_measured, data["bins"], **F64)
    for i, p in enumerate(data["p"]):
        for j, m in enumerate(data["m"]):
            got = trec.predict_trec(data["c"], m=m, p=p)
            assert got.dtype == np.float64
            np.testing.assert_allclose(got, data["trec"][i, j], rtol=1e-10)
            assert trec.valley(got) == data["argmin_step"][i, j] / len(got)
            full = trec.pearson(got, data["measured"])
            np.testing.assert_allclose(full, data["pearson_full"][i, j], rtol=1e-9)
            binned, _ = trec.bin_curve(got, num_bins)
            np.testing.assert_allclose(binned, data["trec_binned"][i, j], rtol=1e-10)
            correlation = trec.pearson(binned, binned_measured)
            np.testing.assert_allclose(correlation, data["pearson_binned"][i, j], rtol=1e-9)


@pytest.mark.parametrize(("x64", "tolerance"), [(True, F64), (False, F32)])
def test_prediction_matches_reference_in_graph(x64, tolerance):
    data = golden("trec_prediction")
    with jax.enable_x64(x64):
        dtype = jnp.float64 if x64 else jnp.float32
        c, p, m = (jnp.asarray(data[name], dtype) for name in ("c", "p", "m"))

        def predict(p, m):
            curve = trec.predict_trec(c, m=m, p=p)
            return curve, trec.bin_curve(curve, 20)[0], trec.valley(curve)

        grid = jax.jit(jax.vmap(jax.vmap(predict, (None, 0)), (0, None)))
        curves, binned, valleys = grid(p, m)
        assert curves.dtype == dtype
        np.testing.assert_allclose(curves, data["trec"], **tolerance)
        np.testing.assert_allclose(binned, data["trec_binned"], **tolerance)
        np.testing.assert_allclose(valleys, data["argmin_step"] / 200, rtol=1e-6)
        measured = jnp.asarray(data["measured"], dtype)
        np.testing.assert_allclose(
            trec.pearson(curves, measured), data["pearson_full"], rtol=1e-9 if x64 else 2e-3
        )


def test_prediction_identities():
    c = d2z_coefficients(0.2, 100)
    np.testing.assert_array_equal(trec.predict_trec(c, m=0.0, p=0.0), np.zeros(100))
    np.testing.assert_allclose(trec.predict_trec(c, m=0.0, p=1.0), 1 - c, rtol=1e-14)
    valleys = [trec.valley(trec.predict_trec(c, m=m)) for m in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)]
    assert all(np.diff(valleys) > 0)
    measured = np.sin(np.arange(100))
    r = trec.pearson(measured, trec.predict_trec(c, m=1.0))
    np.testing.assert_allclose(
        trec.pearson(measured, trec.predict_trec(1e-3 * c, m=1.0)), r, rtol=1e-10
    )


def test_prediction_is_differentiable_in_the_exponent():
    c = jnp.asarray(d2z_coefficients(0.2, 20), jnp.float32)
    slope = jax.jacobian(lambda m: trec.predict_trec(c, m=m))(1.5)
    t = np.arange(1, 21) / 20
    expected = -np.sqrt(np.asarray(c)) * t**1.5 * np.log(t)
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), m=st.floats(0, 12), p=st.floats(0, 2))
def test_predictions_lie_in_the_unit_interval(seed, m, p):
    curve = trec.predict_trec(
        trec.ema_coefficients(np.random.default_rng(seed).uniform(0.0, 0.4, STEPS)), m=m, p=p
    )
    assert ((curve >= 0) & (curve <= 1)).all()


def test_prediction_misuse():
    with pytest.raises(ValueError, match=r"m=-1\.0: must not be negative"):
        trec.predict_trec([0.1, 0.2], m=-1.0)
    with pytest.raises(ValueError, match=r"p=-0\.5: must not be negative"):
        trec.predict_trec([0.1, 0.2], m=1.0, p=-0.5)
    with pytest.raises(ValueError, match=r"c=-0\.2 at step 2: coefficients must not"):
        trec.predict_trec([0.1, -0.2], m=1.0)
    with pytest.raises(ValueError, match=r"m of shape \(2,\): must be a scalar"):
        trec.predict_trec(jnp.ones(3), m=jnp.ones(2))


# --- Fitting --------------------------------------------------------------------------------------


def test_fit_recovers_reference_exponents():
    data = golden("trec_fit")
    for curve, c, m in zip(data["curves"], data["c"], data["m_true"], strict=True):
        for num_bins in (50, 20, 200):
            fit = trec.fit_training_fraction(curve, c, p=float(data["p"]), num_bins=num_bins)
            np.testing.assert_allclose(fit.m, m, atol=1e-5)
            np.testing.assert_allclose(fit.r, 1.0, rtol=1e-10)
            assert fit.at_edge is False
            assert isinstance(fit.m, float)


def test_fit_of_many_noisy_curves_is_the_best_exponent():
    c = d2z_coefficients(0.2, 200, 20)
    rng = np.random.default_rng(0)
    curves = trec.predict_trec(c, m=2.0) + rng.normal(size=(3, 400, 200)) * 0.01
    fit = trec.fit_training_fraction(curves, c, num_bins=20)
    assert fit.m.shape == fit.r.shape == fit.at_edge.shape == (3, 400)
    for index in ((0, 0), (1, 17), (2, 399)):
        single = trec.fit_training_fraction(curves[index], c, num_bins=20)
        np.testing.assert_allclose(single.m, fit.m[index], atol=1e-6)
        np.testing.assert_allclose(single.r, fit.r[index], rtol=1e-12)
        binned, _ = trec.bin_curve(curves[index], 20)

        def score(m, binned=binned):
            return trec.pearson(binned, trec.bin_curve(trec.predict_trec(c, m=m), 20)[0])

        np.testing.assert_allclose(score(fit.m[index]), fit.r[index], rtol=1e-12)
        assert max(score(m) for m in np.arange(0, 12, 0.02)) <= fit.r[index]
        assert score(fit.m[index] + 1e-3) < fit.r[index] > score(fit.m[index] - 1e-3)
    # Noise of 0.01 a step leaves m near 2; the mean of 1200 fits is far closer.
    assert abs(fit.m.mean() - 2) < 0.1


def test_fit_reports_the_edges():
    c = d2z_coefficients(0.2, 100)
    low = trec.fit_training_fraction(trec.predict_trec(c, m=0.0), c)
    assert (low.m, low.at_edge) == (0.0, True)
    t = np.arange(1, 101) / 100
    high = trec.fit_training_fraction(1 - np.sqrt(c) * t**20, c)
    assert (high.m, high.at_edge) == (12.0, True)
    # Between the range's end and its neighbour on the grid.
    inside = trec.fit_training_fraction(trec.predict_trec(c, m=0.013), c)
    np.testing.assert_allclose(inside.m, 0.013, atol=1e-6)
    assert not inside.at_edge


def test_fit_of_the_training_fraction_alone():
    c = d2z_coefficients(0.2, 100)
    fit = trec.fit_training_fraction(trec.predict_trec(c, m=1.7, p=0.0), c, p=0.0)
    np.testing.assert_allclose(fit.m, 1.7, atol=1e-6)
    # m = 0 predicts a constant there: it is skipped.
    fit = trec.fit_training_fraction(trec.predict_trec(c, m=0.03, p=0.0), c, p=0.0)
    np.testing.assert_allclose(fit.m, 0.03, atol=1e-4)
    opposed = trec.fit_training_fraction(np.arange(100.0), c, p=0.0)
    assert -1 <= opposed.r < -0.5
    assert opposed.at_edge


def test_fit_misuse():
    c = d2z_coefficients(0.2, 100)
    curve = trec.predict_trec(c, m=1.0)
    with pytest.raises(ValueError, match="measured has 100 steps and c has 90: must be equal"):
        trec.fit_training_fraction(curve, c[:90])
    with pytest.raises(ValueError, match="num_bins=30: must be a divisor of the 100 steps"):
        trec.fit_training_fraction(curve, c, num_bins=30)
    with pytest.raises(ValueError, match="num_bins=200: must be a divisor of the 100 steps"):
        trec.fit_training_fraction(curve, c, num_bins=200)
    with pytest.raises(ValueError, match="num_bins=1: must be at least 2"):
        trec.fit_training_fraction(curve, c, num_bins=1)
    with pytest.raises(ValueError, match="measured in 50 bins is constant"):
        trec.fit_training_fraction(np.full(100, 0.3), c)
    with pytest.raises(ValueError, match="are all coefficients 0"):
        trec.fit_training_fraction(curve, np.zeros(100))
    with pytest.raises(ValueError, match=r"c of shape \(2, 50\)"):
        trec.fit_training_fraction(curve, c.reshape(2, 50))
    with pytest.raises(ValueError, match=r"p=-1\.0: must not be negative"):
        trec.fit_training_fraction(curve, c, p=-1.0)


def test_power_law_matches_reference():
    data = golden("trec_fit")
    exact = trec.fit_power_law(data["tpp"], data["tau"], data["m_exact"])
    np.testing.assert_allclose((exact.C, exact.mu_tpp, exact.mu_tau), data["law"], rtol=1e-8)
    assert (exact.r2, exact.r2_log) == pytest.approx((1.0, 1.0))
    np.testing.assert_allclose(exact(data["tpp"], data["tau"]), data["m_exact"], rtol=1e-10)
    noisy = trec.fit_power_law(data["tpp"], data["tau"], data["m_noisy"])
    np.testing.assert_allclose((noisy.C, noisy.mu_tpp, noisy.mu_tau), data["law_noisy"], rtol=1e-8)
    assert noisy.r2 == pytest.approx(float(data["r2"]), rel=1e-10)
    assert noisy.r2_log == pytest.approx(float(data["r2_log"]), rel=1e-10)


def test_power_law_is_callable_on_host_and_in_graph():
    law = trec.SMALL_LM_LAW
    expected = 0.743 * 7.5**0.208 * 0.2**-0.493
    np.testing.assert_allclose(law(7.5, 0.2), expected)
    np.testing.assert_allclose(jax.jit(law)(7.5, 0.2), expected, rtol=1e-6)
    with pytest.raises(AttributeError):
        law.C = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"tpp=0\.0: must be positive"):
        law(0.0, 0.2)


def test_power_law_of_equal_exponents():
    law = trec.fit_power_law([1.0, 2.0, 4.0, 8.0], [0.1, 0.4, 0.2, 0.7], [0.3] * 4)
    np.testing.assert_allclose((law.C, law.mu_tpp, law.mu_tau), (0.3, 0, 0), atol=1e-12)
    assert (law.r2, law.r2_log) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("tpp", "tau", "m", "message"),
    [
        ([1.0, 2.0], [0.1, 0.2], [1.0, 2.0], "2 runs do not determine the law: at least 3"),
        ([5.0] * 4, [0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0], "vary independently"),
        ([1.0, 2.0, 3.0], [0.1, 0.2], [1.0, 2.0, 3.0], r"shapes .*'tau': \(2,\).*equal"),
        ([1.0, 2.0, 3.0], [0.1, 0.3, 0.2], [1.0, 0.0, 3.0], r"m=\[1\. 0\. 3\.\]: must be positive"),
    ],
)
def test_power_law_misuse(tpp, tau, m, message):
    with pytest.raises(ValueError, match=message):
        trec.fit_power_law(tpp, tau, m)


# --- Closed forms ---------------------------------------------------------------------------------


def test_closed_forms_match_reference():
    data = golden("trec_valley_closed_form")
    tau = data["tau"][:, None]
    valleys = trec.d2z_valley(tau, data["m"], float(data["p"]))
    np.testing.assert_allclose(valleys, data["d2z_valley"], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(
        trec.linear_ema_peak(tau, data["linear_ratio"]), data["linear_ema_argmax"], **F64
    )
    np.testing.assert_allclose(
        trec.wsd_ema_peak(tau, data["wsd_decay_frac"]), data["wsd_ema_argmax"], **F64
    )
    np.testing.assert_allclose(
        trec.step_critical_timescale(data["step_ratio"][:, None], data["step_at"]),
        data["step_tau_critical"],
        rtol=1e-10,
    )


@pytest.mark.parametrize("tau", [0.05, 0.2, 0.9, 1.5])
def test_discrete_curves_agree_with_closed_forms(tau):
    num_steps = 4000
    tolerance = 2 / num_steps + 1 / (tau * num_steps)
    decay = trec.weight_decay_for_timescale(tau, 0.01, num_steps)

    def peak(name, ratio=0.0, **options):
        lrs = trec.schedule_values(name, num_steps, 0.01, final_ratio=ratio, **options)
        c = trec.coefficients_from_schedule(lrs, decay)
        return trec.valley(-c), c

    _, c = peak("d2z")
    for m in (0.0, 0.5, 2.0, 4.0):
        got = trec.valley(trec.predict_trec(c, m=m))
        np.testing.assert_allclose(got, trec.d2z_valley(tau, m), atol=tolerance)
    for ratio in (0.1, 0.3):
        expected = trec.linear_ema_peak(tau, ratio)
        np.testing.assert_allclose(peak("linear", ratio)[0], expected, atol=tolerance)
    for share in (0.1, 0.5):
        expected = trec.wsd_ema_peak(tau, share)
        got = peak("wsd", decay_fraction=share)[0]
        np.testing.assert_allclose(got, expected, atol=tolerance)


def test_step_schedule_peaks_at_the_end_below_the_critical_timescale():
    critical = trec.step_critical_timescale(0.1, 0.7)
    num_steps = 20_000
    lrs = trec.schedule_values("step", num_steps, 0.01, final_ratio=0.1, step_at=0.7)
    for factor, expected in ((0.9, 1.0), (1.1, 0.7)):
        decay = trec.weight_decay_for_timescale(critical * factor, 0.01, num_steps)
        assert trec.valley(-trec.coefficients_from_schedule(lrs, decay)) == expected


def test_closed_form_misuse():
    with pytest.raises(ValueError, match=r"tau=0\.0: must be positive"):
        trec.d2z_valley(0.0, 1.0)
    with pytest.raises(ValueError, match=r"m=-1\.0: must not be negative"):
        trec.d2z_valley(0.1, -1.0)
    with pytest.raises(ValueError, match=r"final_ratio=1\.0: must lie in \[0, 1\)"):
        trec.linear_ema_peak(0.1, 1.0)
    with pytest.raises(ValueError, match=r"decay_fraction=1\.5: must lie in \[0, 1\]"):
        trec.wsd_ema_peak(0.1, 1.5)
    with pytest.raises(ValueError, match=r"final_ratio=0\.0: must be positive"):
        trec.step_critical_timescale(0.0, 0.7)


# --- Placement ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    fraction=st.floats(0.001, 1.0),
    levels=st.sampled_from([2, 5, 10**6]),
)
def test_place_block_is_the_best_window(seed, fraction, levels):
    # Whole numbers, so that equal windows are equal and few levels give many ties.
    curve = np.random.default_rng(seed).integers(0, levels, STEPS).astype(np.float64)
    start, stop = trec.place_block(curve, fraction)
    size = max(1, round(fraction * STEPS))
    sums = [curve[i : i + size].sum() for i in range(STEPS - size + 1)]
    assert (start, stop) == (int(np.argmin(sums)), int(np.argmin(sums)) + size)


def test_place_block_ties_go_to_the_earliest():
    # 0.1 is inexact: the sums of equal windows differ by rounding.
    assert trec.place_block(np.full(1000, 0.1), 0.1) == (0, 100)
    wave = np.tile([0.3, 0.1, 0.1, 0.3, 0.7], 40)
    assert trec.place_block(wave, 0.01) == (1, 3)
    assert trec.place_block(wave, 1.0) == (0, 200)


def test_place_lowest():
    curve = [5.0, 1.0, 3.0, 1.0, 2.0, 1.0]
    np.testing.assert_array_equal(trec.place_lowest(curve, 1 / 3), [1, 3])
    np.testing.assert_array_equal(trec.place_lowest(curve, 2 / 3), [1, 3, 4, 5])
    np.testing.assert_array_equal(trec.place_lowest(curve, 1.0), range(6))
    np.testing.assert_array_equal(trec.place_lowest(curve, 1e-9), [1])
    np.testing.assert_array_equal(
        trec.place_lowest(np.tile([1.0, 0.0], 500), 0.1), range(1, 200, 2)
    )


def test_curriculum():
    ids = trec.curriculum(6, *trec.place_block([3, 2, 1, 1, 2, 3], 1 / 3))
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, [0, 0, 1, 1, 0, 0])
    assert trec.curriculum(6, 0, 6).all()
    assert not trec.curriculum(6, 3, 3).any()


@pytest.mark.parametrize("place", [trec.place_block, trec.place_lowest])
def test_placement_misuse(place):
    for fraction in (0.0, -0.1, 1.5, np.nan):
        with pytest.raises(ValueError, match=rf"fraction={fraction}: must lie in \(0, 1\]"):
            place(np.arange(5.0), fraction)
    with pytest.raises(ValueError, match=r"trec of shape \(2,\): .*finite"):
        place([1.0, np.nan], 0.5)
    with pytest.raises(ValueError, match=r"trec of shape \(2, 2\): must be one curve"):
        place(np.ones((2, 2)), 0.5)


@pytest.mark.parametrize(("start", "stop"), [(3, 2), (-1, 2), (2, 7)])
def test_curriculum_misuse(start, stop):
    with pytest.raises(ValueError, match=rf"start={start}, stop={stop}: .*num_steps=6"):
        trec.curriculum(6, start, stop)
