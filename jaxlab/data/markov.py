"""Sequences from a random Markov chain, whose best possible loss is known exactly."""

from __future__ import annotations

import numpy as np

from jaxlab.data.batches import EndlessBatches

__all__ = ["MarkovBatches", "entropy_rate", "markov_transition", "stationary_distribution"]

# Separate random streams for one seed: the chain itself, and what is sampled from a chain.
_TRANSITION_STREAM = 0
_BATCH_STREAM = 1


def markov_transition(seed: int, vocab_size: int = 32, concentration: float = 0.1) -> np.ndarray:
    """Transition matrix with independent rows from a symmetric Dirichlet distribution.

    Args:
      seed: at least 0.
      vocab_size: number of states, at least 1.
      concentration: parameter of the Dirichlet distribution, positive; the smaller, the fewer
        successors a state has in effect.

    Returns:
      float64 `[vocab_size, vocab_size]`; row `i` is the distribution of what follows `i`.

    Raises:
      ValueError: a number is out of its range.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size}: must be at least 1")
    if concentration <= 0:
        raise ValueError(f"concentration={concentration}: must be positive")
    generator = _generator(seed, _TRANSITION_STREAM)
    return generator.dirichlet(np.full(vocab_size, concentration), size=vocab_size)


def stationary_distribution(transition: np.ndarray) -> np.ndarray:
    """The distribution that a step of the chain leaves as it is.

    Args:
      transition: `[states, states]`, rows are distributions.

    Returns:
      float64 `[states]`.

    Raises:
      ValueError: the rows are not distributions, or the chain has several stationary
        distributions because it falls apart.

    >>> stationary_distribution(np.array([[0.9, 0.1], [0.3, 0.7]])).round(6).tolist()
    [0.75, 0.25]
    """
    transition = _checked(transition)
    states = len(transition)
    flow = transition.T - np.eye(states)
    if np.linalg.matrix_rank(flow) < states - 1:
        raise ValueError("transition has several stationary distributions: its chain falls apart")
    # The balance equations sum to zero, so that any one may give way to the sum of one.
    flow[-1] = 1.0
    distribution = np.linalg.solve(flow, np.eye(states)[-1]).clip(min=0.0)
    return distribution / distribution.sum()


def entropy_rate(transition: np.ndarray) -> float:
    """Entropy of the next state given the present one, in nats: the least loss of any model.

    Args:
      transition: `[states, states]`, rows are distributions.

    Raises:
      ValueError: as for `stationary_distribution`.

    >>> round(entropy_rate(np.full((4, 4), 0.25)), 6)
    1.386294
    """
    transition = _checked(transition)
    logarithms = np.log(np.where(transition > 0, transition, 1.0))
    return float(-stationary_distribution(transition) @ (transition * logarithms).sum(axis=1))


class MarkovBatches(EndlessBatches):
    """Batches of independent stretches of a stationary chain.

    Attributes:
      batch_size: stretches in a batch.
      length: tokens in a stretch.
      seed: of the samples; the chain has a seed of its own.

    >>> batches = MarkovBatches(markov_transition(0), batch_size=4, length=7, seed=0)
    >>> batches[3].shape, bool((batches[3] == batches[3]).all())
    ((4, 7), True)
    """

    def __init__(self, transition: np.ndarray, *, batch_size: int, length: int, seed: int) -> None:
        """Prepares the cumulative distributions.

        Args:
          transition: `[vocab, vocab]`, rows are distributions.
          batch_size: stretches in a batch, at least 1.
          length: tokens in a stretch, at least 1.
          seed: at least 0.

        Raises:
          ValueError: a number is out of its range, or as for `stationary_distribution`.
        """
        if batch_size < 1 or length < 1:
            raise ValueError(f"batch_size={batch_size}, length={length}: must be at least 1")
        if seed < 0:
            raise ValueError(f"seed={seed}: must be at least 0")
        self.batch_size, self.length, self.seed = batch_size, length, seed
        self._initial = _cumulative(stationary_distribution(transition)[None, :])
        self._following = _cumulative(_checked(transition))

    def batch(self, step: int) -> np.ndarray:
        """The batch of a step: int32 `[batch_size, length]`."""
        uniform = _generator(self.seed, _BATCH_STREAM, step).random((self.length, self.batch_size))
        tokens = np.empty((self.length, self.batch_size), dtype=np.int32)
        bounds = self._initial
        for place in range(self.length):
            # Inverse CDF: the token is the number of bounds that the uniform number has reached.
            tokens[place] = (bounds <= uniform[place][:, None]).sum(axis=1)
            bounds = self._following[tokens[place]]
        return np.ascontiguousarray(tokens.T)


def _generator(seed: int, *stream: int) -> np.random.Generator:
    if seed < 0:
        raise ValueError(f"seed={seed}: must be at least 0")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=stream)))


def _checked(transition: np.ndarray) -> np.ndarray:
    transition = np.asarray(transition, dtype=np.float64)
    if transition.ndim != 2 or transition.shape[0] != transition.shape[1]:
        raise ValueError(f"transition has shape {transition.shape}: must be square")
    if not ((transition >= 0).all() and np.allclose(transition.sum(axis=1), 1.0, atol=1e-6)):
        raise ValueError("each row of transition must be non-negative with sum 1")
    return transition


def _cumulative(rows: np.ndarray) -> np.ndarray:
    bounds = rows.cumsum(axis=1)
    # Exactly 1 at the end: a uniform number below 1 always finds a token.
    return bounds / bounds[:, -1:]
