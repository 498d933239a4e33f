"""What the prediction says about training recipes: figures, numbers and sentences. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxlab.experiments.trec.recipe_files import load_recipe, shipped_recipes
from jaxlab.methods import trec
from jaxlab.methods.trec import Recipe, RecipeReport, WindowReport
from jaxlab.reporting.figures import Figure, Panel, Series
from jaxlab.reporting.report import Result

__all__ = ["plan_result", "recipes_result"]

_STEP_LABEL = "training fraction t/T"
_NUM_EXPONENTS = 9
_UNCERTAINTY = 3.0  # the factor by which fitted exponents differed from the law's
_LARGEST_FITTED = 12.0  # the end of the range in which exponents are fitted
# What `SMALL_LM_LAW` was fitted to.
_RULE_TPP = (1.0, 3000.0)  # beyond it the recommended time scale is not trusted
_LAW_TPP, _LAW_TAU = (3.75, 15.0), (0.1, 0.8)
_DEFAULT_SHARE = 0.1
_CLOSE = 1.25  # a time scale within this factor of the recommended one is close to it
_POINTS = 600
_NARROW = 0.004  # of the width of a panel
_BRACKET = 1.07  # where the best window is drawn, above curves that reach 1


def plan_result(
    recipe: Recipe,
    *,
    fraction: float = 0.1,
    fraction_of: Literal["tokens", "steps"] = "steps",
    m: float | None = None,
    power: float = 0.5,
    phase: int | None = None,
) -> Result:
    """Where a recipe keeps its data best, and how sure that is.

    Args:
      recipe: how the model is to be trained.
      fraction: share of the run that has high-quality data, in (0, 1].
      fraction_of: whether it is a share of the tokens or of the steps.
      m: training-fraction exponent; None: from `SMALL_LM_LAW`.
      power: exponent of the coefficients.
      phase: analyse this phase alone, from 0; None: the whole run.

    Returns:
      Metrics (`best window start` and `best window stop` are shares of the steps), notes, and the
      figures `plan` and `sensitivity`. No claims: nothing is measured.

    Raises:
      ValueError: see `analyze_recipe`.
    """
    report = trec.analyze_recipe(
        recipe,
        fraction=fraction,
        fraction_of=fraction_of,
        m=trec.SMALL_LM_LAW if m is None else m,
        p=power,
        phase=phase,
    )
    exponents = _exponents(report.m)
    sizes = None if fraction_of == "steps" else report.batch_tokens
    curves = [trec.predict_trec(report.c, m=value, p=power) for value in exponents]
    windows = np.asarray([trec.place_block(curve, fraction, sizes=sizes) for curve in curves])
    windows = windows / report.num_steps
    valleys = np.asarray([trec.valley(curve) for curve in curves])
    best = report.best
    metrics = {
        **_metrics(report),
        "best window start": best.fractions[0],
        "best window stop": best.fractions[1],
        "best window start, share of tokens": best.token_fractions[0],
        "best window stop, share of tokens": best.token_fractions[1],
        "best window, share of the coefficients": best.mass,
    }
    for number, window in enumerate(report.high_quality, start=1):
        metrics |= _window_metrics(f"high-quality data {number}", window)
    moves = (
        f"With m from {exponents[0]:.3g} to {exponents[-1]:.3g}, the best window of "
        f"{fraction:.3g} of the {fraction_of} starts between {windows[:, 0].min():.3f} and "
        f"{windows[:, 0].max():.3f} of training; with m = {report.m:.3g} it is "
        f"{_span(best.fractions)}."
    )
    notes = [
        _tau_note(report),
        _exponent_note(report),
        moves,
        *_high_quality_notes(report),
        *_batch_notes(report),
        "Only the shape of the curve is predicted, from the schedule alone. A low value tells that "
        "the final weights remember the data, not that they generalise; what is placed late is "
        "placed at the expense of other data.",
        *_origin_notes(recipe),
    ]
    return Result(
        method="trec",
        variant="plan",
        metrics=metrics,
        figures=(
            _plan_figure(report, fraction, fraction_of),
            _sensitivity_figure(exponents, windows, valleys, report.m),
        ),
        notes=tuple(notes),
    )


def recipes_result(
    recipes: Sequence[Recipe] | None = None, *, m: float | None = None, power: float = 0.5
) -> Result:
    """Where recipes put their best data, and where the prediction would have put it.

    Args:
      recipes: at least one; None: all shipped ones.
      m: training-fraction exponent of all; None: each from `SMALL_LM_LAW`.
      power: exponent of the coefficients.

    Returns:
      Metrics and notes of each recipe, and the figure `recipes`. The best window of a recipe holds
      as many tokens as its own high-quality data (a tenth of them, if it names none). No claims:
      nothing is measured.

    Raises:
      ValueError: there is no recipe, or see `analyze_recipe`.
    """
    if recipes is None:
        recipes = [load_recipe(name) for name in shipped_recipes()]
    if not recipes:
        raise ValueError("recipes=(): must hold at least one")
    metrics: dict[str, float] = {}
    notes, panels = [], []
    for recipe in recipes:
        report = _report_on_own_data(recipe, m, power)
        found = _metrics(report)
        for number, window in enumerate(report.high_quality, start=1):
            found |= _window_metrics(f"high-quality data {number}", window)
        found["best window start"], found["best window stop"] = report.best.fractions
        metrics |= {f"{recipe.name}: {name}": value for name, value in found.items()}
        sentences = [
            _tau_note(report),
            _exponent_note(report),
            *_high_quality_notes(report),
            *_origin_notes(recipe),
        ]
        notes.append(f"{recipe.name}. {' '.join(sentences)}")
        panels.append(_timeline(report))
    return Result(
        method="trec",
        variant="recipes",
        metrics=metrics,
        figures=(
            Figure(
                "recipes",
                "Where published recipes put their best data",
                panels,
                "Learning rate and predicted dip of the training re-evaluation curve, each "
                "relative to its largest value. Shaded (or marked, where it is too narrow): the "
                "recipe's own high-quality data. The bar above: where as many tokens would be kept "
                "best.",
            ),
        ),
        notes=tuple(notes),
    )


def _report_on_own_data(recipe: Recipe, m: float | None, power: float) -> RecipeReport:
    """The report whose best window is as large as the recipe's own high-quality data."""
    steps = trec.recipe_steps(recipe)
    own = sum(steps.batch_tokens[start:stop].sum() for start, stop in steps.high_quality)
    share = float(own / steps.batch_tokens.sum()) or _DEFAULT_SHARE
    exponent = trec.SMALL_LM_LAW if m is None else m
    return trec.analyze_recipe(recipe, m=exponent, p=power, fraction=min(share, 1.0))


