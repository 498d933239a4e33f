import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from jaxlab.evaluation.ranking import (
    Abstention,
    abstention_threshold,
    area_under_rejection_accuracy,
    auroc,
    paired_bootstrap,
    rejection_accuracy,
    reliability,
    wilson_interval,
)
from tests.goldens import golden

FEW = settings(max_examples=40, deadline=None)
EXACT = {"rtol": 1e-12, "atol": 0}


@st.composite
def labelled(draw, *, both=True, size=12):
    """Labels, and scores with many ties, among them infinities."""
    n = draw(st.integers(2 if both else 1, size))
    labels = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    if both and len(set(labels)) == 1:
        labels[draw(st.integers(0, n - 1))] ^= True
    values = st.sampled_from([-np.inf, -2.0, -0.0, 0.0, 0.1, 0.3, 1e-300, 7.0, np.inf])
    return np.array(labels), np.array(draw(st.lists(values, min_size=n, max_size=n)))


def by_pairs(wrong, score):
    """AUROC by its definition."""
    pairs = list(itertools.product(score[wrong], score[~wrong]))
    return sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs)


def test_the_reference_values():
    g = golden("gnll_auroc")
    correct = 1 - g["is_wrong"]
    np.testing.assert_allclose(auroc(g["is_wrong"], g["score"]), g["auroc"], **EXACT)
    accuracies = rejection_accuracy(correct, g["score"], g["quantiles"])
    np.testing.assert_allclose(accuracies, g["acc_at_quantile"], **EXACT)
    area = area_under_rejection_accuracy(correct, g["score"])
    np.testing.assert_allclose(area, g["area_under_thresholded_accuracy"], **EXACT)


@FEW
@given(labelled())
def test_auroc_is_the_share_of_pairs_in_order(data):
    wrong, score = data
    assert auroc(wrong, score) == by_pairs(wrong, score)
    statistic = mannwhitneyu(score[wrong], score[~wrong], method="asymptotic").statistic
    assert auroc(wrong, score) == statistic / (wrong.sum() * (~wrong).sum())


@FEW
@given(labelled(), st.permutations(range(12)))
def test_auroc_knows_only_the_order(data, permutation):
    wrong, score = data
    value = auroc(wrong, score)
    assert auroc(wrong, np.arctan(score) * 4) == value
    np.testing.assert_allclose(auroc(~wrong, score), 1 - value, atol=1e-15)
    np.testing.assert_allclose(auroc(wrong, -score), 1 - value, atol=1e-15)
    assert auroc(wrong, np.zeros_like(score)) == 0.5
    order = [place for place in permutation if place < len(wrong)]
    assert auroc(wrong[order], score[order]) == value


def test_likelihood_and_its_logarithm_rank_alike():
    rng = np.random.default_rng(0)
    nll = rng.exponential(size=50)
    wrong = rng.random(50) < 0.4
    assert auroc(wrong, nll) == auroc(wrong, 1 - np.exp(-nll)) == auroc(wrong, -np.exp(-nll))


@FEW
@given(labelled(both=False), st.lists(st.floats(0, 1), max_size=4))
def test_rejection_keeps_what_is_below_the_quantile(data, fractions):
    correct, score = data
    finite = np.clip(score, -1e3, 1e3)
    accuracies = rejection_accuracy(correct, score, fractions)
    for fraction, accuracy in zip(fractions, accuracies, strict=True):
        # Ranks make the quantile's rounding that of small numbers.
        ranks = np.searchsorted(np.sort(finite), finite).astype(float)
        kept = ranks <= np.quantile(ranks, fraction) + 1e-9
        assert accuracy == correct[kept].mean()
    assert rejection_accuracy(correct, score, 1.0) == correct.mean()


def test_many_scores_at_once():
    rng = np.random.default_rng(1)
    wrong, scores = rng.random(30) < 0.5, rng.integers(0, 9, (2, 3, 30))
    fractions = [0.2, 0.9]
    several = auroc(wrong, scores)
    kept = rejection_accuracy(~wrong, scores, fractions)
    areas = area_under_rejection_accuracy(~wrong, scores)
    assert (several.shape, kept.shape, areas.shape) == ((2, 3), (2, 3, 2), (2, 3))
    for i, j in np.ndindex(2, 3):
        assert several[i, j] == auroc(wrong, scores[i, j])
        np.testing.assert_array_equal(
            kept[i, j], rejection_accuracy(~wrong, scores[i, j], fractions)
        )
        assert areas[i, j] == area_under_rejection_accuracy(~wrong, scores[i, j])
    assert type(auroc(wrong, scores[0, 0])) is float


