"""Comparisons between libraries: each in a process of its own, measured in turns.

A worker is a Python module that prepares its work, then answers one request a line on standard
input with one line of JSON on standard output. While one works the others wait for a line and use
no processor.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "NewWorker",
    "Worker",
    "machine_text",
    "median",
    "peak_memory",
    "running",
    "serve",
    "table",
    "take_turns",
]

ROUNDS = 7
_MARK = "answer "


class Worker:
    """A library at work in a process of its own.

    Args:
      module: the worker's module.
      arguments: of its command line.
      threads: how many processors it may use; None leaves all of them.
    """

    def __init__(self, module: str, arguments: Sequence[str], threads: int | None = None) -> None:
        environment = dict(os.environ)
        if threads is not None:
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        cores = sorted(os.sched_getaffinity(0))[:threads]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self.facts = self._read()

    def ask(self, request: str) -> dict[str, Any]:
        """Has one piece of work done; its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        raise RuntimeError(f"a worker ended with code {self._process.wait()}; see its message")


class NewWorker:
    """A worker that is started for every request and ended after it; its start is what counts.

    Args:
      start: starts it; its facts have `memory`.
    """

    def __init__(self, start: Callable[[], Worker]) -> None:
        self._start = start

    def ask(self, request: str) -> dict[str, Any]:
        """Seconds until the worker was ready, and its memory; the request only names them."""
        del request
        before = time.perf_counter()
        worker = self._start()
        seconds = time.perf_counter() - before
        worker.close()
        return {"seconds": seconds, "memory": worker.facts["memory"]}


def serve(
    facts: Mapping[str, Any], handlers: Mapping[str, Callable[[], Mapping[str, Any]]]
) -> None:
    """The worker's side: says that it is ready, then answers until standard input ends.

    Args:
      facts: versions and the like.
      handlers: by request, what does the work and gives the answer.
    """
    print(_MARK + json.dumps(dict(facts)), flush=True)
    for line in sys.stdin:
        print(_MARK + json.dumps(dict(handlers[line.strip()]())), flush=True)


@contextlib.contextmanager
def running(workers: Mapping[str, Callable[[], Worker]]) -> Iterator[dict[str, Worker]]:
    """Starts workers one after the other, and ends them all."""
    started: dict[str, Worker] = {}
    try:
        for name, start in workers.items():
            started[name] = start()
        yield started
    finally:
        for worker in started.values():
            worker.close()


def take_turns(
    workers: Mapping[str, Worker] | Mapping[str, NewWorker], request: str, rounds: int = ROUNDS
) -> dict[str, list[dict[str, Any]]]:
    """Asks every worker once a round, after one round that is not counted."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for number in range(rounds + 1):
        for name, worker in workers.items():
            answer = worker.ask(request)
            if number:
                answers[name].append(answer)
    return answers


def median(answers: Sequence[Mapping[str, Any]], key: str) -> float:
    """The median of one number over the rounds."""
    return statistics.median(float(answer[key]) for answer in answers)


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine_text() -> str:
    """Processor, cores and load, with a warning where something else runs."""
    name = "unknown processor"
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        name = names[0] if names else name
    load = os.getloadavg()[0]
    busy = " (the machine is busy: numbers are not comparable)" if load > 1 else ""
    return f"{name}, {len(os.sched_getaffinity(0))} cores, load average {load:.2f}{busy}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