def _exponents(m: float) -> np.ndarray:
    """Exponents around `m`, as far as fitted ones were off under other schedules; of 0, to 1."""
    if m == 0:
        return np.linspace(0.0, 1.0, _NUM_EXPONENTS)
    return m * np.geomspace(1 / _UNCERTAINTY, _UNCERTAINTY, _NUM_EXPONENTS)


def _metrics(report: RecipeReport) -> dict[str, float]:
    metrics = {
        "steps": float(report.num_steps),
        "tokens": report.num_tokens,
        "tokens per parameter": report.tpp,
        "tau": report.tau,
        "weight of the initial parameters": report.c0,
        "m": report.m,
        "peak of the coefficients": report.ema_peak,
        "predicted valley": report.valley,
        "predicted valley, share of tokens": report.valley_tokens,
    }
    if report.phase is None:
        metrics["tau, recommended"] = report.recommended_tau
    if report.effective_tpp != report.tpp:
        metrics["tokens per parameter, effective"] = report.effective_tpp
    return metrics


def _window_metrics(name: str, window: WindowReport) -> dict[str, float]:
    return {
        f"{name}, start": window.fractions[0],
        f"{name}, stop": window.fractions[1],
        f"{name}, share of the coefficients": window.mass,
        f"{name}, coefficient / largest": window.relative[1],
        f"{name}, gain / best gain": window.gain,
    }


# --- Sentences ------------------------------------------------------------------------------------


def _span(fractions: tuple[float, float]) -> str:
    start, stop = fractions
    digits = 3 if stop - start > 0.002 else 7
    return f"{start:.{digits}f} to {stop:.{digits}f} of training"


