"""Programs that run on the host, item by item: what a whole compiled step cannot express.

A judge, a long run of a real model, an evaluation of another run's checkpoint. Such a program
compiles what it likes inside; here it is only asked for one item after the other, its results are
kept, and a restart goes on with the item that is missing. `measure_program` makes one of a function
that can be traced but trains nothing: a sampler, an exact enumeration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from jaxlab.errors import InterruptedRun, StorageError, UserError
from jaxlab.parallel.processes import agree, is_main
from jaxlab.training.driver import Observer, Outcome, Phase
from jaxlab.training.lanes import Lane

__all__ = ["HostProgram", "ItemFunction", "drive_host", "measure_program"]

ItemFunction = Callable[[int, int, int], Mapping[str, Any]]
"""`(trial_index, seed, item) -> {name: array}` of numbers or texts, with the same shapes for every
item; texts may differ in length."""

_SAVE_SECONDS = 20.0
_PATTERN = "items-*.json"


@dataclasses.dataclass(frozen=True)
class HostProgram:
    """Work that is done on the host, item by item, for every trial and replicate.

    Attributes:
      name: names its results.
      num_trials: how many settings there are.
      num_items: items of one trial and replicate; None for a single one, without an axis.
      prepare: makes the function of an item; it may load what is large, and is called only when
        an item is missing.
      fingerprint: names the data; a resume on other data is refused.
      examples_per_item: sequences, questions, ... in an item, for the report.
    """

    name: str
    num_trials: int
    num_items: int | None
    prepare: Callable[[], ItemFunction]
    fingerprint: str = ""
    examples_per_item: int = 1

    def __post_init__(self) -> None:
        if self.num_trials < 1 or self.num_items == 0:
            raise ValueError(
                f"num_trials={self.num_trials}, num_items={self.num_items}: both at least 1"
            )


def measure_program(
    name: str,
    trials: Any,
    measure: Callable[[Any, jax.Array], Mapping[str, Any]],
    *,
    fingerprint: str = "",
    examples: int = 1,
) -> HostProgram:
    """What is measured without training, for every trial and replicate, by one compiled program.

    Args:
      name: names its results.
      trials: pytree of arrays `[trial, ...]`.
      measure: `(trial, key) -> {name: array}`; pure and traceable. It holds its own batches of
        problems, since trials and replicates run one after another.
      fingerprint: names the data; a resume on other data is refused.
      examples: problems in one measurement, for the report.

    Returns:
      A program whose arrays are `[trial, replicate, ...]`.
    """

    def prepare() -> ItemFunction:
        compiled = jax.jit(measure)

        def item(trial: int, seed: int, index: int) -> Mapping[str, Any]:
            return compiled(jax.tree.map(lambda leaf: leaf[trial], trials), jax.random.key(seed))

        return item

    count = len(jax.tree.leaves(trials)[0])
    return HostProgram(name, count, None, prepare, fingerprint, examples)


def drive_host(
    program: HostProgram,
    seeds: Sequence[int],
    *,
    observer: Observer,
    folder: epath.Path | None = None,
    stop: Callable[[], int | None] = lambda: None,
) -> Outcome:
    """Computes all items that an earlier start has not.

    Every process computes every item; the first one writes.

    Args:
      program: what to run.
      seeds: one for each replicate.
      observer: told about progress.
      folder: absolute folder of the results; None keeps nothing.
      stop: asked before every item; a signal's number means: save and leave.

    Returns:
      Arrays `[trial, replicate, item, ...]`, float64, int64, bool or text; no states.

    Raises:
      InterruptedRun: `stop` gave a signal. Then, and whatever else ends it, every finished item is
        saved.
      StorageError: results could not be written.
      UserError: the saved results are of other data.
      ValueError: an item's arrays differ in name or shape from the others'.
    """
    start = time.perf_counter()
    store = _Store(program, None if folder is None else folder / program.name)
    wanted = list(_places(program, seeds))
    missing = [place for place in wanted if place not in store.results]
    lanes = [Lane(trial, seed) for trial in range(program.num_trials) for seed in seeds]
    done = len(wanted) - len(missing)
    observer.begin(Phase(program.name, lanes, "items", done or None, len(wanted), 0.0))
    # Processes that do not share a disk know different items: all begin where the last one is.
    if agree(len(missing)) != -agree(-len(missing)):
        missing = wanted
    function = program.prepare() if missing else None
    with store.saved_at_the_end():
        for number, place in enumerate(missing, start=len(wanted) - len(missing) + 1):
            signal = agree(stop() or 0)
            if signal:
                kept = "run the same command to resume" if folder else "nothing was kept"
                raise InterruptedRun(signal, f"stopped before item {number}; {kept}")
            assert function is not None
            store.add(place, function(*place))
            observer.advance(number, None, 0.0)
    return Outcome(
        arrays=_stack(program, [store.results[place] for place in wanted], len(seeds)),
        states=[],
        diverged=[],
        compile_seconds=0.0,
        run_seconds=store.seconds_before + time.perf_counter() - start,
        examples=program.examples_per_item * len(wanted),
    )


def _places(program: HostProgram, seeds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for trial in range(program.num_trials):
        for seed in seeds:
            for item in range(program.num_items or 1):
                yield trial, seed, item


def _stack(
    program: HostProgram, results: Sequence[Mapping[str, np.ndarray]], replicates: int
) -> dict[str, np.ndarray]:
    first = {name: value.shape for name, value in results[0].items()}
    for result in results:
        if {name: value.shape for name, value in result.items()} != first:
            raise ValueError(f"program {program.name}: items differ in names or shapes of arrays")
    items = () if program.num_items is None else (program.num_items,)
    lead = (program.num_trials, replicates, *items)
    return {
        name: np.stack([result[name] for result in results]).reshape(lead + shape)
        for name, shape in first.items()
    }


class _Store:
    """Results of items, saved in files that are written once and never changed."""

    def __init__(self, program: HostProgram, folder: epath.Path | None) -> None:
        self._program, self._folder = program, folder
        self._unsaved: list[list[Any]] = []
        self._saved_at = time.perf_counter()
        self.results: dict[tuple[int, int, int], dict[str, np.ndarray]] = {}
        self.seconds_before = 0.0
        if folder is not None and folder.exists():
            for path in sorted(folder.glob(_PATTERN)):
                self._read(path)

    def add(self, place: tuple[int, int, int], values: Mapping[str, Any]) -> None:
        """Keeps an item's arrays, and saves from time to time."""
        plain = {name: np.asarray(jax.device_get(value)).tolist() for name, value in values.items()}
        # Read back from its written form, so that a resumed run has the same types.
        self.results[place] = {name: np.asarray(value) for name, value in plain.items()}
        self._unsaved.append([*place, plain])
        if time.perf_counter() - self._saved_at > _SAVE_SECONDS:
            self.save()

    @contextlib.contextmanager
    def saved_at_the_end(self) -> Iterator[None]:
        """Saves, also after an exception, which then counts more than a failing disk."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(StorageError):
                self.save()
            raise
        self.save()

    def save(self) -> None:
        """Writes what is new as one more file, whole or not at all."""
        if self._folder is None or not self._unsaved or not is_main():
            return
        now = time.perf_counter()
        record = {
            "fingerprint": self._program.fingerprint,
            "seconds": now - self._saved_at,
            "items": self._unsaved,
        }
        # The token keeps the name of a damaged file from being taken again.
        name = f"items-{len(self.results):08d}-{secrets.token_hex(4)}.json"
        temporary = self._folder / f".{name}.tmp"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(record))
            temporary.rename(self._folder / name)
        except OSError as error:
            raise StorageError(f"cannot write {self._folder / name}: {error}") from error
        self._unsaved, self._saved_at = [], now

    def _read(self, path: epath.Path) -> None:
        try:
            record = json.loads(path.read_text())
            mark, items = record["fingerprint"], record["items"]
            found = {
                (trial, seed, item): {name: np.asarray(value) for name, value in values.items()}
                for trial, seed, item, values in items
            }
            self.seconds_before += float(record["seconds"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return  # its items are computed again
        if mark != self._program.fingerprint:
            raise UserError(
                "data",
                self._program.fingerprint,
                f"the run was started on other data ({mark}); use another run_dir",
            )
        self.results |= found
