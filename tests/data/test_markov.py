import numpy as np
import pytest
from scipy import stats

from jaxlab.data.markov import (
    MarkovBatches,
    entropy_rate,
    markov_transition,
    stationary_distribution,
)

TWO_STATES = np.array([[0.8, 0.2], [0.6, 0.4]])


def test_transitions_are_reproducible_distributions():
    transition = markov_transition(3)
    assert transition.shape == (32, 32)
    assert transition.dtype == np.float64
    np.testing.assert_allclose(transition.sum(axis=1), 1.0, rtol=1e-12)
    assert (transition >= 0).all()
    np.testing.assert_array_equal(transition, markov_transition(3))
    assert (transition != markov_transition(4)).any()


def test_concentration_sets_how_many_successors_matter():
    entropies = [entropy_rate(markov_transition(0, 16, c)) for c in (0.1, 1.0, 100.0)]
    assert entropies == sorted(entropies)
    np.testing.assert_allclose(entropies[2], np.log(16), atol=0.02)


def test_entropy_of_the_default_chain():
    # Mean entropy of a row, digamma(32 c + 1) - digamma(c + 1) at c = 0.1, is 1.74 nats; its
    # mean over 32 rows has a deviation of about 0.09, so 6 of them are never reached.
    assert 1.2 < entropy_rate(markov_transition(0)) < 2.3


def test_two_states_have_a_closed_form():
    stationary = stationary_distribution(TWO_STATES)
    np.testing.assert_allclose(stationary, [0.75, 0.25], rtol=1e-12)

    def entropy(p):
        return -p * np.log(p) - (1 - p) * np.log(1 - p)

    expected = 0.75 * entropy(0.2) + 0.25 * entropy(0.4)
    np.testing.assert_allclose(entropy_rate(TWO_STATES), expected, rtol=1e-12)


def test_the_stationary_distribution_is_kept_by_a_step():
    transition = markov_transition(1)
    stationary = stationary_distribution(transition)
    np.testing.assert_allclose(stationary @ transition, stationary, atol=1e-12)
    np.testing.assert_allclose(stationary.sum(), 1.0, rtol=1e-12)


def test_states_that_are_left_for_ever_have_no_mass():
    transition = np.array([[0.5, 0.5, 0.0], [0.0, 0.8, 0.2], [0.0, 0.6, 0.4]])
    np.testing.assert_allclose(stationary_distribution(transition), [0, 0.75, 0.25], atol=1e-12)


def test_a_cycle_has_no_entropy_and_is_followed_exactly():
    cycle = np.roll(np.eye(5), 1, axis=1)
    assert entropy_rate(cycle) == 0
    batch = MarkovBatches(cycle, batch_size=64, length=9, seed=0)[0]
    np.testing.assert_array_equal(batch, (batch[:, :1] + np.arange(9)) % 5)
    assert set(batch[:, 0].tolist()) == set(range(5))


def test_impossible_transitions_never_happen():
    transition = np.array([[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.3, 0.7], [1, 0, 0, 0], [1, 0, 0, 0]])
    batches = MarkovBatches(transition, batch_size=256, length=20, seed=0)
    batch = batches[0]
    assert (transition[batch[:, :-1], batch[:, 1:]] > 0).all()


def pair_counts(batches, steps, place, vocab):
    """Counts of (token, next token) at one place: independent pairs, one from each stretch."""
    tokens = np.concatenate([batches[step] for step in range(steps)])
    pairs = tokens[:, place] * vocab + tokens[:, place + 1]
    return np.bincount(pairs, minlength=vocab * vocab)


@pytest.mark.parametrize("place", [0, 3])
def test_frequencies_follow_the_chain_from_its_stationary_start(place):
    vocab = 5
    transition = markov_transition(0, vocab, concentration=2.0)
    probabilities = stationary_distribution(transition)[:, None] * transition
    batches = MarkovBatches(transition, batch_size=128, length=5, seed=0)
    counts = pair_counts(batches, 100, place, vocab)
    expected = probabilities.ravel() * counts.sum()
    assert expected.min() > 20
    # Pearson's test over all pairs; a correct sampler fails it with probability 5e-5.
    assert stats.chisquare(counts, expected).pvalue > 5e-5
    # The same samples refute the chain that runs backwards, unless it is reversible.
    backwards = probabilities.T.ravel() * counts.sum()
    assert stats.chisquare(counts, backwards).pvalue < 1e-10


def test_a_batch_depends_on_seed_and_step_alone():
    transition = markov_transition(0)
    options = {"batch_size": 16, "length": 7}
    batches = MarkovBatches(transition, seed=1, **options)
    expected = [batches[step] for step in range(6)]
    again = MarkovBatches(transition, seed=1, **options)
    for step in (5, 0, 3, 3, 1, 4, 2):
        np.testing.assert_array_equal(again[step], expected[step])
    assert expected[0].dtype == np.int32
    assert expected[0].shape == (16, 7)
    assert (expected[0] != expected[1]).any()
    assert (MarkovBatches(transition, seed=2, **options)[0] != expected[0]).any()


def test_stretches_of_a_batch_are_independent():
    # 64 stretches of 12 fair bits: two are equal with probability below 64^2 / 2 / 2^40 < 1e-8.
    batches = MarkovBatches(np.full((2, 2), 0.5), batch_size=64, length=40, seed=0)
    assert len(np.unique(batches[0], axis=0)) == 64


@pytest.mark.parametrize(
    ("transition", "message"),
    [
        (np.ones((2, 3)) / 3, "must be square"),
        (np.ones((2, 2)), "sum 1"),
        (np.array([[1.5, -0.5], [0.5, 0.5]]), "non-negative"),
        (np.eye(3), "falls apart"),
        (np.kron(np.eye(2), TWO_STATES), "falls apart"),
    ],
)
def test_matrices_without_one_chain_are_refused(transition, message):
    with pytest.raises(ValueError, match=message):
        stationary_distribution(transition)
    with pytest.raises(ValueError, match=message):
        MarkovBatches(transition, batch_size=1, length=2, seed=0)


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="vocab_size=0"):
        markov_transition(0, 0)
    with pytest.raises(ValueError, match="concentration=0"):
        markov_transition(0, 4, 0.0)
    with pytest.raises(ValueError, match="seed=-1"):
        markov_transition(-1)
    with pytest.raises(ValueError, match="length=0"):
        MarkovBatches(TWO_STATES, batch_size=1, length=0, seed=0)
    with pytest.raises(ValueError, match="seed=-2"):
        MarkovBatches(TWO_STATES, batch_size=1, length=1, seed=-2)
    with pytest.raises(IndexError, match="step=-1"):
        MarkovBatches(TWO_STATES, batch_size=1, length=1, seed=0)[-1]
