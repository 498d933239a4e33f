"""Intervals against closed forms, and verdicts that never flatter."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jaxlab.reporting.claims import (
    Claim,
    bootstrap_t_interval,
    claim_from_bootstrap,
    claim_from_values,
    format_number,
    paired_bootstrap,
    t_interval,
)

# Two-sided probability with which each random test of this file would fail if the code is right
# and the seed were drawn anew.
FALSE_ALARM = 1e-5


def make_claim(**changes: Any) -> Claim:
    fields: dict[str, Any] = {
        "id": "demo.gain",
        "kind": "claim",
        "statement": "The gain is at least 1.",
        "source": "Table 1: 1.2",
        "unit": "seed",
        "values": (1.0, 2.0),
        "mean": 1.5,
        "low": 1.25,
        "high": 1.75,
        "bound": 1.0,
        "direction": ">=",
    }
    return Claim(**{**fields, **changes})


def from_values(values: Any, bound: float | None = 0.0, **changes: Any) -> Claim:
    return claim_from_values(
        "demo.gain",
        values,
        **{
            "bound": bound,
            "direction": ">=",
            "statement": "It is positive.",
            "source": "Table 1",
            **changes,
        },
    )


@pytest.mark.parametrize("count", [2, 3, 5, 30])
def test_t_interval_agrees_with_scipy(count):
    values = np.random.default_rng(count).normal(3.0, 2.0, size=count)
    expected = stats.t.interval(0.95, count - 1, loc=values.mean(), scale=stats.sem(values))
    np.testing.assert_allclose(t_interval(values), expected, rtol=1e-12)


def test_t_interval_of_equal_values_is_exact():
    assert t_interval([0.1] * 3) == (0.1, 0.1)


@pytest.mark.parametrize("values", [[2.0], [1.0, math.nan], [1.0, math.inf], [1e308, -1e308]])
def test_t_interval_without_information_is_everything(values):
    assert t_interval(values) == (-math.inf, math.inf)


@pytest.mark.parametrize("values", [[], 3.0, [[1.0]]])
def test_values_must_be_a_vector(values):
    for function in (t_interval, paired_bootstrap, from_values):
        with pytest.raises(ValueError, match="vector"):
            function(values)


def test_t_interval_covers_and_its_verdict_is_honest():
    """Coverage is 95 %, and at a true mean on the bound each verdict has probability 2.5 %.

    Both counts are binomial, so the limits hold with probability 1 - FALSE_ALARM each.
    """
    trials, truth = 4000, 0.7
    values = np.random.default_rng(1).normal(truth, 1.0, size=(trials, 4))
    claims = [from_values(row, bound=truth) for row in values]
    covered = sum(claim.low <= truth <= claim.high for claim in claims)
    low, high = stats.binom.interval(1 - FALSE_ALARM, trials, 0.95)
    assert low <= covered <= high
    low, high = stats.binom.interval(1 - FALSE_ALARM, trials, 0.025)
    for verdict in ("holds", "fails"):
        assert low <= sum(claim.verdict == verdict for claim in claims) <= high


def test_bootstrap_of_two_items_has_the_binomial_distribution():
    """Resampling (0, 1) gives means 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4."""
    samples = paired_bootstrap([0.0, 1.0], seed=3)
    assert samples.shape == (10_000,)
    for value, probability in ((0.0, 0.25), (0.5, 0.5), (1.0, 0.25)):
        low, high = stats.binom.interval(1 - FALSE_ALARM, 10_000, probability)
        assert low <= np.sum(samples == value) <= high


def test_bootstrap_interval_agrees_with_its_normal_limit():
    """The resampled means of many items are normal with the items' variance over their number.

    An end of the interval is a quantile of 10,000 samples: its standard error is
    sqrt(p (1 - p) / 10,000) / density = 0.0267 standard errors of the mean, and the skewness of
    exponential items moves it by about 0.05 more. The limit of 0.2 leaves 5.6 standard errors.
    """
    differences = np.random.default_rng(5).exponential(size=800)
    samples = paired_bootstrap(differences)
    claim = claim_from_bootstrap(
        "demo.gain",
        samples,
        float(differences.mean()),
        bound=0.5,
        direction=">=",
        statement="It is large.",
        source="Table 2",
    )
    error = differences.std() / math.sqrt(800)
    assert claim.unit == "text"
    assert claim.values == ()
    assert claim.verdict == "holds"
    assert abs(claim.low - (claim.mean - 1.96 * error)) < 0.2 * error
    assert abs(claim.high - (claim.mean + 1.96 * error)) < 0.2 * error
    assert (claim.low, claim.high) == tuple(np.quantile(samples, [0.025, 0.975]))


def test_bootstrap_is_reproducible_and_bounds_its_memory():
    differences = np.arange(5.0)
    first = paired_bootstrap(differences, num_samples=7, seed=1)
    np.testing.assert_array_equal(first, paired_bootstrap(differences, num_samples=7, seed=1))
    assert not np.array_equal(first, paired_bootstrap(differences, num_samples=7, seed=2))
    many = paired_bootstrap(np.full(2_500_000, 0.1), num_samples=2)
    np.testing.assert_array_equal(many, [0.1, 0.1])


def test_bootstrap_of_one_item_is_unclear():
    samples = paired_bootstrap([5.0], num_samples=10)
    assert np.isnan(samples).all()
    claim = claim_from_bootstrap(
        "a", samples, 5.0, bound=0, direction=">=", statement="s", source="t", values=[5.0]
    )
    assert (claim.low, claim.high, claim.verdict) == (-math.inf, math.inf, "unclear")
    assert claim.values == (5.0,)


def test_bootstrap_needs_a_sample():
    with pytest.raises(ValueError, match="num_samples=0"):
        paired_bootstrap([1.0, 2.0], num_samples=0)


@pytest.mark.parametrize(
    ("mean", "low", "high", "holds", "verdict"),
    [
        (1.5, 1.25, 1.75, True, "holds"),
        (1.5, 1.0, 1.75, True, "holds"),
        (1.5, 0.75, 2.25, True, "unclear"),
        (0.75, 0.25, 1.25, False, "unclear"),
        (0.5, 0.25, 0.75, False, "fails"),
        (0.9, 1.1, 1.2, False, "unclear"),  # a percentile interval may miss the estimate
        (math.nan, math.nan, math.nan, False, "unclear"),
        (math.inf, 2.0, math.inf, False, "unclear"),
        (-math.inf, -math.inf, 0.0, False, "unclear"),
        (1.5, -math.inf, math.inf, True, "unclear"),
    ],
)
def test_verdicts(mean, low, high, holds, verdict):
    claim = make_claim(mean=mean, low=low, high=high)
    assert (claim.holds, claim.verdict) == (holds, verdict)
    mirrored = make_claim(mean=-mean, low=-high, high=-low, bound=-1.0, direction="<=")
    assert (mirrored.holds, mirrored.verdict) == (holds, verdict)
    assert make_claim(mean=mean, low=low, high=high, kind="finding").verdict == "finding"


def test_finding_without_bound():
    finding = from_values([1.0, 2.0], bound=None, kind="finding", unit="prompt")
    assert finding.holds is None
    assert finding.verdict == "finding"
    assert finding.bound_text == "-"
    assert finding.unit == "prompt"


def test_one_seed_and_broken_seeds_are_never_a_success():
    assert from_values([5.0]).verdict == "unclear"
    assert from_values([5.0, math.nan, 5.0]).verdict == "unclear"
    assert from_values([5.0, math.inf]).verdict == "unclear"
    assert from_values([5.0, math.inf]).holds is False


@pytest.mark.parametrize("direction", [">=", "<="])
def test_equal_seeds_on_the_bound_hold(direction):
    assert from_values([0.1] * 3, bound=0.1, direction=direction).verdict == "holds"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "hope"}, "'claim', 'finding'"),
        ({"unit": "image"}, "unit='image'"),
        ({"direction": ">"}, "direction='>'"),
        ({"bound": None}, "only a finding"),
        ({"bound": math.inf}, "bound=inf"),
        ({"low": 3.0}, "low=3.0 exceeds high=1.75"),
        ({"id": " "}, "id must be"),
        ({"source": ""}, "source must be"),
        ({"statement": None}, "statement must be"),
    ],
)
def test_misuse_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        make_claim(**changes)


number = st.floats(allow_nan=True, allow_infinity=True)


@settings(deadline=None, max_examples=100)
@given(values=st.lists(number, min_size=3, max_size=3), bound=st.floats(-1e300, 1e300))
def test_round_trip_through_strict_json_keeps_the_verdict(values, bound):
    claim = from_values(values, bound=bound)
    data = json.loads(json.dumps(claim.to_dict(), allow_nan=False))
    again = Claim.from_dict(data)
    assert data["verdict"] == claim.verdict == again.verdict
    assert data["holds"] == claim.holds == again.holds
    if all(map(math.isfinite, (*values, claim.low, claim.high))):
        assert again == claim


@pytest.mark.parametrize(
    "change",
    [
        {"mean": "much"},
        {"values": None},
        {"values": [[1]]},
        {"bound": 10**400},
        {"kind": "hope"},
        {"id": 7},
        {"unit": []},
    ],
)
def test_malformed_data_is_a_value_error(change):
    with pytest.raises(ValueError, match=r"claim|convert|finite"):
        Claim.from_dict({**make_claim().to_dict(), **change})


def test_data_without_an_attribute_is_a_value_error():
    data = make_claim().to_dict()
    del data["low"]
    with pytest.raises(ValueError, match="lacks 'low'"):
        Claim.from_dict(data)
    not_a_mapping: Any = [1]
    with pytest.raises(ValueError, match="wrong type"):
        Claim.from_dict(not_a_mapping)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "1.5 [1.25, 1.75]"),
        ({"low": -math.inf, "high": math.inf}, "1.5 (no interval)"),
        ({"mean": math.nan}, "not finite"),
    ],
)
def test_estimate_text(changes, text):
    assert make_claim(**changes).estimate_text == text


def test_numbers_in_tables():
    assert make_claim(direction="<=", bound=0.25).bound_text == "<= 0.25"
    assert format_number(-123456.7) == "-123457"
    assert format_number(1e12) == "1e+12"
    assert format_number(9999.6) == "10000"


@pytest.mark.parametrize(("size", "transform"), [(2, "none"), (4, "none"), (4, "fisher")])
def test_bootstrap_t_covers_what_it_promises(size, transform):
    """Two halves of a few seeds each, averaged: the interval holds the truth 95 times in 100.

    1,000 repetitions have a standard deviation of 0.7 points around 95 %; the bounds are six and
    more of them away, so the false-alarm rate is below 1e-8.
    """
    draw = np.random.default_rng(0)
    truth, covered, repetitions = 0.3, 0, 1000
    picks = draw.integers(size, size=(2, 400, size))
    for _ in range(repetitions):
        halves = truth + 0.05 * draw.normal(size=(2, size))
        samples = (halves[0][picks[0]].mean(1) + halves[1][picks[1]].mean(1)) / 2
        low, high = bootstrap_t_interval(halves.mean(), samples, [size, size], transform=transform)
        covered += low <= truth <= high
    assert 0.90 <= covered / repetitions <= 0.99


def test_bootstrap_t_is_the_t_interval_for_one_group():
    """For the mean of one group the corrected bootstrap deviation is s / sqrt(n)."""
    values = np.array([0.1, 0.4, 0.2, 0.7, 0.5])
    picks = np.random.default_rng(0).integers(5, size=(200_000, 5))
    found = bootstrap_t_interval(values.mean(), values[picks].mean(1), [5])
    # The deviation of 200,000 samples is known to 0.2 %; 2 % is ten standard deviations.
    np.testing.assert_allclose(found, t_interval(values), rtol=0.02)


def test_bootstrap_t_without_spread():
    assert bootstrap_t_interval(0.5, [0.5, 0.5], [1, 3]) == (-math.inf, math.inf)
    assert bootstrap_t_interval(0.5, [0.5, math.nan], [3, 3]) == (-math.inf, math.inf)
    low, high = bootstrap_t_interval(1.0, [1.0, 1.0], [2, 2], transform="fisher")
    assert low == pytest.approx(1.0)
    assert high <= 1.0
    with pytest.raises(ValueError, match="transform='log'"):
        bootstrap_t_interval(0.5, [0.5], [2], transform="log")
