"""From the words of a command line, or of a Python call, to validated configurations.

Hydra composes (`configs/`), pydantic validates. Everything here happens before a folder is
created or JAX is imported, and every mistake becomes one `UserError`.
"""

from __future__ import annotations

import copy
import functools
import importlib.resources
import itertools
import math
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args, get_origin

import yaml
from etils import epath
from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    Override,
    QuotedString,
    Transformer,
    ValueType,
)
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.errors import HydraException, MissingConfigException
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from jaxlab.errors import UserError
from jaxlab.experiments import registry
from jaxlab.experiments.base import (
    CommandConfig,
    FieldInfo,
    RunConfig,
    config_fields,
    flatten,
    to_dict,
)

__all__ = [
    "call_launcher",
    "command_of",
    "compose_command",
    "compose_config",
    "compose_configs",
    "config_directory",
    "expand_sweep",
    "load_config",
    "make_config",
    "prepare_overrides",
    "register_defaults",
    "validate",
]

_CHOICES = ("method", "variant", "preset")
_GROUPS = ("scale",)
_DEFAULTS = {"method": "trec", "preset": "cpu"}
_MAX_PRODUCT = 10_000
_HYDRA_KEYS = r"hydra/launcher|hydra\.launcher\..+"


def config_directory() -> pathlib.Path:
    """The folder of the YAML files: inside the installed package, or beside it in a checkout."""
    package = pathlib.Path(str(importlib.resources.files("jaxlab")))
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def register_defaults(methods: Iterable[str]) -> None:
    """Makes the dataclass defaults of these methods known to Hydra.

    Those of its first study are `defaults/<method>`, those of any other
    `defaults/<method>/<study>`.
    """
    store = ConfigStore.instance()
    for slug in methods:
        first, *others = registry.find_method(slug).variants
        store.store(group="defaults", name=slug, node=_defaults(slug, first))
        for variant in others:
            store.store(group=f"defaults/{slug}", name=variant, node=_defaults(slug, variant))


@functools.cache
def _defaults(slug: str, variant: str) -> dict[str, Any]:
    return to_dict(_validated(slug, {"variant": variant}))


def prepare_overrides(words: Sequence[str], *, multirun: bool = False) -> list[str]:
    """Checks `field=value` words and translates them to Hydra's overrides.

    `method`, `variant` and `preset` become one choice of a file, free text is quoted, and every
    field's name is checked. A field that one study alone has may choose the study
    (`registry.Method.implied`).

    Args:
      words: as typed, e.g. `["method=trec", "optimizer.peak_lr=1e-3"]`.
      multirun: whether a word may hold several values, separated by commas.

    Returns:
      Overrides for Hydra; the first one chooses the method file.

    Raises:
      UserError: a word is no assignment, or its field is unknown, or it has several values
        without `multirun`, or several of a field that does not change what is computed.
    """
    for word in words:
        if word.find("=") < 1:
            raise UserError("argument", word, "not an assignment; write field=value")
    chosen: dict[str, list[str]] = {name: [value] for name, value in _DEFAULTS.items()}
    for word in words:
        if word.partition("=")[0] in _CHOICES:
            override = _parse(word, multirun)
            chosen[override.key_or_group] = _values(override)
    if "variant" not in chosen and len(chosen["method"]) == 1:
        names = [word.partition("=")[0] for word in words]
        implied = registry.implied_variant(chosen["method"][0], names)
        chosen |= {"variant": [implied]} if implied else {}
    classes = [
        registry.config_class(slug, variant)
        for slug in chosen["method"]
        for variant in chosen.get("variant", [""])
    ]
    fields = {name: info for cls in classes for name, info in config_fields(cls).items()}
    rest: list[str] = []
    for word in words:
        key = word.partition("=")[0]
        if key in _CHOICES:
            continue
        _check_key(word, fields)
        override = _parse(_quote_text(word, fields, multirun), multirun)
        if override.is_sweep_override():
            _check_sweep(word, fields)
        elif key in _GROUPS:
            _check_file(key, _values(override)[0])
        rest.append(override.input_line or "")
    return [_method_choice(chosen), *rest]


