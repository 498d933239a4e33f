"""The tools that compute from a recipe alone: `plan` and `recipes`."""

from __future__ import annotations

import dataclasses
import math

from jaxlab.errors import UserError
from jaxlab.experiments.trec.planning import plan_result, recipes_result
from jaxlab.experiments.trec.recipe_files import load_recipe, write_mixture_text
from jaxlab.experiments.trec.tool_config import PlanConfig, RecipesConfig
from jaxlab.methods import trec
from jaxlab.reporting.report import Result

__all__ = ["check", "conclude"]


def check(config: PlanConfig | RecipesConfig) -> None:
    """Whether the recipe can be read and has what is asked of it.

    Raises:
      UserError: it cannot, or has not.
    """
    if isinstance(config, RecipesConfig):
        return
    recipe = load_recipe(config.recipe)
    if config.phase is not None and config.phase >= len(recipe.phases):
        allowed = f"must be below the recipe's number of phases, {len(recipe.phases)}"
        raise UserError("phase", config.phase, allowed)
    try:
        report = trec.analyze_recipe(
            recipe,
            fraction=config.fraction,
            fraction_of=config.fraction_of,
            m=trec.SMALL_LM_LAW if config.m is None else config.m,
            p=config.power,
            phase=config.phase,
        )
    except ValueError as error:
        raise UserError("recipe", config.recipe, str(error)) from None
    if config.m is None and not math.isfinite(report.tau):
        allowed = "must be given: without weight decay there is no time scale for the law"
        raise UserError("m", "null", allowed)


def conclude(config: PlanConfig | RecipesConfig) -> Result:
    """What the prediction says; `plan` also writes `mixture.json`, for the data pipeline."""
    if isinstance(config, RecipesConfig):
        return recipes_result(m=config.m, power=config.power)
    result = plan_result(
        load_recipe(config.recipe),
        fraction=config.fraction,
        fraction_of=config.fraction_of,
        m=config.m,
        power=config.power,
        phase=config.phase,
    )
    steps = config.mixture_steps or int(result.metrics["steps"])
    window = result.metrics["best window start"], result.metrics["best window stop"]
    return dataclasses.replace(result, files={"mixture.json": write_mixture_text(window, steps)})
