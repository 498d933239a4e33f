"""Single-sequence uncertainty: decoders, and laws of sequences that are known exactly."""

from __future__ import annotations

import functools
import itertools
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
CHAINS = ("c0", "c1", "c2", "c3")
VOCAB = 6
LANES = 24
BATCH, STEPS = 5, 8
few = settings(max_examples=10, deadline=None)


def widened(logits: np.ndarray) -> np.ndarray:
    """The chain with tokens that never occur, up to VOCAB."""
    vocab = logits.shape[-1]
    table = np.full((VOCAB + 1, VOCAB), -np.inf)
    table[:, 0] = 0.0
    table[:vocab, :vocab], table[VOCAB, :vocab] = logits[:vocab], logits[vocab]
    return table


def stacked(*chains: np.ndarray) -> jax.Array:
    """Chains of any size as one array of LANES chains, the last one repeated."""
    tables = [widened(chain) for chain in chains]
    return jnp.asarray(np.stack(tables + tables[-1:] * (LANES - len(tables))), jnp.float32)


def random_chains(seed: int, count: int, vocab: int, scale: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, vocab + 1, vocab)) * scale


@pytest.fixture(scope="module")
def exact() -> dict[str, gnll.SequenceDistribution]:
    data = golden("gnll_markov_exact")
    return {
        name: gnll.exact_sequence_distribution(data[f"{name}_trans_logits"], int(data[f"{name}_T"]))
        for name in CHAINS
    }


@pytest.fixture(scope="module")
def greedy():
    """Greedy decoding of LANES chains, to 8 tokens."""

    def decode(logits: jax.Array) -> gnll.Decoded:
        found = gnll.greedy_decode(*gnll.markov_start(logits), max_new_tokens=8, eos_id=0)
        return gnll.Decoded(*(x[0] for x in found))

    return jax.jit(jax.vmap(decode))


@pytest.fixture(scope="module")
def beam():
    """Beams of LANES chains, to 5 tokens."""

    def decode(logits: jax.Array) -> gnll.Decoded:
        start = gnll.markov_start(logits)
        found = gnll.beam_decode(*start, beam_width=16, max_new_tokens=5, eos_id=0)
        return gnll.Decoded(*(x[0] for x in found))

    return jax.jit(jax.vmap(decode))


@pytest.fixture(scope="module")
def stateful():
    """Two beams and three samples of STEPS tokens from `table[time, state]`, in BATCH rows.

    The state starts as the number of the row and becomes `memory * state + token`, modulo 5.
    """

    @jax.jit
    def decode(
        table: jax.Array, memory: jax.Array, temperature: jax.Array
    ) -> tuple[gnll.Decoded, gnll.Decoded]:
        def step(state: Any, token: jax.Array) -> tuple[jax.Array, Any]:
            total, time = state
            total = (memory * total + token) % 5
            return table[time, total], (total, time + 1)

        rows, kept = jnp.arange(BATCH, dtype=jnp.int32), {"max_new_tokens": STEPS, "eos_id": 0}
        start = step, (rows, jnp.int32(1)), table[0, rows]
        beams = gnll.beam_decode(*start, beam_width=2, **kept)
        key = jax.random.key(0)
        return beams, gnll.sample_decode(
            *start, key, num_samples=3, temperature=temperature, **kept
        )

    def run(table: np.ndarray, *, memory: int, temperature: float) -> Any:
        arguments = jnp.asarray(table, jnp.float32), jnp.int32(memory), jnp.float32(temperature)
        return jax.tree.map(np.asarray, decode(*arguments))

    return run


