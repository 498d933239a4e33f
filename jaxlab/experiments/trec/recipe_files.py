"""Training recipes as YAML files, and mixtures made of what is planned from them."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

import yaml

from jaxlab.errors import UserError
from jaxlab.experiments.registry import nearest
from jaxlab.methods.trec import Phase, Recipe, recipe_steps

__all__ = ["load_recipe", "shipped_recipes", "write_mixture_text"]

_FIELD = "recipe"
_FOLDER = Path(__file__).parent / "recipes"
_MAX_BYTES = 1_000_000
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*([kMBT]?)")
_UNITS = {"": 0, "k": 3, "M": 6, "B": 9, "T": 12}


def shipped_recipes() -> tuple[str, ...]:
    """The names of the recipes that come with this library, for `load_recipe`."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def load_recipe(path_or_name: Path | str) -> Recipe:
    """A recipe from a YAML file.

    The file holds the attributes of `Recipe`, and in `phases` a list of those of `Phase`; what has
    a default there may be left out, and so may `name`, which is the file's by default. Numbers of
    tokens, parameters and steps may end in k, M, B or T (10^3, 10^6, 10^9, 10^12); batch sizes that
    change are a list `[[start, size], ...]`.

    Args:
      path_or_name: the file, or one of `shipped_recipes`.

    Raises:
      UserError: the file cannot be read, or is no such recipe; names the file and the place.
    """
    reader = _Reader(str(path_or_name))
    path = Path(path_or_name)
    if str(path_or_name) in shipped_recipes():
        path = _FOLDER / f"{path_or_name}.yaml"
    tree = reader.load(path)
    fields = reader.fields(tree, _RECIPE, "")
    phases = fields.pop("phases", [])
    fields["phases"] = tuple(
        reader.build(Phase, reader.fields(phase, _PHASE, f"phases[{i}]."), f"phases[{i}].")
        for i, phase in enumerate(phases)
    )
    recipe = reader.build(Recipe, {"name": path.stem} | fields, "")
    reader.build(recipe_steps, {"recipe": recipe}, "")
    return recipe


def write_mixture_text(window: tuple[float, float], num_steps: int) -> str:
    """A mixture file's text: the second source inside of a window, the first outside.

    Args:
      window: start and stop as shares of the run's steps, in [0, 1].
      num_steps: steps of the run that is to read it, at least 1.

    Returns:
      JSON for `jaxlab.data.mixing.read_mixture`. The window is rounded to whole steps, and has at
      least one.

    Raises:
      ValueError: an argument is out of range.

    >>> write_mixture_text((0.6, 0.7), 1000)
    '{"num_steps": 1000, "segments": [[600, 700, 1]], "default": 0}\\n'
    """
    start, stop = window
    if not 0 <= start < stop <= 1:
        raise ValueError(f"window={window}: must satisfy 0 <= start < stop <= 1")
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps}: must be at least 1")
    # The length is rounded once: both ends by themselves could change the budget.
    length = max(1, round((stop - start) * num_steps))
    first = min(round(start * num_steps), num_steps - length)
    tree = {"num_steps": num_steps, "segments": [[first, first + length, 1]], "default": 0}
    return json.dumps(tree) + "\n"


