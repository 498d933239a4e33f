"""Small laws of sequences that are known exactly: Markov chains, with all sequences enumerated."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab.methods.gnll.arrays import Values, log_softmax, logsumexp
from jaxlab.methods.gnll.decoding import Step
from jaxlab.methods.gnll.sequences import maximum_sequence_probability
from jaxlab.ops.arrays import operands, plain

__all__ = [
    "BestSequence",
    "MarkovStart",
    "SequenceDistribution",
    "best_sequence",
    "exact_sequence_distribution",
    "markov_start",
    "min_entropy",
    "renyi_entropy",
    "sequence_entropy",
    "surprisal_variance",
]

_MOST_SEQUENCES = 1 << 22


class SequenceDistribution(NamedTuple):
    """A law of sequences.

    Attributes:
      sequences: tokens int32 [n, T], with 0 behind an end. They depend on V and T alone: those
        that end early first, and of one length in the order of their tokens.
      log_probs: nats [..., n].
      lengths: tokens of each, the end of sequence counted, int32 [n].
    """

    sequences: Any
    log_probs: Any
    lengths: Any


class BestSequence(NamedTuple):
    """The most probable sequence.

    Attributes:
      tokens: int32 [..., T], with 0 behind an end.
      length: int32 [...].
      log_prob: nats [...].
    """

    tokens: Any
    length: Any
    log_prob: Any


class MarkovStart(NamedTuple):
    """A chain as a model to decode: the first arguments of the decoders.

    Attributes:
      step: the step function.
      state: its state, without content.
      first_logits: of the first token [B, V].
    """

    step: Step
    state: tuple[()]
    first_logits: Float[Array, "B V"]


def exact_sequence_distribution(transition_logits: Values, max_len: int) -> SequenceDistribution:
    """All sequences of an order-1 Markov chain, with their probabilities. Host or graph.

    Token 0 ends a sequence; one that reaches `max_len` tokens ends without it. There are
    `n = sum_{t < T} (V - 1)^(t - 1) + V (V - 1)^(T - 1)` sequences, as many for every chain of
    one V and T, and their probabilities sum to 1. Many chains are best given at once in leading
    axes: `vmap` over chains would copy `sequences` for each if they are returned.

    Args:
      transition_logits: unnormalised log-probabilities [..., V + 1, V], V at least 2: row `i` of
        what follows token `i`, and the last row of the first token. Row 0 is not read.
      max_len: T, at least 1.

    Returns:
      See `SequenceDistribution`; float64 on the host.

    Raises:
      ValueError: the shape is no such table, or there are more than four million sequences.

    Example:
      >>> law = exact_sequence_distribution(np.zeros((3, 2)), 2)
      >>> law.sequences.tolist(), np.exp(law.log_probs).round(4).tolist(), law.lengths.tolist()
      ([[0, 0], [1, 0], [1, 1]], [0.5, 0.25, 0.25], [1, 2, 2])
    """
    xp, (logits,) = operands(transition_logits)
    vocab = _vocabulary(logits.shape)
    if max_len < 1:
        raise ValueError(f"max_len={max_len}: must be at least 1")
    count = sum((vocab - 1) ** t for t in range(max_len - 1)) + vocab * (vocab - 1) ** (max_len - 1)
    if count > _MOST_SEQUENCES:
        raise ValueError(
            f"max_len={max_len} with {vocab} tokens gives {count} sequences: at most "
            f"{_MOST_SEQUENCES}"
        )
    table = log_softmax(xp, logits)
    rows = table.shape[:-2]
    # The laws of what follows each open prefix; prefixes are in the order of their tokens, so the
    # last tokens of neighbours run through 1 to V - 1.
    following, following_open = table[..., vocab:, :], table[..., None, 1:vocab, :]
    ended = []
    for _ in range(max_len - 1):
        ended.append(following[..., 0])
        open_prefixes = following[..., 1:].reshape(*rows, -1, vocab - 1, 1)
        following = (open_prefixes + following_open).reshape(*rows, -1, vocab)
    log_probs = xp.concatenate([*ended, following.reshape(*rows, -1)], -1)
    sequences, lengths = _sequences(vocab, max_len)
    return SequenceDistribution(xp.asarray(sequences), log_probs, xp.asarray(lengths))


def best_sequence(law: SequenceDistribution) -> BestSequence:
    """The most probable sequence; of equal ones the first in the law's order. Host or graph."""
    xp, (log_probs,) = operands(law.log_probs)
    index = xp.argmax(log_probs, axis=-1)
    tokens, lengths = xp.asarray(law.sequences)[index], xp.asarray(law.lengths)[index]
    return BestSequence(tokens, plain(xp, lengths), plain(xp, xp.max(log_probs, axis=-1)))


