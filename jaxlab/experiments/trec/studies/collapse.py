"""Study: curves coincide where the time scale is the same, however it is reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from jaxlab.experiments.trec.scoring import bin_centres, curve_claim, halves_of, seed_resamples
from jaxlab.experiments.trec.studies.common import (
    Setting,
    curves_of,
    make_setting,
    reference_notes,
    study_program,
)
from jaxlab.experiments.trec.study_config import CollapseConfig
from jaxlab.methods import trec
from jaxlab.reporting.claims import Claim, Kind
from jaxlab.reporting.figures import Figure, Panel, Series
from jaxlab.reporting.report import Result
from jaxlab.training.program import Program

__all__ = ["build", "conclude"]

_SOURCE = (
    "arXiv 2509.25380, ablations: tau matched through learning rate, weight decay or batch size "
    "gives the same shape; no number given; piloted here"
)


class _Group(NamedTuple):
    """Settings of one shape."""

    steps: int
    batch_size: int
    settings: list[Setting]


def _groups(config: CollapseConfig) -> dict[str, _Group]:
    """Three programs; the batch size changes with the number of steps, so that tokens stay."""

    def setting(tau: float, steps: int, label: str, factor: float = 1.0) -> Setting:
        return make_setting(config, "d2z", tau, steps, label=label, lr_factor=factor)

    steps, size, tau = config.steps, config.batch_size, config.tau
    return {
        "collapse": _Group(
            steps,
            size,
            [
                setting(tau, steps, "base"),
                setting(tau, steps, "rate / 2, decay x 2", 0.5),
                setting(tau, steps, "rate x 2, decay / 2", 2.0),
                *(setting(other, steps, f"tau = {other:g}") for other in config.other_taus),
            ],
        ),
        "collapse-small-batch": _Group(
            2 * steps, size // 2, [setting(tau, 2 * steps, "batch / 2")]
        ),
        "collapse-large-batch": _Group(
            steps // 2, 2 * size, [setting(tau, steps // 2, "batch x 2")]
        ),
    }


def build(config: CollapseConfig) -> list[Program]:
    """One program for the study's batch size, and one each for half and twice of it."""
    return [
        study_program(config, name, group.settings, batch_size=group.batch_size)
        for name, group in _groups(config).items()
    ]


def conclude(config: CollapseConfig, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Result:
    """Correlates every setting's curve with the base setting's, across the halves of the seeds.

    Seeds share their data and their initial weights between settings, so a setting's curve from
    one half is compared with the base setting's from the other.

    Args:
      config: all settings.
      arrays: of the three programs.

    Returns:
      Claim `trec.collapse`: the least correlation at the same time scale exceeds the greatest at
      another; findings; a figure with all curves over each other.
    """
    binned: dict[str, np.ndarray] = {}
    for name, group in _groups(config).items():
        curves, _ = curves_of(arrays[name])
        for setting, found in zip(group.settings, curves, strict=True):
            binned[setting.label] = trec.bin_curve(found, config.num_bins)[0]
    halves = halves_of(config.replicates)
    assert halves is not None
    others = [f"tau = {tau:g}" for tau in config.other_taus]
    same = [label for label in binned if label != "base" and label not in others]
    claims = _claims(binned, halves, same, others)
    correlations = {
        label: float(_across(binned, label, _half_means(halves))[0]) for label in binned
    }
    return Result(
        method=config.method,
        variant=config.variant,
        metrics={f"r with base: {label}": r for label, r in correlations.items()},
        claims=tuple(claims),
        figures=(_figure(config, binned, others),),
        notes=(
            *reference_notes(config),
            "Correlations are across the two halves of the seeds; that of the base setting with "
            "itself shows what noise leaves.",
        ),
    )


def _half_means(halves: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    """Equal weights `[1, size]` for each half."""
    return [np.full((1, len(half)), 1 / len(half)) for half in halves]


def _across(binned: Mapping[str, np.ndarray], label: str, weights: list[np.ndarray]) -> np.ndarray:
    """Correlation `[draw]` of a setting's curve with the base's of the other half, both ways."""
    size = weights[0].shape[1]
    one, two = (
        [w @ curves for w, curves in zip(weights, (found[:size], found[size:]), strict=True)]
        for found in (binned[label], binned["base"])
    )
    pairs = ((one[0], two[1]), (one[1], two[0]))
    return np.mean([trec.pearson(*pair) for pair in pairs], axis=0)


def _by_seed(
    binned: Mapping[str, np.ndarray], label: str, halves: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Correlation `[replicate]` of each seed's curve with the base's mean of the other half."""
    bases = [binned["base"][half].mean(axis=0) for half in halves[::-1]]
    parts = [
        trec.pearson(binned[label][half], base[None])
        for half, base in zip(halves, bases, strict=True)
    ]
    return np.concatenate(parts)


def _claims(
    binned: Mapping[str, np.ndarray],
    halves: tuple[np.ndarray, np.ndarray],
    same: list[str],
    others: list[str],
) -> list[Claim]:
    def margin(correlation: Callable[[str], np.ndarray]) -> np.ndarray:
        return least(correlation) - np.max([correlation(label) for label in others], axis=0)

    def least(correlation: Callable[[str], np.ndarray]) -> np.ndarray:
        return np.min([correlation(label) for label in same], axis=0)

    weights, place = seed_resamples([len(half) for half in halves])
    # A single seed in a half has no spread that could be known.
    known = min(map(len, halves)) > 1
    text = "correlation with the base setting's curve, across halves of the seeds"
    rows: tuple[tuple[str, Kind, Callable[..., np.ndarray], str], ...] = (
        (
            "trec.collapse",
            "claim",
            margin,
            f"Least {text}, of settings with the same time scale, minus the greatest of settings "
            "with another",
        ),
        (
            "trec.collapse.same",
            "finding",
            least,
            f"Least {text}, of settings with the same time scale",
        ),
        (
            "trec.collapse.itself",
            "finding",
            lambda correlation: correlation("base"),
            "Correlation of the base setting's curve with itself, across halves of the seeds",
        ),
    )
    return [
        curve_claim(
            id,
            float(statistic(lambda label: _across(binned, label, _half_means(halves)))[0]),
            statistic(lambda label: _across(binned, label, weights))[place]
            if known
            else np.full(len(place), np.nan),
            statistic(lambda label: _by_seed(binned, label, halves)),
            halves,
            correlation=kind == "finding",
            kind=kind,
            statement=statement,
            source=_SOURCE,
            bound=0.0 if kind == "claim" else None,
            direction=">=",
        )
        for id, kind, statistic, statement in rows
    ]


def _figure(config: CollapseConfig, binned: Mapping[str, np.ndarray], others: list[str]) -> Figure:
    """Curves by shape alone: centred, and scaled to deviation 1."""
    centres = bin_centres(config.num_bins)
    panels: dict[bool, list[Series]] = {True: [], False: []}
    for label, curves in binned.items():
        mean = curves.mean(axis=0)
        shape = (mean - mean.mean()) / mean.std()
        if label not in others:
            panels[True].append(Series(label, centres, shape))
        if label in others or label == "base":
            panels[False].append(Series(label, centres, shape))
    return Figure(
        "collapse",
        "One time scale, one curve",
        [
            Panel(
                "training fraction t/T",
                "TREC, standardised",
                series,
                title=f"tau = {config.tau:g} for all" if equal else "other time scales",
            )
            for equal, series in panels.items()
        ],
        "Measured curves, mean over seeds, centred and scaled to standard deviation 1, since "
        "their depth differs. (a) settings with the same time scale, (b) with others.",
    )
