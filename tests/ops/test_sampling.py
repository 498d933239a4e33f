import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxlab.ops.sampling import (
    beam_step,
    min_p_mask,
    penalize_seen,
    sample,
    sampling_log_probs,
    top_k_mask,
    top_p_mask,
)

VOCAB = 37
CASES = 24
DRAWS = 40_000
KEY = jax.random.key(7)
CHOICES = ["inverse_cdf", "gumbel"]

# Compiled whole: one by one, the operations take longer to compile than to run.
draw = jax.jit(sample, static_argnames="choice")
law_of = jax.jit(sampling_log_probs)
nucleus = jax.jit(top_p_mask)


def draw_fixed(key, logits, **settings):
    """With settings that are known when it is compiled."""
    return jax.jit(lambda key, logits: sample(key, logits, **settings))(key, logits)


def random_cases():
    """Logits with ties and impossible tokens, and parameters of every row."""
    rng = np.random.default_rng(0)
    logits = np.round(rng.normal(size=(CASES, VOCAB)) * 3 * 2) / 2
    logits[::3] = rng.normal(size=(CASES // 3, VOCAB)) * 2
    logits[rng.random((CASES, VOCAB)) < 0.1] = -np.inf
    parameters = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.5], CASES),
        "top_k": rng.choice([-1, 0, 1, 2, 5, 20, VOCAB, 1000], CASES),
        "top_p": rng.choice([0.0, 0.1, 0.53, 0.9, 0.999, 1.0], CASES),
        "min_p": rng.choice([0.0, 0.07, 0.31, 1.0], CASES),
        "repetition_penalty": rng.choice([1.0, 1.3, 0.8], CASES),
        "presence_penalty": rng.choice([0.0, 0.4], CASES),
        "frequency_penalty": rng.choice([0.0, 0.25], CASES),
    }
    counts = rng.integers(0, 4, (CASES, VOCAB)) * (rng.random((CASES, VOCAB)) < 0.3)
    return logits.astype(np.float32), parameters, counts.astype(np.int32)


def reference(
    logits,
    counts,
    temperature,
    top_k,
    top_p,
    min_p,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
):
    """The law of one row in float64, by sorting, and how near the nucleus' edge is to a tie."""
    x = logits.astype(np.float64)
    x = np.where(counts > 0, np.where(x > 0, x / repetition_penalty, x * repetition_penalty), x)
    x = np.where(counts > 0, x - presence_penalty - counts * frequency_penalty, x)
    if temperature == 0:
        law = np.zeros(len(x))
        law[np.argmax(x)] = 1
        return law, np.inf
    order = np.argsort(-x, kind="stable")
    if 0 < top_k < len(x):
        x[order[top_k:]] = -np.inf
    law = np.exp((x - x.max()) / temperature)
    law /= law.sum()
    before = np.cumsum(law[order]) - law[order]
    margin = np.inf
    if top_p < 1:
        law[order[(before >= top_p) & (np.arange(len(x)) > 0)]] = 0
        margin = np.abs(before[1:] - top_p).min()
    edges = np.abs(np.log(law[law > 0] / law.max()) - np.log(min_p)) if 0 < min_p < 1 else [np.inf]
    margin = min(margin, np.min(edges))
    law[law < min_p * law.max()] = 0
    return law / law.sum(), margin


def test_the_law_is_that_of_a_reference_that_sorts():
    logits, parameters, counts = random_cases()
    arrays = {
        name: jnp.asarray(values, jnp.int32 if name == "top_k" else jnp.float32)
        for name, values in parameters.items()
    }
    found = law_of(jnp.asarray(logits), seen=jnp.asarray(counts), **arrays)
    compared = 0
    for row in range(CASES):
        settings = {name: values[row].item() for name, values in parameters.items()}
        law, margin = reference(logits[row], counts[row], **settings)
        if margin > 1e-5:
            compared += 1
            np.testing.assert_array_equal(np.exp(found[row]) > 0, law > 0)
            np.testing.assert_allclose(np.exp(found[row]), law, atol=2e-6)
    assert compared > CASES / 2


def test_the_nucleus_is_the_smallest_set_that_reaches_p_in_a_large_vocabulary():
    logits = np.random.default_rng(1).normal(size=(2, 20_000)) * 3
    law = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    mask = np.asarray(nucleus(jnp.asarray(logits, jnp.float32), jnp.array([0.9, 0.5])))
    for row, p in enumerate((0.9, 0.5)):
        kept = law[row][mask[row]]
        assert kept.sum() > p - 1e-5
        assert kept.sum() - kept.min() < p + 1e-5
        assert kept.min() > law[row][~mask[row]].max()


