"""Kills a run at random moments and compares what its resumes end with.

    python -m tests.training.kill_and_resume --kills 20

Runs `method=trec preset=test` once undisturbed, then again in another folder, where SIGKILL ends
the process at random moments; after each kill the same command resumes. The checkpoints'
checksums, metrics.jsonl and result.json of both must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

_COMMAND = (
    sys.executable,
    "-m",
    "jaxlab.run",
    "method=trec",
    "preset=test",
    "steps=1200",
    "checkpoint_every=40",
    "eval_every=100",
    "tensorboard=false",
    "log_every=10",
)
_TIMES = ("compile_seconds", "run_seconds", "peak_memory_bytes")


def start(folder: pathlib.Path) -> subprocess.Popen[str]:
    """Starts, or resumes, the run in a folder."""
    return subprocess.Popen(
        [*_COMMAND, f"run_dir={folder}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def wait_for_progress(process: subprocess.Popen[str], folder: pathlib.Path) -> None:
    """Returns when the process has begun to train, or to write, or has ended."""

    def state() -> object:
        files = [folder / "metrics.jsonl", folder / "result.json"]
        return [file.stat().st_mtime_ns if file.exists() else None for file in files]

    before = state()
    while state() == before and process.poll() is None:
        time.sleep(0.002)


def finish(folder: pathlib.Path) -> None:
    """Runs to the end.

    Raises:
      RuntimeError: the run failed.
    """
    process = start(folder)
    output, _ = process.communicate(timeout=600)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}:\n{output}")


def fingerprint(folder: pathlib.Path) -> dict[str, object]:
    """What must be equal: the last checkpoint's checksums, all metrics, the result."""
    result = json.loads((folder / "result.json").read_text())
    paths = sorted(folder.glob("checkpoints/*/*/1200/meta/metadata"))
    records = [json.loads(path.read_text()) for path in paths]
    for record in records:
        del record["meta"]["seconds"]
    return {
        "result": {key: value for key, value in result.items() if key not in _TIMES},
        "metrics": (folder / "metrics.jsonl").read_text().splitlines(),
        "checkpoints": records,
    }


def kill_and_resume(base: pathlib.Path, kills: int, seed: int) -> list[str]:
    """Runs the comparison.

    Args:
      base: an empty folder.
      kills: how often the process is killed before it may finish.
      seed: of the moments.

    Returns:
      One line for each kill: when it came, and the newest checkpoint it left.

    Raises:
      AssertionError: the disturbed run ended differently.
    """
    whole, broken = base / "whole", base / "broken"
    process = start(whole)
    wait_for_progress(process, whole)
    begin = time.monotonic()
    process.communicate(timeout=600)
    length = time.monotonic() - begin
    moments, lines = random.Random(seed), []
    for _ in range(kills):
        process = start(broken)
        wait_for_progress(process, broken)
        delay = moments.uniform(0, length / 4)
        try:
            process.communicate(timeout=delay)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        newest = sorted(
            int(path.name) for path in broken.glob("checkpoints/*/*/[0-9]*") if path.name.isdigit()
        )
        lines.append(f"killed {delay:.2f} s after its first sign, checkpoints {newest}")
        if (broken / "result.json").exists():
            lines[-1] += ", finished"
            if len(lines) < kills:
                broken = base / f"broken{len(lines)}"
    finish(broken)
    for disturbed in base.glob("broken*"):
        if (disturbed / "result.json").exists():
            assert fingerprint(disturbed) == fingerprint(whole), disturbed
    return lines


def main() -> None:
    """The command line of this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for line in kill_and_resume(pathlib.Path(folder), arguments.kills, arguments.seed):
            print(line)
    print(f"{arguments.kills} kills: every resumed run ended bit-equal")


if __name__ == "__main__":
    main()
