"""Runs a configuration: builds its programs, drives them, concludes, and writes what was found.

The same function serves the command line, sweeps and notebooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import yaml
from etils import epath
from jax.sharding import Mesh

from jaxlab.errors import DivergedError, JaxlabError, UserError
from jaxlab.experiments import composition, machine, registry
from jaxlab.experiments.base import RunConfig, config_fields, flatten, identity, to_dict
from jaxlab.parallel.processes import ProcessSettings, agree, is_main, start_processes
from jaxlab.reporting.claims import Claim
from jaxlab.reporting.directory import make_directory, own_directory
from jaxlab.reporting.figures import save
from jaxlab.reporting.files import read_json, write_atomic, write_json
from jaxlab.reporting.report import Result, report_markdown
from jaxlab.reporting.writers import JsonLines, Observers, Progress, TensorBoard
from jaxlab.training.driver import DriveSettings, Outcome, check_batches, drive
from jaxlab.training.host import HostProgram, drive_host
from jaxlab.training.program import Program, check_extension, merge_trials

__all__ = ["load_result", "run", "run_trials"]

T = TypeVar("T")
_OWN_FILES = {".lock"}


def run(config: RunConfig, run_dir: epath.PathLike | None = None) -> Result:
    """Runs one configuration.

    Args:
      config: from `make_config`, or a method's `Config`.
      run_dir: where files go, and where an earlier start of the same run is resumed; None writes
        nothing.

    Returns:
      Metrics, claims, and figures; of a run that had finished before, without figures.

    Raises:
      jaxlab.errors.JaxlabError: see the errors' own texts.
    """
    folder = None if run_dir is None else epath.Path(run_dir)
    return run_trials([config], [folder], folder)[0]


def run_trials(
    configs: Sequence[RunConfig], folders: Sequence[epath.Path | None], work: epath.Path | None
) -> list[Result]:
    """Runs configurations that differ in traced fields alone as the trials of one program.

    Args:
      configs: the trials.
      folders: where each trial's results go, or None for nowhere.
      work: where checkpoints and metrics of all of them go.

    Returns:
      A result for each configuration.
    """
    config = configs[0]
    if work is not None:
        start_processes(ProcessSettings(**dataclasses.asdict(config.distributed)))
    paths = [None if folder is None else _absolute(folder) for folder in folders]
    work = None if work is None else _absolute(work)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision(config.precision))
        known, programs, mesh = _together(work, lambda: _plan(configs, paths, work))
        if known is not None:
            return known
        if work is not None:
            cache = machine.compilation_cache(config.compilation_cache)
            _together(work, lambda: stack.enter_context(cache))
            _together(work, lambda: _claim(configs, paths, work, stack) if is_main() else None)
        stop = stack.enter_context(machine.stop_requests(work is not None))
        return _execute(configs, programs, paths, work, stop, mesh)


def _together(work: epath.Path | None, task: Callable[[], T]) -> T:
    """Does something in every process; if it fails in one, it fails in all.

    Otherwise the others would wait for that one in their next exchange.
    """
    problem: JaxlabError | None = None
    found: Any = None
    try:
        found = task()
    except JaxlabError as error:
        problem = error
    failed = agree(0 if problem is None else 1)
    if problem is not None:
        raise problem
    if failed:
        raise UserError("run_dir", work, "another process failed; see its message")
    return found


def _plan(
    configs: Sequence[RunConfig], paths: Sequence[epath.Path | None], work: epath.Path | None
) -> tuple[list[Result] | None, list[Program | HostProgram], Mesh | None]:
    """What is to be done: nothing if all is finished, else programs and a mesh.

    Whatever is wrong with the settings shows here, before a folder is touched.
    """
    known = _finished(configs, paths)
    if known is not None:
        return known, [], None
    mesh, programs = machine.chosen_mesh(configs[0]), _build(configs)
    if mesh is not None:
        for program in programs:
            if isinstance(program, Program):
                check_batches(program, mesh)
    _check_same_everywhere(programs)
    if configs[0].profile and work is None:
        raise UserError("profile", configs[0].profile, "needs a run_dir for the trace")
    return None, programs, mesh


def _check_same_everywhere(programs: Sequence[Program | HostProgram]) -> None:
    """Every process must read the same data: each device takes its part of what it is given."""
    text = "|".join(program.fingerprint for program in programs)
    mark = int(hashlib.sha256(text.encode()).hexdigest()[:7], 16)
    if agree(mark) != -agree(-mark):
        raise UserError("data", text, "differs between the processes' machines")


def _finished(
    configs: Sequence[RunConfig], paths: Sequence[epath.Path | None]
) -> list[Result] | None:
    """The results, if all runs had finished before."""
    pairs = list(zip(configs, paths, strict=True))
    for config, path in pairs:
        if path is not None:
            _check_foreign(path)
            _compare(config, path)
    if not configs[0].keeps_results:
        return None
    known = [load_result(config, path) for config, path in pairs]
    found = [result for result in known if result is not None]
    return found if len(found) == len(known) else None


def _claim(
    configs: Sequence[RunConfig],
    paths: Sequence[epath.Path | None],
    work: epath.Path,
    stack: contextlib.ExitStack,
) -> None:
    """Locks and prepares the folders."""
    stack.enter_context(own_directory(work))
    for config, path in zip(configs, paths, strict=True):
        if path is not None:
            _compare(config, path)  # again, now that nobody else writes
            make_directory(path)
            text = yaml.safe_dump(to_dict(config), sort_keys=False)
            write_atomic(path / "config.yaml", text)
            _note_session(path, config)


def _note_session(path: epath.Path, config: RunConfig) -> None:
    """environment.json: one entry for each start, written before anything is computed."""
    file = path / "environment.json"
    try:
        sessions = list(read_json(file)["sessions"])
    except (OSError, ValueError, KeyError, TypeError):
        sessions = []
    write_json(file, {"sessions": [*sessions, machine.describe_environment(config)]})


def _absolute(path: epath.Path) -> epath.Path:
    return epath.Path(path).expanduser().absolute() if "://" not in str(path) else epath.Path(path)


def _check_foreign(path: epath.Path) -> None:
    """A folder with somebody's files is no run directory."""
    if not path.exists() or not path.is_dir() or (path / "config.yaml").exists():
        return
    names = [item.name for item in path.iterdir()]
    others = sorted(n for n in names if n not in _OWN_FILES and not n.endswith(".tmp"))
    if others:
        raise UserError(
            "run_dir",
            path,
            f"holds other files ({others[0]}, ...); allowed: a new or empty "
            "folder, or one of a run",
        )


