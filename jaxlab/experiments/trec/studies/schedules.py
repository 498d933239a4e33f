"""Study: how well the curves of all schedules are predicted, at several time scales."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxlab.experiments.trec.scoring import (
    Scores,
    bin_centres,
    cross_fit,
    curve_claim,
    fit_affine,
    halves_of,
)
from jaxlab.experiments.trec.studies.common import (
    Setting,
    curves_of,
    make_setting,
    reference_notes,
    study_program,
)
from jaxlab.experiments.trec.study_config import SchedulesConfig
from jaxlab.methods import trec
from jaxlab.reporting.claims import Claim
from jaxlab.reporting.figures import Figure, Panel, Series
from jaxlab.reporting.report import Result
from jaxlab.training.program import Program

__all__ = ["build", "conclude"]

_NAME = "schedules"
_SOURCE = "arXiv 2509.25380, main schedules: r of 0.97 to 0.99, law of the exponent, smoothed"


def _settings(config: SchedulesConfig) -> list[Setting]:
    return [
        make_setting(config, schedule, tau, config.steps)
        for schedule in config.schedules
        for tau in config.taus
    ]


def build(config: SchedulesConfig) -> list[Program]:
    """One program; its trials are the schedules times the time scales."""
    return [study_program(config, _NAME, _settings(config))]


def conclude(config: SchedulesConfig, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Result:
    """Fits m for each setting on half of the seeds, and scores it on the other half.

    Args:
      config: all settings.
      arrays: of the one program.

    Returns:
      Findings `trec.schedules.<name>` and `.gap`, each a mean over the time scales; scores of every
      setting as metrics; a figure with a panel for each schedule.
    """
    curves, coefficients = curves_of(arrays[_NAME])
    halves = halves_of(config.replicates)
    assert halves is not None
    metrics: dict[str, float] = {}
    claims: list[Claim] = []
    panels: list[Panel] = []
    edges: list[str] = []
    for index, schedule in enumerate(config.schedules):
        places = range(index * len(config.taus), (index + 1) * len(config.taus))
        found = [cross_fit(config, curves[i], coefficients[i], halves) for i in places]
        claims += _findings(schedule, found, halves)
        lines: list[Series] = []
        for tau, i, (estimate, _, _) in zip(config.taus, places, found, strict=True):
            mean = curves[i].mean(axis=0)
            fit = trec.fit_training_fraction(
                mean, coefficients[i], p=config.power, num_bins=config.num_bins
            )
            predicted = trec.predict_trec(coefficients[i], m=fit.m, p=config.power)
            label = f"{schedule}, tau = {tau:g}"
            measured = trec.bin_curve(mean, config.num_bins)[0]
            metrics |= {
                f"{label}: r": float(estimate.r[0]),
                f"{label}: r at m=0": float(estimate.r[0] - estimate.gain[0]),
                f"{label}: m": fit.m,
                f"{label}: measured valley": float(trec.valley(measured, num_steps=config.steps)),
                f"{label}: predicted valley": float(trec.valley(predicted)),
            }
            if fit.at_edge:
                edges.append(label)
            lines += _lines(config, f"tau = {tau:g}", measured, predicted)
        panels.append(
            Panel("training fraction t/T", "loss minus reference (nats)", lines, title=schedule)
        )
    notes = reference_notes(config)
    if edges:
        notes.append(f"The fitted exponent lies at the edge of its range for {'; '.join(edges)}.")
    figure = Figure(
        "schedules",
        "TREC under all schedules",
        panels,
        "Points: measured, mean over seeds. Lines: prediction with m fitted to the curve, scaled "
        "and shifted, since only the shape is predicted.",
    )
    return Result(
        method=config.method,
        variant=config.variant,
        metrics=metrics,
        claims=tuple(claims),
        figures=(figure,),
        notes=tuple(notes),
    )


def _findings(
    schedule: str,
    found: list[tuple[Scores, Scores, Scores]],
    halves: tuple[np.ndarray, np.ndarray],
) -> list[Claim]:
    """Means over the time scales; seeds are resampled for all of them together."""
    rows = (
        ("", "r", ">=", "Correlation of predicted and held-out seeds' measured curve, mean over"),
        (".gap", "gap", "<=", "Distance of predicted and measured valley, mean over"),
    )
    return [
        curve_claim(
            f"trec.schedules.{schedule}{suffix}",
            float(np.mean([getattr(estimate, field)[0] for estimate, _, _ in found])),
            np.mean([getattr(spread, field) for _, spread, _ in found], axis=0),
            np.mean([getattr(seeds, field) for _, _, seeds in found], axis=0),
            halves,
            correlation=field == "r",
            kind="finding",
            statement=f"{text} {len(found)} time scales, schedule {schedule}",
            source=_SOURCE,
            bound=None,
            direction=direction,
        )
        for suffix, field, direction, text in rows
    ]


def _lines(
    config: SchedulesConfig, label: str, measured: np.ndarray, predicted: np.ndarray
) -> list[Series]:
    centres = bin_centres(config.num_bins)
    fitted = fit_affine(trec.bin_curve(predicted, config.num_bins)[0], measured)
    return [
        Series(label, centres, measured, style="points"),
        Series(label, centres, fitted),
    ]