def test_of_equal_tokens_the_first_count():
    equal = jnp.zeros((10,))
    assert jax.jit(top_k_mask)(equal, 3).tolist() == [True] * 3 + [False] * 7
    assert nucleus(equal, 0.5).tolist() == [True] * 5 + [False] * 5
    assert nucleus(equal, 0.51).tolist() == [True] * 6 + [False] * 4
    assert min_p_mask(equal, 1.0).all()
    # Both zeros are one value.
    zeros = jnp.array([[-0.0, 0.0], [0.0, -0.0]])
    assert jax.jit(top_k_mask)(zeros, 1).tolist() == [[True, False]] * 2


def test_at_least_one_token_is_left():
    logits = jnp.array([[0.0, 1.0, 2.0], [-jnp.inf, -50.0, -jnp.inf]])
    for mask in (
        nucleus(logits, 0.0),
        nucleus(logits, 1e-30),
        jax.jit(top_k_mask)(logits, 1),
        min_p_mask(logits, 1.0),
    ):
        assert mask.tolist() == [[False, False, True], [False, True, False]]
    assert nucleus(logits, 1.0).all()
    assert jax.jit(top_k_mask)(logits, jnp.array([0, 3])).all()


def test_greedy_takes_the_first_largest_and_no_random_number():
    logits = jnp.tile(jnp.array([[0.0, 2.0, 2.0], [5.0, -1.0, 4.0]]), (32, 1))
    assert draw_fixed(KEY, logits, temperature=0).tokens.tolist() == [1, 0] * 32
    for key in jax.random.split(KEY, 3):
        cold = draw(key, logits, temperature=0.0, top_p=0.1)
        assert cold.tokens.tolist() == [1, 0] * 32
    tiny = draw(KEY, logits, temperature=1e-37, top_p=1.0)
    assert tiny.tokens[1::2].tolist() == [0] * 32
    # Half of the rows are greedy.
    heat = (jnp.arange(64) % 4 // 2).astype(jnp.float32) * 100
    mixed = draw(KEY, logits, temperature=heat, top_p=1.0).tokens
    assert mixed[heat == 0].tolist() == [1, 0] * 16
    assert set(mixed[heat > 0].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("choice", CHOICES)
def test_numbers_and_arrays_draw_the_same_tokens(choice):
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(400, VOCAB)), jnp.float32)
    settings = {"temperature": 0.8, "top_k": 9, "top_p": 0.8, "min_p": 0.02}
    static = draw_fixed(KEY, logits, choice=choice, **settings)
    rows = {name: jnp.full(400, value) for name, value in settings.items()}
    traced = draw(KEY, logits, choice=choice, **rows)
    np.testing.assert_array_equal(static.tokens, traced.tokens)
    np.testing.assert_array_equal(static.log_probs, traced.log_probs)
    assert static.tokens.dtype == jnp.int32


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.7, "top_k": 5},
        {"temperature": jnp.float32(0.6), "top_k": jnp.int32(6), "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_draws_follow_the_law(choice, settings: dict[str, Any]):
    # Pearson's test; a false alarm comes once in 1e6 for each of the four.
    logits = jnp.array([0.1, 1.0, -0.5, 0.3, -2.0, 1.5, 0.0, -1.0])
    law = np.exp(np.asarray(law_of(logits, **settings), np.float64))
    rows = jnp.broadcast_to(logits, (DRAWS, 8))
    tokens = draw_fixed(KEY, rows, choice=choice, **settings).tokens
    counts = np.bincount(np.asarray(tokens), minlength=8)
    drawn = law > 0
    assert counts[~drawn].sum() == 0
    expected = law[drawn] / law[drawn].sum() * DRAWS
    statistic = ((counts[drawn] - expected) ** 2 / expected).sum()
    assert statistic < stats.chi2.isf(1e-6, drawn.sum() - 1)


@pytest.mark.parametrize(("uniform", "place"), [(0.0, 0), (1 - 2.0**-24, -1)])
def test_the_ends_of_the_unit_interval_fall_on_tokens_that_may_be_drawn(
    uniform, place, monkeypatch
):
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(5000,)), jnp.float32)
    allowed = np.flatnonzero(np.asarray(nucleus(logits, 0.3)))
    monkeypatch.setattr(jax.random, "uniform", lambda *_: jnp.float32(uniform))
    token = draw_fixed(KEY, logits, top_p=0.3).tokens
    assert token == allowed[place]


