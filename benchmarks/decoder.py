"""A real model beside PyTorch's `transformers`: `python -m benchmarks.decoder [MODEL]`.

Needs `pip install -e '.[bench]'` and an idle machine. MODEL is a GGUF file or a name that ends at
one, by default `smollm2-135m`. Each library is measured with every number of threads and compared
at its best. "load" reads the GGUF file, "load folder" the same model as a folder with safetensors;
"first token" is a new process, from its start to the token that follows a short prompt, with
compiled programs from an earlier process. int8 is the type of the weights alone.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.workers import (
    NewWorker,
    Worker,
    machine_text,
    median,
    running,
    table,
    take_turns,
)
from jaxlab.models.pretrained.folders import open_source
from jaxlab.models.pretrained.locate import resolve

__all__ = ["main"]

_REQUESTS = ("load", "load folder", "read 128", "read 1024", "read 4096", "decode 1", "decode 8")
_FIRST = "first token"
_ROWS = (*_REQUESTS[:2], _FIRST, *_REQUESTS[2:])
_ROUNDS = {"load": 3, "load folder": 3, "read 4096": 3, _FIRST: 3}
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
    with tempfile.TemporaryDirectory() as place:
        folder, cache = os.path.join(place, "model"), os.path.join(place, "programs")
        Worker("benchmarks.decoder_jax", ["export", "float32", "1", folder, path]).close()
        makers, starts = _makers(path, folder, cache, cores)
        found: dict[str, dict[str, list[dict[str, Any]]]] = {}
        with running(makers) as workers:
            for name in _REQUESTS:
                found[name] = take_turns(workers, name, _ROUNDS.get(name, 7))
                print(f"measured: {name}", file=sys.stderr, flush=True)
            versions = sorted({str(worker.facts["versions"]) for worker in workers.values()})
            size = next(worker.facts["bytes"] for worker in workers.values())
        found[_FIRST] = take_turns(starts, _FIRST, _ROUNDS[_FIRST])
    print(f"{os.path.basename(path)}; medians; {'; '.join(versions)}; {machine_text()}")
    print(_table(found))
    for name in _ROWS:
        print(_comparison(name, found[name]))
    best = min(_float32(found["decode 1"], "jaxlab").values())
    share = size / best / bandwidth
    print(
        f"decode 1 reads {size / 1e6:.0f} MB of weights a token: {size / best / 1e9:.1f} GB/s, "
        f"{share:.0%} of the {bandwidth / 1e9:.1f} GB/s that {cores} threads read (goal 60%)"
    )


def _makers(
    path: str, folder: str, cache: str, cores: int
) -> tuple[dict[str, Callable[[], Worker]], dict[str, NewWorker]]:
    """What starts the workers that answer requests, and those that give a first token."""
    makers: dict[str, Callable[[], Worker]] = {}
    starts: dict[str, NewWorker] = {}
    modules = {"jaxlab": "benchmarks.decoder_jax"}
    if importlib.util.find_spec("transformers") is not None:
        modules["PyTorch"] = "benchmarks.decoder_torch"
    for kind in ("float32", "bfloat16", "int8"):
        for threads in sorted({1, cores}) if kind == "float32" else [cores]:
            for library, module in modules.items():
                label = f"{library}, {kind}, {threads} thread{'s' if threads > 1 else ''}"
                start = functools.partial(Worker, module, threads=threads)
                makers[label] = functools.partial(start, ["work", kind, str(threads), folder, path])
                first = ["first", kind, str(threads), folder, cache]
                if threads == cores:
                    starts[label] = NewWorker(functools.partial(start, first))
    return makers, starts


def _table(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    rows: list[tuple[str, ...]] = [("milliseconds", *_ROWS, "memory")]
    for label in found["load"]:
        own = [found[name].get(label) for name in _ROWS]
        times = [f"{1e3 * median(each, 'seconds'):.1f}" if each else "-" for each in own]
        memory = max(median(each, "memory") for each in own if each)
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
    goal = f" (goal {_GOALS[name]})" if name in _GOALS else ""
    return f"{name}: {ratio:.2f} x the speed of PyTorch, each at its best{goal}"


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