# --- Exact laws -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHAINS)
def test_exact_laws_match_reference(name, exact):
    data, law = golden("gnll_markov_exact"), exact[name]

    def of(key: str) -> Any:
        return data[f"{name}_{key}"]

    log_p, p = law.log_probs, np.exp(law.log_probs)
    assert log_p.dtype == np.float64
    assert len(p) == of("n_sequences")
    assert len(np.unique(law.sequences, axis=0)) == len(p)
    np.testing.assert_allclose(p.sum(), 1.0, rtol=1e-12)
    best = gnll.best_sequence(law)
    np.testing.assert_array_equal(best.tokens, of("best_sequence"))
    assert best.length == of("best_length")
    pairs = {
        "entropy": gnll.sequence_entropy(log_p),
        "min_entropy": gnll.min_entropy(log_p),
        "renyi2": gnll.renyi_entropy(log_p),
        "var_neglogp": gnll.surprisal_variance(log_p),
        "zero_one_risk": gnll.maximum_sequence_probability(log_p, form="one_minus"),
        "length_pmf": np.bincount(law.lengths, weights=p),
        "expected_length": p @ law.lengths,
        "ln_pe_exact": -(p * log_p) @ (1 / law.lengths),
    }
    for key, value in pairs.items():
        np.testing.assert_allclose(value, of(key), **F64, err_msg=key)
    np.testing.assert_allclose(-best.log_prob, of("min_entropy"), **F64)
    if len(p) < 600:
        ids = law.sequences.sum(-1) % int(of("nclust"))
        found = gnll.semantic_entropy(log_p, ids), gnll.maximum_cluster_probability(log_p, ids)
        np.testing.assert_allclose(found, (of("semantic_entropy"), of("max_cluster_prob")), **F64)


def test_sequences_and_probabilities_belong_together(exact):
    """Against products of the chain's probabilities, one sequence at a time."""
    table = special.log_softmax(golden("gnll_markov_exact")["c2_trans_logits"], -1)
    law = exact["c2"]
    for tokens, log_p, length in zip(*law, strict=True):
        path = [3, *tokens[:length]]
        assert sum(table[i, j] for i, j in itertools.pairwise(path)) == pytest.approx(log_p)
        assert (tokens[length:] == 0).all()
        assert length == 8 or tokens[length - 1] == 0


def summary(logits: Any) -> tuple[Any, ...]:
    law = gnll.exact_sequence_distribution(logits, 4)
    entropies = gnll.sequence_entropy(law.log_probs), gnll.min_entropy(law.log_probs)
    others = gnll.renyi_entropy(law.log_probs, 3.0), gnll.surprisal_variance(law.log_probs)
    return (*entropies, *others, *gnll.best_sequence(law))


def test_exact_laws_in_the_graph():
    """Compiled and batched by vmap, and on the host with leading axes: the same."""
    chains = random_chains(0, 6, 3, 2.0)
    host = summary(chains.reshape(2, 3, 4, 3))
    host = jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), host)
    found = jax.jit(jax.vmap(summary))(jnp.asarray(chains, jnp.float32))
    chex.assert_trees_all_close(found, host, **F32)
    one = summary(chains[0])
    chex.assert_trees_all_close(one, jax.tree.map(lambda x: x[0], host), **F64)


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 6.0))
@few
def test_order_of_entropies(seed, scale):
    """M <= Rényi-2 <= H, and no more than exp(k) sequences of probability exp(-k)."""
    log_p = gnll.exact_sequence_distribution(random_chains(seed, 5, 3, scale), 5).log_probs
    least, second, entropy = (
        f(log_p) for f in (gnll.min_entropy, gnll.renyi_entropy, gnll.sequence_entropy)
    )
    assert (least <= second + 1e-9).all()
    assert (second <= entropy + 1e-9).all()
    assert (least >= 0).all()
    for k in (0.5, 1.0, 2.0, 4.0):
        assert ((log_p >= -k).sum(-1) <= np.exp(k)).all()


def test_predictive_entropy_is_unbiased():
    """Mean and variance over all pairs of draws, each with its probability."""
    log_p = gnll.exact_sequence_distribution(random_chains(1, 1, 3, 1.5)[0], 3).log_probs
    pairs = np.stack(np.meshgrid(log_p, log_p, indexing="ij"), -1)
    weights, values = np.exp(pairs.sum(-1)), gnll.predictive_entropy(pairs)
    mean = (weights * values).sum()
    np.testing.assert_allclose(mean, gnll.sequence_entropy(log_p))
    np.testing.assert_allclose(
        (weights * (values - mean) ** 2).sum(), gnll.surprisal_variance(log_p) / 2
    )
    assert (gnll.best_of_n_nll(pairs) >= gnll.min_entropy(log_p)).all()