def test_rounding_of_the_sums_gives_nothing_to_tokens_that_are_out(monkeypatch):
    # The partial sums grow a little at some tokens of weight 0; random numbers are aimed at those.
    rng = np.random.default_rng(8)
    weights = rng.random(20_000).astype(np.float32) * (rng.random(20_000) < 0.3)
    logits = jnp.log(jnp.asarray(weights))
    sums = np.asarray(jax.jit(lambda x: jnp.cumsum(jnp.exp(x - jnp.max(x))))(logits))
    gaps = np.flatnonzero((np.diff(sums) > 0) & (weights[1:] == 0))[:40]
    shares = np.concatenate([sums[gaps], (sums[gaps] + sums[gaps + 1]) / 2]) / sums.max()
    monkeypatch.setattr(jax.random, "uniform", lambda *_: jnp.asarray(shares, jnp.float32))
    rows = jnp.broadcast_to(logits, (len(shares), 20_000))
    tokens = draw_fixed(KEY, rows).tokens
    assert (weights[np.asarray(tokens)] > 0).all()


def test_log_probabilities_are_of_the_logits_as_given():
    logits, _, counts = random_cases()
    drawn = draw_fixed(
        KEY,
        jnp.asarray(logits),
        temperature=0.5,
        top_k=3,
        seen=jnp.asarray(counts) > 0,
        repetition_penalty=1.5,
    )
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    expected = np.take_along_axis(exact, np.asarray(drawn.tokens)[:, None], -1)[:, 0]
    np.testing.assert_allclose(drawn.log_probs, expected, atol=2e-6)
    half = draw_fixed(KEY, jnp.asarray(logits, jnp.bfloat16), temperature=0)
    assert half.log_probs.dtype == jnp.float32


def test_a_row_without_a_law_is_marked_and_the_others_are_not():
    bad = np.array([[np.nan, 0, 1], [np.inf, 0, 1], [-np.inf] * 3, [0, 1, -np.inf]], np.float32)
    every: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 2},
        {"top_k": jnp.int32(2), "top_p": jnp.float32(0.9), "min_p": jnp.float32(0.1)},
    ]
    for settings in every:
        drawn = draw_fixed(KEY, jnp.asarray(bad), **settings)
        assert drawn.tokens[:3].tolist() == [-1] * 3
        assert np.isnan(drawn.log_probs).tolist() == [True] * 3 + [False]
        assert drawn.tokens[3] in (0, 1)
    law = law_of(jnp.asarray(bad), top_p=0.5)
    assert np.isnan(law).all(-1).tolist() == [True] * 3 + [False]


def test_a_key_for_each_row_makes_rows_independent_of_the_batch():
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(6, VOCAB)), jnp.float32)
    keys = jax.random.split(KEY, 6)
    together = jax.jit(jax.vmap(lambda key, row: sample(key, row, top_p=jnp.float32(0.9))))
    tokens = together(keys, logits).tokens.tolist()
    assert together(keys[2:4], logits[2:4]).tokens.tolist() == tokens[2:4]
    assert draw(keys[3], logits[3], top_p=0.9).tokens == tokens[3]


def test_penalties_lower_what_was_seen():
    logits = jnp.array([[2.0, -2.0, 0.0, 1.0]])
    counts = jnp.array([[1, 2, 1, 0]])
    lowered = penalize_seen(
        logits, counts, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25
    )
    assert lowered.tolist() == [[0.25, -5.0, -0.75, 1.0]]
    seen = counts > 0
    assert penalize_seen(logits, seen, repetition_penalty=jnp.array([2.0])).tolist() == [
        [1.0, -4.0, 0.0, 1.0]
    ]
    impossible = penalize_seen(jnp.full((1, 4), -jnp.inf), counts, repetition_penalty=1.2)
    assert impossible.tolist() == [[-np.inf] * 4]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: must be at least 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": -0.5}, "top_p=-0.5: must be at least 0"),
        ({"min_p": 1.5}, "min_p=1.5: must be at most 1"),
        ({"temperature": jnp.ones(3)}, r"temperature has shape \(3,\); the rows .* have \(2,\)"),
        ({"seen": jnp.zeros((2, 3), bool)}, r"seen has shape \(2, 3\)"),
        ({"seen": jnp.zeros((2, 4), bool), "repetition_penalty": 0.0}, "must be above 0"),
        ({"choice": "greedy"}, "allowed: inverse_cdf, gumbel"),
    ],
)
def test_misuse_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        sample(KEY, jnp.zeros((2, 4)), **settings)


def markov_logits(seed, vocab):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(vocab, vocab)) * 2, jnp.float32)


