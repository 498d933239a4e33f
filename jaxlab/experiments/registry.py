"""The methods that can be run, in one static table.

It is read before anything heavy is imported: by `--help`, by the validation of the command line
and by the README's status table.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from types import ModuleType

from jaxlab.errors import UserError
from jaxlab.experiments.base import RunConfig

__all__ = ["METHODS", "Method", "config_class", "experiment_module", "find_method", "nearest"]


@dataclasses.dataclass(frozen=True)
class Method:
    """A method's entry.

    Attributes:
      slug: what follows `method=`, and the name of its folder under `jaxlab/experiments/`.
      summary: one line for `--help`.
      variants: its studies; the first is the default.
      presets: the sizes it ships.
    """

    slug: str
    summary: str
    variants: tuple[str, ...]
    presets: tuple[str, ...] = ("test", "cpu")


METHODS: dict[str, Method] = {
    entry.slug: entry
    for entry in (
        Method(
            "trec",
            "Predict from AdamW alone which training batches the final model remembers best",
            (
                "text",
                "mlp",
                "schedules",
                "collapse",
                "law",
                "placement",
                "cpt",
                "recipes",
                "plan",
                "measure",
            ),
        ),
    )
}


def nearest(value: str, allowed: list[str] | tuple[str, ...]) -> str:
    """The end of an error message: the nearest match, if there is one, and all that is allowed.

    >>> nearest("trek", ["trec", "freekv"])
    'did you mean trec? Allowed: trec, freekv'
    """
    close = difflib.get_close_matches(value, allowed, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}{'Allowed' if hint else 'allowed'}: {', '.join(allowed)}"


def find_method(slug: str) -> Method:
    """The entry of a method.

    Raises:
      UserError: there is no such method; the message names the nearest one.
    """
    if slug not in METHODS:
        raise UserError("method", slug, f"unknown method; {nearest(slug, list(METHODS))}")
    return METHODS[slug]


def config_class(slug: str, variant: str | None = None) -> type[RunConfig]:
    """The configuration class of a method's study. Imports pydantic, never JAX.

    Args:
      slug: the method.
      variant: one of its studies; None, or one that there is not, stands for the first.
    """
    default = find_method(slug).variants[0]
    classes = importlib.import_module(f"jaxlab.experiments.{slug}.config").CONFIGS
    return classes.get(variant, classes[default])


def experiment_module(slug: str) -> ModuleType:
    """The module with a method's `build` and `conclude`. Imports JAX."""
    find_method(slug)
    return importlib.import_module(f"jaxlab.experiments.{slug}.experiment")