def test_areas_of_a_perfect_and_a_useless_score():
    correct = np.arange(100) < 50
    perfect = area_under_rejection_accuracy(correct, np.arange(100))
    assert perfect > area_under_rejection_accuracy(correct, -np.arange(100))
    np.testing.assert_allclose(
        area_under_rejection_accuracy(correct, np.zeros(100)), 0.45 * 20 / 19
    )
    np.testing.assert_allclose(
        area_under_rejection_accuracy(np.ones(9), np.arange(9), lowest=0.5, num=3), 0.75
    )


@FEW
@given(labelled(both=False), st.floats(0, 1))
def test_no_larger_threshold_would_do(data, target):
    correct, score = data
    rule = abstention_threshold(correct, score, target)
    good = [t for t in score if correct[score <= t].mean() >= target]
    if not good:
        assert rule == Abstention(-np.inf, 0, 0, len(score))
        assert np.isnan(rule.accuracy)
        assert rule.coverage == 0
        return
    kept = score <= max(good)
    assert rule == Abstention(max(good), kept.sum(), correct[kept].sum(), len(score))
    assert rule.accuracy >= target
    assert rule.coverage == kept.mean()


@FEW
@given(labelled(both=False), st.integers(1, 15))
def test_bins_hold_everything_once_and_part_no_ties(data, num_bins):
    correct, score = data
    table = reliability(correct, score, num_bins)
    assert 1 <= len(table.count) <= num_bins
    assert table.count.sum() == len(score)
    assert (table.lowest[1:] > table.highest[:-1]).all()
    for low, high, middle, count, accuracy in zip(
        table.lowest, table.highest, table.score, table.count, table.accuracy, strict=True
    ):
        inside = (score >= low) & (score <= high)
        assert inside.sum() == count
        assert accuracy == correct[inside].mean()
        assert middle in score[inside]
    assert ((table.low <= table.accuracy) & (table.accuracy <= table.high)).all()


def test_bins_are_of_equal_size_without_ties():
    table = reliability(np.arange(12) % 2, np.arange(12)[::-1], 3)
    np.testing.assert_array_equal(table.count, [4, 4, 4])
    np.testing.assert_array_equal(table.lowest, [0, 4, 8])
    np.testing.assert_array_equal(table.score, [1, 5, 9])
    # Ties go where their middle belongs.
    np.testing.assert_array_equal(reliability([1, 0, 0, 1], [0, 1, 1, 1], 2).count, [1, 3])


def test_wilson_interval():
    # Newcombe 1998, table I: 81 of 263 and 0 of 20.
    low, high = wilson_interval([81, 0, 20], [263, 20, 20])
    np.testing.assert_allclose(low[:2], [0.2553, 0], atol=5e-5)
    np.testing.assert_allclose(high[:2], [0.3662, 0.1611], atol=5e-5)
    np.testing.assert_allclose([low[2], high[2]], [1 - high[1], 1])


def test_bootstrap_estimates_and_orders():
    rng = np.random.default_rng(2)
    wrong = np.arange(300) < 120
    noise = rng.normal(size=(3, 300))
    scores = noise + wrong * np.array([[1.5], [0.5], [0.0]])
    result = paired_bootstrap(wrong, scores, reference=1, resamples=400)
    np.testing.assert_array_equal(result.auroc, auroc(wrong, scores))
    assert ((result.low < result.auroc) & (result.auroc < result.high)).all()
    assert result.difference[1] == result.difference_low[1] == result.difference_high[1] == 0
    # Fixed seeds; the first score is 2 deviations better than the second at least.
    assert result.difference_low[0] > 0 > result.difference_high[2]
    assert result.samples.shape == (3, 400)
    assert result.redrawn == 0
    again = paired_bootstrap(wrong, scores, reference=1, resamples=400)
    np.testing.assert_array_equal(result.samples, again.samples)
    other = paired_bootstrap(wrong, scores, reference=1, resamples=400, seed=1)
    assert (result.samples != other.samples).any()
    wider = paired_bootstrap(wrong, scores, reference=1, resamples=400, level=0.99)
    assert (wider.low < result.low).all()