def test_impossible_sequences():
    """A chain with one path has no entropy."""
    chain = np.full((4, 3), -np.inf)
    chain[3, 1] = chain[1, 2] = chain[2, 0] = chain[0, 0] = 0.0
    law = gnll.exact_sequence_distribution(chain, 5)
    found = [gnll.sequence_entropy(law.log_probs), gnll.min_entropy(law.log_probs)]
    np.testing.assert_array_equal([*found, gnll.surprisal_variance(law.log_probs)], 0)
    best = gnll.best_sequence(law)
    np.testing.assert_array_equal(best.tokens, [1, 2, 0, 0, 0])
    assert best.length == 3


# --- Decoders -------------------------------------------------------------------------------------


def test_greedy_matches_reference(greedy):
    data = golden("gnll_markov_exact")
    found = greedy(stacked(*(data[f"{name}_trans_logits"] for name in CHAINS)))
    for lane, name in enumerate(CHAINS):
        cap = int(data[f"{name}_T"])
        tokens, logps, mask = (np.asarray(x[lane, :cap]) for x in found)
        np.testing.assert_array_equal(tokens, data[f"{name}_greedy_sequence"])
        assert mask.sum() == data[f"{name}_greedy_length"]
        np.testing.assert_allclose(gnll.g_nll(logps, mask), data[f"{name}_greedy_nll"], **F32)


def test_greedy_log_probs_are_those_of_teacher_forcing(greedy):
    chains = random_chains(2, LANES, VOCAB, 1.5)
    found = jax.tree.map(np.asarray, greedy(stacked(*chains)))
    rows = np.concatenate([np.full((LANES, 1), VOCAB), found.tokens[:, :-1]], 1)
    logits = chains[np.arange(LANES)[:, None], rows]
    forced = np.where(found.mask, gnll.token_log_probs(logits, found.tokens), 0.0)
    np.testing.assert_allclose(found.token_logprobs, forced, **F32)
    np.testing.assert_array_equal(found.tokens[found.mask], logits.argmax(-1)[found.mask])
    # Behind an end there is nothing but ends.
    assert (found.tokens[~found.mask] == 0).all()
    assert (np.diff(found.mask.astype(int)) <= 0).all()
    ended = ~found.mask.all(-1)
    assert ended.any()
    assert (found.tokens[ended, found.mask[ended].sum(-1) - 1] == 0).all()
    # G-NLL is at least the min-entropy.
    least = gnll.min_entropy(gnll.exact_sequence_distribution(chains[:6], 8 - 2).log_probs)
    short = gnll.g_nll(found.token_logprobs[:6, :6], found.mask[:6, :6])
    assert (short >= least - 1e-5).all()


def test_temperature_and_constants_of_logits(greedy):
    """A constant changes nothing; small temperatures give 0, large ones T log V."""
    chain = random_chains(3, 1, VOCAB, 1.0)[0]
    # No end of sequence, so that every sequence has 8 tokens.
    chain[:, 0] = -np.inf
    found = greedy(stacked(chain, chain + 7.0, chain / 1e-3, chain / 1e4))
    values = gnll.g_nll(*found[1:])
    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)
    np.testing.assert_allclose(values[2], 0.0, atol=1e-5)
    np.testing.assert_allclose(values[3], 8 * np.log(VOCAB - 1), rtol=1e-3)


def test_ties_go_to_the_lowest_token(greedy, beam):
    found = greedy(stacked(np.zeros((VOCAB + 1, VOCAB))))
    np.testing.assert_array_equal(found.tokens[0], 0)
    np.testing.assert_array_equal(found.mask[0], np.arange(8) == 0)
    beams = beam(stacked(np.zeros((VOCAB + 1, VOCAB))))
    np.testing.assert_array_equal(beams.tokens[0, 0], 0)


def test_beams_match_reference(beam):
    data = golden("gnll_markov_exact")
    found = beam(stacked(data["c1_trans_logits"], data["c3_trans_logits"]))
    for lane, name in enumerate(("c1", "c3")):
        expected = data[f"{name}_beam_nll"][data[f"{name}_beam_widths"] == 16]
        np.testing.assert_allclose(gnll.beam_nll(*found[1:])[lane], expected[0], **F32)
        np.testing.assert_array_equal(found.tokens[lane, 0], data[f"{name}_best_sequence"])


