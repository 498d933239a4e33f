"""What is said about recipes: numbers, sentences and figures."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from jaxlab.experiments.trec.planning import plan_result, recipes_result
from jaxlab.methods import trec
from jaxlab.methods.trec import Phase, Recipe
from jaxlab.reporting.figures import to_png
from jaxlab.reporting.report import Result, report_markdown


def phase(**changes: Any) -> Phase:
    fields: dict[str, Any] = {
        "schedule": "cosine",
        "batch_tokens": 100.0,
        "weight_decay": 0.5,
        "steps": 500,
        "peak_lr": 0.02,
        "final_lr": 0.002,
        "warmup_steps": 20,
    }
    return Phase(**(fields | changes))


def recipe(*phases: Phase, **fields: Any) -> Recipe:
    options: dict[str, Any] = {"parameters": 5000.0} | fields
    return Recipe("mine", phases or (phase(),), **options)


def text(result: Result) -> str:
    return " ".join(result.notes)


def test_plan_reports_the_analysis():
    plan = recipe(high_quality=((0.8, 1.0),))
    result = plan_result(plan, fraction=0.2, m=2.0, power=1.0)
    report = trec.analyze_recipe(plan, fraction=0.2, fraction_of="steps", m=2.0, p=1.0)
    assert (result.method, result.variant, result.claims) == ("trec", "plan", ())
    metrics = result.metrics
    window = (metrics["best window start"], metrics["best window stop"])
    assert window == report.best.fractions
    assert metrics["predicted valley"] == report.valley
    assert metrics["tau"] == report.tau == pytest.approx(0.2)
    assert metrics["tau, recommended"] == report.recommended_tau
    assert metrics["tokens per parameter"] == 10
    assert metrics["high-quality data 1, gain / best gain"] == report.high_quality[0].gain
    assert "m = 2 was given" in text(result)
    assert all(isinstance(value, float) for value in metrics.values())


def test_plan_says_how_to_change_the_time_scale():
    # 0.32 is recommended for 10 tokens per parameter.
    shorter = text(plan_result(recipe(), m=1.0))
    assert "tau = 0.2 is 0.621 times what is recommended, a shorter memory: 0.322" in shorter
    assert "lower the weight decay from 0.5 to 0.31, or the learning rate by as much" in shorter
    longer = text(plan_result(recipe(phase(weight_decay=0.1)), m=1.0))
    assert "a longer memory" in longer
    assert "raise the weight decay from 0.1 to 0.31" in longer
    # Which is what makes it so.
    assert "is close to what is recommended" in text(plan_result(recipe(phase(weight_decay=0.31))))
    assert "tau is infinite" in text(plan_result(recipe(phase(weight_decay=0.0)), m=1.0))
    independent = text(plan_result(recipe(phase(weight_decay=0.1, decay_scaled_by_lr=False))))
    assert "the weight decay from 0.1 to 0.00621." in independent
    two = recipe(phase(), phase(weight_decay=0.25))
    assert "multiply all weight decays by 0.447, or the" in text(plan_result(two, m=1.0))
    experts = text(plan_result(recipe(num_experts=5), m=1.0))
    assert "for 2 effective tokens per parameter" in experts


def test_plan_says_where_the_exponent_comes_from():
    law = text(plan_result(recipe()))
    assert "m = 2.65 comes from a law fitted to a language model of 17 thousand" in law
    assert "extrapolated" not in law
    far = text(plan_result(recipe(parameters=100.0)))
    assert "extrapolated to tokens per parameter = 500 (fitted: 3.75 to 15)" in far
    beyond = text(plan_result(recipe(phase(weight_decay=10.0), parameters=100.0)))
    assert "and tau = 0.01 (fitted: 0.1 to 0.8), beyond every exponent" in beyond


def test_plan_shows_how_much_the_exponent_matters():
    result = plan_result(recipe(), m=2.0)
    (band,) = result.figures[1].panels[0].series
    np.testing.assert_allclose(np.asarray(band.x, float), 2 * np.geomspace(1 / 3, 3, 9))
    c = trec.analyze_recipe(recipe(), m=2.0).c
    for m, valley, low, high in zip(band.x, band.y, band.low or (), band.high or (), strict=True):
        curve = trec.predict_trec(c, m=float(m))
        assert valley == trec.valley(curve)
        assert (low * 500, high * 500) == pytest.approx(trec.place_block(curve, 0.1))
    assert band.low is not None
    sentence = f"starts between {min(band.low):.3f} and {max(band.low):.3f} of training"
    assert sentence in text(result)
    none = plan_result(recipe(), m=0.0).figures[1].panels[0]
    assert (none.xscale, none.series[0].x[0], none.series[0].x[-1]) == ("linear", 0.0, 1.0)


def test_plan_draws_the_window_and_the_recipes_own_data():
    plan = recipe(
        phase(), phase(schedule="d2z", peak_lr=None, final_lr=None, steps=1, warmup_steps=0)
    )
    plan = dataclasses.replace(plan, high_quality=((0.5, 0.6), (0.999, 1.0)))
    result = plan_result(plan, m=2.0)
    curve, best = result.figures[0].panels[1].series
    best_start = result.metrics["best window start"]
    assert best.x == (best_start, result.metrics["best window stop"])
    assert (min(curve.y), max(curve.y)) == (0.0, 1.0)
    valley = result.metrics["predicted valley"]
    assert curve.x[int(np.argmin(np.asarray(curve.y, float)))] == pytest.approx(valley)
    panel = result.figures[0].panels[1]
    ((start, stop, label),) = panel.shaded
    assert (start, stop) == pytest.approx((0.5, 0.6), abs=1 / 501)
    assert label == "high-quality data as planned"
    ((position, mark),) = panel.vertical_lines
    assert position == pytest.approx(500 / 501)
    assert mark == "high-quality data, 1 step"
    rate = result.figures[0].panels[0].series[0]
    assert rate.y[-1] == 0.0
    assert max(rate.y) == 1.0
    for figure in result.figures:
        assert to_png(figure).startswith(b"\x89PNG")
    assert "## Metrics" in report_markdown(result, "command")


def test_long_runs_are_drawn_with_their_jumps_and_extremes():
    plan = recipe(phase(schedule="step", steps=20_000, weight_decay=0.01, step_at=0.70003))
    result = plan_result(plan, m=2.0)
    rate, kept = result.figures[0].panels[0].series
    assert len(rate.x) < 700
    drop = int(np.argmax(np.abs(np.diff(rate.y[50:])))) + 50
    np.testing.assert_allclose(np.asarray(rate.x[drop : drop + 2], float) * 20_000, [14000, 14001])
    assert max(kept.y) == 1.0
    assert min(result.figures[0].panels[1].series[0].y) == 0.0


def test_sentences_about_the_recipes_own_data():
    good = plan_result(recipe(high_quality=((0.6, 0.8),)), m=2.0, fraction=0.2)
    gain = good.metrics["high-quality data 1, gain / best gain"]
    assert 0 < gain < 1
    assert f"gains {gain:.0%} of what placement can gain over uniform mixing" in text(good)
    assert "0.600 to 0.800 of training (100 steps)" in text(good)
    bad = plan_result(recipe(high_quality=((0.0, 0.2),)), m=2.0)
    assert "is kept worse than if it were mixed in uniformly" in text(bad)
    grown = recipe(phase(batch_tokens=((0.0, 100.0), (10_000.0, 200.0))))
    assert "from 100 to 200 tokens" in text(plan_result(grown))
    told = text(plan_result(recipe(source="a paper", assumed="the rest")))
    assert "Published: a paper. Assumed: the rest." in told


def test_plan_of_a_phase_alone():
    plan = recipe(phase(), phase(steps=200, schedule="d2z", final_lr=None))
    result = plan_result(plan, m=1.0, phase=1)
    assert result.metrics["steps"] == 200
    assert "for a phase alone there is no recommendation" in text(result)
    alone = dict(plan_result(recipe(plan.phases[1]), m=1.0).metrics)
    assert alone.pop("tau, recommended") > 0
    assert alone == result.metrics


def test_fraction_of_the_tokens():
    plan = recipe(phase(batch_tokens=((0.0, 100.0), (25_000.0, 300.0))))
    result = plan_result(plan, m=2.0, fraction=0.3, fraction_of="tokens")
    share = (
        result.metrics["best window stop, share of tokens"]
        - result.metrics["best window start, share of tokens"]
    )
    assert share == pytest.approx(0.3, abs=0.005)
    assert "window of 0.3 of the tokens" in text(result)
    (band,) = result.figures[1].panels[0].series
    start, stop = trec.analyze_recipe(plan, m=2.0, fraction=0.3).best.fractions
    assert band.low is not None
    assert band.high is not None
    assert (band.low[4], band.high[4]) == pytest.approx((start, stop))  # the exponent itself


def test_recipes_side_by_side():
    late = recipe(high_quality=((0.9, 1.0),))
    none = dataclasses.replace(recipe(phase(weight_decay=0.0)), name="other")
    result = recipes_result([late, none], m=2.0)
    metrics = result.metrics
    assert metrics["mine: tau"] == pytest.approx(0.2)
    assert metrics["other: tau"] == math.inf
    report = trec.analyze_recipe(late, m=2.0, fraction=0.1)
    assert metrics["mine: best window start"] == report.best.fractions[0]
    assert metrics["mine: high-quality data 1, gain / best gain"] == report.high_quality[0].gain
    assert "other: high-quality data 1, start" not in metrics
    assert [note.split(".")[0] for note in result.notes] == ["mine", "other"]
    (figure,) = result.figures
    assert [panel.title for panel in figure.panels] == ["mine", "other"]
    assert figure.panels[0].shaded == ((0.9, 1.0, "high-quality data as planned"),)
    assert max(figure.panels[0].series[1].y) == 1.0
    assert to_png(figure).startswith(b"\x89PNG")


def test_shipped_recipes_side_by_side():
    result = recipes_result(m=2.0)
    assert len(result.figures[0].panels) == len(result.notes) == 4
    assert result.metrics["Llama 3 405B: high-quality data 1, gain / best gain"] < 0
    assert result.metrics["OLMo 2 13B: high-quality data 1, gain / best gain"] > 0.6


def test_planning_misuse():
    with pytest.raises(ValueError, match=r"recipes=\(\): must hold at least one"):
        recipes_result([])
    with pytest.raises(ValueError, match=r"phase=3: must lie in \[0, 1\)"):
        plan_result(recipe(), phase=3)
