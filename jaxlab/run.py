"""The one entry point: `python -m jaxlab.run method=trec steps=300`.

Composes and validates before anything is created; imports JAX only when a job starts. Every
mistake is one line on standard error and exit code 2.
"""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxlab.errors import JaxlabError, UserError
from jaxlab.experiments import composition, registry
from jaxlab.experiments.base import RunConfig, config_fields, flatten, identity_digest, to_dict

if TYPE_CHECKING:
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

examples:
  python -m jaxlab.run
  python -m jaxlab.run method=trec variant=mlp replicates=8
  python -m jaxlab.run -m method=trec optimizer.tau=0.1,0.2,0.4 run_dir=runs/tau

The same command finds its own run again: it resumes it, or says that it is finished.
Exit codes: 0 done, 1 failed, 2 bad input, 3 diverged, 4 a claim does not hold (with
fail_on_claims=true), 130 or 143 stopped and resumable.
"""
_CLAIMS_FAILED = 4
_WIDTH = 100


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
    if words[:1] == ["board"]:
        return _board(words[1:])
    flags, assignments = _split_flags(words)
    if "--help" in flags:
        print(_help(assignments), end="")
        return 0
    multirun = "--multirun" in flags
    overrides = composition.prepare_overrides(assignments, multirun=multirun)
    if multirun:
        return _sweep(overrides, show="--cfg" in flags)
    config = composition.compose_config(overrides)
    if "--cfg" in flags:
        print(_as_yaml(config), end="")
        return 0
    return _single(config)


def _split_flags(words: list[str]) -> tuple[set[str], list[str]]:
    """Flags by their long names, and the `field=value` words."""
    known = {"-h": "--help", "--help": "--help", "-m": "--multirun", "--multirun": "--multirun"}
    flags: set[str] = set()
    assignments: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("--cfg", "-c"):
            kind = next(rest, "")
            if kind != "job":
                raise UserError("--cfg", kind, "allowed: job")
            flags.add("--cfg")
        elif word.startswith("-"):
            if word not in known:
                problem = registry.nearest(word, ["--help", "--cfg", "-m", "--multirun"])
                raise UserError("flag", word, f"unknown; {problem}")
            flags.add(known[word])
        else:
            assignments.append(word)
    return flags, assignments


def _help(assignments: list[str]) -> str:
    typed = dict(word.split("=", 1) for word in assignments if "=" in word)
    if "method" in typed:
        return _method_help(typed["method"])
    width = max(len(slug) for slug in registry.METHODS)
    methods = "\n".join(
        f"  {entry.slug:<{width}}  {entry.summary}  [variant={'|'.join(entry.variants)}]"
        for entry in registry.METHODS.values()
    )
    return _USAGE.format(methods=methods)


def _method_help(slug: str) -> str:
    entry = registry.find_method(slug)
    cls = registry.config_class(slug)
    defaults = flatten(to_dict(composition.validate(slug, {})))
    lines = [
        f"{slug}: {entry.summary}",
        f"variants: {', '.join(entry.variants)}",
        f"presets: {', '.join(entry.presets)}",
        "",
    ]
    groups = {
        "what is computed (identity; * may vary within one sweep program)": "identity",
        "how much of it": "extent",
        "how it is computed (free to change when a run is resumed)": "execution",
    }
    for title, role in groups.items():
        lines.append(f"{title}:")
        for name, info in config_fields(cls).items():
            if info.role == role:
                star = "*" if info.traced else " "
                value = "null" if defaults[name] is None else defaults[name]
                lines.append(f" {star}{name}={value}  {info.description}")
        lines.append("")
    return "\n".join(lines)


def _as_yaml(config: RunConfig) -> str:
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False)


def _board(words: list[str]) -> int:
    from jaxlab.reporting.board import board_text

    if len(words) > 1:
        raise UserError("board", " ".join(words), "one folder at most")
    print(board_text(words[0] if words else "runs", _WIDTH))
    return 0


def _single(config: RunConfig) -> int:
    from jaxlab.reporting.directory import check_writable

    run_dir = config.run_dir or f"runs/{config.method}/{identity_digest(config)}"
    check_writable(run_dir)
    from jaxlab.experiments.runner import run

    result = run(config, run_dir)
    from jaxlab.parallel.processes import is_main

    if not config.quiet and is_main():
        _print_result(result, run_dir)
    failed = any(claim.kind == "claim" and not claim.holds for claim in result.claims)
    return _CLAIMS_FAILED if failed and config.fail_on_claims else 0


def _print_result(result: Result, run_dir: str) -> None:
    from jaxlab.reporting.report import claim_table_text

    if result.provenance.get("finished_before"):
        print(f"{run_dir} is finished already; this is what it found.")
    print(claim_table_text(result, _WIDTH))
    folder = pathlib.Path(run_dir)
    figures = sorted((folder / "figures").glob("*.png"))
    for path in (*figures, folder / "result.json", folder / "report.md"):
        print(path)


def _sweep(overrides: list[str], *, show: bool) -> int:
    """Validates every combination, then lets Hydra's launcher run them."""
    combinations = composition.expand_sweep(overrides)
    configs = [composition.compose_config(combination) for combination in combinations]
    if show:
        print("---\n".join(_as_yaml(config) for config in configs), end="")
        return 0
    from jaxlab.reporting.directory import check_writable
    from jaxlab.sweeps.sweep import run_sweep, sweep_directory

    folder = configs[0].run_dir or sweep_directory(configs)
    check_writable(folder)
    return run_sweep(overrides, configs, folder)


if __name__ == "__main__":
    sys.exit(main())