def sequence_entropy(log_probs: Values) -> Any:
    """Shannon entropy of a law, in nats. Host or graph.

    Args:
      log_probs: of all outcomes [..., n]; minus infinity for impossible ones.

    Returns:
      [...].
    """
    xp, (values,) = operands(log_probs)
    return plain(xp, _mean(xp, values, -values))


def min_entropy(log_probs: Values) -> Any:
    """Min-entropy of a law, `-max_y log p(y)`, in nats: the Rényi entropy of order infinity.

    Host or graph; what G-NLL estimates.

    Args:
      log_probs: as `sequence_entropy`.

    Returns:
      [...].
    """
    return maximum_sequence_probability(log_probs, form="negative_log")


def renyi_entropy(log_probs: Values, order: float = 2.0) -> Any:
    """Rényi entropy of a law, `log(sum_y p(y)^order) / (1 - order)`, in nats. Host or graph.

    It falls with the order: from the Shannon entropy towards 1 to the min-entropy towards
    infinity. For these two see `sequence_entropy` and `min_entropy`.

    Args:
      log_probs: as `sequence_entropy`.
      order: positive and finite, not 1.

    Returns:
      [...].

    Raises:
      ValueError: the order is out of its range.
    """
    if not 0 < order < np.inf or order == 1:
        raise ValueError(f"order={order}: must be positive and finite, not 1")
    xp, (values,) = operands(log_probs)
    return plain(xp, logsumexp(xp, order * values) / (1 - order))


def surprisal_variance(log_probs: Values) -> Any:
    """Variance of `-log p(y)` under the law, in nats squared. Host or graph.

    Over N it is the variance of `predictive_entropy` from N sequences.

    Args:
      log_probs: as `sequence_entropy`.

    Returns:
      [...].
    """
    xp, (values,) = operands(log_probs)
    entropy = _mean(xp, values, -values)
    return plain(xp, _mean(xp, values, (values + entropy[..., None]) ** 2))


def markov_start(
    transition_logits: Float[Array, "V1 V"] | np.ndarray, *, batch_size: int = 1
) -> MarkovStart:
    """A chain as a model for `greedy_decode`, `sample_decode` and `beam_decode`. Graph.

    Args:
      transition_logits: [V + 1, V], as `exact_sequence_distribution`; `vmap` over chains.
      batch_size: B, rows that start alike, at least 1.

    Returns:
      Arguments to unpack: `greedy_decode(*markov_start(logits), max_new_tokens=T, eos_id=0)`.

    Raises:
      ValueError: the shape is no such table, or the size is below 1.

    Example:
      >>> start = markov_start(np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 1.0]]))
      >>> from jaxlab.methods.gnll.decoding import greedy_decode
      >>> greedy_decode(*start, max_new_tokens=3, eos_id=0).tokens.tolist()
      [[1, 0, 0]]
    """
    table = jnp.asarray(transition_logits, jnp.float32)
    if table.ndim != 2:
        raise ValueError(f"transition_logits of shape {table.shape}: must be one chain [V + 1, V]")
    vocab = _vocabulary(table.shape)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: must be at least 1")

    def step(state: tuple[()], token: Array) -> tuple[Array, tuple[()]]:
        return table[token], state

    return MarkovStart(step, (), jnp.broadcast_to(table[vocab][None], (batch_size, vocab)))


def _vocabulary(shape: tuple[int, ...]) -> int:
    if len(shape) < 2 or shape[-1] < 2 or shape[-2] != shape[-1] + 1:
        raise ValueError(
            f"transition_logits of shape {shape}: must be [..., V + 1, V] with V at least 2"
        )
    return shape[-1]


def _sequences(vocab: int, max_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n, T] and lengths [n] in the order of `exact_sequence_distribution`."""
    prefixes = np.zeros((1, 0), np.int32)
    leaves, lengths = [], []
    for length in range(1, max_len + 1):
        grown = np.concatenate(
            [
                np.repeat(prefixes, vocab, axis=0),
                np.tile(np.arange(vocab, dtype=np.int32), len(prefixes))[:, None],
            ],
            axis=1,
        )
        ends = (grown[:, -1] == 0) | (length == max_len)
        leaves.append(np.pad(grown[ends], ((0, 0), (0, max_len - length))))
        lengths.append(np.full(ends.sum(), length, np.int32))
        prefixes = grown[~ends]
    return np.concatenate(leaves), np.concatenate(lengths)


def _mean(xp: Any, log_probs: Any, values: Any) -> Any:
    """Expectation under the law of values that may be infinite where the law is 0."""
    possible = log_probs > -xp.inf
    return xp.sum(xp.exp(log_probs) * xp.where(possible, values, 0.0), axis=-1)
