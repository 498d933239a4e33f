"""Measures of several sampled sequences: entropies of texts and of their meanings."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from jaxlab.methods.gnll.arrays import (
    Ids,
    Mask,
    Values,
    check_choice,
    check_finite_somewhere,
    cluster_labels,
    counted_tokens,
    logsumexp,
    sample_log_likelihoods,
)
from jaxlab.methods.gnll.sequences import LikelihoodForm, as_form
from jaxlab.ops.arrays import operands, plain

__all__ = [
    "SemanticForm",
    "discrete_semantic_entropy",
    "length_normalized_predictive_entropy",
    "length_normalized_semantic_entropy",
    "maximum_cluster_probability",
    "predictive_entropy",
    "sar",
    "semantic_entropy",
    "sentence_sar",
    "token_sar",
]

SemanticForm = Literal["normalized", "monte_carlo", "sdlg"]
"""The three estimates that go by the name of semantic entropy."""


def predictive_entropy(seq_ll: Values) -> Any:
    """PE: the mean negative log-likelihood of sampled sequences. Host or graph.

    Unbiased for the entropy of the law of sequences where they are drawn from it, with variance
    `Var(-log p) / N`.

    Args:
      seq_ll: log-likelihoods [..., N] of N sequences drawn at temperature 1.

    Returns:
      Nats [...].

    Raises:
      ValueError: N is 0, or (host) a log-likelihood is NaN or positive.

    Example:
      >>> predictive_entropy([-1.0, -2.0])
      1.5
    """
    xp, values = sample_log_likelihoods(seq_ll)
    return plain(xp, -xp.mean(values, axis=-1))


def length_normalized_predictive_entropy(seq_ll: Values, lengths: Ids) -> Any:
    """LN-PE: the mean negative log-likelihood for each token, `-(1/N) sum l_n / T_n`.

    Host or graph.

    Args:
      seq_ll: as `predictive_entropy`.
      lengths: tokens of each sequence [..., N], at least 1 (the graph takes 0 as 1).

    Returns:
      Nats a token [...].

    Raises:
      ValueError: as `predictive_entropy`, or shapes differ, or (host) a length is below 1.

    Source: Malinin and Gales 2021.
    """
    xp, values = sample_log_likelihoods(seq_ll, lengths=lengths)
    return plain(xp, -xp.mean(values, axis=-1))


def semantic_entropy(seq_ll: Values, cluster_ids: Ids, *, form: SemanticForm = "normalized") -> Any:
    """SE: the entropy of the meanings of sampled sequences. Host or graph.

    With `L_c = logsumexp_{n in c} l_n`, the mass of the samples in cluster `c`, and
    `p_c = softmax(L)_c` over the C clusters that occur:

    * `normalized`: `-sum_c p_c log p_c`, from 0 to `log C` (Farquhar et al. 2024);
    * `monte_carlo`: `-(1/C) sum_c L_c` (Kuhn et al. 2023);
    * `sdlg`: `-sum_c p_c L_c` (Aichberger et al. 2024); may be negative.

    A sequence that was drawn several times counts as often. The published code of Kuhn, of
    Farquhar and of SAR takes mean log-probabilities a token: `length_normalized_semantic_entropy`.

    Args:
      seq_ll: log-likelihoods [..., N].
      cluster_ids: integers of at least 0 [..., N], equal for equal meanings.
      form: see above.

    Returns:
      Nats [...]. Takes memory N^2 for each row.

    Raises:
      ValueError: shapes differ, N is 0, the form is unknown, ids are no integers, or (host) an id
        is negative, or a log-likelihood NaN or positive, or all of a row are minus infinity.

    Example:
      >>> round(semantic_entropy(np.log([0.25, 0.25, 0.5]), [7, 7, 0]), 4)
      0.6931
    """
    xp, values = sample_log_likelihoods(seq_ll, beside=(cluster_ids,))
    return _semantic_entropy(xp, values, cluster_ids, form)


def length_normalized_semantic_entropy(
    seq_ll: Values, lengths: Ids, cluster_ids: Ids, *, form: SemanticForm = "normalized"
) -> Any:
    """LN-SE: `semantic_entropy` of `l_n / T_n`. Host or graph.

    Args:
      seq_ll: as `semantic_entropy`.
      lengths: as `length_normalized_predictive_entropy`.
      cluster_ids: as `semantic_entropy`.
      form: as `semantic_entropy`.

    Returns:
      Nats [...].

    Raises:
      ValueError: as `semantic_entropy` and `length_normalized_predictive_entropy`.
    """
    xp, values = sample_log_likelihoods(seq_ll, lengths=lengths, beside=(cluster_ids,))
    return _semantic_entropy(xp, values, cluster_ids, form)


def discrete_semantic_entropy(cluster_ids: Ids) -> Any:
    """D-SE: the entropy of how often each meaning was sampled. Host or graph.

    `-sum_c p_c log p_c` with `p_c = n_c / N`; needs no probabilities.

    Args:
      cluster_ids: as `semantic_entropy`.

    Returns:
      Nats [...], from 0 to `log N`.

    Raises:
      ValueError: N is 0, ids are no integers, or (host) one is negative.

    Example:
      >>> round(discrete_semantic_entropy([3, 0, 3, 0]), 4)
      0.6931
    """
    xp, _ = operands(beside=(cluster_ids,))
    # Each of the n_c members gives its cluster 1 / n_c of its term.
    return plain(xp, -xp.mean(_log_frequencies(xp, cluster_labels(xp, cluster_ids)), axis=-1))


def maximum_cluster_probability(
    seq_ll: Values | None,
    cluster_ids: Ids,
    *,
    by: Literal["mass", "frequency"] = "mass",
    form: LikelihoodForm = "probability",
) -> Any:
    """MCP: the probability of the likeliest meaning. Host or graph.

    The counterpart of `maximum_sequence_probability` for meanings. It brings back the cost of
    sampling and clustering that G-NLL saves.

    Args:
      seq_ll: log-likelihoods [..., N]; not read by frequency, and may be None there.
      cluster_ids: as `semantic_entropy`.
      by: `mass`: a cluster's share of the likelihood of all samples; `frequency`: its share of
        their number.
      form: as `maximum_sequence_probability`.

    Returns:
      [...].

    Raises:
      ValueError: as `semantic_entropy`, or a word is not allowed, or there are no
        log-likelihoods where mass is asked for.

    Example:
      >>> maximum_cluster_probability(None, [3, 0, 3, 3], by="frequency")
      0.75
    """
    check_choice("by", by, ("mass", "frequency"))
    if by == "frequency":
        xp, _ = operands(beside=(cluster_ids,))
        log_p = _log_frequencies(xp, cluster_labels(xp, cluster_ids))
    elif seq_ll is None:
        raise ValueError("seq_ll=None: by='mass' needs log-likelihoods")
    else:
        xp, values = sample_log_likelihoods(seq_ll, beside=(cluster_ids,))
        _, log_p, _ = _clusters(xp, values, cluster_ids)
    return as_form(xp, xp.max(log_p, axis=-1), form)


def token_sar(token_logprobs: Values, mask: Mask | None, importance: Values) -> Any:
    """TokenSAR: negative log-likelihood with tokens weighed by their importance. Host or graph.

    `sum_t R_t (-log p_t) / sum_t R_t`, averaged over the sequences. `R_t` is how much the meaning
    changes without the token: one minus the similarity of the texts with and without it.

    Args:
      token_logprobs: nats [..., N, T].
      mask: tokens that count [..., N, T]; None for all.
      importance: `R` [..., N, T], at least 0. A sequence whose importances are all 0 weighs its
        tokens alike.

    Returns:
      Nats a token [...].

    Raises:
      ValueError: shapes differ, or (host) a row has no tokens, a log-probability is NaN or
        positive, or an importance is negative or NaN.

    Source: Duan et al. 2024, "Shifting attention to relevance".
    """
    xp, scores = _token_sar_scores(token_logprobs, mask, importance)
    return plain(xp, xp.mean(scores, axis=-1))


def sentence_sar(seq_ll: Values, similarity: Values, *, tau: float = 1e-3) -> Any:
    """SentSAR: negative log-likelihood of sequences that others support. Host or graph.

    `-log(p_n + (1 / tau) sum_{j != n} sim(n, j) p_j)`, averaged over the sequences; in the log
    domain, so long sequences do not underflow.

    Args:
      seq_ll: log-likelihoods [..., N].
      similarity: of every pair [..., N, N], at least 0; the diagonal is not read.
      tau: positive; the smaller, the more the others' support counts.

    Returns:
      Nats [...]; may be negative.

    Raises:
      ValueError: shapes do not fit, N is 0, tau is not positive, or (host) a log-likelihood is
        NaN or positive or a similarity negative or NaN.

    Source: as `token_sar`.
    """
    xp, values = sample_log_likelihoods(seq_ll, beside=(similarity,))
    return plain(xp, _supported(xp, values, similarity, tau))


def sar(
    token_logprobs: Values,
    mask: Mask | None,
    importance: Values,
    similarity: Values,
    *,
    tau: float = 1e-3,
) -> Any:
    """SAR: `sentence_sar` with `exp(-TokenSAR_n)` as the probability of a sequence. Host or graph.

    Args:
      token_logprobs: as `token_sar`.
      mask: as `token_sar`.
      importance: as `token_sar`.
      similarity: as `sentence_sar`.
      tau: as `sentence_sar`.

    Returns:
      Nats [...]; may be negative.

    Raises:
      ValueError: as `token_sar` and `sentence_sar`.
    """
    xp, scores = _token_sar_scores(token_logprobs, mask, importance, beside=similarity)
    return plain(xp, _supported(xp, -scores, similarity, tau))


def _semantic_entropy(xp: Any, values: Any, cluster_ids: Ids, form: str) -> Any:
    check_choice("form", form, ("normalized", "monte_carlo", "sdlg"))
    log_mass, log_p, first = _clusters(xp, values, cluster_ids)
    if form == "monte_carlo":
        count = xp.sum(first, axis=-1, dtype=values.dtype)
        return plain(xp, -xp.sum(xp.where(first, log_mass, 0.0), axis=-1) / count)
    log = log_p if form == "normalized" else log_mass
    # A cluster of mass 0 adds nothing, though its logarithm is infinite.
    log = xp.where(first & (log_p > -xp.inf), log, 0.0)
    return plain(xp, -xp.sum(xp.exp(log_p) * log, axis=-1))


def _clusters(xp: Any, values: Any, cluster_ids: Ids) -> tuple[Any, Any, Any]:
    """For every sample: log-mass and log-share of its cluster, and whether it is its first."""
    same = _same(cluster_labels(xp, cluster_ids, values.shape))
    if xp is np:
        check_finite_somewhere("seq_ll", values)
    log_mass = logsumexp(xp, xp.where(same, values[..., None, :], -xp.inf))
    log_p = xp.minimum(log_mass - logsumexp(xp, values, keepdims=True), 0.0)
    size = values.shape[-1]
    earlier = np.tri(size, k=-1, dtype=bool).reshape((1,) * (values.ndim - 1) + (size, size))
    return log_mass, log_p, ~xp.any(same & earlier, axis=-1)


def _same(ids: Any) -> Any:
    return ids[..., :, None] == ids[..., None, :]


def _log_frequencies(xp: Any, ids: Any) -> Any:
    """Logarithm of the share of samples in each one's cluster."""
    dtype = np.float64 if xp is np else xp.result_type(float)
    return xp.log(xp.mean(_same(ids), axis=-1, dtype=dtype))


