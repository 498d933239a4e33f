"""A sweep from its command line to the table of its trials."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import hydra
from etils import epath

from jaxlab.experiments import composition
from jaxlab.experiments.base import RunConfig, flatten, identity_digest, to_dict
from jaxlab.reporting.claims import Claim
from jaxlab.reporting.files import read_json, write_atomic, write_json
from jaxlab.reporting.report import make_table, table_text
from jaxlab.sweeps.launcher import job

__all__ = ["run_sweep", "summarize", "sweep_directory"]

_CLAIMS_FAILED = 4
_WIDTH = 100


def sweep_directory(configs: Sequence[RunConfig]) -> str:
    """The default folder of a sweep: the same set of trials finds its own again."""
    digests = sorted({identity_digest(config) for config in configs})
    name = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:8]
    return f"runs/{configs[0].method}/sweep-{name}"


def run_sweep(overrides: Sequence[str], configs: Sequence[RunConfig], folder: str) -> int:
    """Runs a validated sweep through Hydra's launcher and prints its table.

    Args:
      overrides: from `prepare_overrides`; the values of a sweep separated by commas.
      configs: the validated trials, for the table.
      folder: of the sweep; a trial's own folder in it is named by its identity.

    Returns:
      The exit code.
    """
    composition.register_defaults(sorted({config.method for config in configs}))
    folder = os.path.abspath(os.path.expanduser(folder)) if "://" not in folder else folder
    quoted = folder.replace("\\", "\\\\").replace("'", "\\'")
    words = [word for word in overrides if not word.startswith("run_dir=")]
    before = sys.argv
    sys.argv = [before[0], "--multirun", *words, f"run_dir='{quoted}'"]
    try:
        hydra.main(
            config_path=str(composition.config_directory()), config_name="run", version_base=None
        )(job)()
    finally:
        sys.argv = before
    rows = summarize(configs, epath.Path(folder))
    failed = any(
        claim.kind == "claim" and not claim.holds for row in rows for claim in row["claims"]
    )
    return _CLAIMS_FAILED if failed and configs[0].fail_on_claims else 0


def summarize(configs: Sequence[RunConfig], folder: epath.Path) -> list[dict[str, Any]]:
    """Writes sweep.json and sweep.md from the trials' results, and prints the table.

    Args:
      configs: the trials.
      folder: of the sweep.

    Returns:
      For each finished trial its `settings` (the fields that differ between trials), `folder`,
      `metrics` and `claims`.
    """
    flats = [flatten(to_dict(config)) for config in configs]
    varied = [key for key in flats[0] if len({repr(flat.get(key)) for flat in flats}) > 1]
    rows: list[dict[str, Any]] = []
    for config, flat in zip(configs, flats, strict=True):
        path = folder / identity_digest(config) / "result.json"
        if not path.exists():
            continue
        found = read_json(path)
        rows.append(
            {
                "settings": {key: flat.get(key) for key in varied},
                "folder": path.parent.name,
                "metrics": found["metrics"],
                "claims": [Claim.from_dict(claim) for claim in found["claims"]],
            }
        )
    columns = [*varied, "claim", "ours (95 % interval)", "bound", "verdict", "folder"]
    cells = [
        [
            *(str(value) for value in row["settings"].values()),
            claim.id,
            claim.estimate_text,
            claim.bound_text,
            claim.verdict,
            row["folder"],
        ]
        for row in rows
        for claim in row["claims"]
    ]
    table = make_table("sweep", columns, cells, verdict_column=len(columns) - 2, width=_WIDTH)
    text = table_text(table, _WIDTH)
    plain = [{**row, "claims": [claim.to_dict() for claim in row["claims"]]} for row in rows]
    write_json(folder / "sweep.json", plain)
    write_atomic(folder / "sweep.md", f"```\n{text}\n```\n")
    if not configs[0].quiet:
        print(text)
        print(folder / "sweep.json")
    return rows
