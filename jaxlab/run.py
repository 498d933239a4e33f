"""The one entry point: `python -m jaxlab.run method=trec steps=300`.

Composes and validates before anything is created; imports JAX only when a job starts. Every
mistake is one line on standard error and exit code 2.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxlab.errors import JaxlabError, UserError

# Everything else is imported by the functions that need it: the first moments of the process, in
# which Ctrl-C would print Python's traceback, stay short.
if TYPE_CHECKING:
    from jaxlab.experiments.base import CommandConfig, RunConfig
    from jaxlab.reporting.report import Result

__all__ = ["main"]

_USAGE = """\
usage: python -m jaxlab.run [method=NAME] [variant=STUDY] [preset=test|cpu|paper] [field=value ...]
       python -m jaxlab.run -m field=value,value ...     one run for each combination
       python -m jaxlab.run board [DIR]                  all results below DIR in one table
       python -m jaxlab.run method=NAME --help           the fields of a method
       python -m jaxlab.run method=NAME --cfg job        the settings, without running

methods:
{methods}

tools:
{tools}

examples:
  python -m jaxlab.run
  python -m jaxlab.run method=trec variant=mlp replicates=8
  python -m jaxlab.run -m method=trec optimizer.tau=0.1,0.2,0.4 run_dir=runs/tau

