"""Study: the law of the training-fraction exponent, fitted on a small model, used on a larger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxlab.experiments.trec.scoring import bin_centres, curve_claim, fit_affine, seed_resamples
from jaxlab.experiments.trec.studies.common import (
    Setting,
    curves_of,
    make_setting,
    num_parameters,
    reference_notes,
    study_program,
    tokens_per_parameter,
)
from jaxlab.experiments.trec.study_config import LawConfig
from jaxlab.methods import trec
from jaxlab.reporting.claims import Claim, Kind
from jaxlab.reporting.figures import Figure, Panel, Series
from jaxlab.reporting.report import Result
from jaxlab.training.program import Program

__all__ = ["build", "conclude"]

_LARGER = "law-larger"
_SOURCE = (
    "arXiv 2509.25380, law fitted at 111M: r = 0.975 (266M) to 0.986 (3.3B), smoothed, with the "
    "predicted exponent"
)
_STEP_LABEL = "training fraction t/T"


class _Fitted(NamedTuple):
    """Exponents of the small model's settings.

    Attributes:
      tpp: tokens per parameter `[setting]`.
      tau: time scales `[setting]`.
      m: exponents `[draw, setting]`.
      at_edge: whether an exponent is only a bound `[draw, setting]`.
    """

    tpp: np.ndarray
    tau: np.ndarray
    m: np.ndarray
    at_edge: np.ndarray

    def law(self, draw: int) -> trec.PowerLaw | None:
        """The law of one draw; None if too few exponents lie inside their range."""
        usable = ~self.at_edge[draw]
        tpp, tau = self.tpp[usable], self.tau[usable]
        varied = np.stack([np.ones_like(tpp), np.log(tpp), np.log(tau)], axis=-1)
        if np.linalg.matrix_rank(varied) < 3:
            return None
        return trec.fit_power_law(tpp, tau, self.m[draw, usable])


def _fit_settings(config: LawConfig, steps: int) -> list[Setting]:
    return [make_setting(config, "d2z", tau, steps) for tau in config.taus]


def _transfers(config: LawConfig) -> list[tuple[str, float]]:
    """Schedule and time scale of the larger model's settings."""
    middle = sorted(config.transfer_taus)[len(config.transfer_taus) // 2]
    return [
        *(("d2z", tau) for tau in config.transfer_taus),
        *((schedule, middle) for schedule in config.other_schedules),
    ]


def build(config: LawConfig) -> list[Program]:
    """A program for each length of the small model, and one of the larger model."""
    small = [
        study_program(config, f"law-{steps}", _fit_settings(config, steps))
        for steps in config.lengths
    ]
    larger = [make_setting(config, name, tau, config.steps) for name, tau in _transfers(config)]
    return [*small, study_program(config, _LARGER, larger, hidden_width=config.larger_width)]


def conclude(config: LawConfig, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Result:
    """Fits the law to the small model, predicts the larger model's curves, and scores that.

    Args:
      config: all settings.
      arrays: of the programs.

    Returns:
      Claims `trec.law.transfer` and `.gain`, findings for other schedules, the law, and figures
      of the fit with its residuals and of the predicted curves.
    """
    everyone = np.full((1, config.replicates), 1 / config.replicates)
    fitted = _fit(config, arrays, everyone)
    law = fitted.law(0)
    used = int((~fitted.at_edge[0]).sum())
    note = (
        f"The law is fitted to {used} of {fitted.m.shape[1]} settings (those whose exponent lies "
        f"inside its range) of a model of {num_parameters(config)} parameters, and used on one of "
        f"{num_parameters(config, config.larger_width)}. Seeds are resampled for both "
        "together."
    )
    if law is None:
        note = "Too few exponents lie inside their range: there is no law, and nothing to transfer."
    r, alone = _scores(config, arrays[_LARGER], everyone, [law])
    weights, place = seed_resamples([config.replicates])
    spread = spread_alone = np.full((len(place), r.shape[1]), np.nan)
    if config.replicates > 1:
        resampled = _fit(config, arrays, weights[0])
        laws = [resampled.law(draw) for draw in range(len(weights[0]))]
        spread, spread_alone = (
            value[place] for value in _scores(config, arrays[_LARGER], weights[0], laws)
        )
    seeds, seeds_alone = _scores(
        config, arrays[_LARGER], np.eye(config.replicates), [law] * config.replicates
    )
    claims = _claims(config, (r, spread, seeds), (alone, spread_alone, seeds_alone))
    return Result(
        method=config.method,
        variant=config.variant,
        metrics=_metrics(config, fitted, law, r[0], alone[0]),
        claims=tuple(claims),
        figures=()
        if law is None
        else (_law_figure(fitted, law), _curve_figure(config, arrays[_LARGER], law)),
        notes=(
            *reference_notes(config),
            note,
        ),
    )


def _fit(
    config: LawConfig, arrays: Mapping[str, Mapping[str, np.ndarray]], weights: np.ndarray
) -> _Fitted:
    """Exponents of the small model for each row of weights over seeds."""
    tpp, tau, m, at_edge = [], [], [], []
    for steps in config.lengths:
        curves, coefficients = curves_of(arrays[f"law-{steps}"])
        for own_tau, own, kept in zip(config.taus, curves, coefficients, strict=True):
            fit = trec.fit_training_fraction(
                weights @ own, kept, p=config.power, num_bins=config.num_bins
            )
            tpp.append(tokens_per_parameter(config, steps))
            tau.append(own_tau)
            m.append(fit.m)
            # An exponent of zero is an edge too, and has no logarithm.
            at_edge.append(fit.at_edge)
    return _Fitted(np.array(tpp), np.array(tau), np.stack(m, -1), np.stack(at_edge, -1))


def _scores(
    config: LawConfig,
    arrays: Mapping[str, np.ndarray],
    weights: np.ndarray,
    laws: Sequence[trec.PowerLaw | None],
) -> tuple[np.ndarray, np.ndarray]:
    """Correlations `[draw, setting]` of the larger model's curves: by the law, and at m = 0.

    NaN where there is no law.
    """
    curves, coefficients = curves_of(arrays)
    tpp = tokens_per_parameter(config, config.steps, hidden_width=config.larger_width)
    by_law, alone = [], []
    for (_, tau), own, kept in zip(_transfers(config), curves, coefficients, strict=True):
        measured = trec.bin_curve(weights @ own, config.num_bins)[0]
        exponents = [0.0 if law is None else float(law(tpp, tau)) for law in laws]
        predicted = np.stack([trec.predict_trec(kept, m=m, p=config.power) for m in exponents])
        plain = trec.predict_trec(kept, m=0.0, p=config.power)[None]
        for found, curve in ((by_law, predicted), (alone, plain)):
            found.append(trec.pearson(trec.bin_curve(curve, config.num_bins)[0], measured))
        by_law[-1] = np.where([law is None for law in laws], np.nan, by_law[-1])
    return np.stack(by_law, -1), np.stack(alone, -1)


def _claims(
    config: LawConfig,
    scores: tuple[np.ndarray, np.ndarray, np.ndarray],
    alone: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> list[Claim]:
    count = len(config.transfer_taus)
    everyone = np.arange(config.replicates)
    means = [value[:, :count].mean(axis=1) for value in scores]
    gains = [
        (value - other)[:, :count].mean(axis=1) for value, other in zip(scores, alone, strict=True)
    ]
    which = f"of a model with {config.larger_width} instead of {config.model.hidden_width} units"
    rows: list[tuple[str, Kind, list[np.ndarray], float | None, str]] = [
        (
            "trec.law.transfer",
            "claim",
            means,
            0.9,
            f"Correlation with the measured curves {which}, d2z, mean over {count} time scales, "
            "with m by the law of the small model",
        ),
        (
            "trec.law.transfer.gain",
            "claim",
            gains,
            0.3,
            "What that correlation has over the one at m = 0, EMA coefficients alone",
        ),
    ]
    for i, schedule in enumerate(config.other_schedules, start=count):
        own = [value[:, i] for value in scores]
        text = f"The same correlation under schedule {schedule}, whose law was not fitted"
        rows.append((f"trec.law.transfer.{schedule}", "finding", own, None, text))
    return [
        curve_claim(
            id,
            float(estimate[0]),
            spread,
            seeds,
            (everyone,),
            correlation=not id.endswith("gain"),
            kind=kind,
            statement=statement,
            source=_SOURCE,
            bound=bound,
            direction=">=",
        )
        for id, kind, (estimate, spread, seeds), bound, statement in rows
    ]


def _metrics(
    config: LawConfig, fitted: _Fitted, law: trec.PowerLaw | None, r: np.ndarray, alone: np.ndarray
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if law is not None:
        metrics |= {"law: C": law.C, "law: exponent of TPP": law.mu_tpp}
        metrics["law: exponent of tau"] = law.mu_tau
        if law.r2 is not None and law.r2_log is not None:
            metrics |= {"law: R2": law.r2, "law: R2 of the logarithm": law.r2_log}
    for tpp, tau, m in zip(fitted.tpp, fitted.tau, fitted.m[0], strict=True):
        metrics[f"m at TPP = {tpp:.3g}, tau = {tau:g}"] = float(m)
    for (schedule, tau), by_law, plain in zip(_transfers(config), r, alone, strict=True):
        if law is not None:
            metrics[f"larger, {schedule}, tau = {tau:g}: r"] = float(by_law)
        metrics[f"larger, {schedule}, tau = {tau:g}: r at m=0"] = float(plain)
    return metrics


def _law_figure(fitted: _Fitted, law: trec.PowerLaw) -> Figure:
    fits, residuals = [], []
    for tpp in np.unique(fitted.tpp):
        # Those at an edge are no part of the fit, and zero has no logarithm.
        here = (fitted.tpp == tpp) & ~fitted.at_edge[0]
        if not here.any():
            continue
        tau, m = fitted.tau[here], fitted.m[0, here]
        order = np.argsort(tau)
        tau, m = tau[order], m[order]
        label = f"TPP = {tpp:.3g}"
        fine = np.geomspace(tau[0], tau[-1], 50)
        fits += [Series(label, tau, m, style="points"), Series(label, fine, law(float(tpp), fine))]
        residuals.append(Series(label, tau, np.log(m / law(float(tpp), tau)), style="points"))
    return Figure(
        "law",
        "The training-fraction exponent",
        [
            Panel("time scale tau", "exponent m", fits, xscale="log", yscale="log"),
            Panel("time scale tau", "log m minus the law's", residuals, xscale="log"),
        ],
        "Exponents fitted to the small model's curves (points) and the power law through them "
        f"(lines): m = {law.C:.3g} TPP^{law.mu_tpp:.3g} tau^{law.mu_tau:.3g}. "
        f"Right: residuals. Left out: {int(fitted.at_edge[0].sum())} settings whose exponent is an "
        "end of its range.",
    )


def _curve_figure(
    config: LawConfig, arrays: Mapping[str, np.ndarray], law: trec.PowerLaw
) -> Figure:
    curves, coefficients = curves_of(arrays)
    tpp = tokens_per_parameter(config, config.steps, hidden_width=config.larger_width)
    centres = bin_centres(config.num_bins)
    panels = []
    for (schedule, tau), own, kept in zip(_transfers(config), curves, coefficients, strict=True):
        measured = trec.bin_curve(own.mean(axis=0), config.num_bins)[0]
        m = float(law(tpp, tau))
        lines = [Series("measured", centres, measured, style="points")]
        styles = {"by the law": m, "EMA alone (m = 0)": 0.0}
        for label, exponent in styles.items():
            curve = trec.bin_curve(
                trec.predict_trec(kept, m=exponent, p=config.power), config.num_bins
            )[0]
            style = "line" if exponent else "dashed"
            lines.append(Series(label, centres, fit_affine(curve, measured), style=style))
        title = f"{schedule}, tau = {tau:g}: m = {m:.2f}"
        panels.append(Panel(_STEP_LABEL, "loss minus reference (nats)", lines, title=title))
    return Figure(
        "transfer",
        "The larger model's curves, predicted from the small one's law",
        panels,
        "Points: measured, mean over seeds. Lines: predictions, scaled and shifted.",
    )
