"""From the words of a command line, or of a Python call, to validated configurations.

Hydra composes (`configs/`), pydantic validates. Everything here happens before a folder is
created or JAX is imported, and every mistake becomes one `UserError`.
"""

from __future__ import annotations

import importlib.resources
import itertools
import pathlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from jaxlab.errors import UserError
from jaxlab.experiments import registry
from jaxlab.experiments.base import RunConfig, config_fields, flatten, to_dict

__all__ = [
    "command_of",
    "compose_config",
    "config_directory",
    "expand_sweep",
    "make_config",
    "prepare_overrides",
    "validate",
]

_CHOICES = ("method", "variant", "preset")
_GROUPS = ("scale",)
_DEFAULTS = {"method": "trec", "preset": "cpu"}
_MAX_PRODUCT = 100


def config_directory() -> pathlib.Path:
    """The folder of the YAML files: inside the installed package, or beside it in a checkout."""
    package = pathlib.Path(str(importlib.resources.files("jaxlab")))
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def register_defaults(methods: Iterable[str]) -> None:
    """Makes the dataclass defaults of these methods known to Hydra, as the group `defaults`."""
    store = ConfigStore.instance()
    for slug in methods:
        store.store(group="defaults", name=slug, node=to_dict(validate(slug, {})))


def prepare_overrides(words: Sequence[str], *, multirun: bool = False) -> list[str]:
    """Checks `field=value` words and translates them to Hydra's overrides.

    `method`, `variant` and `preset` become one choice of a file, free text is quoted, and every
    field's name is checked.

    Args:
      words: as typed, e.g. `["method=trec", "optimizer.peak_lr=1e-3"]`.
      multirun: whether a word may hold several values, separated by commas.

    Returns:
      Overrides for Hydra; the first one chooses the method file.

    Raises:
      UserError: a word is no assignment, or its field is unknown, or it has several values
        without `multirun`.
    """
    typed = dict(word.split("=", 1) for word in words if "=" in word)
    slugs = [text.strip() for text in typed.get("method", _DEFAULTS["method"]).split(",")]
    classes = [registry.config_class(slug) for slug in slugs]
    fields = {name: info for cls in classes for name, info in config_fields(cls).items()}
    parsed = [_parse(_quote_text(word, fields, multirun), multirun) for word in words]
    chosen: dict[str, list[str]] = {name: [value] for name, value in _DEFAULTS.items()}
    rest: list[str] = []
    for override in parsed:
        key = override.key_or_group
        if key in _CHOICES:
            chosen[key] = _values(override)
            continue
        _check_key(override, fields)
        rest.append(override.input_line or "")
    return [_method_choice(chosen), *rest]


def _parse(word: str, multirun: bool) -> Override:
    key, equals, value = word.partition("=")
    if not equals:
        raise UserError(word, "", "not an assignment; write field=value")
    if key.startswith(("+", "~")):
        raise UserError(key, value, f"write the field without {key[0]}")
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        first = str(error).splitlines()[0]
        raise UserError(
            key, value, f"cannot be read ({first}); quote it: {key}='\"...\"'"
        ) from None
    if override.is_sweep_override() and not multirun:
        raise UserError(key, value, "several values need -m (a sweep), or quotes if it is text")
    return override


def _quote_text(word: str, fields: Mapping[str, Any], multirun: bool) -> str:
    """Protects free text from Hydra's grammar: a folder's name may hold commas and spaces."""
    key, _, value = word.partition("=")
    info = fields.get(key)
    is_text = info is not None and str in (info.annotation, *get_args(info.annotation))
    if not is_text or not value or value == "null" or re.fullmatch(r"[\w./:@%-]+", value):
        return word
    if value[0] == value[-1] and value[0] in "'\"" and len(value) > 1:
        return word
    if multirun and key not in ("run_dir", "compilation_cache"):
        return word
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value).replace("${", "\\${")
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"{key}='{escaped}{trailing * chr(92)}'"


def _values(override: Override) -> list[str]:
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    return [str(override.get_value_element_as_str())]


def _check_key(override: Override, fields: Mapping[str, Any]) -> None:
    key = override.key_or_group
    if key in fields or key in _GROUPS or key.startswith(("hydra.", "hydra/")):
        return
    inside = [name for name in fields if name.startswith(f"{key}.")]
    if inside:
        value = (override.input_line or "").partition("=")[2]
        raise UserError(key, value, f"a group of fields: {', '.join(inside)}")
    known = [*_CHOICES, *_GROUPS, *fields]
    leaves = {name.rsplit(".", 1)[-1]: name for name in known}
    close = registry.nearest(key, known)
    if not close.startswith("did") and (leaf := leaves.get(key.rsplit(".", 1)[-1])):
        close = f"did you mean {leaf}? Allowed"
    hint = close.split(" Allowed")[0] if close.startswith("did") else "see --help for the fields"
    value = (override.input_line or "").partition("=")[2]
    raise UserError(key, value, f"unknown field; {hint}")


def _method_choice(chosen: Mapping[str, Sequence[str]]) -> str:
    """One Hydra choice `method=a/test,b/test` for the product of methods, variants and presets."""
    files: list[str] = []
    for slug, preset in itertools.product(chosen["method"], chosen["preset"]):
        entry = registry.find_method(slug)
        if preset not in entry.presets:
            problem = f"unknown preset of {slug}; {registry.nearest(preset, entry.presets)}"
            raise UserError("preset", preset, problem)
        for variant in chosen.get("variant", entry.variants[:1]):
            if variant not in entry.variants:
                problem = f"unknown variant of {slug}; {registry.nearest(variant, entry.variants)}"
                raise UserError("variant", variant, problem)
            special = variant != entry.variants[0]
            name = f"{slug}/{variant}/{preset}" if special else f"{slug}/{preset}"
            if not (config_directory() / "method" / f"{name}.yaml").is_file():
                raise UserError("preset", preset, f"not shipped for variant={variant} of {slug}")
            files.append(name)
    return "method=" + ",".join(files)