def _read(word: str) -> Override:
    """A `field=value` word as Hydra's grammar reads it."""
    return OverridesParser.create().parse_override(word)


def _parse(word: str, multirun: bool) -> Override:
    key, _, value = word.partition("=")
    try:
        override = _read(word)
    except (HydraException, ValueError, TypeError, ArithmeticError):
        raise UserError(key, value, f"cannot be read; quote text: {key}='\"...\"'") from None
    if not override.is_sweep_override():
        return override
    if not multirun:
        raise UserError(key, value, "several values need -m (a sweep), or quotes if it is text")
    if not _can_be_listed(override):
        raise UserError(key, value, "allowed in a sweep: a,b,c or choice(...) or range(...)")
    return override


def _can_be_listed(sweep: Override) -> bool:
    if sweep.value_type in (ValueType.INTERVAL_SWEEP, ValueType.GLOB_CHOICE_SWEEP):
        return False
    try:
        return bool(_values(sweep))  # a range may be empty
    except (HydraException, ValueError, ArithmeticError):  # or have a step of zero
        return False


def _check_sweep(word: str, fields: Mapping[str, FieldInfo]) -> None:
    """A sweep varies what is computed: its trials' folders are named by that."""
    key, _, value = word.partition("=")
    if key not in fields or fields[key].role != "identity":
        role = fields[key].role if key in fields else "execution"
        raise UserError(
            key, value, f"one value; a sweep varies what is computed (identity), not {role} fields"
        )


def _quote_text(word: str, fields: Mapping[str, FieldInfo], multirun: bool) -> str:
    """Protects free text from Hydra's grammar: a folder's name may hold commas and spaces.

    >>> text = {"name": FieldInfo("execution", False, "A name.", str, "text")}
    >>> _quote_text("name=1.5", text, False), _quote_text("name='a'", text, False)
    ("name='1.5'", "name='a'")
    """
    key, _, value = word.partition("=")
    info = fields.get(key)
    members = () if info is None else (info.annotation, *get_args(info.annotation))
    if info is None or str not in members or not value or key in _GROUPS:
        return word
    if value == "null" and type(None) in members:
        return word
    if get_origin(info.annotation) is tuple and value[0] == "[":
        return word
    if value[0] == value[-1] and value[0] in "'\"" and len(value) > 1:
        return word
    if multirun and info.role == "identity":
        if re.search(r"[()\[\]{}'\"\\]", value):
            return word
        return f"{key}={','.join(_quoted(part.strip()) for part in value.split(','))}"
    return f"{key}={_quoted(value)}"


def _quoted(value: str) -> str:
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value).replace("${", "\\${")
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{trailing * chr(92)}'"


def _values(override: Override) -> list[str]:
    """The values as text, without quotes; of a sweep no more than one beyond what is allowed."""
    if override.is_sweep_override():
        elements = itertools.islice(override.sweep_iterator(), _MAX_PRODUCT + 1)
        return [e.text if isinstance(e, QuotedString) else Transformer.str(e) for e in elements]
    value = override.value()
    return [value if isinstance(value, str) else override.get_value_element_as_str()]


def _check_file(group: str, name: str) -> None:
    names = sorted(path.stem for path in (config_directory() / group).glob("*.yaml"))
    if name not in names:
        raise UserError(group, name, f"unknown choice; {registry.nearest(name, names)}")


