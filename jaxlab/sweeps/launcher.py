"""Jobs that differ in traced fields alone become the trials of one compiled program."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from etils import epath
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf, open_dict

from jaxlab.errors import JaxlabError
from jaxlab.experiments import composition
from jaxlab.experiments.base import RunConfig, identity_digest, static_identity

__all__ = ["group_trials", "job", "launch"]


def job(cfg: Any) -> None:
    """One job of a sweep under any other launcher: runs it in its own folder of the sweep's."""
    tree: Any = OmegaConf.to_container(cfg, resolve=True)
    config = composition.validate(tree["method"], tree)
    _run([config])


def launch(
    hydra_context: Any, config: Any, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Runs all jobs of a sweep, group by group.

    Args:
      hydra_context: Hydra's.
      config: the composed configuration of the sweep, with its `hydra` node.
      job_overrides: one list for each job.
      initial_job_idx: number of the first job.

    Returns:
      One entry for each job, in order.
    """
    returns, configs = [], []
    for number, overrides in enumerate(job_overrides, initial_job_idx):
        whole = hydra_context.config_loader.load_sweep_config(config, list(overrides))
        with open_dict(whole):
            whole.hydra.job.id, whole.hydra.job.num = str(number), number
            hydra_node = whole.pop("hydra")
        tree: Any = OmegaConf.to_container(whole, resolve=True)
        configs.append(composition.validate(tree["method"], tree))
        returns.append(
            JobReturn(
                overrides=overrides,
                cfg=whole,
                hydra_cfg=OmegaConf.create({"hydra": hydra_node}),
                working_dir=configs[-1].run_dir,
                status=JobStatus.COMPLETED,
                _return_value=None,
            )
        )
    groups = group_trials(configs)
    for i, group in enumerate(groups):
        if not group[0].quiet:
            print(f"program {i + 1} of {len(groups)}: {len(group)} trials", flush=True)
        _run(group)
    return returns


def group_trials(configs: Sequence[RunConfig]) -> list[list[RunConfig]]:
    """Splits configurations into groups that share every field but the traced ones.

    A configuration that occurs twice is kept once.
    """
    groups: dict[str, dict[str, RunConfig]] = {}
    for config in configs:
        key = json.dumps(static_identity(config), sort_keys=True)
        groups.setdefault(key, {})[identity_digest(config)] = config
    return [list(group.values()) for group in groups.values()]


def _run(configs: Sequence[RunConfig]) -> None:
    """Runs trials in folders named by their identity, below the sweep's.

    Hydra would print a traceback, so errors become their one line and exit code here.
    """
    from jaxlab.experiments.runner import run_trials

    base = epath.Path(configs[0].run_dir or ".")
    digests = [identity_digest(config) for config in configs]
    work = base / digests[0]
    if len(configs) > 1:
        name = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:8]
        work = base / f"program-{name}"
    try:
        run_trials(configs, [base / digest for digest in digests], work)
    except JaxlabError as error:
        print(f"jaxlab: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
