"""Measures of one sequence, or of the best of a few: G-NLL and what it is compared with."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from jaxlab.methods.gnll.arrays import (
    Ids,
    Mask,
    Values,
    check_choice,
    counted_tokens,
    log_softmax,
    sample_log_likelihoods,
)
from jaxlab.ops.arrays import operands, plain
from jaxlab.ops.losses import cross_entropy_per_token

__all__ = [
    "LikelihoodForm",
    "as_form",
    "beam_nll",
    "best_of_n_nll",
    "g_nll",
    "greedy_gap",
    "length_normalized_g_nll",
    "maximum_sequence_probability",
    "mean_token_entropy",
    "perplexity",
    "sequence_log_likelihood",
    "sequence_nll",
    "token_entropies",
    "token_log_probs",
    "without_eos",
]

LikelihoodForm = Literal["probability", "one_minus", "negative_log"]
"""How a largest probability `m` is given: `m`, `1 - m` or `-log m`."""


def token_log_probs(logits: Values, tokens: Ids) -> Any:
    """Log-probability of every token under the plain softmax of its logits. Host or graph.

    Give the model's own logits, at temperature 1 and before any filter: log-probabilities after
    these are of another law.

    Args:
      logits: unnormalised log-probabilities [..., T, V], of any precision; the graph computes in
        float32 at least.
      tokens: ids [..., T] in [0, V).

    Returns:
      Nats [..., T], at most 0.

    Raises:
      ValueError: shapes do not fit together, or (host) an id lies outside the vocabulary. In the
        graph an id beyond the vocabulary gives NaN.

    Example:
      >>> token_log_probs(np.zeros((2, 4)), [0, 3]).round(4).tolist()
      [-1.3863, -1.3863]
    """
    xp, (values,) = operands(logits, beside=(tokens,))
    ids = xp.asarray(tokens)
    if values.ndim < 1 or ids.shape != values.shape[:-1]:
        raise ValueError(
            f"tokens has shape {ids.shape}; logits of shape {values.shape} need {values.shape[:-1]}"
        )
    if xp is not np:
        return xp.minimum(-cross_entropy_per_token(values, ids), 0.0)
    vocab = values.shape[-1]
    if not ((ids >= 0) & (ids < vocab)).all():
        raise ValueError(f"tokens from {ids.min()} to {ids.max()}: must lie in [0, {vocab})")
    return np.take_along_axis(log_softmax(np, values), ids[..., None], -1)[..., 0]


def without_eos(mask: Mask, tokens: Ids, eos_id: int) -> Any:
    """The mask without the tokens that end their sequence. Host or graph.

    `include_eos=False` of other functions knows only the mask, and takes a sequence as ended
    where padding follows it. An end of sequence that is the very last token is found only here.

    Args:
      mask: True for tokens up to and including the end [..., T].
      tokens: ids [..., T].
      eos_id: the id that ends a sequence.

    Returns:
      bool [..., T].

    Raises:
      ValueError: the shapes differ.
    """
    xp, _ = operands(beside=(mask, tokens))
    counted, ids = xp.asarray(mask).astype(bool), xp.asarray(tokens)
    if counted.shape != ids.shape:
        raise ValueError(f"mask has shape {counted.shape}; tokens has {ids.shape}")
    return counted & (ids != eos_id)


def sequence_log_likelihood(
    token_logprobs: Values, mask: Mask | None = None, *, include_eos: bool = True
) -> Any:
    """Log-probability of sequences, the sum over their tokens. Host or graph.

    Args:
      token_logprobs: nats [..., T]; where the mask is 0 they may be anything.
      mask: 1 up to and including the end of sequence [..., T]; None where all tokens count.
      include_eos: False leaves out the last token of each row that ends before T, for
        comparison with code that drops the stop token. It makes short answers look surer. See
        `without_eos` for rows that may end at T itself.

    Returns:
      Nats [...], at most 0; 0 in the graph for a row without tokens.

    Raises:
      ValueError: shapes differ, or (host) a row has no tokens, or a log-probability that counts
        is NaN or positive.

    Example:
      >>> sequence_log_likelihood([[-1.0, -2.0, 9.0]], [[1, 1, 0]]).tolist()
      [-3.0]
    """
    xp, values, _ = counted_tokens(token_logprobs, mask, include_eos=include_eos)
    return plain(xp, xp.sum(values, axis=-1))


def sequence_nll(
    token_logprobs: Values, mask: Mask | None = None, *, include_eos: bool = True
) -> Any:
    """Negative log-likelihood of any sequence, such as one that was sampled. Host or graph.

    The negative of `sequence_log_likelihood`, with its arguments and errors. To rate a given
    answer this is the measure; it is G-NLL for the greedy answer only.
    """
    return -sequence_log_likelihood(token_logprobs, mask, include_eos=include_eos)


def g_nll(token_logprobs: Values, mask: Mask | None = None, *, include_eos: bool = True) -> Any:
    """G-NLL: the negative log-likelihood of the greedy sequence. Host or graph.

    `-sum_t max_v log p(v | x, y_<t)` along greedy decoding: no sampling, no length
    normalisation, temperature 1, the end of sequence included. It is at least the min-entropy
    `-max_y log p(y | x)` of the model's law of sequences, and equals it where greedy decoding
    finds the most probable sequence.

    Args:
      token_logprobs: of the greedy tokens [..., T], as `greedy_decode` gives them.
      mask: as `sequence_log_likelihood`.
      include_eos: as `sequence_log_likelihood`.

    Returns:
      Nats [...], at least 0.

    Raises:
      ValueError: as `sequence_log_likelihood`.

    Source: arXiv 2412.15176, G-NLL.

    Example:
      >>> g_nll([-0.5, -0.25, 0.0], [1, 1, 0])
      0.75
    """
    return sequence_nll(token_logprobs, mask, include_eos=include_eos)


def length_normalized_g_nll(
    token_logprobs: Values, mask: Mask | None = None, *, include_eos: bool = True
) -> Any:
    """G-NLL for each token of the greedy sequence, `G-NLL / T`. Host or graph.

    The paper finds that it serves less well than `g_nll`: it is no property of the law of
    sequences any more.

    Args:
      token_logprobs: as `g_nll`, as all arguments.
      mask: tokens that count.
      include_eos: whether the end of sequence does.

    Returns:
      Nats a token [...]; 0 in the graph for a row without tokens.

    Raises:
      ValueError: as `sequence_log_likelihood`.
    """
    xp, values, counted = counted_tokens(token_logprobs, mask, include_eos=include_eos)
    return plain(xp, -_mean(xp, values, counted))


def perplexity(
    token_logprobs: Values, mask: Mask | None = None, *, include_eos: bool = True
) -> Any:
    """The exponential of the mean negative log-likelihood of a sequence's tokens. Host or graph.

    Arguments and errors as `length_normalized_g_nll`, whose exponential it is, for any sequence;
    at least 1.
    """
    xp, values, counted = counted_tokens(token_logprobs, mask, include_eos=include_eos)
    return plain(xp, xp.exp(-_mean(xp, values, counted)))


def token_entropies(logits: Values) -> Any:
    """Entropy of the law of every next token. Host or graph.

    Args:
      logits: unnormalised log-probabilities [..., V]; minus infinity for what is impossible.

    Returns:
      Nats [...], in float32 at least.

    Example:
      >>> round(token_entropies([0.0, 0.0, -np.inf]), 4)
      0.6931
    """
    xp, (values,) = operands(logits)
    log_p = log_softmax(xp, values)
    possible = log_p > -xp.inf
    return plain(xp, -xp.sum(xp.exp(log_p) * xp.where(possible, log_p, 0.0), axis=-1))


def mean_token_entropy(
    entropies: Values, mask: Mask | None = None, *, include_eos: bool = True
) -> Any:
    """Mean entropy of the next token along a sequence. Host or graph.

    Args:
      entropies: of the laws that the tokens were taken from [..., T], see `token_entropies`.
      mask: as `sequence_log_likelihood`.
      include_eos: as `sequence_log_likelihood`.

    Returns:
      Nats a token [...]; 0 in the graph for a row without tokens.

    Raises:
      ValueError: shapes differ, or (host) a row has no tokens, or an entropy that counts is
        negative or NaN.
    """
    xp, values, counted = counted_tokens(entropies, mask, include_eos=include_eos, log_probs=False)
    if xp is np and not (values >= 0).all():
        raise ValueError(f"entropies={values.min()}: must be at least 0")
    return plain(xp, _mean(xp, values, counted))


def maximum_sequence_probability(seq_ll: Values, *, form: LikelihoodForm = "probability") -> Any:
    """MSP: the largest probability among candidate sequences. Host or graph.

    Exact over all sequences or where the most probable one is among the candidates, otherwise a
    lower bound of the law's maximum.

    Args:
      seq_ll: log-likelihoods of the candidates [..., N].
      form: `probability`; or a measure of uncertainty: `one_minus`, the aleatoric uncertainty
        under the zero-one score, or `negative_log`, the min-entropy. They order alike.

    Returns:
      [...].

    Raises:
      ValueError: N is 0, the form is unknown, or (host) a log-likelihood is NaN or positive.

    Example:
      >>> maximum_sequence_probability(np.log([0.25, 0.5]), form="one_minus")
      0.5
    """
    xp, values = sample_log_likelihoods(seq_ll)
    return as_form(xp, xp.max(values, axis=-1), form)


def best_of_n_nll(seq_ll: Values) -> Any:
    """Negative log-likelihood of the best of N sampled sequences, `-max_n l_n`. Host or graph.

    At least the min-entropy, and never larger for more samples. Arguments and errors as
    `maximum_sequence_probability`.
    """
    return maximum_sequence_probability(seq_ll, form="negative_log")


def beam_nll(token_logprobs: Values, mask: Mask | None = None, *, include_eos: bool = True) -> Any:
    """Negative log-likelihood of the best sequence that beam search found. Host or graph.

    Args:
      token_logprobs: nats [..., W, T] of W beams, as `beam_decode` gives them.
      mask: [..., W, T]; as `sequence_log_likelihood`.
      include_eos: as `sequence_log_likelihood`.

    Returns:
      Nats [...]; at least the min-entropy, and equal to it for a beam as wide as the tree of
      sequences.

    Raises:
      ValueError: as `sequence_log_likelihood`, or the axis of the beams is missing.
    """
    seq_ll = sequence_log_likelihood(token_logprobs, mask, include_eos=include_eos)
    return best_of_n_nll(seq_ll)


def greedy_gap(greedy_nll: float | Values, other_nll: float | Values) -> Any:
    """How much likelier the best sequence of a wider search is than the greedy one. Host or graph.

    `G-NLL - NLL` in nats: a lower bound of the error of G-NLL as the min-entropy.

    Args:
      greedy_nll: [...], see `g_nll`.
      other_nll: [...] of the same prompts, see `beam_nll`.

    Returns:
      Nats [...]; negative where the wider search found less.

    Raises:
      ValueError: the shapes differ.
    """
    xp, (greedy, other) = operands(greedy_nll, other_nll)
    if greedy.shape != other.shape:
        raise ValueError(f"other_nll has shape {other.shape}; greedy_nll has {greedy.shape}")
    return plain(xp, greedy - other)


def as_form(xp: Any, log_p: Any, form: str) -> Any:
    """A logarithm of a probability in the form that is asked for."""
    check_choice("form", form, ("probability", "one_minus", "negative_log"))
    if form == "negative_log":
        return plain(xp, -log_p)
    return plain(xp, xp.exp(log_p) if form == "probability" else -xp.expm1(log_p))


def _mean(xp: Any, values: Any, counted: Any) -> Any:
    count = xp.sum(counted, axis=-1, dtype=values.dtype)
    return xp.sum(values, axis=-1) / xp.maximum(count, 1.0)
