"""A real model beside PyTorch's `transformers`: `python -m benchmarks.decoder [MODEL]`.

Needs `pip install -e '.[bench]'` and an idle machine. MODEL is a GGUF file or a name that ends at
one, by default `smollm2-135m`. Each library is measured with every number of threads and compared
at its best.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.workers import Worker, machine_text, median, running, table, take_turns
from jaxlab.models.pretrained.folders import open_source
from jaxlab.models.pretrained.locate import resolve

__all__ = ["main"]

_REQUESTS = ("load", "read 128", "read 1024", "read 4096", "decode 1", "decode 8")
_ROUNDS = {"load": 3, "read 4096": 3}
_BANDWIDTH_BYTES = 2**29
# Jaxlab's speed over that of the other, where the project sets itself a goal.
_GOALS = {"load": 2.0, "read 128": 0.8, "read 1024": 0.8, "read 4096": 0.8}
_GOALS |= {"decode 1": 1.15, "decode 8": 1.0}


def main(words: Sequence[str]) -> None:
    """Measures and prints."""
    path = str(open_source(resolve(words[0] if words else "smollm2-135m")).path)
    print(machine_text())
    cores = len(os.sched_getaffinity(0))
    bandwidth = _bandwidth(cores)
    makers: dict[str, Callable[[], Worker]] = {}
    for kind in ("float32", "bfloat16"):
        for threads in sorted({1, cores}) if kind == "float32" else [cores]:
            ending = f"{kind}, {threads} thread{'s' if threads > 1 else ''}"
            makers[f"jaxlab, {ending}"] = functools.partial(_jaxlab, path, kind, threads)
            if importlib.util.find_spec("transformers") is not None:
                makers[f"PyTorch, {ending}"] = functools.partial(_torch, path, kind, threads)
    with running(makers) as workers:
        found = {name: take_turns(workers, name, _ROUNDS.get(name, 7)) for name in _REQUESTS}
        versions = sorted({str(worker.facts["versions"]) for worker in workers.values()})
        size = next(worker.facts["bytes"] for worker in workers.values())
    print(f"{os.path.basename(path)}; medians; {'; '.join(versions)}; {machine_text()}")
    print(_table(found))
    for name in _REQUESTS:
        print(_comparison(name, found[name]))
    best = min(_float32(found["decode 1"], "jaxlab").values())
    share = size / best / bandwidth
    print(
        f"decode 1 reads {size / 1e6:.0f} MB of weights a token: {size / best / 1e9:.1f} GB/s, "
        f"{share:.0%} of the {bandwidth / 1e9:.1f} GB/s that {cores} threads read (goal 60%)"
    )


def _jaxlab(path: str, kind: str, threads: int) -> Worker:
    return Worker("benchmarks.decoder_jax", [path, kind], threads)


def _torch(path: str, kind: str, threads: int) -> Worker:
    return Worker("benchmarks.decoder_torch", [path, kind, str(threads)], threads)


def _table(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    rows: list[tuple[str, ...]] = [("milliseconds", *_REQUESTS, "memory")]
    for label in found["load"]:
        times = [f"{1e3 * median(found[name][label], 'seconds'):.1f}" for name in _REQUESTS]
        memory = max(median(found[name][label], "memory") for name in _REQUESTS)
        rows.append((label, *times, f"{memory / 2**20:.0f} MiB"))
    return table(rows)


def _float32(answers: Mapping[str, Sequence[Mapping[str, Any]]], library: str) -> dict[str, float]:
    return {
        label: median(values, "seconds")
        for label, values in answers.items()
        if label.startswith(f"{library}, float32")
    }


def _comparison(name: str, answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    others = _float32(answers, "PyTorch")
    if not others:
        return f"{name}: nothing to compare with"
    ratio = min(others.values()) / min(_float32(answers, "jaxlab").values())
    return f"{name}: {ratio:.2f} x the speed of PyTorch, each at its best (goal {_GOALS[name]})"


def _bandwidth(threads: int) -> float:
    """Bytes a second that this many threads read from memory, best of several."""
    parts = [np.ones(_BANDWIDTH_BYTES // 4 // threads, np.float32) for _ in range(threads)]
    seconds = []
    for _ in range(5):
        readers = [threading.Thread(target=np.dot, args=(part, part)) for part in parts]
        start = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        seconds.append(time.perf_counter() - start)
    return _BANDWIDTH_BYTES / min(seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
