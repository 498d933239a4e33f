"""What the measured and predicted curves say about the paper's claims. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from jaxlab.experiments.trec.config import Config
from jaxlab.experiments.trec.scoring import (
    bin_centres,
    binned_correlation,
    cross_fit,
    curve_claim,
    fit_affine,
    halves_of,
)
from jaxlab.methods import trec
from jaxlab.reporting.claims import Claim, Direction
from jaxlab.reporting.figures import Figure, Panel, Series
from jaxlab.reporting.report import Result

__all__ = ["conclude"]

_PAPER = "arXiv 2509.25380, law of the exponent: r = 0.966 (111M) to 0.986 (3.3B), smoothed"
_STEP_LABEL = "training fraction t/T"


def conclude(config: Config, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Result:
    """Fits the training-fraction exponent on half of the seeds and scores it on the other half.

    Args:
      config: all settings.
      arrays: of the one program, `[trial, replicate, ...]` with one trial.

    Returns:
      Claims `trec.shape.*` and `trec.argmin.*`, findings, and three figures.
    """
    found = {name: value[0] for name, value in arrays[config.variant].items()}
    loss = found["replay/loss"].astype(np.float64)
    coefficients = trec.ema_coefficients(found["alphas"][0].astype(np.float64))
    curves = loss
    if config.reference == "next":
        curves = loss - found["replay/reference_loss"].astype(np.float64)
    mean = curves.mean(axis=0)
    fit = trec.fit_training_fraction(mean, coefficients, p=config.power, num_bins=config.num_bins)
    halves = halves_of(len(curves))
    claims: list[Claim] = []
    if halves is not None:
        claims += _claims(config, curves, coefficients, halves)
        if config.reference == "next":
            claims.append(_without_reference(config, loss, coefficients, halves))
    notes = _notes(config, fit)
    metrics = {
        "m": fit.m,
        "r at m": fit.r,
        "r at m=0": binned_correlation(config, mean, coefficients, 0.0),
        "measured valley": float(
            trec.valley(trec.bin_curve(mean, config.num_bins)[0], num_steps=config.steps)
        ),
        "predicted valley": float(
            trec.valley(trec.predict_trec(coefficients, m=fit.m, p=config.power))
        ),
        "depth of the dip (nats)": float(np.ptp(trec.bin_curve(mean, config.num_bins)[0])),
        "training loss, last bin (nats)": float(
            trec.bin_curve(found["train/loss"].mean(axis=0, dtype=np.float64), config.num_bins)[0][
                -1
            ]
        ),
        "validation loss (nats)": float(found["validation/loss"][:, -1].mean()),
    }
    return Result(
        method=config.method,
        variant=config.variant,
        metrics=metrics,
        claims=tuple(claims),
        figures=_figures(config, found, curves, coefficients, fit.m),
        notes=notes,
    )


def _claims(
    config: Config,
    curves: np.ndarray,
    coefficients: np.ndarray,
    halves: tuple[np.ndarray, np.ndarray],
) -> list[Claim]:
    name = config.variant
    rows: tuple[tuple[str, str, float, Direction, str, str], ...] = (
        (
            f"trec.shape.{name}",
            "r",
            0.85,
            ">=",
            "The prediction, with m from half of the seeds, correlates with the other half's "
            "measured curve",
            _PAPER,
        ),
        (
            f"trec.shape.{name}.gain",
            "gain",
            0.3,
            ">=",
            "The training-fraction term adds to the correlation of EMA coefficients alone (m = 0)",
            "arXiv 2509.25380, training-fraction term: needed, no number given; piloted here",
        ),
        (
            f"trec.argmin.{name}",
            "gap",
            0.10,
            "<=",
            "Predicted and measured valley lie within a tenth of the run",
            "arXiv 2509.25380, placement: best segments lie where predicted; piloted here",
        ),
    )
    estimate, spread, seeds = cross_fit(config, curves, coefficients, halves)
    return [
        curve_claim(
            id,
            getattr(estimate, field)[0],
            getattr(spread, field),
            getattr(seeds, field),
            halves,
            bound=bound,
            direction=direction,
            statement=statement,
            source=source,
            kind="claim",
            correlation=field == "r",
        )
        for id, field, bound, direction, statement, source in rows
    ]


def _without_reference(
    config: Config,
    loss: np.ndarray,
    coefficients: np.ndarray,
    halves: tuple[np.ndarray, np.ndarray],
) -> Claim:
    """The curve as the paper measures it."""
    estimate, spread, seeds = cross_fit(config, loss, coefficients, halves)
    return curve_claim(
        f"trec.shape.{config.variant}.without_reference",
        estimate.r[0],
        spread.r,
        seeds.r,
        halves,
        bound=None,
        direction=">=",
        source=_PAPER,
        kind="finding",
        correlation=True,
        statement="The same correlation when no reference model's loss is subtracted",
    )


def _notes(config: Config, fit: trec.TrainingFractionFit) -> tuple[str, ...]:
    notes = []
    if config.reference == "next":
        notes.append(
            "The measured curve is the final model's loss on each training batch minus that of "
            "another replicate's final model on the same batch (the next one of the same half of "
            "the seeds), which removes the batch's difficulty; the paper subtracts nothing and "
            "averages far larger batches."
        )
    if config.replicates < 4:
        notes.append(
            f"{config.replicates} replicates leave {config.replicates // 2} in a half; intervals "
            "need at least 4, and 8 are advised."
        )
    if fit.at_edge:
        notes.append(f"The fitted exponent m = {fit.m:.2f} lies at the edge of its search range.")
    return tuple(notes)


def _figures(
    config: Config,
    found: Mapping[str, np.ndarray],
    curves: np.ndarray,
    coefficients: np.ndarray,
    m: float,
) -> tuple[Figure, ...]:
    return (
        _comparison_figure(config, curves, coefficients, m),
        _training_figure(config, found),
        _coefficients_figure(config, found["alphas"][0], coefficients),
    )


def _comparison_figure(
    config: Config, curves: np.ndarray, coefficients: np.ndarray, m: float
) -> Figure:
    means = trec.bin_curve(curves, config.num_bins)[0]
    measured = means.mean(axis=0)
    # Only the shape is predicted, so each seed's own level is no part of the error.
    shapes = means - means.mean(axis=1, keepdims=True)
    error = shapes.std(axis=0, ddof=1) / np.sqrt(len(means)) if len(means) > 1 else 0 * measured
    lines = []
    kinds: tuple[tuple[str, float, Literal["line", "dashed"]], ...] = (
        (f"predicted, m = {m:.2f}", m, "line"),
        ("predicted, EMA alone (m = 0)", 0.0, "dashed"),
    )
    for label, exponent, style in kinds:
        predicted = trec.predict_trec(coefficients, m=exponent, p=config.power)
        scaled = fit_affine(trec.bin_curve(predicted, config.num_bins)[0], measured)
        lines.append(Series(label, bin_centres(config.num_bins), scaled, style=style))
    points = Series(
        f"measured, {len(curves)} seeds",
        bin_centres(config.num_bins),
        measured,
        measured - error,
        measured + error,
        style="points",
    )
    what = "minus reference model's " if config.reference == "next" else ""
    return Figure(
        "trec",
        "TREC, measured and predicted",
        [Panel(_STEP_LABEL, f"loss {what}(nats/token)", [points, *lines])],
        "Loss of the final model on the batches of each part of training. Points: mean over "
        "seeds, with one standard error of the shape (each seed's own level removed). Lines: "
        "prediction from AdamW's EMA coefficients, scaled and shifted to the measurement, since "
        "only the shape is predicted.",
    )


def _training_figure(config: Config, found: Mapping[str, np.ndarray]) -> Figure:
    trained, replayed = (
        trec.bin_curve(found[name].astype(np.float64), config.num_bins)[0].mean(axis=0)
        for name in ("train/loss", "replay/loss")
    )
    validation = found["validation/loss"].mean(axis=0)
    places = np.minimum(np.arange(len(validation)) * config.eval_every / config.steps, 1.0)
    kind = "text" if config.variant == "text" else "data"
    series = [
        Series("on the batch, when it was trained on", bin_centres(config.num_bins), trained),
        Series("on the batch, after training (TREC)", bin_centres(config.num_bins), replayed),
        Series(f"on validation {kind}", places, validation, style="points"),
    ]
    return Figure(
        "training",
        "Training loss",
        [Panel(_STEP_LABEL, "loss (nats/token)", series)],
        "Mean over seeds. The training loss falls throughout; the re-evaluated one, of the final "
        "weights, dips where the weights still remember.",
    )


def _coefficients_figure(config: Config, alphas: np.ndarray, coefficients: np.ndarray) -> Figure:
    steps = np.arange(1, config.steps + 1) / config.steps
    kept = Series("coefficient", steps, coefficients * config.steps)
    schedule = Series("schedule", steps, alphas / alphas.max())
    return Figure(
        "coefficients",
        "What AdamW keeps of each update",
        [
            Panel(_STEP_LABEL, "EMA coefficient times T", [kept]),
            Panel(_STEP_LABEL, "learning rate / peak", [schedule]),
        ],
        "Left: weight of each step's update in the final weights, from the optimiser state. "
        f"Right: the schedule ({config.optimizer.schedule}, tau = {config.optimizer.tau:g}).",
    )
