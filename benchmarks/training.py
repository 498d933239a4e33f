"""Training speed beside PyTorch's: `python -m benchmarks.training [WIDTH ...]`.

Needs `pip install -e '.[bench]'` and an idle machine. On a CPU every library is measured with each
number of threads and compared at its best. On a GPU both compute in bfloat16.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.training_sizes import Sizes, step_flops
from benchmarks.workers import Worker, machine_text, median, running, table, take_turns

__all__ = ["main"]

_WIDTHS = (256, 512)


def main(words: Sequence[str]) -> None:
    """Measures the given widths and prints."""
    print(machine_text())
    for width in map(int, words or _WIDTHS):
        _compare(width)
    _cold_start()


def _compare(width: int) -> None:
    sizes = Sizes(width)
    cores = len(os.sched_getaffinity(0))
    counts = sorted({1, cores})
    modes = [("jaxlab", None)]
    if importlib.util.find_spec("torch") is not None:
        modes += [("PyTorch eager", "eager"), ("PyTorch compile", "compile")]
    makers: dict[str, Callable[[], Worker]] = {}
    for threads in counts:
        for name, mode in modes:
            label = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
            makers[label] = functools.partial(_start, width, mode, threads)
    with running(makers) as workers:
        steps = take_turns(workers, "steps")
        peaks = take_turns(workers, "peak", rounds=3)
        own = {name: worker for name, worker in workers.items() if name.startswith("jaxlab")}
        scanned, replayed = take_turns(own, "scanned"), take_turns(own, "trec")
        versions = sorted({str(worker.facts["versions"]) for worker in workers.values()})
    print(
        f"\nwidth {width}: {sizes.num_layers} layers, {sizes.batch_size} x {sizes.context} tokens, "
        f"vocabulary {sizes.vocab_size}; medians of 7; {'; '.join(versions)}; {machine_text()}"
    )
    print(_speed_table(sizes, steps, peaks))
    best = {name: _best(steps, name) for name, _ in modes}
    for name in list(best)[1:]:
        ratio = median(steps[best[name]], "seconds") / median(steps[best["jaxlab"]], "seconds")
        print(f"jaxlab / {name}, each at its best: {ratio:.2f} x the tokens a second")
    fastest = best["jaxlab"]
    step = median(steps[fastest], "seconds")
    print(f"one compiled loop / Python loop: {median(scanned[fastest], 'seconds') / step:.2f}")
    print(f"TREC / training: {median(replayed[fastest], 'seconds') / step:.2f}")


def _start(width: int, mode: str | None, threads: int) -> Worker:
    if mode is None:
        return Worker("benchmarks.training_jax", [str(width)], threads)
    return Worker("benchmarks.training_torch", [str(width), mode, str(threads)], threads)


def _best(answers: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> str:
    own = [label for label in answers if label.startswith(name)]
    return min(own, key=lambda label: median(answers[label], "seconds"))


def _speed_table(
    sizes: Sizes,
    steps: Mapping[str, Sequence[Mapping[str, Any]]],
    peaks: Mapping[str, Sequence[Mapping[str, Any]]],
) -> str:
    rows = [("", "ms a step", "tokens/s", "GFLOP/s", "own peak", "share", "memory")]
    for label, answers in steps.items():
        seconds, rate = median(answers, "seconds"), median(peaks[label], "rate")
        achieved = step_flops(sizes) / seconds
        rows.append(
            (
                label,
                f"{1e3 * seconds:.0f}",
                f"{sizes.tokens / seconds:.0f}",
                f"{achieved / 1e9:.1f}",
                f"{rate / 1e9:.1f}",
                f"{achieved / rate:.0%}",
                f"{median(answers, 'memory') / 2**20:.0f} MiB",
            )
        )
    return table(rows)


def _cold_start() -> None:
    """Seconds from the shell to the table of a tiny run, without and with compiled programs."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = []
        for number in range(4):
            command = [
                sys.executable,
                "-m",
                "jaxlab.run",
                "preset=test",
                "quiet=true",
                f"run_dir={folder}/run{number}",
                f"compilation_cache={folder}/cache",
            ]
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - start)
    print(
        f"\ncold start of a tiny run: {seconds[0]:.1f} s without compiled programs, "
        f"{sorted(seconds[1:])[1]:.1f} s with them"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
