"""Studies: where good data helps most, in one run and in continued pre-training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxlab.experiments.trec.studies.common import (
    Setting,
    chains,
    make_setting,
    schedule_rates,
    study_program,
    tokens_per_parameter,
)
from jaxlab.experiments.trec.study_config import CptConfig, PlacementConfig
from jaxlab.methods import trec
from jaxlab.reporting.claims import Claim, Kind, claim_from_values, t_interval
from jaxlab.reporting.figures import Figure, Panel, Series
from jaxlab.reporting.report import Result
from jaxlab.training.program import Program

__all__ = ["build", "conclude", "target_examples"]

_NAME = "placement"
_EVEN, _NONE = "even", "none"
_LEAST_SEGMENTS = 5
_PAPER = (
    "arXiv 2509.25380, placement at 610M: under step decay the best of ten segments is the one "
    "before the drop, the end is worse, all beat uniform mixing; no losses given; piloted here"
)
_PAPER_CPT = (
    "arXiv 2509.25380, continued pre-training at 3.9B: good data in the middle beats good data at "
    "the end for every learning rate; no losses given; piloted here"
)


class _Arm(NamedTuple):
    """One trial.

    Attributes:
      schedule: of the part of the run in which data are placed.
      place: the segment, from 0, or `even` or `none`.
    """

    schedule: str
    place: int | str


def _schedules(config: PlacementConfig | CptConfig) -> tuple[str, ...]:
    return config.schedules if isinstance(config, PlacementConfig) else ("d2z",)


def _arms(config: PlacementConfig | CptConfig) -> list[_Arm]:
    places: list[int | str] = [*range(config.num_segments), _EVEN, _NONE]
    return [_Arm(schedule, place) for schedule in _schedules(config) for place in places]


def _pretrain_steps(config: PlacementConfig | CptConfig) -> int:
    return config.pretrain_steps if isinstance(config, CptConfig) else 0


def _setting(config: PlacementConfig | CptConfig, arm: _Arm) -> Setting:
    own = make_setting(config, arm.schedule, config.tau, config.steps, label=str(arm.place))
    if not isinstance(config, CptConfig):
        return own
    steps, peak = config.pretrain_steps, config.optimizer.peak_lr
    before = trec.weight_decay_for_timescale(config.pretrain_tau, peak, steps)
    return Setting(
        own.label,
        np.concatenate([schedule_rates(config, "linear", steps), own.learning_rate]),
        np.concatenate([np.full(steps, before), np.full(config.steps, own.weight_decay)]),
    )


def target_examples(
    place: int | str, num_steps: int, num_segments: int, batch_size: int
) -> np.ndarray:
    """How many examples of each step's batch are high-quality.

    Args:
      place: the segment that holds nothing else, or `even`: every batch holds its share, or
        `none`.
      num_steps: steps of the run.
      num_segments: equal parts of the run; all placements but `none` use as much as one holds.
      batch_size: examples in a batch.

    Returns:
      int64 `[num_steps]`.

    >>> [target_examples(place, 4, 2, 3).tolist() for place in (0, 1, "even", "none")]
    [[3, 3, 0, 0], [0, 0, 3, 3], [1, 2, 1, 2], [0, 0, 0, 0]]
    """
    total = num_steps // num_segments * batch_size
    if place == _NONE:
        return np.zeros(num_steps, np.int64)
    if place == _EVEN:
        return np.diff(np.arange(num_steps + 1) * total // num_steps)
    counts = np.zeros((num_segments, num_steps // num_segments), np.int64)
    counts[int(place)] = batch_size
    return counts.reshape(-1)


def build(config: PlacementConfig | CptConfig) -> list[Program]:
    """One program; its trials are the schedules times the placements."""
    arms, before = _arms(config), _pretrain_steps(config)
    size = config.batch_size
    data = chains(config, size)
    counts = np.stack(
        [
            np.pad(target_examples(arm.place, config.steps, config.num_segments, size), (before, 0))
            for arm in arms
        ]
    )
    # The high-quality examples are read in order, so every placement sees the same ones.
    read = counts.cumsum(axis=1) - counts

    def batches(trial: int, seed: int, step: int) -> np.ndarray:
        base, count = data.base(seed, step), int(counts[trial, step])
        if not count:
            return base
        first = int(read[trial, step])
        places = np.arange(first, first + count)
        rows = [
            data.target(seed, int(index))[places[places // size == index] % size]
            for index in np.unique(places // size)
        ]
        return np.concatenate([*rows, base[count:]])

    settings = [_setting(config, arm) for arm in arms]
    return [study_program(config, _NAME, settings, batches=batches, targets=True, replay=False)]


def conclude(
    config: PlacementConfig | CptConfig, arrays: Mapping[str, Mapping[str, np.ndarray]]
) -> Result:
    """Compares the placements' held-out loss on high-quality data with the prediction.

    Args:
      config: all settings.
      arrays: of the one program.

    Returns:
      Claims `trec.placement.step`, `.step.even` and `trec.placement.predicted`, or `trec.cpt`;
      findings; bars of all placements with the predicted window shaded.
    """
    found = arrays[_NAME]
    arms = _arms(config)
    target, base = (
        dict(zip(arms, found[name], strict=True)) for name in ("target/loss", "validation/loss")
    )
    predicted = {
        schedule: _predicted_segment(config, found["alphas"][arms.index(_Arm(schedule, _NONE)), 0])
        for schedule in _schedules(config)
    }
    if isinstance(config, PlacementConfig):
        claims = _placement_claims(config, target, predicted)
    else:
        claims = _cpt_claims(config, target, base, predicted)
    data = chains(config, config.batch_size)
    metrics = {"least possible loss on high-quality data (nats)": data.target_entropy}
    for schedule, segment in predicted.items():
        metrics[f"{schedule}: predicted segment"] = segment + 1
        losses = _segments(config, target, schedule).mean(axis=1)
        metrics[f"{schedule}: best segment"] = int(losses.argmin()) + 1
    return Result(
        method=config.method,
        variant=config.variant,
        metrics=metrics,
        claims=tuple(claims),
        figures=(_figure(config, target, predicted, data.target_entropy),),
        notes=(
            "Every placement sees the same high-quality examples, a share of "
            f"1/{config.num_segments}; even: spread over all batches. Losses are on held-out data.",
            *_notes(config, predicted),
        ),
        files={"losses.csv": _table(target, base)},
    )


def _exponent(config: PlacementConfig | CptConfig) -> float:
    if config.m is not None:
        return config.m
    return float(trec.SMALL_LM_LAW(tokens_per_parameter(config, config.steps), config.tau))


def _notes(config: PlacementConfig | CptConfig, predicted: Mapping[str, int]) -> list[str]:
    source = "given" if config.m is not None else "by the law of a small language model"
    notes = [f"The prediction uses m = {_exponent(config):.2f} ({source}), fixed before the runs."]
    if isinstance(config, CptConfig) and config.num_segments - 1 in predicted.values():
        notes.append("The predicted segment is the last one: trec.cpt has nothing to compare.")
    return notes


def _predicted_segment(config: PlacementConfig | CptConfig, alphas: np.ndarray) -> int:
    """The segment with the lowest predicted mean, from what the optimiser recorded.

    Of continued pre-training its own steps count alone; the pre-trained weights are its start.
    """
    coefficients = trec.ema_coefficients(alphas[-config.steps :].astype(np.float64))
    curve = trec.predict_trec(coefficients, m=_exponent(config), p=config.power)
    return int(trec.bin_curve(curve, config.num_segments)[0].argmin())


def _segments(
    config: PlacementConfig | CptConfig, target: Mapping[_Arm, np.ndarray], schedule: str
) -> np.ndarray:
    """Losses `[segment, replicate]` by where the good data were."""
    return np.stack([target[_Arm(schedule, i)] for i in range(config.num_segments)])


def _placement_claims(
    config: PlacementConfig, target: Mapping[_Arm, np.ndarray], predicted: Mapping[str, int]
) -> list[Claim]:
    claims = []
    if "step" in config.schedules:
        losses = _segments(config, target, "step")
        before = losses[round(config.optimizer.step_at * config.num_segments) - 1]
        even = target[_Arm("step", _EVEN)]
        rows = (
            ("trec.placement.step", losses[-1] - before, 0.3, "at the end"),
            ("trec.placement.step.even", even - before, 0.0, "evenly mixed"),
        )
        for id, values, bound, other in rows:
            statement = (
                f"Held-out loss on good data placed {other}, minus placed just before the drop "
                "of the learning rate (nats)"
            )
            claims.append(_claim(id, values, bound, statement, _PAPER))
    distances = {
        schedule: np.abs(_segments(config, target, schedule).argmin(axis=0) - segment)
        for schedule, segment in predicted.items()
    }
    statement = (
        "Distance of the best measured and the predicted segment, the largest of "
        f"{', '.join(distances)} (segments)"
    )
    largest = np.max(list(distances.values()), axis=0)
    # Among fewer segments most lie within one of each other.
    bound = 1.0 if config.num_segments >= _LEAST_SEGMENTS else None
    claims.append(
        _claim("trec.placement.predicted", largest, bound, statement, _PAPER, direction="<=")
    )
    for schedule, segment in predicted.items():
        losses = _segments(config, target, schedule)
        even = target[_Arm(schedule, _EVEN)]
        rows = (
            (f"trec.placement.{schedule}.end", losses[-1], "in the last segment"),
            (f"trec.placement.{schedule}.mixed", even, "evenly mixed"),
        )
        claims += [
            _claim(
                id,
                values - losses[segment],
                None,
                f"Held-out loss on good data placed {other}, minus placed in the predicted "
                f"segment, schedule {schedule} (nats)",
                _PAPER,
            )
            for id, values, other in rows
        ]
    return claims


def _cpt_claims(
    config: CptConfig,
    target: Mapping[_Arm, np.ndarray],
    base: Mapping[_Arm, np.ndarray],
    predicted: Mapping[str, int],
) -> list[Claim]:
    (schedule,) = predicted
    losses, segment = _segments(config, target, schedule), predicted[schedule]
    even, none = (target[_Arm(schedule, place)] for place in (_EVEN, _NONE))
    best = losses.argmin(axis=0)
    cost = base[_Arm(schedule, segment)] - base[_Arm(schedule, _NONE)]
    # A prediction of the last segment has nothing to be compared with: the claim is unclear.
    gain = losses[-1] - losses[segment] if segment < len(losses) - 1 else 0 * best + np.nan
    text = "Held-out loss on good data"
    return [
        _claim(
            "trec.cpt",
            gain,
            0.0,
            f"{text} placed in the last segment of continued pre-training, minus placed in the "
            "predicted one (nats)",
            _PAPER_CPT,
        ),
        _claim(
            "trec.cpt.predicted",
            np.abs(best - segment),
            None,
            "Distance of the best measured and the predicted segment (segments)",
            _PAPER_CPT,
            direction="<=",
        ),
        _claim(
            "trec.cpt.mixed",
            even - losses[segment],
            None,
            f"{text} evenly mixed, minus placed in the predicted segment (nats)",
            _PAPER_CPT,
        ),
        _claim(
            "trec.cpt.none",
            none - losses[segment],
            None,
            f"{text} never seen, minus placed in the predicted segment (nats)",
            _PAPER_CPT,
        ),
        _claim(
            "trec.cpt.forgetting",
            cost,
            None,
            "What the predicted segment costs on held-out base data, against none (nats)",
            _PAPER_CPT,
            direction="<=",
        ),
    ]


def _claim(
    id: str,
    values: np.ndarray,
    bound: float | None,
    statement: str,
    source: str,
    direction: str = ">=",
) -> Claim:
    kind: Kind = "finding" if bound is None else "claim"
    claim = claim_from_values(
        id,
        values,
        bound=bound,
        direction=direction,  # pyright: ignore[reportArgumentType]
        statement=statement,
        source=source,
        kind=kind,
    )
    if id.endswith("predicted") and np.isfinite(claim.low):  # a distance
        claim = dataclasses.replace(claim, low=max(claim.low, 0.0))
    return claim


def _table(target: Mapping[_Arm, np.ndarray], base: Mapping[_Arm, np.ndarray]) -> str:
    """All held-out losses as CSV; segments count from 1."""
    rows = ["schedule,place,replicate,loss_good,loss_base"]
    for arm, losses in target.items():
        place = arm.place + 1 if isinstance(arm.place, int) else arm.place
        for replicate, pair in enumerate(zip(losses, base[arm], strict=True)):
            numbers = ",".join(f"{value:.6f}" for value in pair)
            rows.append(f"{arm.schedule},{place},{replicate},{numbers}")
    return "\n".join(rows) + "\n"


def _figure(
    config: PlacementConfig | CptConfig,
    target: Mapping[_Arm, np.ndarray],
    predicted: Mapping[str, int],
    floor: float,
) -> Figure:
    panels = []
    for schedule, segment in predicted.items():
        losses = _segments(config, target, schedule)
        intervals = np.array([t_interval(row) for row in losses])
        low, high = np.where(np.isfinite(intervals), intervals, np.nan).T
        centres = np.arange(1, config.num_segments + 1)
        ends = [0.5, config.num_segments + 0.5]
        lines = [Series("in one segment", centres, losses.mean(axis=1), low, high, style="bar")]
        for place, label in ((_EVEN, "evenly mixed"), (_NONE, "none")):
            lines.append(
                Series(label, ends, [target[_Arm(schedule, place)].mean()] * 2, style="dashed")
            )
        lines.append(Series("least possible", ends, [floor] * 2))
        panels.append(
            Panel(
                f"segment of the run (of {config.num_segments})",
                "held-out loss on good data (nats)",
                lines,
                title=f"{schedule}, tau = {config.tau:g}",
                shaded=[(segment + 0.5, segment + 1.5, "predicted")],
            )
        )
    return Figure(
        config.variant,
        "Where good data helps most",
        panels,
        "Held-out loss after training with the good data in one segment; mean and 95 % interval "
        "over seeds. Shaded: the segment that the prediction names before any training.",
    )