def _check_key(word: str, fields: Mapping[str, FieldInfo]) -> None:
    key, _, value = word.partition("=")
    if key.startswith(("+", "~")):
        raise UserError(key, value, f"write the field without {key[0]}")
    if key in fields or key in _GROUPS or re.fullmatch(_HYDRA_KEYS, key):
        return
    if key.startswith(("hydra.", "hydra/")):
        raise UserError(
            key, value, "not used here; allowed of Hydra: hydra/launcher and hydra.launcher.*"
        )
    inside = [name for name in fields if name.startswith(f"{key}.")]
    if inside:
        raise UserError(key, value, f"a group of fields: {', '.join(inside)}")
    known = [*_CHOICES, *_GROUPS, *fields]
    leaves = {name.rsplit(".", 1)[-1]: name for name in known}
    close = registry.nearest(key, known)
    if not close.startswith("did") and (leaf := leaves.get(key.rsplit(".", 1)[-1])):
        close = f"did you mean {leaf}? Allowed"
    hint = close.split(" Allowed")[0] if close.startswith("did") else "see --help for the fields"
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


def compose_command(overrides: Sequence[str]) -> CommandConfig:
    """Composes and validates one configuration, of a method or a tool.

    Args:
      overrides: from `prepare_overrides`, each with a single value.

    Raises:
      UserError: a choice does not exist, or a value is of the wrong type or out of its bounds.
    """
    return _compose_all([overrides])[0]


def compose_config(overrides: Sequence[str]) -> RunConfig:
    """Composes and validates one configuration of a method.

    Args:
      overrides: from `prepare_overrides`, each with a single value.

    Raises:
      UserError: as `compose_command`, or it is a tool's.
    """
    return compose_configs([overrides])[0]


def compose_configs(combinations: Sequence[Sequence[str]]) -> list[RunConfig]:
    """Composes and validates many configurations of methods.

    Args:
      combinations: from `expand_sweep`.

    Raises:
      UserError: as `compose_config`.
    """
    return [_of_method(config) for config in _compose_all(combinations)]


def _of_method(config: CommandConfig) -> RunConfig:
    if not isinstance(config, RunConfig):
        problem = f"is a tool; allowed: python -m jaxlab.run method={config.method}, without -m"
        raise UserError("method", config.method, problem)
    return config


def _compose_all(combinations: Sequence[Sequence[str]]) -> list[CommandConfig]:
    """Composes quickly what shares its files.

    Hydra composes once for each choice of files; the values of single fields are then read by
    Hydra's grammar and put into a copy of what it composed.
    """
    composed: dict[tuple[str, ...], dict[str, Any]] = {}
    parsed: dict[str, Override] = {}
    configs = []
    for overrides in combinations:
        values = {word: parsed.get(word) or _read(word) for word in overrides[1:]}
        parsed |= values
        # With references to other fields, Hydra has to see them all.
        simple = not any("${" in word for word in values)
        plain = {word: o for word, o in values.items() if simple and not _is_choice(o)}
        files = tuple(word for word in overrides if word not in plain)
        if files not in composed:
            composed[files] = _compose(files)
        tree = copy.deepcopy(composed[files])
        for override in plain.values():
            _assign(tree, override.key_or_group, override.value())
        configs.append(_validated(_slug(overrides), tree))
    return configs


def _is_choice(override: Override) -> bool:
    return override.key_or_group in _GROUPS or override.is_hydra_override()


def _slug(overrides: Sequence[str]) -> str:
    return overrides[0].partition("=")[2].split("/")[0]


def _assign(tree: dict[str, Any], name: str, value: Any) -> None:
    *path, leaf = name.split(".")
    for part in path:
        tree = tree[part]
    tree[leaf] = value


def call_launcher(task: Callable[[Any], Any], jobs: Sequence[Sequence[str]]) -> Sequence[JobReturn]:
    """Hands jobs to the launcher of Hydra's that the first of them chooses.

    Args:
      task: runs a composed configuration; pickled where the launcher needs it.
      jobs: overrides, each with a single value, validated before.

    Returns:
      The launcher's answers, in the order of the jobs.
    """
    register_defaults(sorted({_slug(overrides) for overrides in jobs}))
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(config_directory()), version_base=None):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        config = hydra.compose_config("run", list(jobs[0]), run_mode=RunMode.MULTIRUN)
        context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
        launcher = Plugins.instance().instantiate_launcher(context, task, config)
        own = [[word for word in job if not word.startswith("hydra")] for job in jobs]
        return launcher.launch(own, initial_job_idx=0)


