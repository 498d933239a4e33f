"""Watches a run: metrics to files, progress to the terminal."""

from __future__ import annotations

import abc
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from etils import epath

from jaxlab.errors import StorageError
from jaxlab.reporting.files import is_remote, to_plain, write_atomic

__all__ = ["JsonLines", "Observers", "Progress", "TensorBoard"]

_FLUSH_SECONDS = 30.0


class _Lane(Protocol):
    @property
    def trial(self) -> int: ...
    @property
    def seed(self) -> int: ...


class _Phase(Protocol):
    @property
    def program(self) -> str: ...
    @property
    def lanes(self) -> Sequence[Any]: ...
    @property
    def name(self) -> str: ...
    @property
    def done(self) -> int | None: ...
    @property
    def total(self) -> int: ...
    @property
    def compile_seconds(self) -> float: ...


class Observers:
    """Passes every event on to each of several observers, in order.

    Args:
      *members: objects with any of the methods below and `close`.
    """

    def __init__(self, *members: Any) -> None:
        self.members = members

    def begin(self, phase: _Phase) -> None:
        """A phase starts; `done` of its `total` items are restored, None if it begins afresh."""
        for member in self.members:
            member.begin(phase)

    def advance(self, done: int, loss: float | None, compile_seconds: float) -> None:
        """The phase has finished `done` items."""
        for member in self.members:
            member.advance(done, loss, compile_seconds)

    def metrics(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Values after `step` steps: name to array `[lane]`."""
        for member in self.members:
            member.metrics(step, values)

    def close(self) -> None:
        """Ends all members."""
        for member in self.members:
            member.close()


class _FileObserver(abc.ABC):
    """Remembers whose metrics are being written."""

    program = ""
    lanes: Sequence[_Lane] = ()

    def begin(self, phase: _Phase) -> None:
        self.program, self.lanes = phase.program, phase.lanes
        if phase.name == "train":
            self.rewind(-1 if phase.done is None else phase.done)

    @abc.abstractmethod
    def rewind(self, step: int) -> None:
        """Training starts after `step` (-1: afresh): what was written beyond it is void."""

    def advance(self, done: int, loss: float | None, compile_seconds: float) -> None:
        """Files hold metrics, not progress."""
        del done, loss, compile_seconds


class JsonLines(_FileObserver):
    """metrics.jsonl: one JSON object a line with program, step, seeds and values for each lane.

    When a run resumes, the lines beyond the checkpoint's step are dropped, so the file of a
    resumed run is the file of an undisturbed one.

    Args:
      path: the file.
    """

    def __init__(self, path: epath.Path) -> None:
        self._path, self._remote = path, is_remote(path)
        self._lines: list[str] = []
        self._flushed = time.monotonic()

    def _label(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "seeds": [lane.seed for lane in self.lanes],
            "trials": [lane.trial for lane in self.lanes],
        }

    def rewind(self, step: int) -> None:
        """Drops what an interrupted run wrote after `step`."""
        if not self._path.exists():
            return
        kept, label = [], self._label()
        old = self._path.read_text()
        for line in old.splitlines(keepends=True):
            try:
                entry = json.loads(line)
                later = entry["step"] > step and label.items() <= entry.items()
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # the end of a line that a crash cut off
            if not later:
                kept.append(line)
        if "".join(kept) != old:
            write_atomic(self._path, "".join(kept))

    def metrics(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Appends one line."""
        plain = to_plain({name: np.asarray(value, np.float64) for name, value in values.items()})
        self._lines.append(json.dumps({"step": step, **self._label(), **plain}) + "\n")
        # An object store cannot append: there the whole file is written, seldom.
        if not self._remote or time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        text, self._lines = "".join(self._lines), []
        self._flushed = time.monotonic()
        if not text:
            return
        try:
            if self._remote:
                before = self._path.read_text() if self._path.exists() else ""
                self._path.write_text(before + text)
                return
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Writes what is left."""
        self._flush()


class TensorBoard(_FileObserver):
    """TensorBoard events: a folder for each program and set of seeds, a curve for each lane.

    Args:
      folder: where those folders go.
    """

    def __init__(self, folder: epath.Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._number = 0

    def rewind(self, step: int) -> None:
        """Starts an event file; TensorBoard hides what older files hold beyond `step`."""
        from tensorboardX import SummaryWriter

        self.close()
        seeds = [lane.seed for lane in self.lanes]
        own = self._folder / self.program / f"seeds-{min(seeds)}-{max(seeds)}"
        self._number += 1  # two files of one second must not share a name
        self._writer = SummaryWriter(
            str(own), purge_step=step + 1, filename_suffix=f".{os.getpid()}.{self._number}"
        )

    def metrics(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Adds one point to each curve."""
        many = len({lane.trial for lane in self.lanes}) > 1
        for name, value in values.items():
            for lane, number in zip(self.lanes, value, strict=True):
                trial = f"trial{lane.trial}-" if many else ""
                self._writer.add_scalar(f"{name}/{trial}seed{lane.seed}", float(number), step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Progress:
    """A progress bar on a terminal, a plain line for every tenth of a phase elsewhere.

    Args:
      stream: where to print; by default standard output.
    """

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream or sys.stdout
        self._bar: Any = None
        self._task: Any = None
        self._terminal = self._stream.isatty()

    def begin(self, phase: _Phase) -> None:
        """Announces a phase."""
        self.close()
        self._label = f"{phase.program} {phase.name}"
        self._first = self._said = phase.done or 0
        self._total, self._compiled_before = phase.total, phase.compile_seconds
        self._start = time.monotonic()
        if phase.done is not None:
            self._print(f"{self._label}: resuming after {phase.done} of {phase.total}")
        if self._terminal:
            self._open_bar()

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(file=self._stream),
        )
        self._bar.start()
        note = "compiling"
        self._task = self._bar.add_task(
            self._label, total=self._total, completed=self._first, note=note
        )

    def advance(self, done: int, loss: float | None, compile_seconds: float) -> None:
        """Shows steps, rate without compilation, loss and the time left."""
        elapsed = time.monotonic() - self._start - (compile_seconds - self._compiled_before)
        rate = (done - self._first) / max(elapsed, 1e-9)
        left = (self._total - done) / max(rate, 1e-9)
        text = f"{rate:.1f}/s, {int(left // 60)}:{int(left % 60):02d} left"
        text = text if loss is None else f"loss {loss:.4f}, {text}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=text)
        elif done >= self._total or done - self._said >= self._total / 10:
            self._said = done
            self._print(f"{self._label}: {done}/{self._total}, {text}")

    def metrics(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """The loss in `advance` is enough for a terminal."""
        del step, values

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves the last bar on the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
