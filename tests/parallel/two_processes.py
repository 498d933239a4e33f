"""Starts `python -m jaxlab.run` as two processes of four CPU devices each."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

WORDS = (
    "method=trec",
    "preset=test",
    "batch_size=8",
    "tensorboard=false",
    "log_every=1",
    "checkpoint_every=10",
    "steps_per_dispatch=5",
)


def _start(
    words: tuple[str, ...], folder: pathlib.Path, devices: int, cache: str
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_COMPILATION_CACHE_DIR": cache,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "jaxlab.run", *WORDS, *words, f"run_dir={folder}"],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def pair(
    folder: pathlib.Path, cache: str, *words: str
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """Two processes of one run; whatever happens, none is left."""
    port = free_port()
    both = [
        _start(
            (
                f"distributed.coordinator=127.0.0.1:{port}",
                "distributed.num_processes=2",
                f"distributed.process_id={i}",
                "distributed.start_seconds=60",
                "distributed.heartbeat_seconds=10",
                *words,
            ),
            folder,
            4,
            cache,
        )
        for i in range(2)
    ]
    try:
        yield both[0], both[1]
    finally:
        for process in both:
            process.kill()
            process.communicate()


def finish(processes: tuple[subprocess.Popen[str], ...], timeout: float = 240) -> list[str]:
    """Waits for all; their outputs."""
    outputs = []
    for process in processes:
        out, err = process.communicate(timeout=timeout)
        outputs.append(out + err)
    return outputs


def alone(folder: pathlib.Path, cache: str, *words: str) -> str:
    """The same run as one process of eight devices, with a mesh over all of them."""
    process = _start(("mesh.data=-1", *words), folder, 8, cache)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    return out


def losses(folder: pathlib.Path) -> np.ndarray:
    """Training losses `[step, replicate]` from metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["train/loss"] for line in lines if "train/loss" in line])


def wait_for_steps(folder: pathlib.Path, steps: int, process: subprocess.Popen[str]) -> None:
    """Returns when a checkpoint of at least `steps` steps is complete."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        found = [p.name for p in folder.glob("checkpoints/*/*/*") if p.name.isdigit()]
        if any(int(name) >= steps for name in found):
            return
        time.sleep(0.02)
    raise AssertionError(f"no checkpoint of step {steps} in {folder}: {process.poll()}")


def terminate_one(folder: pathlib.Path, cache: str, *words: str) -> list[int | None]:
    """SIGTERM to the second process after the first checkpoint; both exit codes."""
    with pair(folder, cache, *words) as both:
        wait_for_steps(folder, 10, both[0])
        both[1].send_signal(signal.SIGTERM)
        finish(both)
        return [process.returncode for process in both]


def kill_one(folder: pathlib.Path, cache: str, *words: str) -> tuple[float, int | None]:
    """SIGKILL to the second process; seconds until the first has ended, and its exit code."""
    with pair(folder, cache, *words) as both:
        wait_for_steps(folder, 10, both[0])
        both[1].kill()
        begin = time.monotonic()
        finish((both[0],))
        return time.monotonic() - begin, both[0].returncode
