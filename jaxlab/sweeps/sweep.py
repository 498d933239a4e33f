"""A sweep from its command line to the table of its trials."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from jaxlab.errors import DivergedError, JaxlabError, UserError
from jaxlab.experiments import composition
from jaxlab.experiments.base import RunConfig, flatten, identity_digest, to_dict
from jaxlab.reporting.claims import Claim
from jaxlab.reporting.directory import own_directory
from jaxlab.reporting.files import is_remote, write_atomic, write_json
from jaxlab.reporting.report import make_table, table_text
from jaxlab.sweeps.launcher import job
from jaxlab.sweeps.outcome import TABLE_WIDTH, claims_code

__all__ = ["Trial", "plan_sweep", "run_sweep", "summarize", "sweep_directory"]

_IN_THIS_PROCESS = ("vmap", "basic")  # launchers
_TRIAL_FOLDER = r"(program-)?[0-9a-f]{8}"
_OWN_FILES = r"sweep\.json|sweep\.md|multirun\.yaml|\.lock|\.submitit|\.sweep\..*\.tmp"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One combination of a sweep's values.

    Attributes:
      overrides: for Hydra, each with one value.
      config: what they compose to.
    """

    overrides: tuple[str, ...]
    config: RunConfig

    @property
    def digest(self) -> str:
        """Names the trial's folder."""
        return identity_digest(self.config)


def plan_sweep(overrides: Sequence[str]) -> list[Trial]:
    """All trials of a sweep, validated; a combination that occurs twice is kept once.

    Args:
      overrides: from `prepare_overrides(..., multirun=True)`.

    Raises:
      UserError: there are too many, one of them is invalid, or two compute the same thing in
        different ways, so that they would share a folder.
    """
    combinations = composition.expand_sweep(overrides)
    found: dict[str, Trial] = {}
    configs = composition.compose_configs(combinations)
    for combination, config in zip(combinations, configs, strict=True):
        trial = Trial(tuple(combination), config)
        before = found.setdefault(trial.digest, trial)
        if before.config != config:
            one, two = flatten(to_dict(before.config)), flatten(to_dict(config))
            key = next(key for key in two if one.get(key) != two[key])
            raise UserError(
                key,
                f"{one.get(key)},{two[key]}",
                "these trials compute the same; a sweep varies what is computed (identity fields)",
            )
    return list(found.values())


def sweep_directory(configs: Sequence[RunConfig]) -> str:
    """The default folder of a sweep: the same set of trials finds its own again."""
    digests = sorted({identity_digest(config) for config in configs})
    name = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:8]
    return f"runs/{configs[0].method}/sweep-{name}"


def run_sweep(trials: Sequence[Trial], folder: str) -> int:
    """Runs the trials that are not finished through Hydra's launcher and prints a table of all.

    The table is printed and written however the sweep ends.

    Args:
      trials: from `plan_sweep`.
      folder: of the sweep; a trial's own folder in it is named by its identity.

    Returns:
      The exit code.
    """
    folder = folder if is_remote(folder) else os.path.abspath(folder)
    path = epath.Path(folder)
    configs = [trial.config for trial in trials]
    writes = _is_writer(trials[0])
    codes: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    with _shared(trials[0], path, writes):
        try:
            codes = _call_launcher(trials, folder)
        except SystemExit as stop:  # of a trial that another launcher ran in this process
            codes = {"": stop.code if isinstance(stop.code, int) else 1}
        finally:
            if writes and _was_begun(path):
                rows = summarize(configs, path, codes)
    worst = [code for code in codes.values() if code not in (0, DivergedError.exit_code)]
    if worst or any(codes.values()):
        return worst[0] if worst else DivergedError.exit_code
    if any(row["status"] != "finished" for row in rows):
        return 1
    return claims_code((claim for row in rows for claim in row["claims"]), configs[0])


def _launcher_name(trial: Trial) -> str:
    words = [word.partition("=") for word in trial.overrides]
    return {key: value for key, _, value in words}.get("hydra/launcher", "vmap")


def _is_writer(trial: Trial) -> bool:
    """Whether this process is the one that owns the folder, of several that may run the sweep."""
    if _launcher_name(trial) not in _IN_THIS_PROCESS:
        return True  # it only submits the trials
    from jaxlab.parallel.processes import ProcessSettings, is_main, start_processes

    start_processes(ProcessSettings(**dataclasses.asdict(trial.config.distributed)))
    return is_main()


@contextlib.contextmanager
def _shared(trial: Trial, path: epath.Path, writes: bool) -> Iterator[None]:
    """Owns the folder in the process that writes; the others follow its decision."""
    problem: JaxlabError | None = None
    with contextlib.ExitStack() as stack:
        if writes:
            try:
                stack.enter_context(_own(path))
            except JaxlabError as error:
                problem = error
        refused = problem is not None
        if _launcher_name(trial) in _IN_THIS_PROCESS:
            from jaxlab.parallel.processes import agree

            refused = bool(agree(int(refused)))
        if refused:
            raise problem or UserError("run_dir", path, "refused by process 0; see its message")
        yield


