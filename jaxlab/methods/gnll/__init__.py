"""G-NLL: the uncertainty of a language model's answer from its greedy sequence alone.

Under the zero-one score, the aleatoric uncertainty of a law of sequences is one minus the
probability of the most probable sequence. Its monotone form is the min-entropy,
`-max_y log p(y | x)`, and the negative log-likelihood of the greedy sequence (G-NLL) estimates it
with a single generation, where entropies of texts or meanings need many samples.

Source: Aichberger, Schweighofer and Hochreiter, "Rethinking Uncertainty Estimation in LLMs: A
Principled Single-Sequence Measure", ICLR 2026, arXiv 2412.15176. Baselines: Malinin and Gales
2021 (PE, LN-PE), Kuhn et al. 2023 and Farquhar et al. 2024 (SE, D-SE), Aichberger et al. 2024
(SDLG), Duan et al. 2024 (SAR).

Conventions:

* Logarithms are natural. Log-probabilities are the model's own: of the plain softmax of its logits,
  with the end of sequence, whatever temperature drew the tokens.
* T is the length of a sequence, N the number of samples of one prompt; any axes may come before.
* Functions that say "host or graph" compute with JAX where an argument is a `jax.Array` (traced or
  not), in its precision but at least float32; anything else they compute in float64 with NumPy.
  Values are checked on the host only; shapes always.

The smallest example: an answer of two tokens and an end, certain but for its first token.

>>> answer = [-0.7, -0.1, -0.01]
>>> round(g_nll(answer), 2)
0.81
"""

from __future__ import annotations

from jaxlab.methods.gnll.clustering import cluster_by_entailment, cluster_by_equality
from jaxlab.methods.gnll.complexity import (
    entropy_sample_bound,
    maximum_failure_probability,
    maximum_sample_bound,
)
from jaxlab.methods.gnll.decoding import (
    Decoded,
    Step,
    beam_decode,
    greedy_decode,
    sample_decode,
)
from jaxlab.methods.gnll.markov import (
    BestSequence,
    MarkovStart,
    SequenceDistribution,
    best_sequence,
    exact_sequence_distribution,
    markov_start,
    min_entropy,
    renyi_entropy,
    sequence_entropy,
    surprisal_variance,
)
from jaxlab.methods.gnll.samples import (
    discrete_semantic_entropy,
    length_normalized_predictive_entropy,
    length_normalized_semantic_entropy,
    maximum_cluster_probability,
    predictive_entropy,
    sar,
    semantic_entropy,
    sentence_sar,
    token_sar,
)
from jaxlab.methods.gnll.scoring import (
    Uncertainty,
    log_score_uncertainty,
    zero_one_uncertainty,
)
from jaxlab.methods.gnll.sequences import (
    beam_nll,
    best_of_n_nll,
    g_nll,
    greedy_gap,
    length_normalized_g_nll,
    maximum_sequence_probability,
    mean_token_entropy,
    perplexity,
    sequence_log_likelihood,
    sequence_nll,
    token_entropies,
    token_log_probs,
    without_eos,
)

__all__ = [
    "BestSequence",
    "Decoded",
    "MarkovStart",
    "SequenceDistribution",
    "Step",
    "Uncertainty",
    "beam_decode",
    "beam_nll",
    "best_of_n_nll",
    "best_sequence",
    "cluster_by_entailment",
    "cluster_by_equality",
    "discrete_semantic_entropy",
    "entropy_sample_bound",
    "exact_sequence_distribution",
    "g_nll",
    "greedy_decode",
    "greedy_gap",
    "length_normalized_g_nll",
    "length_normalized_predictive_entropy",
    "length_normalized_semantic_entropy",
    "log_score_uncertainty",
    "markov_start",
    "maximum_cluster_probability",
    "maximum_failure_probability",
    "maximum_sample_bound",
    "maximum_sequence_probability",
    "mean_token_entropy",
    "min_entropy",
    "perplexity",
    "predictive_entropy",
    "renyi_entropy",
    "sample_decode",
    "sar",
    "semantic_entropy",
    "sentence_sar",
    "sequence_entropy",
    "sequence_log_likelihood",
    "sequence_nll",
    "surprisal_variance",
    "token_entropies",
    "token_log_probs",
    "token_sar",
    "without_eos",
    "zero_one_uncertainty",
]
