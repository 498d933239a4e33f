"""Single-sequence uncertainty: scoring rules, measures, samples, clusters, bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from jaxlab.methods import gnll
from tests.goldens import golden

F64: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}
F32: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
# The published code of these computes in float32.
TORCH: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
INPUTS = ("token_logprobs", "lengths", "ids_strict", "sdlg_ids", "token_importance", "similarity")
SEEDS = st.integers(0, 2**32 - 1)
few = settings(max_examples=15, deadline=None)


def measures(data: dict[str, Any]) -> dict[str, Any]:
    """Whatever is computed from the samples of prompts, by the names of the reference values."""
    logps, lengths, ids = data["token_logprobs"], data["lengths"], data["ids_strict"]
    places = np.arange(logps.shape[-1], dtype=lengths.dtype)
    mask = places.reshape((1,) * (logps.ndim - 1) + (-1,)) < lengths[..., None]
    seq_ll = gnll.sequence_log_likelihood(logps, mask)
    importance, similarity, sdlg = data["token_importance"], data["similarity"], data["sdlg_ids"]
    return {
        "pe": gnll.predictive_entropy(seq_ll),
        "ln_pe": gnll.length_normalized_predictive_entropy(seq_ll, lengths),
        "se": gnll.semantic_entropy(seq_ll, ids),
        "ln_se": gnll.length_normalized_semantic_entropy(seq_ll, lengths, ids),
        "d_se": gnll.discrete_semantic_entropy(ids),
        "sdlg_se": gnll.semantic_entropy(seq_ll, sdlg, form="sdlg"),
        "sdlg_ln_se": gnll.length_normalized_semantic_entropy(seq_ll, lengths, sdlg, form="sdlg"),
        # The published code takes 5 off the logarithm of every cluster.
        "se_unnormalised_mc": 5.0
        + gnll.length_normalized_semantic_entropy(seq_ll, lengths, ids, form="monte_carlo"),
        "tok_sar": gnll.token_sar(logps, mask, importance),
        "sent_sar_np": gnll.sentence_sar(seq_ll, similarity),
        "sar_np": gnll.sar(logps, mask, importance, similarity),
        "by_mass": gnll.maximum_cluster_probability(seq_ll, ids, form="one_minus"),
        "by_frequency": gnll.maximum_cluster_probability(None, ids, by="frequency"),
        "best_of_n": gnll.best_of_n_nll(seq_ll),
        "beam": gnll.beam_nll(logps, mask),
        "per_token": gnll.length_normalized_g_nll(logps, mask),
        "perplexity": gnll.perplexity(logps, mask),
        "token_entropy": gnll.mean_token_entropy(-logps, mask),
    }


@pytest.fixture(scope="module")
def prompts() -> dict[str, np.ndarray]:
    return {key: golden("gnll_estimators")[key] for key in INPUTS}


@pytest.fixture(scope="module")
def host(prompts: dict[str, np.ndarray]) -> dict[str, Any]:
    return measures(prompts)


def random_samples(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-likelihoods [3, 6] and cluster ids."""
    rng = np.random.default_rng(seed)
    return -rng.exponential(4.0, (3, 6)), rng.integers(0, 4, (3, 6))


# --- Reference values -----------------------------------------------------------------------------


def test_measures_match_reference(host):
    reference = golden("gnll_estimators")
    float32 = {"sdlg_se", "sdlg_ln_se", "se_unnormalised_mc", "tok_sar"}
    for name in host.keys() & reference.keys():
        tolerance = TORCH if name in float32 else F64
        np.testing.assert_allclose(host[name], reference[name], **tolerance, err_msg=name)
        assert host[name].dtype == np.float64
    for name in ("sar", "sent_sar"):
        np.testing.assert_allclose(host[f"{name}_np"], reference[name], rtol=1e-4)
    assert len(host.keys() & reference.keys()) == 11


def test_measures_in_the_graph(prompts, host):
    """Compiled and batched by vmap: the values of the host, in float32."""
    arrays = {
        key: jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else jnp.int32)
        for key, x in prompts.items()
    }
    found = jax.jit(jax.vmap(measures))(arrays)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(found))
    chex.assert_trees_all_close(found, host, **F32)