def search(table, beams, steps, end, length_penalty):
    """Beam search over a Markov chain that begins after token 0."""
    scores = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf)
    lengths, finished = jnp.zeros(beams, jnp.int32), jnp.zeros(beams, bool)
    last, texts = jnp.zeros(beams, jnp.int32), [[] for _ in range(beams)]
    step = jax.jit(functools.partial(beam_step, end_tokens=(end,)))
    for _ in range(steps):
        found = step(scores, table[last], lengths, finished, length_penalty=length_penalty)
        texts = [
            texts[parent] + ([] if finished[parent] else [token])
            for parent, token in zip(found.parents.tolist(), found.tokens.tolist(), strict=True)
        ]
        scores, lengths, finished, last = found.scores, found.lengths, found.finished, found.tokens
    return texts, np.asarray(scores), np.asarray(lengths)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_a_wide_beam_finds_the_best_of_all_texts(length_penalty):
    vocab, steps, end = 4, 3, 3
    table = markov_logits(5, vocab)
    law = np.asarray(table, np.float64)
    law -= np.log(np.exp(law).sum(-1, keepdims=True))
    ranked = []
    for length in range(1, steps + 1):
        for text in itertools.product(range(vocab), repeat=length):
            complete = text[-1] == end or length == steps
            if end not in text[:-1] and complete:
                score = sum(law[a, b] for a, b in itertools.pairwise((0, *text)))
                ranked.append((score / length**length_penalty, score, list(text)))
    ranked.sort(reverse=True)
    texts, scores, lengths = search(table, 45, steps, end, length_penalty)
    count = len(ranked)
    ranks = scores / lengths**length_penalty
    np.testing.assert_allclose(ranks[:count], [rank for rank, _, _ in ranked], rtol=1e-5)
    assert (scores[count:] == -np.inf).all()
    # By text, since two of them may have the same score.
    expected = {tuple(text): score for _, score, text in ranked}
    found = {tuple(text): score for text, score in zip(texts[:count], scores[:count], strict=True)}
    assert found == pytest.approx(expected, rel=1e-5)
    assert lengths[:count].tolist() == [len(text) for text in texts[:count]]


def test_one_beam_is_greedy():
    table = markov_logits(6, 9)
    texts, _, _ = search(table, 1, 5, 8, 0.0)
    expected, last, rows = [], 0, np.asarray(table)
    for _ in range(5):
        last = int(np.argmax(rows[last]))
        expected.append(last)
        if last == 8:
            break
    assert texts == [expected]


def test_finished_beams_stay_in_batches_too():
    scores = jnp.array([[-1.0, -2.0], [-0.5, -0.6]])
    logits = jnp.zeros((2, 2, 5)).at[0, 0].set(jnp.nan)
    finished = jnp.array([[True, False], [False, False]])
    step = jax.jit(functools.partial(beam_step, end_tokens=(4, 0)))
    found = step(scores, logits, jnp.array([[3, 4], [1, 1]]), finished)
    assert found.tokens[0].tolist() == [4, 0]
    assert found.parents[0].tolist() == [0, 1]
    assert found.finished.tolist() == [[True, True], [True, False]]
    assert found.lengths.tolist() == [[3, 5], [2, 2]]
    np.testing.assert_allclose(found.scores[0], [-1.0, -2 - np.log(5)], rtol=1e-6)
    assert found.tokens[1].tolist() == [0, 1]


def test_beams_without_a_law_are_marked():
    scores = jnp.array([[0.0, -1.0], [0.0, -jnp.inf], [jnp.nan, 0.0]])
    logits = jnp.zeros((3, 2, 3)).at[:2, 1, 0].set(jnp.nan)
    step = jax.jit(functools.partial(beam_step, end_tokens=(2,)))
    found = step(scores, logits, jnp.ones((3, 2), int), jnp.zeros((3, 2), bool))
    # A beam that does not exist cannot harm the others.
    assert (found.tokens < 0).tolist() == [[True] * 2, [False] * 2, [True] * 2]
    assert np.isnan(found.scores).tolist() == [[True] * 2, [False] * 2, [True] * 2]
    assert not found.finished[0].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"end_tokens": ()}, "at least one"),
        ({"end_tokens": (5,)}, r"ids in \[0, 5\)"),
        ({"lengths": jnp.zeros(3, int)}, "lengths has shape"),
        ({"logits": jnp.zeros((3, 5))}, "logits has shape"),
    ],
)
def test_misuse_of_beams_is_refused(change, words):
    arguments = {
        "scores": jnp.zeros(2),
        "logits": jnp.zeros((2, 5)),
        "lengths": jnp.zeros(2, int),
        "finished": jnp.zeros(2, bool),
        "end_tokens": (0,),
    }
    with pytest.raises(ValueError, match=words):
        beam_step(**{**arguments, **change})
