"""Jobs that differ in traced fields alone become the trials of one compiled program."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from etils import epath
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from jaxlab.errors import DivergedError, JaxlabError
from jaxlab.experiments import composition
from jaxlab.experiments.base import RunConfig, identity_digest, static_identity

__all__ = ["Task", "group_trials", "launch", "program_name", "sweep"]


class Task:
    """What Hydra is given to run, and how it went.

    Hydra's launchers call it with a composed configuration, perhaps in another process.

    Attributes:
      jobs: the overrides of each trial that has to run.
      configs: all trials of the sweep, also those that are finished; `run_dir` is the sweep's.
      codes: exit codes of the trials that ended, by the digest of their identity.
      error: what ended the sweep; to be raised when its table is written.
    """

    def __init__(self, jobs: Sequence[Sequence[str]], configs: Sequence[RunConfig]) -> None:
        self.jobs = [list(job) for job in jobs]
        self.configs = list(configs)
        self.codes: dict[str, int] = {}
        self.error: BaseException | None = None

    def __call__(self, cfg: Any) -> int:
        tree: Any = OmegaConf.to_container(cfg, resolve=True)
        return self.run([composition.validate(tree["method"], tree)])

    def run(self, configs: Sequence[RunConfig]) -> int:
        """Runs trials in folders named by their identity, below the sweep's.

        Returns:
          0, or 3 if one diverged, which does not end the sweep.

        Raises:
          SystemExit: with the exit code of any other error, after its line is printed: Hydra would
            print a traceback.
        """
        from jaxlab.experiments.runner import run_trials

        base = epath.Path(configs[0].run_dir or ".")
        folders = [base / identity_digest(config) for config in configs]
        code = 0
        try:
            run_trials(configs, folders, base / program_name(configs))
        except JaxlabError as error:
            print(f"jaxlab: {error}", file=sys.stderr)
            if not isinstance(error, DivergedError):
                raise SystemExit(error.exit_code) from None
            code = error.exit_code
        self.codes |= {identity_digest(config): code for config in configs}
        return code


def sweep(launcher: Any, task: Task) -> None:
    """Hands a task's jobs to one of Hydra's launchers and notes how they ended.

    An error that is nobody's mistake (`OSError`, one of Hydra's) ends the sweep; it is kept in
    `task.error`, for the caller to raise.
    """
    try:
        returns = launcher.launch(task.jobs, initial_job_idx=0)
        for overrides, done in zip(task.jobs, returns, strict=True):
            [config] = composition.compose_configs([overrides])
            task.codes.setdefault(identity_digest(config), int(done.return_value or 0))
    except Exception as error:
        task.error = error
        raise SystemExit(1) from None


def launch(task: Task, job_overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Runs all jobs of a sweep, group by group.

    Args:
      task: of this sweep.
      job_overrides: one list for each job.

    Returns:
      One entry for each job, in order.
    """
    configs = composition.compose_configs(job_overrides)
    programs = _programs(configs, task.configs)
    for i, trials in enumerate(programs):
        if not trials[0].quiet:
            print(f"program {i + 1} of {len(programs)}: {len(trials)} trials", flush=True)
        task.run(trials)
    return [
        JobReturn(
            overrides=overrides,
            working_dir=config.run_dir,
            status=JobStatus.COMPLETED,
            _return_value=task.codes[identity_digest(config)],
        )
        for overrides, config in zip(job_overrides, configs, strict=True)
    ]


def _programs(
    unfinished: Sequence[RunConfig], everything: Sequence[RunConfig]
) -> list[list[RunConfig]]:
    """The unfinished trials of each program; all of them where the program was begun as a whole."""
    base = epath.Path(unfinished[0].run_dir or ".")
    whole = {_key(group[0]): group for group in group_trials(everything)}
    programs = []
    for group in group_trials(unfinished):
        begun = whole[_key(group[0])]
        programs.append(begun if (base / program_name(begun)).exists() else group)
    return programs


def group_trials(configs: Sequence[RunConfig]) -> list[list[RunConfig]]:
    """Splits configurations into groups that share every field but the traced ones.

    A configuration that occurs twice is kept once. A group is in the order of its digests, so
    that it is the same program whatever the order of a sweep's values.
    """
    groups: dict[str, dict[str, RunConfig]] = {}
    for config in configs:
        groups.setdefault(_key(config), {})[identity_digest(config)] = config
    return [[group[digest] for digest in sorted(group)] for group in groups.values()]


def _key(config: RunConfig) -> str:
    return json.dumps(static_identity(config), sort_keys=True)


def program_name(configs: Sequence[RunConfig]) -> str:
    """The folder of what the trials of one program share; a single trial's is its own."""
    digests = sorted(identity_digest(config) for config in configs)
    if len(digests) == 1:
        return digests[0]
    return f"program-{hashlib.sha256(' '.join(digests).encode()).hexdigest()[:8]}"