def test_bootstrap_spread_is_that_of_the_theory():
    # Hanley and McNeil's deviation of an AUROC of normal scores, by DeLong's structural components.
    rng = np.random.default_rng(3)
    wrong = np.arange(200) < 90
    score = rng.normal(size=200) + wrong
    above = (score[wrong][:, None] > score[~wrong]).astype(float)
    deviation = np.sqrt(above.mean(1).var() / 90 + above.mean(0).var() / 110)
    samples = paired_bootstrap(wrong, score[None], resamples=2000).samples[0]
    # The deviation of 2000 draws is known to 1.6 %: five of these, plus terms of order 1/n.
    assert samples.std() == pytest.approx(deviation, rel=0.1)


@settings(max_examples=20, deadline=None)
@given(labelled(size=6), st.integers(0, 99))
def test_resamples_always_have_an_auroc(data, seed):
    wrong, score = data
    result = paired_bootstrap(wrong, np.stack([score, -score]), resamples=20, seed=seed)
    assert np.isfinite(result.samples).all()
    np.testing.assert_allclose(result.samples.sum(0), 1)


def test_rare_errors_are_redrawn_in_pieces(monkeypatch):
    wrong = np.arange(8) == 3
    whole = paired_bootstrap(wrong, np.arange(8.0)[None], resamples=200)
    assert 0.25 < whole.redrawn / (200 + whole.redrawn) < 0.45  # (7/8)^8 = 0.34, 2.9 deviations
    monkeypatch.setattr("jaxlab.evaluation.ranking._CHUNK", 8 * 30)
    pieces = paired_bootstrap(wrong, np.arange(8.0)[None], resamples=200)
    assert pieces.samples.shape == (1, 200)
    assert set(pieces.samples.ravel()) <= {k / 10 for k in range(11)} | set(whole.samples.ravel())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: auroc([1, 1], [0, 1]), "AUROC is undefined: all 2 answers are wrong"),
        (lambda: auroc([0], [0]), "AUROC is undefined: all 1 answers are right"),
        (lambda: paired_bootstrap([0, 0], [[1, 2]]), "AUROC is undefined"),
        (lambda: auroc([0, 1], [[1, 2], [1, np.nan]]), r"score\[1, 1\] is NaN"),
        (lambda: rejection_accuracy([0, 1], [1, np.nan], [1]), r"score\[1\] is NaN"),
        (lambda: auroc([0, 1], [1, 2, 3]), r"shape \(2,\).*shape \(3,\)"),
        (lambda: auroc([], []), "at least one question"),
        (lambda: auroc([0, 2], [1, 2]), "1 and 0"),
        (lambda: auroc(["a", "b"], [1, 2]), "1 and 0"),
        (lambda: rejection_accuracy([0, 1], [1, 2], [0.5, 1.1]), "fractions"),
        (lambda: rejection_accuracy([0, 1], [1, 2], [[0.5]]), "at most one row"),
        (lambda: area_under_rejection_accuracy([0, 1], [1, 2], lowest=1), "lowest=1"),
        (lambda: area_under_rejection_accuracy([0, 1], [1, 2], num=1), "num=1"),
        (lambda: abstention_threshold([0, 1], [1, 2], 1.5), "target_accuracy=1.5"),
        (lambda: abstention_threshold([0, 1], [[1, 2]], 0.5), "one row"),
        (lambda: reliability([0, 1], [1, 2], 0), "num_bins=0"),
        (lambda: reliability([0, 1], [1, 2], level=1), "level=1"),
        (lambda: wilson_interval(3, 2), "0 <= successes <= total"),
        (lambda: paired_bootstrap([0, 1], [1, 2]), r"\[scores, questions\]"),
        (lambda: paired_bootstrap([0, 1], [[1, 2]], reference=1), "reference=1"),
        (lambda: paired_bootstrap([0, 1], [[1, 2]], resamples=0), "resamples=0"),
        (lambda: paired_bootstrap([0, 1], [[1, 2]], level=0), "level=0"),
    ],
)
def test_misuse_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
