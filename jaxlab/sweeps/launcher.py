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

__all__ = ["group_trials", "job", "launch", "program_name"]

_GO_ON = (0, DivergedError.exit_code)


def job(cfg: Any) -> int:
    """One job of a sweep under any other launcher: runs it in its own folder of the sweep's.

    Returns:
      0, or 3 if it diverged.

    Raises:
      SystemExit: with any other exit code, which ends the sweep.
    """
    tree: Any = OmegaConf.to_container(cfg, resolve=True)
    code = _run([composition.validate(tree["method"], tree)])
    if code not in _GO_ON:
        raise SystemExit(code)
    return code


def launch(
    hydra_context: Any, config: Any, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Runs all jobs of a sweep that are not finished, group by group.

    A group that diverges does not keep the others from running; any other error does.

    Args:
      hydra_context: Hydra's.
      config: the composed configuration of the sweep, with its `hydra` node.
      job_overrides: one list for each job.
      initial_job_idx: number of the first job.

    Returns:
      One entry for each job, in order; its value is the exit code.
    """
    configs = composition.compose_configs(job_overrides)
    programs = _unfinished_programs(configs)
    codes: dict[str, int] = {}
    stopped = 0
    for i, trials in enumerate(programs):
        if not trials[0].quiet:
            print(f"program {i + 1} of {len(programs)}: {len(trials)} trials", flush=True)
        code = _run(trials)
        codes |= {identity_digest(trial): code for trial in trials}
        if code not in _GO_ON:
            stopped = code
            break
    unfinished = {identity_digest(trial) for trials in programs for trial in trials}
    return [
        JobReturn(
            overrides=overrides,
            working_dir=one.run_dir,
            status=JobStatus.COMPLETED,
            _return_value=codes.get(digest, stopped if digest in unfinished else 0),
        )
        for overrides, one in zip(job_overrides, configs, strict=True)
        for digest in [identity_digest(one)]
    ]


def _unfinished_programs(configs: Sequence[RunConfig]) -> list[list[RunConfig]]:
    """The trials of each program that are not finished; all where it was begun as a whole."""
    from jaxlab.experiments.runner import load_result

    base = epath.Path(configs[0].run_dir or ".")
    programs = []
    for group in group_trials(configs):
        left = [
            one
            for one in group
            if not one.keeps_results or load_result(one, base / identity_digest(one)) is None
        ]
        if left:
            programs.append(group if (base / program_name(group)).exists() else left)
    return programs


def _run(configs: Sequence[RunConfig]) -> int:
    """Runs trials in folders named by their identity, below the sweep's.

    Hydra would print a traceback, so errors become their one line and exit code here.
    """
    from jaxlab.experiments.runner import run_trials

    base = epath.Path(configs[0].run_dir or ".")
    folders = [base / identity_digest(config) for config in configs]
    try:
        run_trials(configs, folders, base / program_name(configs))
    except JaxlabError as error:
        print(f"jaxlab: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


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