def test_scoring_rules_match_reference():
    data = golden("gnll_scoring_rules")
    laws = data["p"], data["posterior_p"], data["posterior_w"]
    for name, rule in (("log", gnll.log_score_uncertainty), ("zo", gnll.zero_one_uncertainty)):
        expected = [data[f"{name}_{part}"] for part in gnll.Uncertainty._fields]
        np.testing.assert_allclose(rule(*laws), expected, **F64)
    both = jax.jit(lambda *x: (gnll.log_score_uncertainty(*x), gnll.zero_one_uncertainty(*x)))
    found = both(*(jnp.asarray(x, jnp.float32) for x in laws))
    chex.assert_trees_all_close(
        found, (gnll.log_score_uncertainty(*laws), gnll.zero_one_uncertainty(*laws)), **F32
    )


def test_clusters_match_reference():
    data = golden("gnll_estimators")
    nli = data["nli"]
    for ids, expected in (
        (gnll.cluster_by_entailment(nli), "ids_strict"),
        (gnll.cluster_by_entailment(nli, strict=False), "ids_lenient"),
        (gnll.cluster_by_entailment(nli, variant="sdlg"), "sdlg_ids"),
    ):
        np.testing.assert_array_equal(ids, data[expected])
    np.testing.assert_array_equal(
        gnll.cluster_by_entailment(nli.reshape(3, 4, 10, 10)).reshape(12, 10), data["ids_strict"]
    )


# --- Scoring rules --------------------------------------------------------------------------------


@given(SEEDS, st.sampled_from(["model_generates", "posterior_generates"]))
@few
def test_epistemic_parts_are_not_negative(seed, convention):
    rng = np.random.default_rng(seed)
    # Rounded laws have ties and impossible outcomes.
    laws = rng.multinomial(6, np.full(4, 0.25), (2, 5)) / 6
    laws = np.where(rng.random((2, 1, 1)) < 0.5, laws, rng.dirichlet(np.ones(4), (2, 5)))
    p, weights = laws[:, 0], rng.dirichlet(np.ones(5))
    for rule in (gnll.log_score_uncertainty, gnll.zero_one_uncertainty):
        parts = rule(p, laws, weights, convention=convention)
        chex.assert_shape(parts, (2,))
        assert (parts.epistemic >= -1e-12).all()
        assert (parts.aleatoric >= -1e-12).all()
        np.testing.assert_allclose(parts.total, parts.aleatoric + parts.epistemic)
        same = rule(p, np.stack([p] * 3, 1), convention=convention)
        np.testing.assert_allclose(same.epistemic, 0.0, atol=1e-12)


def test_zero_one_score_is_not_strictly_proper():
    p, others = [0.6, 0.3, 0.1], [[0.5, 0.1, 0.4], [0.9, 0.05, 0.05]]
    assert gnll.zero_one_uncertainty(p, others).epistemic == 0
    assert gnll.log_score_uncertainty(p, others).epistemic > 0.1


def test_ties_are_guessed_at_random():
    parts = gnll.zero_one_uncertainty([0.7, 0.2, 0.1], [[0.4, 0.2, 0.4]])
    np.testing.assert_allclose(parts, (1 - (0.7 + 0.1) / 2, 0.3, 0.3))


def test_conventions_swap_the_roles():
    """With one plausible model, the posterior's outcomes are those of a swapped pair."""
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.5, 0.3])
    for rule in (gnll.log_score_uncertainty, gnll.zero_one_uncertainty):
        swapped = rule(p, q[None], convention="posterior_generates")
        np.testing.assert_allclose(swapped, rule(q, p[None]))
        assert not np.allclose(swapped, rule(p, q[None]))


def test_impossible_outcomes():
    assert gnll.log_score_uncertainty([0.5, 0.5], [[1.0, 0.0]]).epistemic == np.inf
    ruled_out = gnll.log_score_uncertainty([0.5, 0.5], [[1.0, 0.0], [0.5, 0.5]], [0.0, 1.0])
    assert ruled_out.epistemic == 0
    assert gnll.log_score_uncertainty([1.0, 0.0], [[0.5, 0.5]]).total == pytest.approx(np.log(2))


# --- Sequences and samples ------------------------------------------------------------------------


