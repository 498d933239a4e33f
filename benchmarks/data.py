"""What reading data costs: `python -m benchmarks.data`.

Prints one table: a batch of the default text run beside the training step that consumes it, and
how fast documents are packed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import jax

from jaxlab.data.packing import pack_documents
from jaxlab.data.text import Document, standard_library_corpus, standard_library_documents
from jaxlab.data.tokenizers import BpeTokenizer, ByteTokenizer, Tokenizer
from jaxlab.data.windows import WindowBatches
from jaxlab.experiments.composition import make_config
from jaxlab.experiments.trec.config import Config
from jaxlab.experiments.trec.experiment import build
from jaxlab.training.lanes import Lane, Lanes, choose_layout
from jaxlab.training.program import Program

__all__ = ["main"]

_ROUNDS = 7
_BATCHES_PER_ROUND = 500
_SEED = 0
_GOAL = 0.10
_TEXT_BYTES = 8_000_000
_TRAINING_BYTES = 1_000_000
_VOCABULARY_SIZE = 4096
_ROW_LENGTH = 1024


def main() -> None:
    """Measures and prints."""
    load = os.getloadavg()[0]
    print(f"{jax.devices()[0].device_kind}, {os.cpu_count()} processors, load average {load:.2f}")
    if load > 1:
        print("warning: the machine is busy with something else, so all numbers come out slower")
    config = make_config("trec")
    assert isinstance(config, Config)
    source = _default_source(config)
    batch, step = _batch_seconds(source), _step_seconds(build(config)[0])
    share = statistics.median(batch) / statistics.median(step)
    verdict = "below" if share < _GOAL else "NOT below"
    shape = " x ".join(map(str, source[0].shape))
    rows = [
        ("", "median", f"range of {_ROUNDS}"),
        _row(f"batch of the default text run, {shape}", [1e3 * t for t in batch], "ms"),
        _row("training step of the default text run", [1e3 * t for t in step], "ms"),
        ("batch / step", f"{share:.2%}", f"{verdict} the goal of {_GOAL:.0%}"),
        *_packing_rows(),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, median, note in rows:
        print(f"{name:<{widths[0]}}  {median:>{widths[1]}}  {note}".rstrip())


def _default_source(config: Config) -> WindowBatches:
    corpus = standard_library_corpus(
        max_bytes=config.data.max_bytes, validation_fraction=config.data.validation_fraction
    )
    return WindowBatches(
        corpus.train, batch_size=config.batch_size, context=config.context, seed=_SEED
    )


def _batch_seconds(source: WindowBatches) -> list[float]:
    """Seconds a batch; each round begins an epoch and pays for its shuffle."""
    epochs = itertools.count()

    def read() -> None:
        first = next(epochs) * source.steps_per_epoch
        for step in range(first, first + _BATCHES_PER_ROUND):
            source[step]

    return [seconds / _BATCHES_PER_ROUND for seconds in _timed(read)]


def _step_seconds(program: Program) -> list[float]:
    """Seconds a training step, as the driver runs it, with a batch that costs nothing."""
    batch = program.batches(0, _SEED, 0)
    program = dataclasses.replace(program, batches=lambda *_: batch)
    layout = choose_layout(program)
    lanes = Lanes(program, [Lane(0, _SEED)], layout)
    states = lanes.init()
    count = layout.steps_per_dispatch

    def dispatch() -> None:
        nonlocal states
        states, metrics = lanes.advance(states, 0, count)
        lanes.fetch(metrics, count)

    return [seconds / count for seconds in _timed(dispatch)]


def _packing_rows() -> list[tuple[str, str, str]]:
    documents = standard_library_documents(_TEXT_BYTES)
    rows = [_packing_row("byte", ByteTokenizer(), documents)]
    if importlib.util.find_spec("tokenizers") is None:
        return [*rows, ("packing of BPE tokens", "-", "needs the package tokenizers")]
    sample = standard_library_documents(_TRAINING_BYTES)
    return [*rows, _packing_row("BPE", BpeTokenizer.train(sample, _VOCABULARY_SIZE), documents)]


def _packing_row(
    name: str, tokenizer: Tokenizer, documents: Sequence[Document]
) -> tuple[str, str, str]:
    """Speed in bytes of text, which compares tokenizers; the tokens are there beforehand."""
    encoded = [tokenizer.encode(document.text.decode()) for document in documents]
    megabytes = sum(len(document.text) for document in documents) / 1e6
    padding = 0.0

    def pack() -> None:
        nonlocal padding
        with tempfile.TemporaryDirectory() as folder:
            packed = pack_documents(
                encoded, _ROW_LENGTH, separator=tokenizer.separator, folder=folder
            )
            padding = packed.padding

    speeds = [megabytes / seconds for seconds in _timed(pack)]
    row = _row(f"packing of {name} tokens into rows of {_ROW_LENGTH}", speeds, "MB/s of text")
    return (*row[:2], f"{row[2]}, padding {padding:.2%}")


def _timed(function: Callable[[], None]) -> list[float]:
    """Seconds of each round, after one that is not counted."""
    function()
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return found


def _row(name: str, values: Sequence[float], unit: str) -> tuple[str, str, str]:
    median, least, most = statistics.median(values), min(values), max(values)
    return name, f"{median:.4g} {unit}", f"{least:.4g} to {most:.4g}"


if __name__ == "__main__":
    main()