def _compare(config: RunConfig, path: epath.Path) -> None:
    """Refuses a folder whose run computes something else.

    Raises:
      UserError: naming the first field that differs, or what cannot be extended.
    """
    saved = composition.load_config(path)
    if saved is None:
        return
    old, new = identity(saved), identity(config)
    different = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    others = [key for key in different if key != "steps"]
    if others:
        key = others[0]
        more = f" ({len(others) - 1} more fields differ)" if len(others) > 1 else ""
        raise UserError(
            key,
            new.get(key),
            f"the run in {path} has {old.get(key)}{more}; "
            "choose another run_dir or the same settings",
        )
    if config.replicates < saved.replicates:
        raise UserError(
            "replicates",
            config.replicates,
            f"the run in {path} has {saved.replicates}; allowed: as many or more",
        )
    if different:
        for before, after in zip(_build([saved]), _build([config]), strict=True):
            if isinstance(before, Program) and isinstance(after, Program):
                check_extension(before, after)


def load_result(config: RunConfig, path: epath.Path | None) -> Result | None:
    """The result of a run that finished with exactly these settings, without its figures.

    Args:
      config: the settings.
      path: the run's folder; None for no folder.

    Returns:
      None if the run has not finished, or its result.json cannot be read.
    """
    if path is None or not (path / "result.json").exists():
        return None
    try:
        data = dict(read_json(path / "result.json"))
        claims = tuple(Claim.from_dict(claim) for claim in data.pop("claims"))
        if data["settings"] != _outcome_settings(config):
            return None
        return Result(
            method=data.pop("method"),
            variant=data.pop("variant"),
            metrics=data.pop("metrics"),
            claims=claims,
            notes=tuple(data.pop("notes")),
            provenance={
                **{key: value for key, value in data.items() if key not in ("figures", "files")},
                "finished_before": True,
            },
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _outcome_settings(config: RunConfig) -> dict[str, Any]:
    """The fields that decide what a run finds."""
    fields = config_fields(type(config))
    flat = flatten(to_dict(config))
    return {name: value for name, value in flat.items() if fields[name].role != "execution"}


def _build(configs: Sequence[RunConfig]) -> list[Program | HostProgram]:
    build = registry.experiment_module(configs[0].method).build
    built = [build(config) for config in configs]
    if len(built) == 1:
        return built[0]
    return [merge_trials(list(same)) for same in zip(*built, strict=True)]


def _execute(
    configs: Sequence[RunConfig],
    programs: Sequence[Program | HostProgram],
    paths: Sequence[epath.Path | None],
    work: epath.Path | None,
    stop: Callable[[], int | None],
    mesh: Mesh | None,
) -> list[Result]:
    config = configs[0]
    seeds = [config.seed + r for r in range(config.replicates)]
    outcomes: dict[str, Outcome] = {}
    with _observers(config, work) as observer:
        for program in programs:
            folder = None if work is None else work / "checkpoints"
            if isinstance(program, HostProgram):
                outcomes[program.name] = drive_host(
                    program, seeds, observer=observer, folder=folder, stop=stop
                )
                continue
            outcomes[program.name] = drive(
                program,
                seeds,
                _settings(config, work, mesh),
                observer=observer,
                folder=folder,
                stop=stop,
            )
    results, diverged = [], []
    for i, (one, path) in enumerate(zip(configs, paths, strict=True)):
        parts = {name: _of_config(o, i, len(configs)) for name, o in outcomes.items()}
        if any(part is None for part in parts.values()):
            diverged.append(composition.command_of(one))
            continue
        result: Result = registry.experiment_module(one.method).conclude(one, parts)
        result = dataclasses.replace(
            result, provenance=_provenance(one, outcomes.values(), len(configs))
        )
        if path is not None and is_main():
            _write(result, one, path)
        results.append(result)
    if diverged:
        raise DivergedError(
            f"{len(diverged)} of {len(configs)} trials diverged, the others are done: "
            + "; ".join(diverged)
        )
    return results


def _provenance(config: RunConfig, outcomes: Iterable[Outcome], num_configs: int) -> dict[str, Any]:
    """Where the numbers come from; time and examples are this configuration's share."""
    found = list(outcomes)
    return {
        "settings": _outcome_settings(config),
        "seeds": [config.seed + r for r in range(config.replicates)],
        "machine": machine.machine_name(),
        "compile_seconds": sum(o.compile_seconds for o in found) / num_configs,
        "run_seconds": sum(o.run_seconds for o in found) / num_configs,
        "trials_in_program": num_configs,
        "examples_seen": sum(o.examples for o in found) // num_configs,
        "peak_memory_bytes": machine.peak_memory(),
    }


def _of_config(outcome: Outcome, index: int, count: int) -> dict[str, np.ndarray] | None:
    """One configuration's share of a program's arrays; None if one of its trials diverged."""
    size = len(next(iter(outcome.arrays.values()))) // count
    own = range(index * size, (index + 1) * size)
    if set(own) & set(outcome.diverged):
        return None
    return {name: value[own.start : own.stop] for name, value in outcome.arrays.items()}


def _settings(config: RunConfig, work: epath.Path | None, mesh: Mesh | None) -> DriveSettings:
    return DriveSettings(
        trial_axis=config.trial_axis,
        steps_per_dispatch=config.steps_per_dispatch,
        checkpoint_every=config.checkpoint_every,
        log_every=config.log_every,
        debug=config.debug,
        profile=work / "profile" if config.profile and work is not None else None,
        mesh=mesh,
    )


@contextlib.contextmanager
def _observers(config: RunConfig, work: epath.Path | None) -> Iterator[Observers]:
    members: list[Any] = [Progress()] if is_main() and not config.quiet else []
    if work is not None and is_main():
        members.append(JsonLines(work / "metrics.jsonl"))
        if config.tensorboard:
            members.append(TensorBoard(work / "tensorboard"))
    observers = Observers(*members)
    with warnings.catch_warnings():
        # One line each on standard error, without the code line that Python adds.
        warnings.showwarning = lambda message, *_: print(f"jaxlab: {message}", file=sys.stderr)
        try:
            yield observers
        finally:
            observers.close()


def _write(result: Result, config: RunConfig, path: epath.Path) -> None:
    """Figures and report first; result.json, which marks the run as finished, last."""
    make_directory(path / "figures")
    for figure in result.figures:
        save(figure, path / "figures" / f"{figure.name}.png")
    if result.files:
        make_directory(path / "files")
    for name, text in result.files.items():
        write_atomic(path / "files" / name, text)
    command = composition.command_of(config)
    write_atomic(path / "report.md", report_markdown(result, command))
    write_json(path / "result.json", result.to_dict())
