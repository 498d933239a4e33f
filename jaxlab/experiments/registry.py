"""The methods and tools that can be run, in static tables.

They are read before anything heavy is imported: by `--help`, by the validation of the command line
and by the README's status table.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Iterable, Mapping
from types import ModuleType

from jaxlab.errors import UserError
from jaxlab.experiments.base import CommandConfig

__all__ = [
    "METHODS",
    "TOOLS",
    "Method",
    "config_class",
    "experiment_module",
    "find_method",
    "implied_variant",
    "nearest",
    "tool_module",
]


@dataclasses.dataclass(frozen=True)
class Method:
    """A method's or tool's entry.

    Attributes:
      slug: what follows `method=`, and the name of its folder under `jaxlab/experiments/`.
      summary: one line for `--help`.
      variants: its studies; the first is the default.
      presets: the sizes it ships.
      implied: fields, or groups of fields, of one study alone, which choose it where no `variant=`
        does.
    """

    slug: str
    summary: str
    variants: tuple[str, ...]
    presets: tuple[str, ...] = ("test", "cpu")
    implied: Mapping[str, str] = dataclasses.field(default_factory=dict)


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
        Method(
            "gnll",
            "Tell a language model's wrong answers from the probability of its greedy one",
            ("study", "stress", "model"),
            implied={"model": "model", "data": "model", "judge": "model"},
        ),
    )
}


TOOLS: dict[str, Method] = {
    entry.slug: entry
    for entry in (
        Method("generate", "Text from a pretrained or trained language model", ("text",)),
    )
}
"""What makes no claims and keeps no run."""


def nearest(value: str, allowed: list[str] | tuple[str, ...]) -> str:
    """The end of an error message: the nearest match, if there is one, and all that is allowed.

    >>> nearest("trek", ["trec", "freekv"])
    'did you mean trec? Allowed: trec, freekv'
    """
    close = difflib.get_close_matches(value, allowed, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}{'Allowed' if hint else 'allowed'}: {', '.join(allowed)}"


def find_method(slug: str) -> Method:
    """The entry of a method or tool.

    Raises:
      UserError: there is no such method; the message names the nearest one.
    """
    known = {**METHODS, **TOOLS}
    if slug not in known:
        raise UserError("method", slug, f"unknown method; {nearest(slug, list(known))}")
    return known[slug]


def implied_variant(slug: str, names: Iterable[str]) -> str | None:
    """The study that a method's fields choose by being named; None if they leave it open.

    >>> implied_variant("gnll", ["seed", "judge.kind"])
    'model'
    """
    implied = find_method(slug).implied
    return next((implied[g] for name in names if (g := name.partition(".")[0]) in implied), None)


def config_class(slug: str, variant: str | None = None) -> type[CommandConfig]:
    """The configuration class of a method's study, or of a tool. Imports pydantic, never JAX.

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


def tool_module(slug: str) -> ModuleType:
    """The module with a tool's `run`, from its configuration to an exit code. May import JAX."""
    return importlib.import_module(f"jaxlab.experiments.{slug}.tool")
