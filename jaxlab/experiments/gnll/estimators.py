"""All uncertainty measures of the same answers, by name."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxlab.methods import gnll

__all__ = ["BASELINES", "ESTIMATORS", "Estimator", "Texts", "estimate", "generations"]


class Estimator(NamedTuple):
    """A measure of uncertainty.

    Attributes:
      label: short name, as the papers write it.
      samples: whether it needs samples; otherwise it needs the greedy answer alone.
    """

    label: str
    samples: bool


ESTIMATORS: dict[str, Estimator] = {
    "g_nll": Estimator("G-NLL", False),
    "ln_g_nll": Estimator("LN-G-NLL", False),
    "beam_nll": Estimator("beam NLL", False),
    "sampled_nll": Estimator("sampled NLL", True),
    "best_of_n_nll": Estimator("best-of-N NLL", True),
    "pe": Estimator("PE", True),
    "ln_pe": Estimator("LN-PE", True),
    "se": Estimator("SE", True),
    "ln_se": Estimator("LN-SE", True),
    "d_se": Estimator("D-SE", True),
    "mcp": Estimator("MCP", True),
    "sent_sar": Estimator("SentSAR", True),
}

BASELINES = (
    "pe",
    "ln_pe",
    "se",
    "ln_se",
    "d_se",
)
"""Those that the paper compares G-NLL with."""

_PAIRS_AT_ONCE = 4_000_000  # of samples: the measures of meanings compare them all


def generations(name: str, num_samples: int, num_beams: int = 1) -> int:
    """How many texts a measure needs of each question.

    Args:
      name: out of `ESTIMATORS`.
      num_samples: samples of each question.
      num_beams: width of the beam search.
    """
    if name == "beam_nll":
        return num_beams
    return num_samples if ESTIMATORS[name].samples and name != "sampled_nll" else 1


class Texts(NamedTuple):
    """Generated texts.

    Attributes:
      log_probs: of each token, in nats, `[..., T]`.
      lengths: tokens of each text, what ended it included, `[...]`.
    """

    log_probs: np.ndarray
    lengths: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        """True for tokens of the text."""
        return np.arange(self.log_probs.shape[-1]) < self.lengths[..., None]

    @property
    def log_likelihood(self) -> np.ndarray:
        """Of each text, in nats, float64 `[...]`."""
        return gnll.sequence_log_likelihood(self.log_probs.astype(np.float64), self.mask)


def estimate(
    greedy: Texts, samples: Texts, clusters: np.ndarray, beam: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Every measure for every question.

    Args:
      greedy: one text a question, `[..., T]`.
      samples: N texts a question, drawn at temperature 1, `[..., N, T]`.
      clusters: numbers of the samples' meanings, `[..., N]`.
      beam: negative log-likelihood of a beam search's best text, `[...]`; None for no such text.

    Returns:
      By the names of `ESTIMATORS`, `[...]`; larger is less certain. `sampled_nll` is that of the
      first sample; SentSAR takes texts of one meaning as similar (1) and all others as not (0).
    """
    lead, number = clusters.shape[:-1], clusters.shape[-1]
    flat = [value.reshape(-1, *value.shape[len(lead) :]) for value in (*greedy, *samples, clusters)]
    block = max(1, _PAIRS_AT_ONCE // number**2)
    parts = []
    for first in range(0, len(flat[0]), block):
        *texts, meanings = (value[first : first + block] for value in flat)
        parts.append(_block(Texts(*texts[:2]), Texts(*texts[2:]), meanings))
    found = {
        name: np.concatenate([part[name] for part in parts]).reshape(lead) for name in parts[0]
    }
    if beam is not None:
        found["beam_nll"] = beam
    return {name: found[name] for name in ESTIMATORS if name in found}


def _block(greedy: Texts, samples: Texts, clusters: np.ndarray) -> dict[str, np.ndarray]:
    """Measures of some questions `[question]`."""
    log_probs, mask = greedy.log_probs.astype(np.float64), greedy.mask
    drawn, lengths = samples.log_likelihood, samples.lengths
    same = (clusters[:, :, None] == clusters[:, None]).astype(np.float64)
    return {
        "g_nll": gnll.g_nll(log_probs, mask),
        "ln_g_nll": gnll.length_normalized_g_nll(log_probs, mask),
        "sampled_nll": -drawn[:, 0],
        "best_of_n_nll": gnll.best_of_n_nll(drawn),
        "pe": gnll.predictive_entropy(drawn),
        "ln_pe": gnll.length_normalized_predictive_entropy(drawn, lengths),
        "se": gnll.semantic_entropy(drawn, clusters),
        "ln_se": gnll.length_normalized_semantic_entropy(drawn, lengths, clusters),
        "d_se": gnll.discrete_semantic_entropy(clusters),
        "mcp": gnll.maximum_cluster_probability(drawn, clusters, form="negative_log"),
        "sent_sar": gnll.sentence_sar(drawn, same),
    }
