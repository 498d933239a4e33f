"""What every experiment's configuration is made of.

A configuration is a frozen pydantic dataclass that derives from `RunConfig`, or, of a tool that
keeps no run, from `CommandConfig`. Each field is
typed, bounded, documented, and says what role it plays:

* `identity`: what is computed. Two runs with equal identity fields are the same run.
* `extent`: how much of it. A larger value continues a finished run.
* `execution`: how and where it is computed. Free to change between a run and its resume.

A `traced` field may differ between the trials of one compiled program.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
)

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as pydantic_dataclass

__all__ = [
    "CommandConfig",
    "DistributedConfig",
    "FieldInfo",
    "MeshConfig",
    "RunConfig",
    "config_fields",
    "configuration",
    "flatten",
    "identity",
    "identity_digest",
    "option",
    "static_identity",
    "to_dict",
]

C = TypeVar("C")
Role = Literal["identity", "extent", "execution"]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def configuration(cls: type[C]) -> type[C]:
    """Class decorator: a frozen, keyword-only, validated dataclass.

    It refuses unknown fields, and NaN and infinities where a field does not allow them by itself.
    """
    strict = ConfigDict(extra="forbid", allow_inf_nan=False)
    return pydantic_dataclass(frozen=True, kw_only=True, config=strict)(cls)  # pyright: ignore[reportReturnType]


def option(
    description: str, *, role: Role = "identity", traced: bool = False, **bounds: Any
) -> Any:
    """Describes a field, for use inside `typing.Annotated`.

    Args:
      description: one line for help and error messages, with the unit.
      role: see the module's text.
      traced: whether trials of one compiled program may differ in it.
      **bounds: pydantic's own: `ge`, `gt`, `le`, `lt`, `pattern`, ...
    """
    extra = {"role": role, "traced": traced}
    return Field(description=description, json_schema_extra=extra, **bounds)


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _expanded(path: str | None) -> str | None:
    return path and os.path.expanduser(path)


# A folder is given as text or as a path object; a leading ~ is expanded once, here.
_from_path, _expand_user = BeforeValidator(_as_text), AfterValidator(_expanded)


@configuration
class MeshConfig:
    """How many devices share one lane; all 1 lets lanes share the devices instead."""

    data: Annotated[
        int, option("Devices that share a batch; -1: all that are left.", role="execution", ge=-1)
    ] = 1
    fsdp: Annotated[
        int,
        option(
            "Devices that share a batch and the parameters; -1: all that are left.",
            role="execution",
            ge=-1,
        ),
    ] = 1
    model: Annotated[
        int,
        option(
            "Devices that share the wide layers; -1: all that are left.", role="execution", ge=-1
        ),
    ] = 1


@configuration
class DistributedConfig:
    """How processes find each other; Slurm, Cloud TPU (also GKE) and Open MPI need none of it."""

    coordinator: Annotated[
        str | None, option("host:port of process 0.", role="execution", min_length=1)
    ] = None
    num_processes: Annotated[
        int | None, option("How many processes there are.", role="execution", ge=1)
    ] = None
    process_id: Annotated[int | None, option("Which of them this is.", role="execution", ge=0)] = (
        None
    )
    start_seconds: Annotated[
        int, option("How long to wait for all of them.", role="execution", ge=1)
    ] = 300
    heartbeat_seconds: Annotated[
        int, option("After how long a silent process counts as dead.", role="execution", ge=1)
    ] = 100


@configuration
class CommandConfig:
    """Fields of everything that `method=` names: of methods, and of tools, which keep no run."""

    method: Annotated[str, option("Which paper's method to run.")]
    variant: Annotated[str, option("Which study of the method.")]
    preset: Annotated[
        Literal["test", "cpu", "paper"],
        option("Sizes: test (seconds), cpu (minutes on 2 cores) or paper.", role="execution"),
    ] = "cpu"
    scale: Annotated[str, option("The machine that the run is laid out for.", role="execution")] = (
        "cpu"
    )
    seed: Annotated[int, option("Seed of the random numbers.", ge=0, le=2**31 - 1)] = 100
    precision: Annotated[
        Literal["highest", "high", "default"],
        option("Precision of float32 matrix products on accelerators."),
    ] = "highest"
    mesh: Annotated[MeshConfig, Field()] = MeshConfig()
    distributed: Annotated[DistributedConfig, Field()] = DistributedConfig()
    compilation_cache: Annotated[
        str,
        option(
            "Folder of compiled programs, or auto (the user's cache folder), or off.",
            role="execution",
            min_length=1,
        ),
        _from_path,
        _expand_user,
    ] = "auto"
    quiet: Annotated[bool, option("Print nothing but errors.", role="execution")] = False


@configuration
class RunConfig(CommandConfig):
    """Fields that every method has.

    Attributes:
      keeps_results: whether a finished run is found again; False for what depends on more than its
        settings and is computed anew.
    """

    keeps_results: ClassVar[bool] = True

    seed: Annotated[
        int,
        option(
            "Seed of the first replicate; replicate r uses seed + r. "
            "Reports start at 100, tuning stays below.",
            ge=0,
            le=2**31 - 2**16,
        ),
    ] = 100
    replicates: Annotated[
        int,
        option("How often the study is repeated with other seeds.", role="extent", ge=1, le=4096),
    ] = 4
    run_dir: Annotated[
        str | None,
        option(
            "Where files go; default runs/<method>/<digest of the settings>.",
            role="execution",
            min_length=1,
        ),
        _from_path,
        _expand_user,
    ] = None
    trial_axis: Annotated[
        Literal["auto", "loop", "vmap"],
        option(
            "How trials and replicates share the machine: one by one, or batched.", role="execution"
        ),
    ] = "auto"
    steps_per_dispatch: Annotated[
        Annotated[int, Field(ge=1, le=1_000_000)] | Literal["auto"],
        option("Training steps in one call of the compiled program.", role="execution"),
    ] = "auto"
    checkpoint_every: Annotated[
        int, option("Steps between checkpoints.", role="execution", ge=1, le=10_000_000)
    ] = 200
    log_every: Annotated[
        int, option("Steps between lines of metrics.jsonl.", role="execution", ge=1, le=10_000_000)
    ] = 10
    tensorboard: Annotated[bool, option("Write TensorBoard events.", role="execution")] = True
    profile: Annotated[
        bool, option("Write a profiler trace of 5 steps to run_dir/profile.", role="execution")
    ] = False
    debug: Annotated[
        bool, option("Run without compilation and stop at the first NaN.", role="execution")
    ] = False
    fail_on_claims: Annotated[
        bool, option("Exit with code 4 when a claim does not hold.", role="execution")
    ] = False

    def output_folder(self) -> str:
        """Where this run's files go.

        Raises:
          jaxlab.errors.UserError: the study needs `run_dir`.
        """
        return self.run_dir or f"runs/{self.method}/{identity_digest(self)}"


@dataclasses.dataclass(frozen=True)
class FieldInfo:
    """What a dotted field of a configuration is: see the module's text.

    `allowed` says in words which values it takes.
    """

    role: Role
    traced: bool
    description: str
    annotation: Any
    allowed: str


@functools.lru_cache(maxsize=64)
def config_fields(cls: type) -> dict[str, FieldInfo]:
    """The fields of a configuration class by dotted name, nested ones expanded."""
    found: dict[str, FieldInfo] = {}
    for name, info in cls.__pydantic_fields__.items():
        if hasattr(info.annotation, "__pydantic_fields__"):
            inner = config_fields(info.annotation)
            found.update({f"{name}.{key}": value for key, value in inner.items()})
            continue
        extra = info.json_schema_extra
        if not isinstance(extra, dict):
            raise TypeError(f"{cls.__name__}.{name} has no description: write it with option(...)")
        found[name] = FieldInfo(
            extra["role"],  # pyright: ignore[reportArgumentType]
            bool(extra["traced"]),
            info.description or "",
            info.annotation,
            _allowed(info.annotation, info.metadata),
        )
    return found


def _allowed(annotation: Any, metadata: Sequence[Any]) -> str:
    """The values of a type with pydantic's bounds, e.g. `whole number >= 1 or auto`."""
    names = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    marks = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f"{sign} {getattr(item, key):.12g}"
        for item in metadata
        for key, sign in marks.items()
        if getattr(item, key, None) is not None
    ]
    limits = " " + ", ".join(bounds) if bounds else ""
    if annotation in names:
        return names[annotation] + limits
    if annotation is type(None):
        return "null"
    members = get_args(annotation)
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, members))
    if get_origin(annotation) is Annotated:
        inner = [item for info in members[1:] for item in getattr(info, "metadata", ())]
        return _allowed(members[0], inner)
    if get_origin(annotation) is tuple:
        return f"list of {_allowed(members[0], ())}{limits}"
    texts = [_allowed(member, ()) for member in members]
    texts[0] += limits
    return " or ".join(texts)


def to_dict(config: CommandConfig) -> dict[str, Any]:
    """The configuration as plain nested dicts, lists, strings and numbers."""
    return TypeAdapter(type(config)).dump_python(config, mode="json")


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts to dotted names.

    >>> flatten({"a": 1, "b": {"c": 2}})
    {'a': 1, 'b.c': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def identity(config: RunConfig) -> dict[str, Any]:
    """The identity fields of a configuration by dotted name."""
    fields = config_fields(type(config))
    return {k: v for k, v in flatten(to_dict(config)).items() if fields[k].role == "identity"}


def static_identity(config: RunConfig) -> dict[str, Any]:
    """The fields that all trials of one compiled program must share."""
    fields = config_fields(type(config))
    flat = flatten(to_dict(config))
    return {k: v for k, v in flat.items() if fields[k].role != "execution" and not fields[k].traced}


def identity_digest(config: RunConfig) -> str:
    """Eight hexadecimal digits that name the run with these identity fields."""
    text = json.dumps(identity(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