def test_uniform_sequences():
    """G-NLL, PE and best of N are T log V; distinct clusters of equal weight give log N."""
    steps, vocab, count = 5, 7, 4
    logps = gnll.token_log_probs(np.zeros((count, steps, vocab)), np.zeros((count, steps), int))
    seq_ll = gnll.sequence_log_likelihood(logps)
    exact = steps * np.log(vocab)
    found = [gnll.predictive_entropy(seq_ll), gnll.best_of_n_nll(seq_ll), gnll.beam_nll(logps)]
    np.testing.assert_allclose([*gnll.g_nll(logps), *found], exact)
    entropies = gnll.token_entropies(np.zeros((steps, vocab)))
    np.testing.assert_allclose(gnll.mean_token_entropy(entropies), np.log(vocab))
    np.testing.assert_allclose(gnll.perplexity(logps), vocab)
    ids = np.array([5, 0, 9, 2])
    np.testing.assert_allclose(gnll.semantic_entropy(seq_ll, ids), np.log(count))
    np.testing.assert_allclose(gnll.discrete_semantic_entropy(ids), np.log(count))


def test_certain_sequences():
    logps, ids = np.zeros((3, 4)), np.zeros(3, int)
    seq_ll = gnll.sequence_log_likelihood(logps)
    zeros = [
        *gnll.g_nll(logps),
        gnll.maximum_sequence_probability(seq_ll, form="one_minus"),
        gnll.maximum_cluster_probability(seq_ll, ids, form="negative_log"),
        gnll.predictive_entropy(seq_ll),
        gnll.semantic_entropy(seq_ll, ids),
        gnll.discrete_semantic_entropy(ids),
        gnll.token_sar(logps, None, np.ones((3, 4))),
        gnll.token_entropies([50.0, -np.inf, -np.inf]),
    ]
    np.testing.assert_allclose(zeros, 0.0, atol=1e-12)
    assert gnll.maximum_sequence_probability(seq_ll) == 1


@given(SEEDS)
@few
def test_clusters_are_a_partition(seed):
    """One cluster has no entropy; order, names and repetition of the samples do not matter."""
    seq_ll, ids = random_samples(seed)
    order = np.random.default_rng(seed).permutation(6)
    for form in ("normalized", "sdlg", "monte_carlo"):
        value = gnll.semantic_entropy(seq_ll, ids, form=form)
        for changed in ((seq_ll[:, order], ids[:, order]), (seq_ll, 10 - 3 * ids)):
            np.testing.assert_allclose(gnll.semantic_entropy(*changed, form=form), value)
    twice = np.tile(seq_ll, 2), np.tile(ids, 2)
    for measure in (
        lambda ll, _: gnll.predictive_entropy(ll),
        gnll.semantic_entropy,
        lambda _, c: gnll.discrete_semantic_entropy(c),
        gnll.maximum_cluster_probability,
        lambda ll, c: gnll.maximum_cluster_probability(ll, c, by="frequency"),
    ):
        np.testing.assert_allclose(measure(*twice), measure(seq_ll, ids))
    one = np.full_like(ids, 3)
    np.testing.assert_allclose(gnll.semantic_entropy(seq_ll, one), 0, atol=1e-12)
    np.testing.assert_allclose(gnll.discrete_semantic_entropy(one), 0, atol=1e-12)
    largest = np.log([len(set(row)) for row in ids])
    assert (gnll.semantic_entropy(seq_ll, ids) <= largest + 1e-12).all()
    assert (gnll.discrete_semantic_entropy(ids) <= largest + 1e-12).all()


def test_length_normalisation():
    seq_ll, ids = random_samples(0)
    lengths = np.full(seq_ll.shape, 5)
    np.testing.assert_allclose(
        gnll.length_normalized_predictive_entropy(seq_ll, lengths),
        gnll.predictive_entropy(seq_ll) / 5,
    )
    np.testing.assert_allclose(
        gnll.length_normalized_semantic_entropy(seq_ll, lengths, ids),
        gnll.semantic_entropy(seq_ll / 5, ids),
    )


def test_best_of_n_falls_with_the_number_of_samples():
    seq_ll, _ = random_samples(3)
    values = [gnll.best_of_n_nll(seq_ll[:, :n]) for n in range(1, 7)]
    assert (np.diff(values, axis=0) <= 0).all()
    np.testing.assert_array_equal(values[0], -seq_ll[:, 0])