@contextlib.contextmanager
def _own(path: epath.Path) -> Iterator[None]:
    """Keeps other sweeps out; a folder that is still empty at the end is removed again."""
    _check_content(path)
    new = [place for place in (path, *path.parents) if not is_remote(path) and not place.exists()]
    try:
        with own_directory(path):
            yield
    finally:
        if new and not _was_begun(path):
            with contextlib.suppress(OSError):
                (path / ".lock").unlink(missing_ok=True)
                for place in new:
                    place.rmdir()


def _check_content(path: epath.Path) -> None:
    """A sweep does not write among somebody's files, nor into a single run's folder.

    Raises:
      UserError: naming what the folder holds.
    """
    if not path.is_dir():
        return
    names = sorted(item.name for item in path.iterdir())
    if "config.yaml" in names:
        raise UserError("run_dir", path, "a single run's folder; a sweep needs one of its own")
    others = [name for name in names if not re.fullmatch(f"{_TRIAL_FOLDER}|{_OWN_FILES}", name)]
    if others:
        raise UserError(
            "run_dir",
            path,
            f"holds other files ({others[0]}, ...); allowed: a new or empty folder, or a sweep's",
        )


def _was_begun(path: epath.Path) -> bool:
    return path.is_dir() and any(re.fullmatch(_TRIAL_FOLDER, item.name) for item in path.iterdir())


def _call_launcher(trials: Sequence[Trial], folder: str) -> dict[str, int]:
    """Hands the trials to the chosen launcher of Hydra's.

    Returns:
      Exit codes of the trials that were run, by digest.
    """
    from jaxlab.experiments.runner import load_result

    place = composition.prepare_overrides([f"run_dir={folder}"])[-1]
    left = [
        trial
        for trial in trials
        # Ours leaves finished trials out by itself: it has to know them as parts of a program.
        if _launcher_name(trial) == "vmap"
        or load_result(trial.config, epath.Path(folder) / trial.digest) is None
    ]
    if not left:
        return {}
    jobs = [
        [*(word for word in trial.overrides if not word.startswith("run_dir=")), place]
        for trial in left
    ]
    returns = composition.call_launcher(job, jobs)
    return {
        trial.digest: int(done.return_value or 0) for trial, done in zip(left, returns, strict=True)
    }


def summarize(
    configs: Sequence[RunConfig], folder: epath.Path, codes: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Writes sweep.json and sweep.md from the trials' results, and prints the table.

    Args:
      configs: the trials.
      folder: of the sweep.
      codes: exit codes of trials by digest, to tell those that diverged.

    Returns:
      For each trial its `settings` (the fields that differ between trials), `folder`, `status`
      (finished, diverged, not finished), `metrics` and `claims`.
    """
    flats = [flatten(to_dict(config)) for config in configs]
    varied = [key for key in flats[0] if len({repr(flat.get(key)) for flat in flats}) > 1]
    rows = [
        {"settings": {key: flat.get(key) for key in varied}, **_row(config, folder, codes or {})}
        for config, flat in zip(configs, flats, strict=True)
    ]
    columns = [*varied, "claim", "ours (95 % interval)", "bound", "verdict", "folder"]
    cells = [
        [*(str(value) for value in row["settings"].values()), *texts, row["folder"]]
        for row in rows
        for texts in _claim_texts(row)
    ]
    table = make_table("sweep", columns, cells, verdict_column=len(columns) - 2, width=TABLE_WIDTH)
    text = table_text(table, TABLE_WIDTH)
    plain = [{**row, "claims": [claim.to_dict() for claim in row["claims"]]} for row in rows]
    write_json(folder / "sweep.json", plain)
    write_atomic(folder / "sweep.md", f"```\n{text}\n```\n")
    if not configs[0].quiet:
        print(text)
        print(folder / "sweep.json")
    return rows


def _row(config: RunConfig, folder: epath.Path, codes: Mapping[str, int]) -> dict[str, Any]:
    from jaxlab.experiments.runner import load_result

    digest = identity_digest(config)
    result = load_result(config, folder / digest)
    row: dict[str, Any] = {"folder": digest, "status": "finished", "metrics": {}, "claims": []}
    if result is None:
        diverged = codes.get(digest) == DivergedError.exit_code
        return {**row, "status": "diverged" if diverged else "not finished"}
    return {**row, "metrics": result.metrics, "claims": list(result.claims)}


def _claim_texts(row: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    claims: list[Claim] = row["claims"]
    if not claims:
        return [("-", "-", "-", row["status"])]
    return [(c.id, c.estimate_text, c.bound_text, c.verdict) for c in claims]
