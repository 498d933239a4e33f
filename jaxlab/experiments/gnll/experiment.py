"""G-NLL: trees that are known exactly, trained models, a pretrained one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlab.experiments.base import RunConfig
from jaxlab.experiments.gnll import (
    closed_book,
    conclusions,
    pretrained,
    pretrained_results,
    trees,
)
from jaxlab.experiments.gnll.config import PretrainedConfig, StressConfig, StudyConfig
from jaxlab.reporting.report import Result

__all__ = ["build", "conclude"]


def build(config: RunConfig) -> list[Any]:
    """The programs of a study.

    Args:
      config: all settings.

    Returns:
      Of `study` one program that measures trees and one that trains; of `stress` one that trains;
      of `model` one that asks question by question.

    Raises:
      UserError: the questions or the model cannot be used, or it would not fit into memory.
    """
    if isinstance(config, PretrainedConfig):
        return [pretrained.build(config)]
    if isinstance(config, StressConfig):
        return [closed_book.build(config, tuple(conclusions.STRESS_TASKS.values()))]
    assert isinstance(config, StudyConfig)
    return [
        trees.build(config.tree),
        closed_book.build(config, tuple(conclusions.STUDY_TASKS.values())),
    ]


def conclude(config: RunConfig, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Result:
    """What the programs' arrays say.

    Args:
      config: all settings.
      arrays: by program, `[trial, replicate, ...]`.
    """
    if isinstance(config, PretrainedConfig):
        return pretrained_results.conclude(config, arrays)
    if isinstance(config, StressConfig):
        return conclusions.conclude_stress(config, arrays)
    assert isinstance(config, StudyConfig)
    return conclusions.conclude_study(config, arrays)
