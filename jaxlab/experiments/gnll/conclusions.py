"""What the studies with trained models say of the paper's claims. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxlab.data.closed_book import Phrasing
from jaxlab.experiments.gnll import closed_book, trees
from jaxlab.experiments.gnll.config import ClosedBookConfig, StressConfig, StudyConfig
from jaxlab.experiments.gnll.estimators import BASELINES, ESTIMATORS, generations
from jaxlab.reporting.claims import Claim, Kind, claim_from_values, t_interval
from jaxlab.reporting.figures import Figure, Panel, Series
from jaxlab.reporting.report import Result

__all__ = ["STRESS_TASKS", "STUDY_TASKS", "conclude_stress", "conclude_study"]

STUDY_TASKS: dict[str, Phrasing] = {"short": "none", "long": "even"}
"""Answers alone, and answers after one of a few phrasings."""
STRESS_TASKS: dict[str, Phrasing] = {"stress": "by_confidence"}

_PAPER = (
    "arXiv 2412.15176: mean AUROC 0.721 (G-NLL) and 0.707 (D-SE, best of 10-sample measures) over "
    "18 settings of 6 models and 6 tasks"
)
_ABLATION = "arXiv 2412.15176, ablations, in words; no numbers known here"


def conclude_study(config: StudyConfig, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Result:
    """Trees and trained models.

    Args:
      config: all settings.
      arrays: by program, `[trial, replicate, ...]`.
    """
    found = _all_scores(config, STUDY_TASKS, arrays[closed_book.NAME])
    tree = arrays[trees.NAME]
    return Result(
        method="gnll",
        variant=config.variant,
        metrics=_metrics(found) | trees.metrics(config.tree, tree),
        claims=(*_claims(config, found), *trees.claims(config.tree, tree)),
        figures=(_figure(config, found), trees.figure(config.tree, tree)),
        notes=_notes(config, found),
    )


def conclude_stress(config: StressConfig, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Result:
    """Where the measure fails.

    Args:
      config: all settings.
      arrays: by program, `[trial, replicate, ...]`.
    """
    found = _all_scores(config, STRESS_TASKS, arrays[closed_book.NAME])
    scores = found["stress"].auroc
    source = "limit of the claim, not in the paper"
    many = config.world.num_phrasings
    claims = (
        _claim(
            "gnll.stress",
            scores["d_se"] - scores["g_nll"],
            "finding",
            None,
            f"D-SE's AUROC less G-NLL's where right answers can begin in {many} ways and wrong "
            "ones in one: the probability of one text says little of its meaning.",
            source,
        ),
        _claim(
            "gnll.stress.g_nll",
            scores["g_nll"],
            "finding",
            None,
            "G-NLL's AUROC there; below 0.5 it takes right answers for the less certain ones.",
            source,
        ),
    )
    return Result(
        method="gnll",
        variant=config.variant,
        metrics=_metrics(found),
        claims=claims,
        figures=(_figure(config, found),),
        notes=_notes(config, found),
    )


def _all_scores(
    config: ClosedBookConfig,
    tasks: Mapping[str, Phrasing],
    arrays: Mapping[str, np.ndarray],
) -> dict[str, closed_book.Scores]:
    return {
        task: closed_book.scores(
            config, phrasing, {name: value[index] for name, value in arrays.items()}
        )
        for index, (task, phrasing) in enumerate(tasks.items())
    }


def _mean_over_tasks(found: Mapping[str, closed_book.Scores], name: str) -> np.ndarray:
    """AUROC of a measure, `[replicate]`."""
    return np.mean([scores.auroc[name] for scores in found.values()], axis=0)


def _claims(config: StudyConfig, found: Mapping[str, closed_book.Scores]) -> list[Claim]:
    number = config.num_samples
    own = _mean_over_tasks(found, "g_nll")
    best = np.mean(
        [np.max([scores.auroc[name] for name in BASELINES], axis=0) for scores in found.values()],
        axis=0,
    )
    labels = ", ".join(ESTIMATORS[name].label for name in BASELINES)
    piloted = f"{_PAPER}; bound piloted here"
    return [
        _claim(
            "gnll.qa.auroc",
            own - best,
            "claim",
            -0.01,
            f"G-NLL's AUROC (1 generation) less the best of {labels} ({number} generations), which "
            "is chosen anew for every task and seed; mean of the short and the long task.",
            piloted,
        ),
        _claim(
            "gnll.qa.auroc.entropy",
            own - _mean_over_tasks(found, "pe"),
            "claim",
            0.03,
            f"G-NLL's AUROC (1 generation) less PE's ({number} generations).",
            piloted,
        ),
        _claim(
            "gnll.qa.auroc.sampled",
            own - _mean_over_tasks(found, "sampled_nll"),
            "claim",
            0.0,
            "G-NLL's AUROC less that of the negative log-likelihood of one sampled answer.",
            _ABLATION,
        ),
        _claim(
            "gnll.qa.length",
            own - _mean_over_tasks(found, "ln_g_nll"),
            "finding",
            None,
            "G-NLL's AUROC less that of G-NLL divided by the number of tokens.",
            f"{_ABLATION}: normalising by length hurts",
        ),
    ]


def _claim(
    id: str, values: np.ndarray, kind: Kind, bound: float | None, statement: str, source: str
) -> Claim:
    if np.isnan(values).any():
        statement += " AUROC is undefined for a seed whose answers are all right or all wrong."
    return claim_from_values(
        id,
        values,
        bound=bound,
        direction=">=",
        kind=kind,
        statement=statement,
        source=source,
    )


def _metrics(found: Mapping[str, closed_book.Scores]) -> dict[str, float]:
    metrics = {}
    for task, scores in found.items():
        metrics[f"{task}.accuracy"] = float(scores.accuracy.mean())
        for name, values in scores.auroc.items():
            if not np.isnan(values).any():
                metrics[f"{task}.auroc.{name}"] = float(values.mean())
    return metrics


def _notes(config: ClosedBookConfig, found: Mapping[str, closed_book.Scores]) -> tuple[str, ...]:
    notes = [
        f"Uncertainty of {config.world.num_entities} greedy answers a seed; AUROC: does it tell "
        "wrong answers from right ones. Meanings are equal words, whatever phrasing precedes them.",
        f"Generations a question: G-NLL and sampled NLL 1, other measures of samples "
        f"{config.num_samples}.",
    ]
    for task, scores in found.items():
        undefined = [config.seed + i for i in np.flatnonzero(np.isnan(scores.auroc["g_nll"]))]
        if undefined:
            seeds = ", ".join(map(str, undefined))
            notes.append(
                f"Task {task}, seed {seeds}: all answers are right or all are wrong, so AUROC is "
                "undefined."
            )
    if config.replicates < 2:
        notes.append("1 replicate: there are no intervals; 5 or more are advised.")
    return tuple(notes)


def _figure(config: ClosedBookConfig, found: Mapping[str, closed_book.Scores]) -> Figure:
    """AUROC of every measure, a panel for each task."""
    panels = []
    for task, scores in found.items():
        names = list(scores.auroc)
        labels = [
            f"{ESTIMATORS[name].label} ({generations(name, config.num_samples)})" for name in names
        ]
        means = [scores.auroc[name].mean() for name in names]
        ends = np.array([t_interval(scores.auroc[name]) for name in names])
        # Of few seeds the interval goes beyond what an AUROC can be.
        low, high = (np.where(np.isfinite(e), np.clip(e, 0, 1), np.nan) for e in ends.T)
        points = Series("measured", labels, means, low, high, style="points")
        chance = Series("chance", labels, [0.5] * len(labels), style="dashed")
        accuracy = scores.accuracy.mean()
        panels.append(
            Panel(
                "measure",
                "AUROC",
                [points, chance],
                title=f"{task} answers, {accuracy:.0%} of them right",
            )
        )
    return Figure(
        "auroc",
        "Which measure tells wrong answers from right ones",
        panels,
        f"Mean and 95 % interval over {config.replicates} seeds, cut at 0 and 1; in brackets the "
        "generations a question.",
    )