def test_two_beams_find_what_greedy_misses(stateful):
    """c2 is flat: its best sequence ends at once, which greedy decoding does not see."""
    data = golden("gnll_markov_exact")
    chain = data["c2_trans_logits"]
    # Without memory the state is the last token.
    table = np.broadcast_to(np.pad(chain[:3], ((0, 2), (0, 0))), (STEPS + 1, 5, 3)).copy()
    table[0] = chain[3]
    beams, cold = stateful(table, memory=0, temperature=0.0)
    nll = gnll.beam_nll(*beams[1:])
    np.testing.assert_allclose(nll, np.full(BATCH, data["c2_min_entropy"]), **F32)
    g_nll = gnll.g_nll(cold.token_logprobs[:, 0], cold.mask[:, 0])
    expected = np.full(BATCH, data["c2_greedy_nll"] - data["c2_min_entropy"])
    np.testing.assert_allclose(gnll.greedy_gap(g_nll, nll), expected, rtol=1e-5)


def test_wide_beams_are_exact(beam):
    """16 beams hold all open prefixes of 3 tokens and 5 places: the best sequences, in order."""
    chains = random_chains(4, LANES, 3, 1.0)
    found = jax.tree.map(np.asarray, beam(stacked(*chains)))
    law = gnll.exact_sequence_distribution(chains, 5)
    seq_ll = gnll.sequence_log_likelihood(found.token_logprobs, found.mask)
    np.testing.assert_allclose(gnll.best_of_n_nll(seq_ll), gnll.min_entropy(law.log_probs), **F32)
    assert (np.diff(seq_ll) <= 1e-5).all()
    places = {tuple(tokens): place for place, tokens in enumerate(law.sequences.tolist())}
    for lane in range(LANES):
        index = [places[tuple(tokens)] for tokens in found.tokens[lane].tolist()]
        assert len(set(index)) == 16
        np.testing.assert_allclose(seq_ll[lane], law.log_probs[lane][index], **F32)
        np.testing.assert_array_equal(found.mask[lane].sum(-1), law.lengths[index])


def test_beams_without_sequences(beam):
    """A chain with three sequences leaves thirteen beams of probability 0."""
    chain = np.full((4, 3), -np.inf)
    chain[3], chain[1, 0], chain[2, 0], chain[0, 0] = (1.0, 2.0, 0.0), 0.0, 0.0, 0.0
    found = beam(stacked(chain))
    seq_ll = gnll.sequence_log_likelihood(found.token_logprobs[0], found.mask[0])
    np.testing.assert_allclose(np.exp(seq_ll[:3]), special.softmax([2.0, 1.0, 0.0]), rtol=1e-5)
    np.testing.assert_array_equal(seq_ll[3:], -np.inf)
    np.testing.assert_array_equal(found.tokens[0, :3], [[1, 0, 0, 0, 0], [0] * 5, [2, 0, 0, 0, 0]])


def test_states_follow_their_sequences(stateful):
    """Beams and samples of a model whose state matters, rescored from scratch."""
    table = np.random.default_rng(5).normal(size=(STEPS + 1, 5, 3)) * 1.5
    table[..., 0] -= 1.0

    def laws(row: int, tokens: np.ndarray) -> np.ndarray:
        totals = (row + np.cumsum([0, *tokens[:-1]])) % 5
        return special.log_softmax(table[np.arange(STEPS), totals], -1)

    beams, drawn = stateful(table, memory=1, temperature=1.0)
    _, cold = stateful(table, memory=1, temperature=0.0)
    for found in (beams, drawn, cold):
        for row, each in itertools.product(range(BATCH), range(found.tokens.shape[1])):
            tokens, logps, mask = (x[row, each] for x in found)
            law = laws(row, tokens)
            expected = np.where(mask, law[np.arange(STEPS), tokens], 0.0)
            np.testing.assert_allclose(logps, expected, **F32)
            if found is cold:
                np.testing.assert_array_equal(tokens[mask], law.argmax(-1)[mask])
    seq_ll = gnll.sequence_log_likelihood(beams.token_logprobs, beams.mask)
    assert (seq_ll[:, 0] >= seq_ll[:, 1]).all()