The same command finds its own run again: it resumes it, or says that it is finished.
Exit codes: 0 done, 1 failed, 2 bad input, 3 diverged, 4 a claim does not hold (with
fail_on_claims=true), 130 or 143 stopped and resumable.
"""
_BOARD_USAGE = "usage: python -m jaxlab.run board [DIR]   all results below DIR (runs) in one table"
_FLAGS = {"-h": "--help", "--help": "--help", "-m": "--multirun", "--multirun": "--multirun"}
# Object stores that paths can name: the package that reads each, and how to install it.
_STORES = {
    "gs": ("gcsfs", "'jaxlab[gcs]'"),
    "s3": ("s3fs", "s3fs"),
    "az": ("adlfs", "adlfs"),
    "hf": ("huggingface_hub", "'jaxlab[hub]'"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
      arguments: without the program's name; by default the process's own.

    Returns:
      The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except JaxlabError as error:
        print(f"jaxlab: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("jaxlab: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of a pipe has gone; Python must not complain about it when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"jaxlab: no space left on the device{_of_file(error)}", file=sys.stderr)
        return 1


def _of_file(error: OSError) -> str:
    return f" ({error.filename})" if error.filename else ""


def _dispatch(words: list[str]) -> int:
    flags, assignments = _split_flags(words)
    if words[:1] == ["board"]:
        return _board(words[1:], "--help" in flags)
    if "--help" in flags:
        print(_help(assignments, multirun="--multirun" in flags), end="")
        return 0
    from jaxlab.experiments import composition

    multirun = "--multirun" in flags
    overrides = composition.prepare_overrides(assignments, multirun=multirun)
    if multirun:
        return _sweep(overrides, show="--cfg" in flags)
    config = composition.compose_command(overrides)
    if "--cfg" in flags:
        print(_as_yaml(config), end="")
        return 0
    from jaxlab.experiments.base import RunConfig

    return _single(config) if isinstance(config, RunConfig) else _tool(config)


def _split_flags(words: list[str]) -> tuple[set[str], list[str]]:
    """Flags by their long names, and the `field=value` words."""
    flags: set[str] = set()
    assignments: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("--cfg", "-c"):
            kind = next(rest, "")
            if kind != "job":
                raise UserError("--cfg", kind, "allowed: job")
            flags.add("--cfg")
        elif word in _FLAGS:
            flags.add(_FLAGS[word])
        elif word.startswith("-"):
            from jaxlab.experiments.registry import nearest

            problem = "allowed: -h, -c job, -m"
            if word.startswith("--"):
                problem = nearest(word, ["--help", "--cfg", "-m", "--multirun"])
            raise UserError("flag", word, f"unknown; {problem}")
        else:
            assignments.append(word)
    return flags, assignments


def _help(assignments: list[str], *, multirun: bool) -> str:
    from jaxlab.experiments import registry

    if any("=" in word for word in assignments):
        return _method_help(assignments, multirun)
    width = max(len(slug) for slug in registry.METHODS)
    methods = "\n".join(
        f"  {entry.slug:<{width}}  {entry.summary}  [variant={'|'.join(entry.variants)}]"
        for entry in registry.METHODS.values()
    )
    tools = "\n".join(f"  {entry.slug}  {entry.summary}" for entry in registry.TOOLS.values())
    return _USAGE.format(methods=methods, tools=tools)


def _method_help(assignments: list[str], multirun: bool) -> str:
    """The fields of a method, with the values that these words would run with (first)."""
    from jaxlab.experiments import composition, registry
    from jaxlab.experiments.base import RunConfig, config_fields, flatten, to_dict

    overrides = composition.prepare_overrides(assignments, multirun=multirun)
    config = composition.compose_command(composition.expand_sweep(overrides)[0])
    entry = registry.find_method(config.method)
    values = flatten(to_dict(config))
    lines = [
        f"{entry.slug}: {entry.summary}",
        f"variants: {', '.join(entry.variants)}",
        f"presets: {', '.join(entry.presets)}",
        f"values below: variant={config.variant} preset={config.preset}",
        "",
    ]
    groups = {
        "what is computed (identity; * may vary within one sweep program)": "identity",
        "how much of it": "extent",
        "how it is computed (free to change when a run is resumed)": "execution",
    }
    if not isinstance(config, RunConfig):
        groups = {"what is computed": "identity", "how it is computed": "execution"}
    for title, role in groups.items():
        lines.append(f"{title}:")
        for name, info in config_fields(type(config)).items():
            if info.role == role:
                star = "*" if info.traced else " "
                value = "null" if values[name] is None else values[name]
                lines.append(f" {star}{name}={value}  {info.description} [{info.allowed}]")
        lines.append("")
    return "\n".join(lines)


def _as_yaml(config: CommandConfig) -> str:
    import yaml

    from jaxlab.experiments.base import to_dict

    return yaml.safe_dump(to_dict(config), sort_keys=False)


def _board(words: list[str], usage: bool) -> int:
    if usage:
        print(_BOARD_USAGE)
        return 0
    if len(words) > 1:
        raise UserError("board", " ".join(words), "one folder at most")
    folder = os.path.expanduser(words[0]) if words else "runs"
    _check_store(folder, "board")
    from jaxlab.reporting.board import board_text
    from jaxlab.sweeps.outcome import TABLE_WIDTH

    print(board_text(folder, TABLE_WIDTH))
    return 0


def _single(config: RunConfig) -> int:
    run_dir = config.output_folder()
    _check_folders(config, run_dir)
    from jaxlab.experiments.runner import run

    result = run(config, run_dir)
    from jaxlab.parallel.processes import is_main
    from jaxlab.sweeps.outcome import claims_code

    if not config.quiet and is_main():
        _print_result(result, run_dir)
    return claims_code(result.claims, config)


def _tool(config: CommandConfig) -> int:
    from jaxlab.experiments.registry import tool_module

    _check_cache(config)
    return tool_module(config.method).run(config)


def _check_folders(config: RunConfig, run_dir: str) -> None:
    """Refuses folders that cannot be used, before anything is created or JAX is imported."""
    from jaxlab.reporting.directory import check_writable

    _check_store(run_dir, "run_dir")
    check_writable(run_dir)
    _check_cache(config)


def _check_cache(config: CommandConfig) -> None:
    from jaxlab.reporting.directory import check_writable

    cache = config.compilation_cache
    if cache not in ("auto", "off"):
        _check_store(cache, "compilation_cache")
        check_writable(cache, "compilation_cache")
        if "://" not in cache:
            _check_creatable(cache, "compilation_cache")


def _check_creatable(path: str, field: str) -> None:
    """Permissions do not tell everything: /proc allows no folder to anybody."""
    place = pathlib.Path(path).absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryDirectory(dir=place):
            pass
    except OSError as error:
        raise UserError(field, path, f"cannot be written: {error.strerror}") from None


def _check_store(path: str, field: str) -> None:
    """Refuses an address whose store is unknown, or whose package is not installed.

    Raises:
      UserError: saying what to install, or what to write.
    """
    scheme, mark, _ = path.partition("://")
    if not mark:
        return
    if scheme not in _STORES:
        stores = ", ".join(f"{name}://" for name in _STORES)
        raise UserError(field, path, f"allowed: a folder's plain path, or {stores}")
    package, install = _STORES[scheme]
    if importlib.util.find_spec(package) is None:
        raise UserError(field, path, f"needs the package {package}: pip install {install}")


def _print_result(result: Result, run_dir: str) -> None:
    from etils import epath

    from jaxlab.reporting.report import result_text
    from jaxlab.sweeps.outcome import TABLE_WIDTH

    if result.provenance.get("finished_before"):
        print(f"{run_dir} is finished already; this is what it found.")
    print(result_text(result, TABLE_WIDTH))
    folder = epath.Path(run_dir)
    figures = sorted((folder / "figures").glob("*.png"))
    files = sorted((folder / "files").glob("*"))
    for path in (*figures, *files, folder / "result.json", folder / "report.md"):
        print(os.fspath(path))


def _sweep(overrides: list[str], *, show: bool) -> int:
    """Validates every combination, then lets Hydra's launcher run them."""
    from jaxlab.sweeps.sweep import plan_sweep, run_sweep, sweep_directory

    trials = plan_sweep(overrides)
    configs = [trial.config for trial in trials]
    if show:
        print("---\n".join(_as_yaml(config) for config in configs), end="")
        return 0
    folder = configs[0].run_dir or sweep_directory(configs)
    _check_folders(configs[0], folder)
    return run_sweep(trials, folder)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