def compose_config(overrides: Sequence[str]) -> RunConfig:
    """Composes and validates one configuration.

    Args:
      overrides: from `prepare_overrides`, each with a single value.

    Raises:
      UserError: a choice does not exist, or a value is of the wrong type or out of its bounds.
    """
    slug = overrides[0].partition("=")[2].split("/")[0]
    register_defaults([slug])
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(config_directory()), version_base=None):
            composed = compose("run", list(overrides))
            tree = OmegaConf.to_container(composed, resolve=True)
    except MissingConfigException as error:
        group, _, value = (error.missing_cfg_file or "").rpartition("/")
        problem = registry.nearest(value, [str(name) for name in error.options or ()])
        raise UserError(group or "configs", value, f"unknown choice; {problem}") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError("command line", " ".join(overrides), str(error).splitlines()[0]) from None
    return validate(slug, tree)


def validate(slug: str, tree: Any) -> RunConfig:
    """A method's configuration from nested dicts.

    Raises:
      UserError: with the dotted field, its value and what is allowed.
    """
    cls = registry.config_class(slug)
    try:
        return TypeAdapter(cls).validate_python(tree)
    except ValidationError as error:
        raise _explain(error, cls) from None


def _explain(error: ValidationError, cls: type[RunConfig]) -> UserError:
    """The first problem as field, value and what is allowed."""
    fields = config_fields(cls)
    problems = error.errors()
    first = problems[0]
    if first["type"] == "value_error":  # raised by a configuration's own check, in our form
        field, _, rest = first["msg"].removeprefix("Value error, ").partition("=")
        value, _, allowed = rest.partition(": ")
        return UserError(field, value, allowed)
    # The location of a union goes on with the names of its members.
    names = [str(part) for part in first["loc"]]
    prefixes = [".".join(names[:n]) for n in range(len(names), 0, -1)]
    field = next((prefix for prefix in prefixes if prefix in fields), prefixes[0])
    if field not in fields:
        problem = f"unknown field; {registry.nearest(field, list(fields))}"
        return UserError(field, first["input"], problem)
    if first["type"] == "literal_error":
        options = [str(choice) for choice in get_args(fields[field].annotation)]
        return UserError(field, first["input"], registry.nearest(str(first["input"]), options))
    depth = field.count(".") + 1
    allowed = " or ".join(
        dict.fromkeys(_wish(p["msg"]) for p in problems if p["loc"][:depth] == first["loc"][:depth])
    )
    return UserError(field, first["input"], f"must {allowed}")


def _wish(message: str) -> str:
    """Pydantic's sentence as what follows "must".

    >>> _wish("Input should be a valid integer, unable to parse string as an integer")
    'be a valid integer'
    >>> _wish("String should have at least 1 character")
    'have at least 1 character'
    """
    return message.partition("should ")[2].partition(", unable to")[0] or message


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """The single-valued override lists of a sweep, in Hydra's order.

    Products beyond a hundred are checked value by value instead: the list then holds, for every
    value, one composition in which all other fields have their first value.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    choices = [
        [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
        if o.is_sweep_override()
        else [o.input_line or ""]
        for o in parsed
    ]
    product = 1
    for values in choices:
        product *= len(values)
    if product <= _MAX_PRODUCT:
        return [list(combination) for combination in itertools.product(*choices)]
    first = [values[0] for values in choices]
    return [
        [*first[:i], value, *first[i + 1 :]] for i, values in enumerate(choices) for value in values
    ]


def make_config(
    method: str, *, variant: str | None = None, preset: str = "cpu", **overrides: Any
) -> RunConfig:
    """A configuration from Python values: the preset's, changed by the keywords.

    Args:
      method: a registered method.
      variant: one of its studies; by default the first.
      preset: `test`, `cpu` or `paper`.
      **overrides: fields; nested ones as dicts (`optimizer={"peak_lr": 1e-3}`).

    Raises:
      UserError: as the command line would print it.
    """
    words = [f"method={method}", f"preset={preset}"]
    words += [f"variant={variant}"] if variant else []
    tree = to_dict(compose_config(prepare_overrides(words)))
    fields = config_fields(registry.config_class(method))
    for name, value in flatten(overrides).items():
        if name not in fields:
            raise UserError(name, value, f"unknown field; {registry.nearest(name, list(fields))}")
        *path, leaf = name.split(".")
        node = tree
        for part in path:
            node = node[part]
        node[leaf] = value
    return validate(method, tree)


def command_of(config: RunConfig) -> str:
    """The shell command that runs this configuration, without execution fields.

    >>> command_of(make_config("trec", preset="test", seed=7))
    'python -m jaxlab.run method=trec preset=test seed=7'
    """
    entry = registry.find_method(config.method)
    words = [f"method={config.method}"]
    words += [f"variant={config.variant}"] if config.variant != entry.variants[0] else []
    words += [f"preset={config.preset}"] if config.preset != _DEFAULTS["preset"] else []
    base = make_config(config.method, variant=config.variant, preset=config.preset)
    before, fields = flatten(to_dict(base)), config_fields(type(config))
    words += [
        f"{name}={'null' if value is None else value}"
        for name, value in flatten(to_dict(config)).items()
        if value != before[name] and fields[name].role != "execution"
    ]
    return shlex.join(["python", "-m", "jaxlab.run", *words])
