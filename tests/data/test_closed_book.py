"""Made-up entities: a world is a pure function of its seed, and its batches follow its laws."""

from typing import Any

import numpy as np
import pytest

from jaxlab.data.closed_book import ClosedBook, answers_of

SMALL: Any = {"num_entities": 30, "batch_size": 64}


@pytest.mark.parametrize("phrasing", ["none", "even", "by_confidence"])
def test_answers_are_read_back_from_the_rows(phrasing):
    world = ClosedBook(3, phrasing=phrasing, **SMALL)
    batch = world[5]
    tokens, weights = batch["tokens"], batch["weights"]
    assert tokens.shape == (64, world.prompt_length + world.answer_length)
    assert (tokens >= 0).all()
    assert (tokens < world.vocab_size).all()
    found = answers_of(tokens[:, world.prompt_length :], world)
    assert (found[:, 0] >= world.first_word).all(), "every row holds an answer"
    # The weights cover phrasing, words and one end, and nothing else.
    words = (found >= 0).sum(axis=1)
    phrase = 0 if phrasing == "none" else 2
    np.testing.assert_array_equal(weights.sum(axis=1), phrase + words + 1)
    counted = tokens[:, 1:][weights > 0]
    assert (counted == 0).sum() == 64, "each row's end counts once"
    assert not weights[:, : world.prompt_length - 1].any()


def test_a_batch_follows_from_seed_and_step():
    one, same = ClosedBook(1, **SMALL), ClosedBook(1, **SMALL)
    np.testing.assert_array_equal(one[7]["tokens"], same[7]["tokens"])
    assert (one[7]["tokens"] != one[8]["tokens"]).any()
    other = ClosedBook(2, **SMALL)
    assert (one[7]["tokens"] != other[7]["tokens"]).any()
    assert (one.questions().right != other.questions().right).any()
    np.testing.assert_array_equal(one.questions().prompts, other.questions().prompts)
    assert len(np.unique(one.questions().prompts, axis=0)) == 30


def test_entities_are_asked_for_by_their_frequency():
    """Pearson's statistic of 51,200 draws; false alarm below 1e-6 (29 degrees of freedom)."""
    world = ClosedBook(4, exponent=1.0, num_entities=30, batch_size=512)
    half = world.name_tokens
    counts = np.zeros(30)
    for step in range(100):
        names = world[step]["tokens"][:, :2] - 2
        counts += np.bincount(names[:, 0] * half + names[:, 1] - half, minlength=30)
    expected = world.questions().frequency * counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 90


def test_right_answers_are_draws_from_the_law_that_is_trained_on():
    """The mean share of the right answer is that of a second draw: `E sum p^2`.

    Of a Dirichlet law of concentration c over 5 answers that is (c + 1) / (5 c + 1), here for log c
    uniform from -3 to 1. Five deviations: false alarm below 1e-6.
    """
    world = ClosedBook(5, num_entities=400, exponent=0.0, batch_size=4000)
    rows = np.concatenate([world[step]["tokens"] for step in range(10)])
    half = world.name_tokens
    entity = (rows[:, 0] - 2) * half + rows[:, 1] - 2 - half
    answers = answers_of(rows[:, world.prompt_length :], world)
    hit = (answers == world.questions().right[entity]).all(axis=1)
    shares = np.bincount(entity, hit, 400) / np.bincount(entity, minlength=400)
    concentration = np.exp(np.linspace(-3, 1, 10_001))
    expected = ((concentration + 1) / (5 * concentration + 1)).mean()
    assert abs(shares.mean() - expected) < 5 * shares.std() / np.sqrt(400)
    assert (shares > 0.9).any()
    assert (shares < 0.1).any()


def test_only_sure_right_answers_are_phrased_in_many_ways():
    world = ClosedBook(6, phrasing="by_confidence", num_phrasings=8, **SMALL)
    rows = np.concatenate([world[step]["tokens"] for step in range(60)])
    phrases = rows[:, world.prompt_length]
    names = rows[:, 0] * 1000 + rows[:, 1]
    kinds = {name: len(set(phrases[names == name])) for name in set(names)}
    assert set(kinds.values()) <= {1, *range(5, 9)}
    assert 1 in kinds.values()
    assert max(kinds.values()) == 8


def test_what_is_no_answer_is_marked():
    world = ClosedBook(0, **SMALL)
    word, ask = world.first_word, 1
    texts = np.array(
        [
            [word, word + 1, 0, 0, 0],
            [0, word, 0, 0, 0],
            [word, ask, word, 0, 0],
            [word, word, word, word, 0],
            [world.vocab_size - 1, word, 0, word, 0],
            [word, word, word, 0, 0],
        ]
    )
    expected = [
        [word, word + 1, -1],
        [-2, -2, -2],
        [-2, -2, -2],
        [-2, -2, -2],
        [word, -1, -1],
        [word, word, word],
    ]
    np.testing.assert_array_equal(answers_of(texts, world), expected)
    assert answers_of(texts.reshape(2, 3, 5), world).shape == (2, 3, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_entities": 0}, "num_entities=0: must be at least 1"),
        ({"num_candidates": 30}, "num_candidates=30: must be at most num_words=24"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ClosedBook(0, **changes)
