"""Studies of TREC: many settings as the trials of one program for each shape."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxlab.experiments.trec.studies import collapse, law, placement, schedules
from jaxlab.experiments.trec.study_config import (
    CollapseConfig,
    CptConfig,
    LawConfig,
    PlacementConfig,
    SchedulesConfig,
    StudyConfig,
)
from jaxlab.reporting.report import Result
from jaxlab.training.program import Program

__all__ = ["build", "conclude"]


def build(config: StudyConfig) -> list[Program]:
    """The programs of a study."""
    match config:
        case SchedulesConfig():
            return schedules.build(config)
        case CollapseConfig():
            return collapse.build(config)
        case LawConfig():
            return law.build(config)
        case PlacementConfig() | CptConfig():
            return placement.build(config)
    raise TypeError(f"no study of {type(config).__name__}")


def conclude(config: StudyConfig, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Result:
    """What the arrays `[trial, replicate, ...]` of the programs say."""
    match config:
        case SchedulesConfig():
            return schedules.conclude(config, arrays)
        case CollapseConfig():
            return collapse.conclude(config, arrays)
        case LawConfig():
            return law.conclude(config, arrays)
        case PlacementConfig() | CptConfig():
            return placement.conclude(config, arrays)
    raise TypeError(f"no study of {type(config).__name__}")