def test_forms_of_a_largest_probability():
    seq_ll, ids = random_samples(4)
    for measure in (
        lambda form: gnll.maximum_sequence_probability(seq_ll, form=form),
        lambda form: gnll.maximum_cluster_probability(seq_ll, ids, form=form),
    ):
        p = measure("probability")
        np.testing.assert_allclose(measure("one_minus"), 1 - p)
        np.testing.assert_allclose(measure("negative_log"), -np.log(p))
    certain = gnll.maximum_sequence_probability([-1e-12], form="one_minus")
    np.testing.assert_allclose(certain, 1e-12, rtol=1e-10)


def test_impossible_samples_have_no_mass():
    seq_ll, ids = [-1.0, -np.inf, -1.0], [0, 1, 2]
    for form in ("normalized", "sdlg"):
        found = gnll.semantic_entropy(seq_ll, ids, form=form)
        np.testing.assert_allclose(found, gnll.semantic_entropy([-1.0, -1.0], [0, 2], form=form))
    np.testing.assert_allclose(gnll.maximum_cluster_probability(seq_ll, ids), 0.5)
    # Nor does a token of no importance count, even an impossible one.
    assert gnll.token_sar([[-np.inf, -2.0]], None, [[0.0, 1.0]]) == 2


def test_relevance_without_support_or_difference():
    """No similarity: SentSAR is the mean NLL; equal importance: TokenSAR is LN-NLL."""
    data = golden("gnll_estimators")
    logps, lengths = data["token_logprobs"], data["lengths"]
    seq_ll = logps.sum(-1)
    none = np.zeros(data["similarity"].shape)
    np.testing.assert_allclose(gnll.sentence_sar(seq_ll, none), gnll.predictive_entropy(seq_ll))
    mask = np.arange(8) < lengths[..., None]
    per_token = gnll.length_normalized_predictive_entropy(seq_ll, lengths)
    for importance in (np.full(logps.shape, 0.3), np.zeros(logps.shape)):
        np.testing.assert_allclose(gnll.token_sar(logps, mask, importance), per_token)
    # Long sequences do not underflow: equal ones that support each other fully.
    supported = gnll.sentence_sar(np.full(2, -5000.0), np.ones((2, 2)), tau=0.5)
    np.testing.assert_allclose(supported, 5000 - np.log(3))