def _tau_note(report: RecipeReport) -> str:
    low, high = _RULE_TPP
    if report.phase is not None or not low <= report.effective_tpp <= high:
        reason = (
            f"outside {low:g} to {high:g} tokens per parameter"
            if report.phase is None
            else "for a phase alone"
        )
        return f"tau = {report.tau:.3g}; {reason} there is no recommendation to compare it with."
    recommended = report.recommended_tau
    what = "tokens per parameter"
    if report.effective_tpp != report.tpp:
        what = "effective tokens per parameter"
    rule = (
        f"{recommended:.3g} is recommended for {report.effective_tpp:.4g} {what} "
        "(1.084 TPP^-0.527, whose factor is less certain than its exponent"
    )
    rule += ")"
    if math.isinf(report.tau):
        return f"Without weight decay AdamW forgets nothing (tau is infinite); {rule}."
    ratio = report.tau / recommended
    if 1 / _CLOSE <= ratio <= _CLOSE:
        return f"tau = {report.tau:.3g} is close to what is recommended: {rule}."
    longer = ratio > 1
    decays = {phase.weight_decay for phase in _phases(report)}
    change = f"multiply all weight decays by {ratio:.3g}"
    if len(decays) == 1:
        (decay,) = decays
        change = f"{'raise' if longer else 'lower'} the weight decay"
        change += f" from {decay:.3g} to {decay * ratio:.3g}"
    if all(phase.decay_scaled_by_lr for phase in _phases(report)):
        change += ", or the learning rate by as much"
    return (
        f"tau = {report.tau:.3g} is {ratio:.3g} times what is recommended, a "
        f"{'longer' if longer else 'shorter'} memory: {rule}. To get there, {change}."
    )


def _phases(report: RecipeReport) -> Sequence[trec.Phase]:
    phases = report.recipe.phases
    return phases if report.phase is None else phases[report.phase : report.phase + 1]


def _exponent_note(report: RecipeReport) -> str:
    if report.law is None:
        return (
            f"m = {report.m:.3g} was given. The exponent depends on the schedule as well as on "
            "tokens per parameter and tau: it is best fitted to short runs under this schedule."
        )
    outside = [
        f"{name} = {value:.3g} (fitted: {low:g} to {high:g})"
        for name, value, (low, high) in (
            ("tokens per parameter", report.effective_tpp, _LAW_TPP),
            ("tau", report.tau, _LAW_TAU),
        )
        if not low <= value <= high
    ]
    text = (
        f"m = {report.m:.3g} comes from a law fitted to a language model of 17 thousand parameters "
        "under linear decay to zero, since the paper's constants are not published"
    )
    if outside:
        text += f"; it is extrapolated to {' and '.join(outside)}"
    if report.m > _LARGEST_FITTED:
        text += f", beyond every exponent that was fitted (at most {_LARGEST_FITTED:g})"
    return (
        f"{text}. Under other schedules fitted exponents differed from it about threefold: take "
        "the place of the window as rough, and give m if you have fitted it."
    )


def _high_quality_notes(report: RecipeReport) -> list[str]:
    notes = []
    exponents = _exponents(report.m)
    for window in report.high_quality:
        gains = [window.gain]
        for m in (exponents[0], exponents[-1]):
            curve = trec.predict_trec(report.c, m=m, p=report.p)
            gains.append(
                trec.evaluate_window(
                    (window.start, window.stop),
                    c=report.c,
                    trec=curve,
                    batch_tokens=report.batch_tokens,
                ).gain
            )
        steps = window.stop - window.start
        best = tuple(place / report.num_steps for place in window.best)
        if window.gain < 0:
            gain = "is kept worse than if it were mixed in uniformly"
        else:
            gain = f"gains {window.gain:.0%} of what placement can gain over uniform mixing"
        notes.append(
            f"The recipe's own high-quality data, {_span(window.fractions)} "
            f"({steps} step{'' if steps == 1 else 's'}), holds {window.mass:.3g} of the sum of the "
            f"coefficients and {gain} ({min(gains):.2f} to {max(gains):.2f} of it with m from "
            f"{exponents[0]:.3g} to {exponents[-1]:.3g}). The best window of as many tokens is "
            f"{_span((best[0], best[1]))}."
        )
    return notes


def _batch_notes(report: RecipeReport) -> list[str]:
    if not np.ptp(report.batch_tokens):
        return []
    best = report.best.token_fractions
    return [
        f"Batches grow or shrink from {report.batch_tokens.min():.3g} to "
        f"{report.batch_tokens.max():.3g} tokens. Coefficients and training fractions are per "
        f"step; in tokens, the best window is {best[0]:.3f} to {best[1]:.3f} of the run."
    ]