class _Loader(yaml.SafeLoader):
    """Safe, and strict about keys that are given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"the key {key.value} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Reader:
    """Turns what a file says into arguments; every mistake names the file and the place."""

    def __init__(self, name: str) -> None:
        self.name = name

    def fail(self, problem: str) -> NoReturn:
        raise UserError(_FIELD, self.name, problem) from None

    def load(self, path: Path) -> Any:
        """The file's content."""
        try:
            if path.stat().st_size > _MAX_BYTES:
                self.fail(f"is larger than {_MAX_BYTES} bytes: must be a recipe in YAML")
            # A SafeLoader: it builds plain values only, and refuses tags.
            return yaml.load(path.read_text(encoding="utf-8"), _Loader)
        except FileNotFoundError:
            allowed = nearest(self.name, shipped_recipes())
            self.fail(f"there is no such file, and no shipped recipe of that name; {allowed}")
        except OSError as error:
            self.fail(f"cannot be read ({error.strerror or error})")
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            place = "" if mark is None else f"line {mark.line + 1} column {mark.column + 1}: "
            self.fail(f"is not YAML ({place}{' '.join(str(error.problem).split())})")
        except (yaml.YAMLError, ValueError, RecursionError):
            self.fail("is not YAML in UTF-8")

    def fields(self, tree: Any, kinds: Mapping[str, _Kind], place: str) -> dict[str, Any]:
        """The values of a mapping by name, each of its kind."""
        where = place.rstrip(".") or "the file"
        if not isinstance(tree, dict):
            self.fail(f"{where} is {_short(tree)}: must hold {', '.join(kinds)}")
        for key in tree:
            if key not in kinds:
                problem = f"{place}{key} is no field of a recipe"
                self.fail(f"{problem}; {nearest(str(key), list(kinds))}")
        found = {}
        for key, kind in kinds.items():
            if tree.get(key) is not None:
                try:
                    found[key] = kind(tree[key])
                except ValueError as error:
                    self.fail(f"{place}{key} is {_short(tree[key])}: must be {error}")
        for key in ("schedule", "batch_tokens", "weight_decay", "parameters", "phases"):
            if key in kinds and key not in found:
                self.fail(f"{place}{key} is missing")
        return found

    def build(self, make: Callable[..., Any], fields: dict[str, Any], place: str) -> Any:
        """What `make` makes of the fields; its ValueError names one of them and its value."""
        try:
            return make(**fields)
        except ValueError as error:
            found = re.fullmatch(r"([\w.\[\]]+)=(.*?): (.*)", str(error), re.DOTALL)
            text = "{} is {}: {}".format(*found.groups()) if found else str(error)
            self.fail(f"{place}{text}")


_Kind = Callable[[Any], Any]


def _short(value: Any) -> str:
    """The value in little room, however deep its aliases nest it."""
    return reprlib.repr(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text")
    return " ".join(value.split())


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _match(value: Any) -> re.Match[str] | None:
    if not isinstance(value, int | float | str):
        return None
    return _NUMBER.fullmatch(str(value).strip().replace("_", ""))


def _number(value: Any) -> float:
    # YAML takes 1e-3, without a point, for a text.
    found = _match(value)
    if found is None or found[2]:
        raise ValueError("a number, e.g. 3e-4")
    return float(found[1])


def _size(value: Any) -> float:
    found = _match(value)
    if found is None:
        raise ValueError("a number, e.g. 4000, 4M or 5T (k, M, B, T: 10^3, 10^6, 10^9, 10^12)")
    size = float(Decimal(found[1]).scaleb(_UNITS[found[2]]))
    if not math.isfinite(size):
        raise ValueError("finite")
    return size


def _whole(value: Any) -> int:
    size = _size(value)
    if size != int(size):
        raise ValueError("a whole number, e.g. 2000 or 1.2M")
    return int(size)


def _pairs(value: Any) -> tuple[tuple[float, float], ...]:
    if not isinstance(value, list) or any(not isinstance(x, list) or len(x) != 2 for x in value):
        raise ValueError("a list of pairs, e.g. [[0, 4M], [252M, 8M]]")
    return tuple((_size(first), _size(second)) for first, second in value)


def _batches(value: Any) -> float | tuple[tuple[float, float], ...]:
    return _pairs(value) if isinstance(value, list) else _size(value)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list")
    return value


_PHASE: dict[str, _Kind] = {
    "schedule": _text,
    "batch_tokens": _batches,
    "weight_decay": _number,
    "steps": _whole,
    "tokens": _size,
    "peak_lr": _number,
    "final_lr": _number,
    "start_lr": _number,
    "warmup_steps": _whole,
    "horizon": _size,
    "step_at": _number,
    "decay_fraction": _number,
    "num_cycles": _whole,
    "decay_scaled_by_lr": _flag,
    "high_quality": _flag,
}

_RECIPE: dict[str, _Kind] = {
    "name": _text,
    "source": _text,
    "assumed": _text,
    "parameters": _size,
    "parameter_kind": _text,
    "num_experts": _whole,
    "experts_per_token": _whole,
    "high_quality": _pairs,
    "high_quality_unit": _text,
    "b1": _number,
    "phases": _list,
}