def _compose(overrides: Sequence[str]) -> dict[str, Any]:
    register_defaults([_slug(overrides)])
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(config_directory()), version_base=None):
            composed = compose("run", list(overrides))
            tree: Any = OmegaConf.to_container(composed, resolve=True)
            return tree
    except MissingConfigException as error:
        group, _, value = (error.missing_cfg_file or "").rpartition("/")
        problem = registry.nearest(value, [str(name) for name in error.options or ()])
        raise UserError(group or "configs", value, f"unknown choice; {problem}") from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        typed = dict(word.split("=", 1) for word in overrides[1:])
        key = getattr(error, "full_key", None) or next(reversed(typed), "method")
        raise UserError(key, typed.get(key, ""), str(error).splitlines()[0]) from None


def validate(slug: str, tree: Mapping[str, Any]) -> RunConfig:
    """A method's configuration from nested dicts.

    Raises:
      UserError: with the dotted field, its value and what is allowed.
    """
    return _of_method(_validated(slug, tree))


def _validated(slug: str, tree: Mapping[str, Any]) -> CommandConfig:
    cls = registry.config_class(slug, tree.get("variant"))
    try:
        return TypeAdapter(cls).validate_python(tree)
    except ValidationError as error:
        raise _explain(error, cls) from None


def load_config(folder: epath.PathLike) -> RunConfig | None:
    """The configuration of the run in a folder; None if the folder holds no run.

    Raises:
      UserError: its config.yaml cannot be read by this version.
    """
    file = epath.Path(folder) / "config.yaml"
    if not file.exists():
        return None
    try:
        tree = yaml.safe_load(file.read_text())
        return validate(tree["method"], tree)
    except (yaml.YAMLError, OSError, ValueError, KeyError, TypeError, UserError) as error:
        problem = f"its config.yaml cannot be read by this version ({str(error).splitlines()[0]})"
        raise UserError("run_dir", folder, problem) from None


def _explain(error: ValidationError, cls: type[CommandConfig]) -> UserError:
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
    if get_origin(fields[field].annotation) is tuple:
        if first["type"] == "literal_error":
            options = [str(choice) for choice in get_args(get_args(fields[field].annotation)[0])]
            return UserError(field, first["input"], registry.nearest(str(first["input"]), options))
        return UserError(field, first["input"], f"must be a {fields[field].allowed}, as in [a,b]")
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

    Raises:
      UserError: there are more than ten thousand.
    """
    parsed = [_read(word) for word in overrides]
    counts = [len(_values(override)) for override in parsed]
    if math.prod(counts) > _MAX_PRODUCT:
        several = [o.key_or_group for o, n in zip(parsed, counts, strict=True) if n > 1]
        problem = f"more than {_MAX_PRODUCT} combinations; allowed: at most {_MAX_PRODUCT}"
        raise UserError("sweep", " x ".join(several), problem)
    choices = [
        [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
        if o.is_sweep_override()
        else [o.input_line or ""]
        for o in parsed
    ]
    return [list(combination) for combination in itertools.product(*choices)]


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
    flat = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in flatten(overrides).items()
    }
    variant = variant or registry.implied_variant(method, flat)
    words = [f"method={method}", f"preset={preset}"]
    words += [f"variant={variant}"] if variant else []
    words += [f"{group}={flat.pop(group)}" for group in _GROUPS if group in flat]
    tree = to_dict(compose_config(prepare_overrides(words)))
    fields = config_fields(registry.config_class(method, variant))
    for name, value in flat.items():
        if name not in fields:
            raise UserError(name, value, f"unknown field; {registry.nearest(name, list(fields))}")
        _assign(tree, name, value)
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