def _origin_notes(recipe: Recipe) -> list[str]:
    notes = []
    if recipe.source:
        notes.append(f"Published: {recipe.source}.")
    if recipe.assumed:
        notes.append(f"Assumed: {recipe.assumed}.")
    return notes


# --- Figures --------------------------------------------------------------------------------------


def _places(report: RecipeReport) -> np.ndarray:
    """Steps to draw, from 0: evenly spaced ones, and both sides of every jump of the rate."""
    spaced = np.linspace(0, report.num_steps - 1, _POINTS).round().astype(np.int64)
    jumps = np.flatnonzero(np.abs(np.diff(report.lrs)) > 0.02 * report.lrs.max())[:_POINTS]
    special = [jumps, jumps + 1, [np.argmax(report.c), np.argmin(report.trec)]]
    return np.unique(np.concatenate([spaced, *special]))


def _relative(values: np.ndarray) -> np.ndarray:
    largest = values.max()
    return values / largest if largest else values


def _own_data(
    report: RecipeReport,
) -> tuple[list[tuple[float, float, str]], list[tuple[float, str]]]:
    """The recipe's own data as shaded ranges, or as marks where they are too narrow to see."""
    shaded, marked = [], []
    for window in report.high_quality:
        start, stop = window.fractions
        steps = window.stop - window.start
        if stop - start < _NARROW:
            marked.append((start, f"high-quality data, {steps} step{'' if steps == 1 else 's'}"))
        else:
            shaded.append((start, stop, "high-quality data as planned"))
    return shaded, marked


def _best_bar(report: RecipeReport, label: str) -> Series:
    return Series(label, report.best.fractions, [_BRACKET, _BRACKET])


def _plan_figure(
    report: RecipeReport, fraction: float, fraction_of: Literal["tokens", "steps"]
) -> Figure:
    places = _places(report)
    x = (places + 1) / report.num_steps
    rate = Series("learning rate", x, _relative(report.lrs)[places])
    kept = Series("EMA coefficient", x, _relative(report.c)[places])
    curve = (report.trec - report.trec.min()) / max(np.ptp(report.trec), np.finfo(float).tiny)
    predicted = Series(f"predicted TREC, m = {report.m:.2f}", x, curve[places])
    best = _best_bar(report, f"best {fraction:.3g} of the {fraction_of}")
    shaded, marked = _own_data(report)
    return Figure(
        "plan",
        report.recipe.name,
        [
            Panel(_STEP_LABEL, "relative to its largest", [rate, kept], title="Training"),
            Panel(
                _STEP_LABEL,
                "predicted loss, 0 lowest, 1 highest",
                [predicted, best],
                title="What is remembered",
                shaded=shaded,
                vertical_lines=marked,
            ),
        ],
        "Left: the schedule, and the weight of each step's update in the final weights. Right: the "
        "predicted loss of the final weights on each training batch, whose scale and level are not "
        "predicted, and the window in which data is kept best. Shaded or marked: the recipe's own "
        "high-quality data.",
    )


def _sensitivity_figure(
    exponents: np.ndarray, windows: np.ndarray, valleys: np.ndarray, m: float
) -> Figure:
    band = Series("valley, and the best window around it", exponents, valleys, *windows.T)
    return Figure(
        "sensitivity",
        "How the best window depends on m",
        [
            Panel(
                "training-fraction exponent m",
                _STEP_LABEL,
                [band],
                vertical_lines=[(m, "used")],
                xscale="linear" if m == 0 else "log",
            )
        ],
        "Where the predicted curve is lowest, and start and stop of the best window, for exponents "
        "from half to twice the one that is used.",
    )


def _timeline(report: RecipeReport) -> Panel:
    places = _places(report)
    x = (places + 1) / report.num_steps
    shaded, marked = _own_data(report)
    dip = _relative(report.trec.max() - report.trec)
    return Panel(
        _STEP_LABEL,
        "relative to its largest",
        [
            Series("learning rate", x, _relative(report.lrs)[places]),
            Series("predicted dip", x, dip[places]),
            _best_bar(report, "where as many tokens are kept best"),
        ],
        title=report.recipe.name,
        shaded=shaded,
        vertical_lines=marked,
    )
