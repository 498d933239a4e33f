"""Settings of TREC's tools, which train nothing: plan, recipes, measure."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from jaxlab.errors import UserError
from jaxlab.experiments.base import RunConfig, configuration, identity_digest, option

__all__ = ["MeasureConfig", "PlanConfig", "RecipesConfig"]

_M = "Training-fraction exponent; null: the law, from tokens per parameter and time scale."


@configuration
class PlanConfig(RunConfig):
    """From a training recipe to a curriculum."""

    keeps_results: ClassVar[bool] = False  # the recipe may have changed

    method: Annotated[Literal["trec"], option("This method.")] = "trec"
    variant: Annotated[Literal["plan"], option("This tool.")] = "plan"
    recipe: Annotated[
        str, option("A recipe's YAML file, or the name of a shipped one.", min_length=1)
    ] = "olmo2-13b"
    fraction: Annotated[
        float, option("Share of the run that has high-quality data.", gt=0, le=1)
    ] = 0.1
    fraction_of: Annotated[Literal["steps", "tokens"], option("What that is a share of.")] = "steps"
    m: Annotated[float | None, option(_M, ge=0, le=100)] = None
    power: Annotated[float, option("Exponent p of the EMA coefficient.", gt=0, le=4)] = 0.5
    phase: Annotated[
        int | None,
        option("Analyse this phase alone, from 0: continued pre-training; null: all.", ge=0),
    ] = None
    mixture_steps: Annotated[
        int | None,
        option("Steps of the mixture file; null: the recipe's.", ge=1, le=100_000_000),
    ] = None
    replicates: Annotated[
        int, option("A plan is computed, not measured: one.", role="extent", ge=1, le=1)
    ] = 1


@configuration
class RecipesConfig(RunConfig):
    """Where published recipes put their best data, and where the prediction would have."""

    keeps_results: ClassVar[bool] = False  # shipped ones may have changed

    method: Annotated[Literal["trec"], option("This method.")] = "trec"
    variant: Annotated[Literal["recipes"], option("This tool.")] = "recipes"
    m: Annotated[float | None, option(_M, ge=0, le=100)] = None
    power: Annotated[float, option("Exponent p of the EMA coefficient.", gt=0, le=4)] = 0.5
    replicates: Annotated[
        int, option("Recipes are computed, not measured: one.", role="extent", ge=1, le=1)
    ] = 1


@configuration
class MeasureConfig(RunConfig):
    """The curve of a finished run, from its own checkpoint and data."""

    keeps_results: ClassVar[bool] = False  # the run may have been extended

    method: Annotated[Literal["trec"], option("This method.")] = "trec"
    variant: Annotated[Literal["measure"], option("This tool.")] = "measure"
    num_bins: Annotated[
        int, option("Equal bins of the curve; must divide the run's steps.", ge=4, le=100_000)
    ] = 20
    power: Annotated[float, option("Exponent p of the EMA coefficient.", gt=0, le=4)] = 0.5
    reference: Annotated[
        Literal["next", "none"],
        option("Subtract the loss of the run's next replicate, or none (paper)."),
    ] = "next"
    program: Annotated[
        str | None,
        option("Which of the run's programs, by name; null: the first.", min_length=1),
    ] = None
    replicates: Annotated[
        int, option("The replicates are the run's.", role="extent", ge=1, le=1)
    ] = 1
    steps_per_item: Annotated[
        int,
        option("Batches that are read and evaluated at once.", role="execution", ge=1, le=65_536),
    ] = 64

    def output_folder(self) -> str:
        """Inside the measured run's folder."""
        if self.run_dir is None:
            raise UserError("run_dir", "null", "variant=measure needs a finished run's folder")
        return f"{self.run_dir.rstrip('/')}/trec/{identity_digest(self)}"