def test_samples_follow_the_law(exact):
    """20000 sequences of c0 at temperature 1 and 2; each z-test has a false-alarm rate of 3e-5.

    Log-probabilities are those of temperature 1 throughout.
    """
    data, count = golden("gnll_markov_exact"), 20000
    chain, law = data["c0_trans_logits"], exact["c0"]

    @jax.jit
    def draw(heat: jax.Array) -> gnll.Decoded:
        return gnll.sample_decode(
            *gnll.markov_start(chain),
            jax.random.key(11),
            num_samples=count,
            max_new_tokens=6,
            eos_id=0,
            temperature=heat,
        )

    places = {tuple(tokens): place for place, tokens in enumerate(law.sequences.tolist())}
    for heat in (1.0, 2.0):
        found = jax.tree.map(lambda x: np.asarray(x)[0], draw(jnp.float32(heat)))
        index = np.array([places[tuple(tokens)] for tokens in found.tokens.tolist()])
        seq_ll = gnll.sequence_log_likelihood(found.token_logprobs, found.mask)
        np.testing.assert_allclose(seq_ll, law.log_probs[index], **F32)
        np.testing.assert_array_equal(found.mask.sum(-1), law.lengths[index])
        p = np.exp(gnll.exact_sequence_distribution(chain / heat, 6).log_probs)
        # The mean surprise, and how often each of the likeliest sequences is drawn.
        mean, square = p @ law.log_probs, p @ law.log_probs**2
        assert abs(seq_ll.mean() - mean) < 4.2 * np.sqrt((square - mean**2) / count)
        for place in np.argsort(p)[-5:]:
            error = np.sqrt(p[place] * (1 - p[place]) / count)
            assert abs((index == place).mean() - p[place]) < 4.2 * error


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be at least 1"),
        ({"eos_id": 3}, r"eos_id=3: must lie in \[0, 3\)"),
        ({"first_logits": jnp.zeros(3)}, r"first_logits has shape \(3,\)"),
    ],
)
def test_decoder_errors(changed, message):
    arguments: dict[str, Any] = {
        **gnll.markov_start(np.zeros((4, 3)))._asdict(),
        "max_new_tokens": 2,
        "eos_id": 0,
        **changed,
    }
    for decode in (
        gnll.greedy_decode,
        functools.partial(gnll.beam_decode, beam_width=2),
        functools.partial(gnll.sample_decode, key=jax.random.key(0), num_samples=2),
    ):
        with pytest.raises(ValueError, match=message):
            decode(**arguments)


def test_other_errors():
    start = gnll.markov_start(np.zeros((4, 3)))
    kept = {"max_new_tokens": 2, "eos_id": 0}
    with pytest.raises(ValueError, match="beam_width=0: must be at least 1"):
        gnll.beam_decode(*start, beam_width=0, **kept)
    with pytest.raises(ValueError, match="num_samples=0: must be at least 1"):
        gnll.sample_decode(*start, jax.random.key(0), num_samples=0, **kept)
    with pytest.raises(ValueError, match="temperature=-1"):
        gnll.sample_decode(*start, jax.random.key(0), num_samples=1, temperature=-1.0, **kept)
    for shape in ((3,), (3, 3), (2, 1)):
        with pytest.raises(ValueError, match=r"must be \[..., V \+ 1, V\] with V at least 2"):
            gnll.exact_sequence_distribution(np.zeros(shape), 2)
    with pytest.raises(ValueError, match="must be one chain"):
        gnll.markov_start(np.zeros((2, 4, 3)))
    with pytest.raises(ValueError, match="batch_size=0"):
        gnll.markov_start(np.zeros((4, 3)), batch_size=0)
    with pytest.raises(ValueError, match="max_len=0: must be at least 1"):
        gnll.exact_sequence_distribution(np.zeros((4, 3)), 0)
    with pytest.raises(ValueError, match=r"max_len=9 with 30 tokens gives .* sequences: at most"):
        gnll.exact_sequence_distribution(np.zeros((31, 30)), 9)
    for order in (1.0, 0.0, np.inf):
        with pytest.raises(ValueError, match="must be positive and finite, not 1"):
            gnll.renyi_entropy(np.zeros(1), order)
