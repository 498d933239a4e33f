"""What a training recipe keeps of its data, and where good data would have been kept best.

Host functions in float64, in O(T) for `T` steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxlab.methods.trec.arrays import Curve, check_lengths
from jaxlab.methods.trec.curves import valley
from jaxlab.methods.trec.ema import (
    momentum_coefficients,
    recommended_timescale,
    update_coefficients,
)
from jaxlab.methods.trec.placement import place_block
from jaxlab.methods.trec.prediction import SMALL_LM_LAW, PowerLaw, effective_tpp, predict_trec
from jaxlab.methods.trec.recipes import Recipe, RecipeSteps, recipe_steps

__all__ = ["RecipeReport", "WindowReport", "analyze_recipe", "evaluate_window"]


@dataclass(frozen=True)
class WindowReport:
    """A window of steps of a recipe, and the data seen in it.

    Means are over tokens: steps count as much as their batches hold.

    Attributes:
      start: first step, from 0.
      stop: first step after it.
      fractions: start and stop as shares of the steps.
      token_fractions: start and stop as shares of the tokens.
      mass: share of the sum of all coefficients that the window holds.
      relative: smallest, mean and largest coefficient in the window, relative to the run's largest.
      mean_trec: mean of the predicted curve in the window.
      rest_trec: mean outside of it; None where the window is the whole run.
      best: the window of as many tokens with the lowest mean, `(start, stop)`.
      best_trec: that mean.
      gain: how much of what placement can gain over uniform mixing the window gains,
        `(run's mean - mean_trec) / (run's mean - best_trec)`: 1 for the best window, 0 for one no
        better than mixing, negative for a worse one. Unlike means, it does not depend on the scale
        and level of the curve, which are not predicted.
    """

    start: int
    stop: int
    fractions: tuple[float, float]
    token_fractions: tuple[float, float]
    mass: float
    relative: tuple[float, float, float]
    mean_trec: float
    rest_trec: float | None
    best: tuple[int, int]
    best_trec: float
    gain: float


@dataclass(frozen=True, eq=False)
class RecipeReport:
    """What `analyze_recipe` finds; arrays hold one value for each of the `T` steps.

    Attributes:
      recipe: what was analysed.
      phase: the phase that was analysed alone, from 0; None for the whole run.
      lrs: learning rates.
      alphas: smoothing factors.
      batch_tokens: tokens of each batch.
      tokens: tokens trained on up to the end of the step.
      c: coefficients of the updates (with momentum, of the gradients); see `update_coefficients`.
      c0: weight of the initial parameters: those that the phase started from.
      density: coefficient per token, `c / batch_tokens`, as a multiple of the run's mean; equal to
        `c` up to scale where all batches have one size.
      trec: predicted curve.
      num_tokens: tokens of the run.
      tau: AdamW's time scale, `1 / (T max(alpha))`: with one weight decay,
        `1 / (peak_lr * weight_decay * T)`. Infinite without weight decay.
      tpp: tokens per parameter.
      effective_tpp: as the experts see them; equal to `tpp` for a dense model.
      recommended_tau: `recommended_timescale(effective_tpp)`.
      m: training-fraction exponent of the prediction.
      law: the law that gave `m`; None where `m` was given.
      p: exponent of the coefficients.
      ema_peak: training fraction (by steps) of the largest coefficient.
      valley: training fraction of the lowest predicted value.
      ema_peak_tokens: share of the tokens trained on by then.
      valley_tokens: share of the tokens trained on by then.
      best: where a given share of the data would be kept best.
      high_quality: the recipe's own windows of high-quality data.
    """

    recipe: Recipe
    phase: int | None
    lrs: np.ndarray
    alphas: np.ndarray
    batch_tokens: np.ndarray
    tokens: np.ndarray
    c: np.ndarray
    c0: float
    density: np.ndarray
    trec: np.ndarray
    num_tokens: float
    tau: float
    tpp: float
    effective_tpp: float
    recommended_tau: float
    m: float
    law: PowerLaw | None
    p: float
    ema_peak: float
    valley: float
    ema_peak_tokens: float
    valley_tokens: float
    best: WindowReport
    high_quality: tuple[WindowReport, ...]

    @property
    def num_steps(self) -> int:
        """Steps `T` of what was analysed."""
        return len(self.lrs)


def analyze_recipe(
    recipe: Recipe,
    *,
    fraction: float = 0.1,
    fraction_of: Literal["tokens", "steps"] = "tokens",
    m: float | PowerLaw = SMALL_LM_LAW,
    p: float = 0.5,
    phase: int | None = None,
    averaging: Curve | None = None,
) -> RecipeReport:
    """Predicts what a recipe's final weights keep of its data. Host.

    The training fraction `t / T` counts steps, as the coefficients do; where batches change their
    size, see `tokens` and `density` for the position and the weight of a token. A change of the
    batch size leaves the prediction itself as it is, which no measurement supports or contradicts.

    Args:
      recipe: how the model is trained.
      fraction: share of the data that is to be placed best, in (0, 1].
      fraction_of: whether it is a share of the tokens or of the steps.
      m: training-fraction exponent, at least 0, or the law that gives it for the effective tokens
        per parameter and `tau`. The default law is of a tiny model under linear decay to zero.
      p: exponent of the coefficients.
      phase: analyse this phase alone, from 0; None: the whole run. For continued pre-training: the
        weights it starts from have the weight `c0`, and `T`, `tau`, tokens and `t / T` are the
        phase's own. (That `t / T` restarts is an assumption.)
      averaging: weights of the steps' weights in the average that is evaluated; see
        `ema_coefficients`. None: the final weights.

    Returns:
      The report.

    Raises:
      ValueError: the recipe contradicts itself (see `recipe_steps`), or an argument is out of
        range.

    Example:
      >>> from jaxlab.methods.trec.recipes import Phase
      >>> phase = Phase("step", batch_tokens=1e6, weight_decay=0.5, steps=1000, peak_lr=1e-2)
      >>> report = analyze_recipe(Recipe("plan", (phase,), parameters=1e8), m=2.0)
      >>> round(report.tau, 3), report.tpp, report.best.fractions
      (0.2, 10.0, (0.6, 0.7))
    """
    if fraction_of not in ("tokens", "steps"):
        raise ValueError(f"fraction_of={fraction_of!r}: must be 'tokens' or 'steps'")
    steps = _select(recipe, recipe_steps(recipe), phase)
    c, c0 = update_coefficients(steps.lrs, steps.alphas, averaging=averaging, initial=True)
    if recipe.b1 is not None:
        c = momentum_coefficients(c, b1=recipe.b1)
    num_steps = len(c)
    tokens = np.cumsum(steps.batch_tokens)
    num_tokens = float(tokens[-1])
    largest = float(steps.alphas.max())
    tau = 1 / (largest * num_steps) if largest else math.inf
    tpp = num_tokens / recipe.parameters
    effective = effective_tpp(tpp, recipe.num_experts, recipe.experts_per_token)
    law = m if isinstance(m, PowerLaw) else None
    exponent = float(m(effective, tau) if isinstance(m, PowerLaw) else m)
    if not 0 <= exponent < math.inf:
        raise ValueError(f"m={exponent}: must be at least 0 and finite")
    trec = predict_trec(c, m=exponent, p=p)
    density = c / steps.batch_tokens
    by_steps = fraction_of == "steps"
    window = place_block(trec, fraction, sizes=None if by_steps else _sizes(steps.batch_tokens))
    peak, lowest = float(valley(-c)), float(valley(trec))
    return RecipeReport(
        recipe=recipe,
        phase=phase,
        lrs=steps.lrs,
        alphas=steps.alphas,
        batch_tokens=steps.batch_tokens,
        tokens=tokens,
        c=c,
        c0=c0,
        density=density * (num_tokens / c.sum()),
        trec=trec,
        num_tokens=num_tokens,
        tau=tau,
        tpp=tpp,
        effective_tpp=effective,
        recommended_tau=recommended_timescale(effective),
        m=exponent,
        law=law,
        p=p,
        ema_peak=peak,
        valley=lowest,
        ema_peak_tokens=float(tokens[round(peak * num_steps) - 1] / num_tokens),
        valley_tokens=float(tokens[round(lowest * num_steps) - 1] / num_tokens),
        best=evaluate_window(window, c=c, trec=trec, batch_tokens=steps.batch_tokens),
        high_quality=tuple(
            evaluate_window(chosen, c=c, trec=trec, batch_tokens=steps.batch_tokens)
            for chosen in steps.high_quality
        ),
    )


def _select(recipe: Recipe, steps: RecipeSteps, phase: int | None) -> RecipeSteps:
    """The steps of one phase, or all of them."""
    if phase is None:
        return steps
    if not 0 <= phase < len(recipe.phases):
        raise ValueError(f"phase={phase}: must lie in [0, {len(recipe.phases)})")
    start, stop = steps.starts[phase : phase + 2]
    inside = (
        (max(first, start) - start, min(last, stop) - start) for first, last in steps.high_quality
    )
    return RecipeSteps(
        steps.lrs[start:stop],
        steps.alphas[start:stop],
        steps.batch_tokens[start:stop],
        (0, stop - start),
        tuple((first, last) for first, last in inside if first < last),
    )


def evaluate_window(
    window: tuple[int, int], *, c: Curve, trec: Curve, batch_tokens: Curve
) -> WindowReport:
    """What a recipe keeps of the data in a window, and how that compares. Host.

    Args:
      window: first step, from 0, and first step after it.
      c: coefficients [T].
      trec: predicted or measured curve [T].
      batch_tokens: tokens of each step's batch [T], positive.

    Returns:
      The window's report.

    Raises:
      ValueError: the window is empty or lies outside of the run, or lengths differ.
    """
    start, stop = window
    c, trec, batches = (np.asarray(x, np.float64) for x in (c, trec, batch_tokens))
    check_lengths("c", c, "trec", trec)
    check_lengths("c", c, "batch_tokens", batches)
    if not 0 <= start < stop <= len(c):
        raise ValueError(f"window={window}: must satisfy 0 <= start < stop <= {len(c)}")
    chosen = slice(start, stop)
    ends = np.concatenate([[0.0], np.cumsum(batches)])
    size, total = ends[stop] - ends[start], ends[-1]

    def mean_of(steps: slice) -> float:
        return float(np.average(trec[steps], weights=batches[steps]))

    run, mean = mean_of(slice(None)), mean_of(chosen)
    best = place_block(trec, min(1.0, size / total), sizes=_sizes(batches))
    lowest = mean_of(slice(*best))
    if lowest >= mean:  # windows are equally large only up to a batch
        best, lowest = window, mean
    relative = c[chosen] / c.max()
    whole = stop - start == len(c)
    return WindowReport(
        start=start,
        stop=stop,
        fractions=(start / len(c), stop / len(c)),
        token_fractions=(float(ends[start] / total), float(ends[stop] / total)),
        mass=float(c[chosen].sum() / c.sum()),
        relative=(float(relative.min()), float(relative.mean()), float(relative.max())),
        mean_trec=mean,
        rest_trec=None if whole else float((run * total - mean * size) / (total - size)),
        best=best,
        best_trec=lowest,
        gain=(run - mean) / (run - lowest) if run > lowest else 1.0,
    )


def _sizes(batches: np.ndarray) -> np.ndarray | None:
    """The sizes of batches, if they differ."""
    return batches if np.ptp(batches) else None