def test_end_of_sequence_and_padding():
    logps = np.array([[-1.0, -2.0, -4.0, np.nan], [-1.0, -2.0, -4.0, -8.0]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(gnll.g_nll(logps, mask), [7, 15])
    np.testing.assert_array_equal(gnll.g_nll(logps, mask, include_eos=False), [3, 15])
    np.testing.assert_allclose(gnll.length_normalized_g_nll(logps, mask), [7 / 3, 15 / 4])
    np.testing.assert_allclose(
        gnll.length_normalized_g_nll(logps, mask, include_eos=False), [3 / 2, 15 / 4]
    )
    tokens = np.array([[5, 6, 2, 2], [5, 6, 7, 2]])
    inner = gnll.without_eos(mask, tokens, 2)
    np.testing.assert_array_equal(inner, [[1, 1, 0, 0], [1, 1, 1, 0]])
    np.testing.assert_array_equal(gnll.g_nll(logps, inner), [3, 7])
    padded = np.pad(logps, ((0, 0), (0, 3)), constant_values=7.0), np.pad(mask, ((0, 0), (0, 3)))
    np.testing.assert_array_equal(gnll.g_nll(*padded), [7, 15])
    assert gnll.greedy_gap(7.0, 5.5) == 1.5


def test_token_log_probs():
    rng = np.random.default_rng(0)
    logits, tokens = rng.normal(size=(2, 3, 5)) * 4, rng.integers(0, 5, (2, 3))
    expected = np.take_along_axis(special.log_softmax(logits, -1), tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(gnll.token_log_probs(logits, tokens), expected, **F64)
    np.testing.assert_allclose(gnll.token_log_probs(logits + 300, tokens), expected, rtol=1e-9)
    half = jnp.asarray(logits, jnp.bfloat16)
    found = jax.jit(gnll.token_log_probs)(half, tokens)
    assert found.dtype == jnp.float32
    # bfloat16 logits, but the logarithms of their exact softmax.
    exact = gnll.token_log_probs(np.asarray(half, np.float64), tokens)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        gnll.token_entropies(logits), special.entr(special.softmax(logits, -1)).sum(-1)
    )


def test_empty_rows_in_the_graph():
    """Nothing is NaN where no token counts."""

    @jax.jit
    def found(logps: jax.Array, mask: jax.Array) -> list[jax.Array]:
        return [
            gnll.g_nll(logps, mask),
            gnll.length_normalized_g_nll(logps, mask),
            gnll.perplexity(logps, mask) - 1,
            gnll.token_sar(logps, mask, -logps)[None],
        ]

    for values in found(jnp.full((2, 3), -1.0), jnp.zeros((2, 3), bool)):
        np.testing.assert_array_equal(values, 0)


def test_host_and_graph_arrays_together():
    """One JAX array among the arguments is enough for the graph."""
    seq_ll, ids = random_samples(5)
    ids = np.asarray(ids, np.int32)
    expected = gnll.semantic_entropy(seq_ll, ids)
    for found in (
        jax.jit(lambda x: gnll.semantic_entropy(x, ids))(seq_ll.astype(np.float32)),
        jax.jit(lambda x: gnll.semantic_entropy(seq_ll, x))(ids),
    ):
        np.testing.assert_allclose(found, expected, **F32)


# --- Clusters -------------------------------------------------------------------------------------


def test_later_clusters_take_over():
    """Answer 2 is equivalent to both others, which are not to each other: the last one wins."""
    labels = np.full((4, 4), 2)
    labels[0, 1] = 0
    np.testing.assert_array_equal(gnll.cluster_by_entailment(labels), [0, 1, 1, 1])
    labels[0, 3] = 1
    np.testing.assert_array_equal(gnll.cluster_by_entailment(labels, strict=False), [0, 1, 1, 1])
    # One direction neutral suffices, both do not.
    neutral = np.array([[2, 1], [2, 2]])
    np.testing.assert_array_equal(gnll.cluster_by_entailment(neutral), [0, 1])
    np.testing.assert_array_equal(gnll.cluster_by_entailment(neutral, strict=False), [0, 0])
    neutral[1, 0] = 1
    np.testing.assert_array_equal(gnll.cluster_by_entailment(neutral, strict=False), [0, 1])
    np.testing.assert_array_equal(gnll.cluster_by_entailment(neutral, variant="sdlg"), [0, 0])


def test_equal_keys():
    np.testing.assert_array_equal(gnll.cluster_by_equality(["b", "a", "b", "B"]), [0, 1, 0, 2])
    rows = [["b", "a"], ["a", "a"]]
    np.testing.assert_array_equal(gnll.cluster_by_equality(rows), [[0, 1], [0, 0]])
    keys = np.array([[[7, 7, 1]], [[1, 2, 1]]])
    np.testing.assert_array_equal(gnll.cluster_by_equality(keys), [[[0, 0, 1]], [[0, 1, 0]]])
    # Trailing zero bytes and tuples stay what they are.
    np.testing.assert_array_equal(gnll.cluster_by_equality([b"a\0", b"a", b"a"]), [0, 1, 1])
    np.testing.assert_array_equal(gnll.cluster_by_equality([(1, 2), (1,), (1, 2)]), [0, 1, 0])


# --- Numbers of samples ---------------------------------------------------------------------------


def test_bound_of_the_maximum():
    """Failures of sampling do not exceed the bound, and meet it for draws from the law itself.

    Each frequency is of 4000 experiments; a deviation of 4.5 standard errors has a false-alarm
    rate below 1e-5, and the seed is fixed.
    """
    data, rng = golden("gnll_markov_exact"), np.random.default_rng(0)
    for name in ("c0", "c2"):
        log_p = gnll.exact_sequence_distribution(
            data[f"{name}_trans_logits"], int(data[f"{name}_T"])
        ).log_probs
        p, best = np.exp(log_p), log_p.max()
        # A proposal that is flatter than the law.
        flat = p**0.5 / (p**0.5).sum()
        for q, eps, count in ((p, 0.5, 4), (p, 2.0, 10), (flat, 1.0, 20)):
            near = log_p >= best - eps
            bound = gnll.maximum_failure_probability(
                count, p[near].sum(), weight_bound=max((p / q)[near].max(), 1.0)
            )
            drawn = rng.choice(len(q), (4000, count), p=q / q.sum())
            failed = (best - log_p[drawn].max(-1) > eps).mean()
            slack = 4.5 * np.sqrt(bound * (1 - bound) / 4000)
            assert failed <= bound + slack
            if q is p:
                assert failed >= bound - slack


def test_numbers_of_samples_reach_their_probability():
    for mass, delta, weight in ((0.3, 0.05, 1.0), (0.01, 1e-3, 4.0), (1.0, 0.5, 1.0)):
        count = np.ceil(gnll.maximum_sample_bound(mass, delta, weight_bound=weight))
        assert gnll.maximum_failure_probability(count, mass, weight_bound=weight) <= delta
    masses = jnp.array([0.2, 0.4])
    np.testing.assert_allclose(
        gnll.maximum_sample_bound(masses, 0.1), np.log(10) / np.array([0.2, 0.4]), rtol=1e-6
    )
    np.testing.assert_allclose(gnll.entropy_sample_bound(1.0, 3.0, 0.1, 0.1), 200 * np.log(20))


def test_bound_of_the_entropy_with_weights():
    """Equally probable sequences and another proposal: a range of `C (b - a)` would be 0.

    2000 experiments; large errors are far rarer than delta = 0.1 with as many draws as asked
    for, and happen in about half of the experiments with 14. Both limits are more than ten
    standard errors away (false-alarm rate below 1e-20).
    """
    size, rng = 8, np.random.default_rng(1)
    p = np.full(size, 1 / size)
    q = np.where(np.arange(size) < size // 2, 0.5, 1.5) / size
    weights, surprise = p / q, np.log(size)
    count = int(
        np.ceil(
            gnll.entropy_sample_bound(
                surprise, surprise, 0.2, 0.1, weights=(weights.min(), weights.max())
            )
        )
    )
    assert count > 100

    def wrong(draws: int) -> float:
        drawn = rng.choice(size, (2000, draws), p=q)
        estimates = weights[drawn].mean(-1) * surprise
        return (np.abs(estimates - surprise) > 0.2).mean()

    assert wrong(count) <= 0.1
    assert wrong(14) > 0.3


# --- Errors ---------------------------------------------------------------------------------------

LL = np.full((2, 3), -1.0)
IDS = np.zeros((2, 3), int)
# Words that its types do not allow.
loose: Any = gnll


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gnll.g_nll(LL, [[1, 1, 1], [0, 0, 0]]), "row 1 has no tokens: an empty gen"),
        (
            lambda: gnll.g_nll(LL[None], [[[1, 1, 1], [1, 0, 0]]], include_eos=False),
            r"row \(0, 1\) has no tokens but the end",
        ),
        (lambda: gnll.g_nll([0.5, -1.0]), r"token_logprobs=0.5 at index \(0,\): must be at most 0"),
        (lambda: gnll.g_nll([[-1.0, np.nan]]), r"token_logprobs=nan at index \(0, 1\)"),
        (lambda: gnll.g_nll(LL, np.ones((2, 2))), r"mask has shape \(2, 2\)"),
        (lambda: gnll.g_nll(np.zeros((2, 0))), "T at least 1"),
        (lambda: gnll.mean_token_entropy(LL), "entropies=-1.0: must be at least 0"),
        (lambda: gnll.token_log_probs(np.zeros((2, 3)), [0, 3]), r"must lie in \[0, 3\)"),
        (lambda: gnll.token_log_probs(np.zeros((2, 3)), [0]), r"need \(2,\)"),
        (lambda: gnll.without_eos(LL, [0], 0), r"tokens has \(1,\)"),
        (lambda: gnll.greedy_gap([1.0], [1.0, 2.0]), r"other_nll has shape \(2,\)"),
        (lambda: gnll.predictive_entropy(np.zeros((2, 0))), "N at least 1"),
        (lambda: gnll.predictive_entropy([0.1]), "seq_ll=0.1"),
        (lambda: gnll.semantic_entropy(LL, IDS[:1]), r"cluster_ids has shape \(1, 3\)"),
        (lambda: gnll.semantic_entropy(LL, IDS - 1), r"cluster_ids=-1 at index \(0, 0\)"),
        (lambda: gnll.semantic_entropy(LL, LL), "must be integers"),
        (lambda: loose.semantic_entropy(LL, IDS, form="other"), "form='other': allowed: normal"),
        (lambda: gnll.semantic_entropy(LL * np.inf, IDS), "row 0 is minus infinity throughout"),
        (lambda: gnll.discrete_semantic_entropy([-2]), "cluster_ids=-2"),
        (lambda: gnll.discrete_semantic_entropy(np.zeros((2, 0), int)), "N at least 1"),
        (lambda: gnll.maximum_cluster_probability(None, IDS), "seq_ll=None: by='mass' needs"),
        (lambda: loose.maximum_sequence_probability(LL, form="log"), "form='log': allowed"),
        (lambda: gnll.length_normalized_predictive_entropy(LL, IDS), "lengths=0 at index"),
        (lambda: gnll.length_normalized_predictive_entropy(LL, [1]), r"lengths has shape \(1,\)"),
        (lambda: gnll.token_sar(LL, None, LL), "importance=-1.0: must be at least 0"),
        (lambda: gnll.token_sar(LL, None, [1.0]), r"importance has shape \(1,\)"),
        (lambda: gnll.token_sar(LL[0], None, -LL[0]), r"must be \[..., N, T\]"),
        (lambda: gnll.sentence_sar(LL, np.zeros((2, 3, 2))), r"need \(2, 3, 3\)"),
        (lambda: gnll.sentence_sar(LL[0], -np.ones((3, 3))), "similarity=-1.0"),
        (lambda: gnll.sentence_sar(LL[0], np.ones((3, 3)), tau=0), "tau=0: must be positive"),
        (lambda: gnll.cluster_by_entailment(np.zeros((2, 3), int)), r"must be \[..., N, N\]"),
        (lambda: gnll.cluster_by_entailment(np.full((2, 2), 3)), "0 contradiction, 1 neutral"),
        (lambda: loose.cluster_by_entailment(IDS[:, :2], variant="x"), "allowed: farquhar, sdlg"),
        (lambda: gnll.cluster_by_equality([]), "at least one"),
        (lambda: gnll.cluster_by_equality(np.zeros((2, 0))), "N at least 1"),
        (lambda: gnll.cluster_by_equality([["a"], ["a", "b"]]), r"\[1, 2\] entries"),
        (lambda: gnll.log_score_uncertainty([0.5, 0.6], [[0.5, 0.5]]), "sum 1"),
        (lambda: gnll.log_score_uncertainty([0.5, 0.5], [[1.5, -0.5]]), "posterior_p="),
        (lambda: gnll.log_score_uncertainty([0.5, 0.5], [0.5, 0.5]), "posterior_p has shape"),
        (lambda: gnll.zero_one_uncertainty([1.0], [[1.0]], [-1.0]), "weights="),
        (lambda: gnll.zero_one_uncertainty([1.0], [[1.0]], [1.0, 1.0]), "weights has shape"),
        (
            lambda: loose.zero_one_uncertainty([1.0], [[1.0]], convention="both"),
            "convention='both': allowed: model_generates, posterior_generates",
        ),
        (lambda: gnll.maximum_sample_bound(0.0, 0.1), r"mass=0.0: must lie in \(0, 1\]"),
        (lambda: gnll.maximum_sample_bound(0.5, 1.0), r"delta=1.0: must lie in \(0, 1\)"),
        (lambda: gnll.maximum_sample_bound(0.5, 0.1, weight_bound=0.4), "at least mass=0.5"),
        (lambda: gnll.maximum_failure_probability(0, 0.1), "num_samples=0: must be at least 1"),
        (lambda: gnll.entropy_sample_bound(2.0, 1.0, 0.1, 0.1), "high=1.0: must be at least low"),
        (lambda: gnll.entropy_sample_bound(-1.0, 1.0, 0.1, 0.1), "low=-1.0"),
        (lambda: gnll.entropy_sample_bound(0.0, 1.0, 0.0, 0.1), "error=0.0: must be positive"),
        (
            lambda: gnll.entropy_sample_bound(0.0, 1.0, 0.1, 0.1, weights=(0.0, 0.5)),
            r"weights\[1\]=0.5: must be at least 1",
        ),
    ],
)
def test_errors(call: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_shapes_are_checked_while_tracing():
    with pytest.raises(ValueError, match="mask has shape"):
        jax.eval_shape(gnll.g_nll, jnp.zeros((2, 3)), jnp.zeros((2, 2)))
    with pytest.raises(ValueError, match="cluster_ids has shape"):
        jax.eval_shape(gnll.semantic_entropy, jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32))
