"""Recipes of several phases: how they are laid out and what they keep of their data."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.methods import trec
from jaxlab.methods.trec import Phase, Recipe


def phase(**changes: Any) -> Phase:
    fields: dict[str, Any] = {
        "schedule": "cosine",
        "batch_tokens": 100.0,
        "weight_decay": 0.5,
        "steps": 200,
        "peak_lr": 0.05,
        "final_lr": 0.005,
        "warmup_steps": 20,
    }
    return Phase(**(fields | changes))


def recipe(*phases: Phase, **fields: Any) -> Recipe:
    options: dict[str, Any] = {"parameters": 1000.0} | fields
    return Recipe("plan", phases or (phase(),), **options)


# --- Steps ----------------------------------------------------------------------------------------


def test_phases_follow_one_another():
    plan = recipe(
        phase(),
        phase(schedule="linear", peak_lr=None, final_lr=0.0, warmup_steps=0, steps=50),
        phase(schedule="constant", final_lr=None, weight_decay=0.1, steps=30, warmup_steps=10),
    )
    steps = trec.recipe_steps(plan)
    expected = np.concatenate(
        [
            trec.schedule_values("cosine", 200, 0.05, 20, 0.1),
            trec.schedule_values("linear", 50, 0.005),
            trec.schedule_values("constant", 30, 0.05, 10),
        ]
    )
    np.testing.assert_allclose(steps.lrs, expected, rtol=1e-14)
    decay = np.repeat([0.5, 0.5, 0.1], [200, 50, 30])
    np.testing.assert_allclose(steps.alphas, expected * decay, rtol=1e-14)
    assert steps.starts == (0, 200, 250, 280)
    assert steps.lrs[249] == 0  # the last step has exactly the final rate
    np.testing.assert_array_equal(steps.batch_tokens, 100.0)


def test_warmup_from_a_rate_above_zero():
    rates = phase(start_lr=0.01, warmup_steps=4).rates()
    np.testing.assert_allclose(rates[:4], [0.02, 0.03, 0.04, 0.05])
    np.testing.assert_allclose(rates[4:], phase(warmup_steps=4).rates()[4:])


def test_a_phase_may_end_before_its_schedule():
    whole = phase(steps=200).rates()
    np.testing.assert_allclose(phase(steps=150, horizon=200).rates(), whole[:150])
    by_tokens = phase(steps=None, tokens=15_000.0, horizon=20_000.0)
    np.testing.assert_allclose(by_tokens.rates(), whole[:150])
    # The next phase goes on from there.
    plan = recipe(
        phase(steps=150, horizon=200),
        phase(schedule="d2z", peak_lr=None, final_lr=None, warmup_steps=0, steps=10),
    )
    np.testing.assert_allclose(trec.recipe_steps(plan).lrs[150], whole[149] * 0.9)


def test_independent_weight_decay_and_momentum():
    plan = recipe(phase(decay_scaled_by_lr=False, weight_decay=0.02), b1=0.9)
    report = trec.analyze_recipe(plan, m=1.0)
    np.testing.assert_array_equal(report.alphas, 0.02)
    assert report.tau == pytest.approx(1 / (0.02 * 200))
    updates = trec.coefficients_from_schedule(report.lrs, 0.02, decay_scaled_by_lr=False)
    np.testing.assert_allclose(report.c, trec.momentum_coefficients(updates, b1=0.9), rtol=1e-12)


def test_batches_change_their_size():
    stages = ((0.0, 100.0), (250.0, 200.0), (1000.0, 400.0))
    by_tokens = phase(batch_tokens=stages, steps=None, tokens=2000.0, warmup_steps=0)
    # 250 tokens take 3 batches of 100; 750 take 4 of 200; 1000 take 3 of 400.
    np.testing.assert_array_equal(by_tokens.batches(), [100] * 3 + [200] * 4 + [400] * 3)
    by_steps = phase(batch_tokens=stages, steps=9, warmup_steps=0)
    np.testing.assert_array_equal(by_steps.batches(), [100] * 3 + [200] * 4 + [400] * 2)
    short = phase(batch_tokens=stages, steps=2, warmup_steps=0)
    np.testing.assert_array_equal(short.batches(), [100, 100])
    short = phase(batch_tokens=stages, steps=None, tokens=600.0, warmup_steps=0)
    np.testing.assert_array_equal(short.batches(), [100] * 3 + [200] * 2)


@pytest.mark.parametrize(
    ("intervals", "unit", "windows"),
    [
        (((0.25, 0.5),), "share", ((50, 100),)),
        (((0.5, 1.0), (0.0, 0.25)), "share", ((0, 50), (100, 200))),
        (((0.0, 1049.0), (3051.0, 20_000.0)), "tokens", ((0, 10), (31, 200))),
        (((0.1234, 0.1235),), "share", ((25, 26),)),
    ],
)
def test_intervals_become_steps(intervals, unit, windows):
    plan = recipe(high_quality=intervals, high_quality_unit=unit)
    assert trec.recipe_steps(plan).high_quality == windows


def test_marked_phases_hold_good_data():
    plan = recipe(
        phase(),
        phase(steps=50, high_quality=True, warmup_steps=0),
        phase(steps=50, high_quality=True, warmup_steps=0),
        high_quality=((0.1, 0.2), (0.6, 0.7)),
    )
    assert trec.recipe_steps(plan).high_quality == ((30, 60), (180, 250), (250, 300))


# --- Analysis -------------------------------------------------------------------------------------


def test_report_of_a_single_phase():
    report = trec.analyze_recipe(recipe(high_quality=((0.5, 0.7),)), m=1.5, fraction=0.2)
    lrs = trec.schedule_values("cosine", 200, 0.05, 20, 0.1)
    c, c0 = trec.ema_coefficients(trec.adamw_alphas(lrs, 0.5), initial=True)
    np.testing.assert_allclose(report.c, c, rtol=1e-12)
    assert report.c0 == pytest.approx(c0)
    assert report.tau == pytest.approx(trec.adamw_timescale(0.05, 0.5, 200))
    assert (report.num_steps, report.num_tokens, report.tpp) == (200, 20_000.0, 20.0)
    assert report.recommended_tau == pytest.approx(trec.recommended_timescale(20.0))
    assert (report.m, report.law, report.p) == (1.5, None, 0.5)
    curve = trec.predict_trec(c, m=1.5)
    np.testing.assert_allclose(report.trec, curve, rtol=1e-12)
    assert report.valley == report.valley_tokens == trec.valley(curve)
    assert report.ema_peak == report.ema_peak_tokens == trec.valley(-c)
    assert (report.best.start, report.best.stop) == trec.place_block(curve, 0.2)
    assert report.best.gain == 1.0
    (found,) = report.high_quality
    assert (found.start, found.stop) == (100, 140)
    assert found.fractions == found.token_fractions == (0.5, 0.7)
    assert found.mass == pytest.approx(c[100:140].sum() / c.sum())
    part = c[100:140] / c.max()
    assert found.relative == pytest.approx((part.min(), part.mean(), part.max()))
    assert found.mean_trec == pytest.approx(curve[100:140].mean(), rel=1e-12)
    rest = np.delete(curve, range(100, 140))
    assert found.rest_trec == pytest.approx(rest.mean(), rel=1e-12)
    assert found.best == trec.place_block(curve, 0.2)
    best = curve[slice(*found.best)].mean()
    expected = (curve.mean() - curve[100:140].mean()) / (curve.mean() - best)
    assert found.gain == pytest.approx(expected, rel=1e-9)
    assert 0 < found.gain < 1
    np.testing.assert_allclose(report.density, c / c.mean(), rtol=1e-12)
    np.testing.assert_allclose(report.tokens, 100.0 * np.arange(1, 201))


def test_exponent_comes_from_the_law_of_effective_tokens_per_parameter():
    plan = recipe(num_experts=8, experts_per_token=2)
    report = trec.analyze_recipe(plan)
    assert report.effective_tpp == 5.0
    assert report.law is trec.SMALL_LM_LAW
    assert report.m == pytest.approx(trec.SMALL_LM_LAW(5.0, report.tau))
    assert report.recommended_tau == pytest.approx(trec.recommended_timescale(5.0))
    assert report.m < trec.analyze_recipe(recipe()).m


def test_a_phase_alone_starts_afresh():
    second = phase(schedule="d2z", final_lr=None, steps=80, peak_lr=0.1, warmup_steps=8)
    plan = recipe(phase(), second, high_quality=((0.5, 0.9),))
    report = trec.analyze_recipe(plan, phase=1, m=2.0)
    alone = trec.analyze_recipe(recipe(second), m=2.0)
    for name in ("lrs", "c", "trec", "density", "tokens"):
        np.testing.assert_array_equal(getattr(report, name), getattr(alone, name))
    for name in ("tau", "tpp", "c0", "valley", "best"):
        assert getattr(report, name) == getattr(alone, name)
    assert report.phase == 1
    # Steps 140 to 252 of 280, of which the phase has those from 200 on.
    assert [(w.start, w.stop) for w in report.high_quality] == [(0, 52)]
    # What the whole run keeps of the first phase is its own coefficients times c0 of the second.
    whole, first = trec.analyze_recipe(plan), trec.analyze_recipe(plan, phase=0)
    np.testing.assert_allclose(whole.c, np.concatenate([first.c * report.c0, report.c]), rtol=1e-10)
    assert whole.c0 == pytest.approx(first.c0 * report.c0)
    assert first.high_quality[0].stop == 200


def test_without_weight_decay():
    plan = recipe(phase(weight_decay=0.0))
    report = trec.analyze_recipe(plan, m=1.0)
    assert report.tau == math.inf
    assert report.c0 == 1.0
    np.testing.assert_allclose(report.c, report.lrs / report.lrs.sum(), rtol=1e-12)
    assert report.ema_peak == pytest.approx(trec.ema_peak("cosine", np.inf, warmup_fraction=0.1))
    assert trec.analyze_recipe(plan).m == 0.0  # the law's limit


def test_a_phase_without_weight_decay_still_counts():
    plan = recipe(
        phase(),
        phase(weight_decay=0.0, peak_lr=None, final_lr=None, warmup_steps=0, schedule="d2z"),
    )
    report = trec.analyze_recipe(plan, m=0.0)
    # Both sides of the border move the weights alike.
    assert report.c[200] == pytest.approx(report.c[199], rel=0.02)
    assert report.c.sum() == pytest.approx(1 - report.c0)


def test_averaged_weights():
    weights = trec.exponential_averaging(200, 0.95)
    report = trec.analyze_recipe(recipe(), averaging=weights, m=1.0)
    expected = trec.ema_coefficients(report.alphas, averaging=weights)
    np.testing.assert_allclose(report.c, expected, rtol=1e-12)
    assert report.valley < trec.analyze_recipe(recipe(), m=1.0).valley


def test_positions_by_steps_and_by_tokens():
    plan = recipe(
        phase(batch_tokens=((0.0, 100.0), (10_000.0, 300.0)), steps=200),
        high_quality=((0.5, 0.75),),
    )
    report = trec.analyze_recipe(plan, m=2.0, fraction=0.3)
    tokens = np.cumsum(np.repeat([100.0, 300.0], 100))
    np.testing.assert_array_equal(report.tokens, tokens)
    assert report.valley_tokens == tokens[round(report.valley * 200) - 1] / 40_000
    (window,) = report.high_quality
    assert window.token_fractions == pytest.approx((0.5, 0.75), abs=300 / 40_000)
    assert window.fractions == (window.start / 200, window.stop / 200)
    share = report.best.token_fractions[1] - report.best.token_fractions[0]
    assert share == pytest.approx(0.3, abs=300 / 40_000)
    by_steps = trec.analyze_recipe(plan, m=2.0, fraction=0.3, fraction_of="steps")
    assert (by_steps.best.start, by_steps.best.stop) == trec.place_block(report.trec, 0.3)
    inside = slice(window.start, window.stop)
    expected = np.average(report.trec[inside], weights=report.batch_tokens[inside])
    assert window.mean_trec == pytest.approx(expected)
    assert report.density @ report.batch_tokens == pytest.approx(report.num_tokens)
    np.testing.assert_allclose(
        report.density[150] / report.density[50], report.c[150] / report.c[50] / 3, rtol=1e-12
    )


def test_data_everywhere_is_as_good_as_it_gets():
    report = trec.analyze_recipe(recipe(high_quality=((0.0, 1.0),)), m=1.0)
    (window,) = report.high_quality
    assert (window.rest_trec, window.gain) == (None, 1.0)
    assert window.mass == pytest.approx(1.0)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), fraction=st.floats(0.01, 1.0))
def test_windows_of_unequal_entries_are_the_best(seed, fraction):
    rng = np.random.default_rng(seed)
    curve, sizes = rng.normal(size=30), rng.integers(1, 5, 30).astype(np.float64)
    start, stop = trec.place_block(curve, fraction, sizes=sizes)
    target = fraction * sizes.sum()
    assert stop > start
    largest = sizes[start:stop].max() if stop - start > 1 else sizes.max()
    assert abs(sizes[start:stop].sum() - target) <= largest
    mean = np.average(curve[start:stop], weights=sizes[start:stop])
    for other in range(30):  # windows that reach the target, of which the best may be smaller
        ends = np.cumsum(sizes[other:])
        gaps = np.abs(ends - target)
        if ends[-1] >= target and (gaps == gaps.min()).sum() == 1:
            last = other + 1 + int(np.argmin(gaps))
            assert mean <= np.average(curve[other:last], weights=sizes[other:last]) + 1e-9


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 30))
def test_equal_entries_are_as_without_sizes(seed, size):
    curve = np.random.default_rng(seed).integers(0, 4, 30).astype(np.float64)
    plain = trec.place_block(curve, size / 30)
    assert trec.place_block(curve, size / 30, sizes=np.full(30, 0.5)) == plain


# --- Published recipes ----------------------------------------------------------------------------


def test_annealing_of_llama_3_405b_keeps_nothing():
    main = Phase(
        "cosine", 13e6, 0.1, steps=1_200_000, peak_lr=8e-5, final_lr=8e-7, warmup_steps=8000
    )
    annealing = Phase("linear", 16e6, 0.1, tokens=40e6, high_quality=True)
    report = trec.analyze_recipe(Recipe("llama", (main, annealing), 405e9), m=2.0)
    assert report.num_steps == 1_200_003
    assert report.tau == pytest.approx(0.104, abs=5e-4)
    assert report.ema_peak == pytest.approx(0.571, abs=1e-3)
    last = report.c[-3:]
    assert last.sum() / report.c.sum() == pytest.approx(8e-8, rel=0.02)
    np.testing.assert_allclose(last / report.c.max(), [0.031, 0.015, 0], atol=5e-4)
    (window,) = report.high_quality
    assert window.stop - window.start == 3
    assert window.gain < 0  # worse than mixing
    peak = trec.ema_peak(
        "cosine", report.tau, final_ratio=0.01, warmup_fraction=8000 / report.num_steps
    )
    assert report.ema_peak == pytest.approx(peak, abs=1e-5)


def test_last_data_of_olmo_2_13b_is_kept_well():
    main = Phase("cosine", 8.4e6, 0.1, tokens=5e12, peak_lr=9e-4, final_lr=9e-5, warmup_steps=2000)
    annealing = Phase("linear", 8.4e6, 0.1, tokens=3e11, high_quality=True)
    report = trec.analyze_recipe(Recipe("olmo", (main, annealing), 13.7e9), m=2.0)
    (window,) = report.high_quality
    assert window.fractions[0] == pytest.approx(0.943, abs=5e-4)
    assert report.ema_peak == window.fractions[0]  # exactly where it starts
    assert window.mass == pytest.approx(0.148, abs=1e-3)
    assert window.gain > 0.6


def test_best_window_of_a_two_phase_run_lies_before_its_second_phase():
    plan = Recipe(
        "two-phase",
        (Phase("cosine", 6e6, 0.1, tokens=1e12, peak_lr=3e-4, final_lr=3e-6),),
        8e9,
        high_quality=((0.6, 1.0),),
    )
    report = trec.analyze_recipe(plan, m=2.0, fraction=0.4)
    np.testing.assert_allclose(report.best.fractions, (0.5, 0.9), atol=0.02)
    assert 0 < report.high_quality[0].gain < 1


# --- Misuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "cosin"}, "schedule=cosin: must be one of .*did you mean 'cosine'"),
        ({"steps": None}, "steps=None: exactly one of steps and tokens must be given"),
        ({"tokens": 1e4}, "steps=200: exactly one of"),
        ({"steps": 0}, "steps=0: must be a whole number, at least 1"),
        ({"steps": None, "tokens": -1.0}, r"tokens=-1\.0: must be positive"),
        ({"steps": None, "tokens": 1e12}, r"steps=10000000000: must be at most 100000000"),
        ({"horizon": 100}, "horizon=100: must be at least the phase's own length 200"),
        ({"batch_tokens": 0.0}, r"batch_tokens=0\.0: must be at least 1"),
        ({"batch_tokens": ((5.0, 100.0),)}, "batch_tokens=.*: stages must start at 0 tokens"),
        ({"batch_tokens": ((0.0, 1.0), (0.0, 2.0))}, "and then at ever larger numbers"),
        ({"peak_lr": 0.0}, r"peak_lr=0\.0: must be positive"),
        ({"peak_lr": math.nan}, "peak_lr=nan: must be positive"),
        ({"peak_lr": None}, "warmup_steps=20: must be 0 without a peak_lr"),
        ({"final_lr": 0.06}, r"final_lr=0\.06: must be at least 0 and at most peak_lr"),
        ({"schedule": "constant"}, r"final_lr=0\.005: must be left out with schedule='constant'"),
        ({"schedule": "d2z"}, r"final_lr=0\.005: must be left out with schedule='d2z'"),
        ({"start_lr": 0.06}, r"start_lr=0\.06: must be in \[0, peak_lr\]"),
        ({"start_lr": 0.01, "warmup_steps": 0}, r"start_lr=0\.01: must be .* 0 without warm-up"),
        ({"warmup_steps": 200}, "warmup_steps=200: must be .* below the 200 steps"),
        ({"weight_decay": -0.1}, r"weight_decay=-0\.1: must be at least 0"),
        ({"step_at": 1.5}, r"step_at=1\.5: must be in \[0, 1\]"),
        ({"decay_fraction": 0.0}, r"decay_fraction=0\.0: must be in \(0, 1\]"),
        ({"num_cycles": 0}, "num_cycles=0: must be at least 1"),
    ],
)
def test_phase_misuse(changes, message):
    with pytest.raises(ValueError, match=message):
        phase(**changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"phases": ()}, r"phases=\(\): must hold at least one phase"),
        ({"parameters": 0.0}, r"parameters=0\.0: must be positive"),
        ({"parameter_kind": "all"}, "parameter_kind='all': must be one of total, non-embedding"),
        ({"num_experts": 0}, "num_experts=0: must be at least 1"),
        ({"experts_per_token": 2}, r"experts_per_token=2: must be in \[1, num_experts=1\]"),
        ({"high_quality": ((0.5, 0.4),)}, "high_quality=.*: must be disjoint intervals"),
        ({"high_quality": ((0.1, 0.4), (0.3, 0.5))}, "must be disjoint intervals"),
        ({"high_quality": ((0.5, 2.0),)}, r"disjoint intervals \(start, stop\) in \[0, 1\]"),
        ({"high_quality_unit": "steps"}, "high_quality_unit='steps': must be one of share"),
        ({"b1": 1.0}, r"b1=1\.0: must be in \[0, 1\)"),
    ],
)
def test_recipe_misuse(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(recipe(), **fields)


def test_contradictions_name_the_phase():
    to_zero = phase(schedule="d2z", final_lr=None)
    onwards = phase(peak_lr=None, warmup_steps=0)
    for phases, message in (
        ((onwards,), r"phases\[0\]\.peak_lr=None: must be given where no phase before ended above"),
        ((to_zero, onwards), r"phases\[1\]\.peak_lr=None: must be given where no phase before"),
        (
            (phase(final_lr=0.001), onwards),
            r"phases\[1\]\.final_lr=0\.005: must be at most the rate 0\.001",
        ),
        ((phase(), phase(peak_lr=4.0)), r"phases\[1\]\.alphas=1\.0 at step 10: lr \* weight_"),
        (
            (phase(schedule="wsd", decay_fraction=1.0),),
            r"phases\[0\]\.decay_fraction=1\.0: must be at most 0\.9",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            trec.recipe_steps(recipe(*phases))
    beyond = recipe(high_quality=((100.0, 50_000.0),), high_quality_unit="tokens")
    with pytest.raises(ValueError, match=r"high_quality=\(100\.0, 50000\.0\): .*20000 tokens"):
        trec.recipe_steps(beyond)


def test_analysis_misuse():
    with pytest.raises(ValueError, match=r"phase=1: must lie in \[0, 1\)"):
        trec.analyze_recipe(recipe(), phase=1)
    with pytest.raises(ValueError, match=r"m=-1\.0: must be at least 0"):
        trec.analyze_recipe(recipe(), m=-1.0)
    with pytest.raises(ValueError, match=r"fraction=0: must lie in \(0, 1\]"):
        trec.analyze_recipe(recipe(), fraction=0)
    wrong: Any = "batches"
    with pytest.raises(ValueError, match="fraction_of='batches': must be 'tokens' or 'steps'"):
        trec.analyze_recipe(recipe(), fraction_of=wrong)
    three = np.ones(3)
    with pytest.raises(ValueError, match=r"window=\(2, 2\): must satisfy 0 <= start < stop <= 3"):
        trec.evaluate_window((2, 2), c=three, trec=three, batch_tokens=three)
    with pytest.raises(ValueError, match="c has 3 steps and trec has 2: must be equal"):
        trec.evaluate_window((0, 2), c=three, trec=three[:2], batch_tokens=three)
    with pytest.raises(ValueError, match=r"sizes of shape \(2,\): must be positive, \(3,\)"):
        trec.place_block([1.0, 2.0, 3.0], 0.5, sizes=[1.0, 2.0])
