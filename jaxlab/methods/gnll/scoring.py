"""Uncertainties that proper scoring rules give, and their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxlab.methods.gnll.arrays import Values, check_choice
from jaxlab.ops.arrays import operands, plain

__all__ = ["Convention", "Uncertainty", "log_score_uncertainty", "zero_one_uncertainty"]

Convention = Literal["model_generates", "posterior_generates"]
"""Whose outcomes are scored: the given model's, or the plausible models'."""


class Uncertainty(NamedTuple):
    """Parts of an expected score.

    Attributes:
      total: their sum.
      aleatoric: the score that remains where the law of the outcomes is known.
      epistemic: what is added because it is not; at least 0 under a proper score, but for
        rounding.
    """

    total: Any
    aleatoric: Any
    epistemic: Any


def log_score_uncertainty(
    p: Values,
    posterior_p: Values,
    weights: Values | None = None,
    *,
    convention: Convention = "model_generates",
) -> Uncertainty:
    """Uncertainty under the log score, `S(p, y) = -log p(y)`. Host or graph.

    With the given model `p_w` and plausible models `p_v` of the posterior:

    * `model_generates`: the outcomes are the given model's, the plausible models predict them:
      `TU = E_v CE(p_w, p_v)`, `AU = H(p_w)`, `EU = E_v KL(p_w || p_v)`;
    * `posterior_generates`: the roles are swapped: `TU = E_v CE(p_v, p_w)`, `AU = E_v H(p_v)`,
      `EU = E_v KL(p_v || p_w)`.

    Args:
      p: the given model's probabilities [..., K].
      posterior_p: those of plausible models [..., M, K].
      weights: of the plausible models [M] or [..., M], at least 0, scaled to sum 1; equal ones by
        default.
      convention: see above; the paper's is the first.

    Returns:
      Nats, each [...]. Where a prediction rules out what happens, total and epistemic are
      infinite.

    Raises:
      ValueError: shapes do not fit together, the convention is unknown, or (host) probabilities
        are negative or do not sum to 1, or weights are negative or all 0.

    Source: arXiv 2412.15176, section on proper scoring rules.

    Example:
      >>> parts = log_score_uncertainty([0.5, 0.5], [[0.5, 0.5], [0.25, 0.75]])
      >>> [round(part, 4) for part in parts]
      [0.7651, 0.6931, 0.0719]
    """
    return _uncertainty(_entropy, _divergence, p, posterior_p, weights, convention)


def zero_one_uncertainty(
    p: Values,
    posterior_p: Values,
    weights: Values | None = None,
    *,
    convention: Convention = "model_generates",
) -> Uncertainty:
    """Uncertainty under the zero-one score. Host or graph.

    `S(p, y) = 1 - 1[y in M(p)] / #M(p)` with `M(p)`, the outcomes of largest probability: of
    several that are equally probable, one is guessed at random. With `y_v` in `M(p_v)`:

    * `model_generates`: `TU = 1 - E_v p_w(y_v)`, `AU = 1 - max_y p_w(y)`;
    * `posterior_generates`: `TU = 1 - E_v p_v(y_w)`, `AU = 1 - E_v max_y p_v(y)`.

    The score is proper but not strictly: the epistemic part is 0 wherever all models have the
    same outcome of largest probability.

    Args:
      p: as `log_score_uncertainty`, as all arguments.
      posterior_p: plausible models.
      weights: of the plausible models.
      convention: who generates the outcomes.

    Returns:
      Parts in [0, 1], each [...].

    Raises:
      ValueError: as `log_score_uncertainty`.

    Source: arXiv 2412.15176; the rule with ties is example 4 of Gneiting and Raftery 2007.

    Example:
      >>> parts = zero_one_uncertainty([0.5, 0.25, 0.25], [[0.5, 0.25, 0.25], [0.2, 0.4, 0.4]])
      >>> [round(part, 4) for part in parts]
      [0.625, 0.5, 0.125]
    """
    return _uncertainty(_error, _excess_error, p, posterior_p, weights, convention)


def _uncertainty(
    own: Callable[[Any, Any], Any],
    excess: Callable[[Any, Any, Any], Any],
    p: Values,
    posterior_p: Values,
    weights: Values | None,
    convention: str,
) -> Uncertainty:
    """Parts of a score, given a law's score of itself, and what another prediction adds."""
    check_choice("convention", convention, ("model_generates", "posterior_generates"))
    xp, (law, laws, *rest) = operands(p, posterior_p, *(() if weights is None else (weights,)))
    if law.ndim < 1 or laws.ndim != law.ndim + 1 or (*laws.shape[:-2], laws.shape[-1]) != law.shape:
        raise ValueError(
            f"posterior_p has shape {laws.shape}; p of shape {law.shape} needs "
            f"{(*law.shape[:-1], 'M', *law.shape[-1:])}"
        )
    share = _shares(xp, rest[0] if rest else xp.ones_like(laws[..., 0]), laws.shape[:-1])
    if xp is np:
        _check_laws("p", law)
        _check_laws("posterior_p", laws)
    given = xp.broadcast_to(law[..., None, :], laws.shape)
    if convention == "model_generates":
        aleatoric = own(xp, law)
        added = excess(xp, given, laws)
    else:
        aleatoric = xp.sum(share * own(xp, laws), axis=-1)
        added = excess(xp, laws, given)
    # A model without weight does not count, even where it adds infinity.
    epistemic = xp.sum(share * xp.where(share > 0, added, 0.0), axis=-1)
    return Uncertainty(*(plain(xp, x) for x in (aleatoric + epistemic, aleatoric, epistemic)))


def _shares(xp: Any, weights: Any, shape: tuple[int, ...]) -> Any:
    if weights.shape not in (shape, shape[-1:]):
        raise ValueError(f"weights has shape {weights.shape}; posterior_p needs {shape}")
    if xp is np and not ((weights >= 0).all() and (weights.sum(-1) > 0).all()):
        raise ValueError(f"weights={weights}: must be at least 0, not all of them 0")
    return xp.broadcast_to(weights / xp.sum(weights, axis=-1, keepdims=True), shape)


def _check_laws(name: str, p: np.ndarray) -> None:
    good = (p >= 0).all(-1) & (np.abs(p.sum(-1) - 1) <= 1e-6)
    if not good.all():
        index = tuple(np.argwhere(~good)[0].tolist())
        raise ValueError(f"{name}={p[index]} at row {index}: must be at least 0 with sum 1")


def _log(xp: Any, p: Any) -> Any:
    return xp.where(p > 0, xp.log(xp.where(p > 0, p, 1.0)), -xp.inf)


def _entropy(xp: Any, p: Any) -> Any:
    return -xp.sum(p * xp.where(p > 0, _log(xp, p), 0.0), axis=-1)


def _divergence(xp: Any, truth: Any, prediction: Any) -> Any:
    possible = truth > 0
    log_truth = xp.where(possible, _log(xp, truth), 0.0)
    log_prediction = xp.where(possible, _log(xp, prediction), 0.0)
    return xp.sum(truth * (log_truth - log_prediction), axis=-1)


def _error(xp: Any, p: Any) -> Any:
    return 1 - xp.max(p, axis=-1)


def _excess_error(xp: Any, truth: Any, prediction: Any) -> Any:
    best = prediction == xp.max(prediction, axis=-1, keepdims=True)
    caught = xp.sum(xp.where(best, truth, 0.0), axis=-1) / xp.sum(best, axis=-1, dtype=truth.dtype)
    return xp.max(truth, axis=-1) - caught