def _token_sar_scores(
    token_logprobs: Values, mask: Mask | None, importance: Values, beside: Any = None
) -> tuple[Any, Any]:
    """The array module and the weighed negative log-likelihood of every sequence [..., N]."""
    xp, (values, relevance) = operands(token_logprobs, importance, beside=(mask, beside))
    _, values, counted = counted_tokens(values, mask)
    if values.ndim < 2 or values.shape[-2] < 1:
        raise ValueError(
            f"token_logprobs of shape {values.shape}: must be [..., N, T] with N at least 1"
        )
    if relevance.shape != values.shape:
        raise ValueError(
            f"importance has shape {relevance.shape}; token_logprobs has {values.shape}"
        )
    relevance = xp.where(counted, relevance, 0.0)
    if xp is np and not (relevance >= 0).all():
        raise ValueError(f"importance={relevance.min()}: must be at least 0")
    total = xp.sum(relevance, axis=-1, keepdims=True)
    weight = xp.where(total > 0, relevance, counted.astype(relevance.dtype))
    total = xp.maximum(xp.sum(weight, axis=-1), xp.finfo(weight.dtype).tiny)
    # Infinity times no importance counts as nothing.
    weighed = weight * xp.where(weight > 0, values, 0.0)
    return xp, -xp.sum(weighed, axis=-1) / total


def _supported(xp: Any, values: Any, similarity: Values, tau: float) -> Any:
    """Mean over the sequences of `-log` of their own and the others' weighed probability."""
    if not tau > 0:
        raise ValueError(f"tau={tau}: must be positive")
    pairs = xp.asarray(similarity, values.dtype)
    size = values.shape[-1]
    if pairs.shape != (*values.shape, size):
        raise ValueError(
            f"similarity has shape {pairs.shape}; {size} sequences need {(*values.shape, size)}"
        )
    own = np.eye(size, dtype=bool).reshape((1,) * (values.ndim - 1) + (size, size))
    weight = xp.where(own, 1.0, pairs / tau)
    if xp is np and not (weight >= 0).all():
        raise ValueError(f"similarity={pairs.min()}: must be at least 0")
    log_weight = xp.where(weight > 0, xp.log(xp.where(weight > 0, weight, 1.0)), -xp.inf)
    return -xp.mean(logsumexp(xp, values[..., None, :] + log_weight), axis=-1)
