"""The one training loop: dispatches, evaluates, saves, resumes and stops.

The order at every boundary is: evaluate, save, next batch, update. Metrics of a dispatch are
fetched after the next one was sent, so the device never waits for the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from jaxlab.errors import DivergedError, InterruptedRun, UserError
from jaxlab.parallel.mesh import check_batch
from jaxlab.parallel.processes import Agreement
from jaxlab.training.checkpoints import CheckpointStore, Restored
from jaxlab.training.lanes import Lane, Lanes, Layout, choose_layout, sound_lanes
from jaxlab.training.program import Evaluation, Program

__all__ = [
    "DriveSettings",
    "Observer",
    "Outcome",
    "Phase",
    "check_batches",
    "drive",
    "evaluation_steps",
]

_PROFILED_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run: the training of some lanes, or an evaluation after it.

    Attributes:
      program: the program's name.
      lanes: whose metrics follow.
      name: `train`, or an evaluation's name.
      done: items that are restored; None says that the phase begins afresh, and that what an
        earlier start has reported for these lanes is void.
      total: items in all: steps, or batches.
      compile_seconds: spent so far, for rates without it.
    """

    program: str
    lanes: Sequence[Lane]
    name: str
    done: int | None
    total: int
    compile_seconds: float


class Observer(Protocol):
    """What watches a run: writers of metrics and a progress display."""

    def begin(self, phase: Phase) -> None:
        """A phase starts."""
        ...

    def advance(self, done: int, loss: float | None, compile_seconds: float) -> None:
        """The phase has finished `done` items; `loss` is the newest one fetched."""
        ...

    def metrics(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Values after `step` steps: name to array `[lane]`."""
        ...


@dataclasses.dataclass(frozen=True)
class DriveSettings:
    """How a program is driven; nothing here changes what is computed.

    Attributes:
      trial_axis: see `lanes`.
      steps_per_dispatch: the most steps in one call, or by rule.
      checkpoint_every: steps between checkpoints.
      log_every: steps between calls of `Observer.metrics`.
      debug: run without compilation and stop at the first NaN.
      profile: folder for a profiler trace of a few steps.
      mesh: run each lane on all of these devices; None runs lanes side by side.
    """

    trial_axis: Literal["auto", "loop", "vmap"] = "auto"
    steps_per_dispatch: int | Literal["auto"] = "auto"
    checkpoint_every: int = 1000
    log_every: int = 10
    debug: bool = False
    profile: epath.Path | None = None
    mesh: Mesh | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a program leaves.

    Attributes:
      arrays: `train/loss` and the like `[trial, replicate, step]`; evaluations' metrics
        `[trial, replicate, evaluation]` (during training) or `[trial, replicate, batch]` or
        `[trial, replicate]` (after it); the summary's arrays `[trial, replicate, ...]`.
      states: one final state a lane, trial-major.
      diverged: the trials whose loss became NaN or infinite for some seed; their arrays hold NaN.
      compile_seconds: tracing and compilation, in all processes that led to the result.
      run_seconds: everything else, likewise.
      examples: examples seen by all lanes together, over all processes of the run.
    """

    arrays: dict[str, np.ndarray]
    states: list[Any]
    diverged: list[int]
    compile_seconds: float
    run_seconds: float
    examples: int


def evaluation_steps(num_steps: int, every: int) -> list[int]:
    """The numbers of steps done at which an evaluation runs: 0, every, ... and the end.

    >>> evaluation_steps(10, 4)
    [0, 4, 8, 10]
    """
    return [*range(0, num_steps, every), num_steps]


def drive(
    program: Program,
    seeds: Sequence[int],
    settings: DriveSettings,
    *,
    observer: Observer,
    folder: epath.Path | None = None,
    stop: Callable[[], int | None] = lambda: None,
) -> Outcome:
    """Runs a program for all its trials and the given seeds, from its checkpoints if it has any.

    Replicates that are added to a finished run are trained beside the finished ones, which are
    only restored.

    Args:
      program: what to run.
      seeds: one for each replicate.
      settings: how to run it.
      observer: told about progress and metrics.
      folder: absolute folder of the checkpoints; None keeps nothing.
      stop: asked at every dispatch; a signal's number means: save and leave.

    Returns:
      The arrays that the conclusions need.

    Raises:
      DivergedError: a loss is NaN or infinite in every trial; the last good checkpoint stays.
        Where other trials are sound, the run goes on and `Outcome.diverged` names the trial.
      InterruptedRun: `stop` gave a signal; everything is saved.
      StorageError: a checkpoint could not be written.
      UserError: the checkpoints belong to other data.
    """
    run = _Run(program, seeds, settings, observer, _AgreedStop(stop))
    cohorts = [run.cohort(*part) for part in _cohort_folders(folder, program.name, len(seeds))]
    for cohort in cohorts:
        cohort.train()
    order = _trial_major(program.num_trials, [len(cohort.seeds) for cohort in cohorts])
    states = [state for cohort in cohorts for state in cohort.lanes.split(cohort.states)]
    lanes = cohorts[0].lanes
    if len(cohorts) > 1:
        everyone = [Lane(t, seed) for t in range(program.num_trials) for seed in seeds]
        lanes = run.lanes(everyone, lanes.layout, lanes.group_size)
    states = lanes.join([states[i] for i in order])
    final = _final_evaluations(lanes, states, len(seeds), observer, run.stop)
    final |= lanes.summarize(states)
    shape = (program.num_trials, len(seeds))
    arrays = _merge(program.num_trials, [cohort.history for cohort in cohorts])
    arrays |= {name: value.reshape(shape + value.shape[1:]) for name, value in final.items()}
    seconds = {
        kind: spent + sum(cohort.seconds_before[kind] for cohort in cohorts)
        for kind, spent in run.seconds().items()
    }
    return Outcome(
        arrays,
        lanes.split(states),
        sorted({trial for cohort in cohorts for trial in cohort.diverged}),
        seconds["compile"],
        seconds["run"],
        program.examples_per_step * program.num_steps * len(lanes.lanes),
    )


class _Run:
    """What the parts of one call of `drive` share."""

    def __init__(
        self,
        program: Program,
        seeds: Sequence[int],
        settings: DriveSettings,
        observer: Observer,
        stop: Callable[[], int | None],
    ) -> None:
        self.program, self.seeds, self.settings = program, seeds, settings
        self.observer, self.stop = observer, stop
        self._start = time.perf_counter()
        self._all_lanes: list[Lanes] = []
        mesh = settings.mesh
        if mesh is not None:
            check_batches(program, mesh)
        size = 1 if settings.debug else settings.steps_per_dispatch
        axis = "loop" if mesh is not None else settings.trial_axis
        self.layout = choose_layout(program, axis, size)

    def cohort(self, first: int, last: int, folder: epath.Path | None) -> _Cohort:
        """The replicates from `first` to `last`."""
        return _Cohort(self, self.seeds[first:last], folder)

    def lanes(self, members: list[Lane], layout: Layout, group_size: int | None = None) -> Lanes:
        """The program, compiled for these lanes when it is first called."""
        made = Lanes(
            self.program,
            members,
            layout,
            mesh=self.settings.mesh,
            debug=self.settings.debug,
            group_size=group_size,
        )
        self._all_lanes.append(made)
        return made

    def seconds(self) -> dict[str, float]:
        """Spent since the call: `compile` in tracing and compilation, `run` in all else."""
        compiling = sum(lanes.compile_seconds for lanes in self._all_lanes)
        return {"compile": compiling, "run": time.perf_counter() - self._start - compiling}


class _AgreedStop:
    """Asks whether to stop, so that all processes get the same answer at the same dispatch.

    With several processes the answer is that of the question before: the exchange runs while the
    devices compute.
    """

    def __init__(self, ask: Callable[[], int | None]) -> None:
        self._ask = ask
        self._agreement = Agreement() if jax.process_count() > 1 else None
        self._sent: jax.Array | None = None

    def __call__(self) -> int | None:
        """The signal to stop by, or None."""
        own = self._ask()
        if self._agreement is None:
            return own
        before, self._sent = self._sent, self._agreement.send(own or 0)
        return None if before is None else int(before) or None


def check_batches(program: Program, mesh: Mesh) -> None:
    """Whether all batches of a program can be split over a mesh.

    Raises:
      UserError: naming the numbers.
    """
    sources = [program.batches, *(e.batches for e in program.evaluations.values())]
    for source in sources:
        for leaf in jax.tree.leaves(source(0, 0, 0)):
            check_batch(np.shape(leaf)[0] if np.ndim(leaf) else 1, mesh)


def _cohort_folders(
    folder: epath.Path | None, name: str, replicates: int
) -> list[tuple[int, int, epath.Path | None]]:
    """Ranges of replicates that were, or are to be, trained together, with their folders."""
    if folder is None:
        return [(0, replicates, None)]
    base = folder / name
    ranges: list[tuple[int, int]] = []
    if base.exists():
        matches = (re.fullmatch(r"replicates-(\d+)-(\d+)", p.name) for p in base.iterdir())
        ranges = sorted((int(m[1]), int(m[2])) for m in matches if m)
    done = 0
    for first, last in ranges:
        if first != done:
            raise UserError(
                "run_dir", base, f"the checkpoints of replicates {done} to {first - 1} are missing"
            )
        done = last
    if done < replicates:
        ranges.append((done, replicates))
    return [(a, b, base / f"replicates-{a:05d}-{b:05d}") for a, b in ranges]


def _trial_major(num_trials: int, sizes: Sequence[int]) -> list[int]:
    """Places, in the concatenation of the cohorts' lanes, of all lanes in trial-major order."""
    offsets = np.cumsum([0, *[num_trials * size for size in sizes]])
    return [
        int(offsets[c]) + trial * size + r
        for trial in range(num_trials)
        for c, size in enumerate(sizes)
        for r in range(size)
    ]


def _merge(num_trials: int, histories: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Histories `[lane, time]` of the cohorts as `[trial, replicate, time]`."""
    return {
        name: np.concatenate(
            [h[name].reshape(num_trials, -1, h[name].shape[-1]) for h in histories], axis=1
        )
        for name in histories[0]
    }


class _Cohort:
    """Replicates that are trained together, with one series of checkpoints."""

    def __init__(self, run: _Run, seeds: Sequence[int], folder: epath.Path | None) -> None:
        self.run, self.seeds, self.folder = run, seeds, folder
        self.program, self.settings, self.observer = run.program, run.settings, run.observer
        self.members = [Lane(t, seed) for t in range(run.program.num_trials) for seed in seeds]
        self.lanes = run.lanes(self.members, run.layout)
        self.history: dict[str, np.ndarray] = {}
        self.states: list[Any] = []
        self.diverged: dict[int, str] = {}
        self.step = 0
        self.saved_step = -1
        self.seconds_before = {"compile": 0.0, "run": 0.0}  # of earlier starts
        self._spent_before = self.seconds_before  # of this start, before this cohort's turn
        self._store: CheckpointStore | None = None
        self._pending: tuple[int, int, list[Any]] | None = None
        self._schedules = {
            name: evaluation_steps(self.program.num_steps, e.every)
            for name, e in self.program.evaluations.items()
            if e.every is not None
        }

    def train(self) -> None:
        """Runs to the last step, from the newest intact checkpoint."""
        self._spent_before = self.run.seconds()
        with contextlib.ExitStack() as stack:
            if self.folder is not None:
                self._store = CheckpointStore(self.folder)
                stack.callback(self._store.close)
            self._start()
            self.observer.begin(
                Phase(
                    self.program.name,
                    self.members,
                    "train",
                    self.step if self.saved_step >= 0 else None,
                    self.program.num_steps,
                    self.lanes.compile_seconds,
                )
            )
            dispatches = 0
            while True:
                self._evaluate_if_due()
                self._save_if_due()
                if self.step == self.program.num_steps:
                    break
                if (number := self.run.stop()) is not None:
                    self._leave(number)
                self._dispatch(self._next_boundary() - self.step, dispatches)
                dispatches += 1
            self._flush()
            self._check_weights(self.lanes.stack(self.states))

    def _dispatch(self, count: int, number: int) -> None:
        """One dispatch; with `profile` the first is a single step, which compiles, and the second
        is traced."""
        if self.settings.profile is None or number > 1:
            self._advance(count)
        elif number == 0:
            self._advance(1)
        else:
            with jax.profiler.trace(str(self.settings.profile)):
                self._advance(min(count, _PROFILED_STEPS))
                jax.block_until_ready(self.states)

    def _start(self) -> None:
        restored = None
        if self._store is not None:
            restored = self._store.restore_newest(self.lanes.abstract_stacked())
        if restored is None:
            self.states = self.lanes.fit_memory(self.lanes.init())
            return
        meta = restored.meta
        if meta["fingerprint"] != self.program.fingerprint:
            raise UserError(
                "data",
                self.program.fingerprint,
                f"the run was started on other data ({meta['fingerprint']}); use another run_dir",
            )
        self._keep_layout(meta)
        self.states = self.lanes.fit_memory(self.lanes.unstack(restored.state))
        self.step = self.saved_step = restored.step
        self.history = self._adopt(restored)
        self.seconds_before = dict(meta["seconds"])
        self._note_diverged(self.history.get("train/loss", np.zeros((len(self.members), 0))), 0)

    def _keep_layout(self, meta: Mapping[str, Any]) -> None:
        """The rules that were fixed at the start stay, unless the user now asks for others."""
        settings, layout = self.settings, self.lanes.layout
        if settings.steps_per_dispatch == "auto" and not settings.debug:
            layout = dataclasses.replace(layout, steps_per_dispatch=meta["steps_per_dispatch"])
        if settings.trial_axis == "auto" and settings.mesh is None:
            layout = dataclasses.replace(layout, trial_axis=meta["trial_axis"])
        if layout != self.lanes.layout:
            self.lanes = self.run.lanes(self.members, layout)

    def _adopt(self, restored: Restored) -> dict[str, np.ndarray]:
        """The saved history, widened if the run has been given more steps."""
        old_steps = restored.meta["num_steps"]
        history = {}
        for name, values in restored.history.items():
            group = name.partition("/")[0]
            if group in self._schedules:
                every = self.program.evaluations[group].every or 1
                old, new = evaluation_steps(old_steps, every), self._schedules[group]
                wide = np.full((len(values), len(new)), np.nan, values.dtype)
                for i, step in enumerate(old):
                    if step in new:
                        wide[:, new.index(step)] = values[:, i]
            else:
                wide = np.full((len(values), self.program.num_steps), np.nan, values.dtype)
                wide[:, :old_steps] = values
            history[name] = wide
        return history

    def _next_boundary(self) -> int:
        every = [self.settings.checkpoint_every, *self._evaluation_intervals()]
        ends = [self.step - self.step % n + n for n in every]
        limit = self.step + self.lanes.layout.steps_per_dispatch
        return min(limit, self.program.num_steps, *ends)

    def _evaluation_intervals(self) -> Iterable[int]:
        return [e.every for e in self.program.evaluations.values() if e.every is not None]

    def _advance(self, count: int) -> None:
        with _naming_nans(self.step):
            self.states, metrics = self.lanes.advance(self.states, self.step, count)
        sent, self._pending = self._pending, (self.step, count, metrics)
        self.step += count
        self._collect(sent)

    def _flush(self) -> None:
        sent, self._pending = self._pending, None
        self._collect(sent)

    def _collect(self, sent: tuple[int, int, list[Any]] | None) -> None:
        """Fetches a dispatch's metrics, checks the loss and reports."""
        if sent is None:
            return
        start, count, metrics = sent
        values = self.lanes.fetch(metrics, count)
        for name, value in values.items():
            record = self._record(f"train/{name}", self.program.num_steps, value.dtype)
            record[:, start : start + count] = value
        self._note_diverged(values["loss"], start)
        every = self.settings.log_every
        for i in range(count):
            done = start + i + 1
            if done % every == 0 or done == self.program.num_steps:
                found = {f"train/{name}": value[:, i] for name, value in values.items()}
                self.observer.metrics(done, found)
        sound = [lane.trial not in self.diverged for lane in self.members]
        loss = float(np.mean(values["loss"][sound, -1]))
        self.observer.advance(start + count, loss, self.lanes.compile_seconds)

    def _record(self, name: str, width: int, dtype: Any) -> np.ndarray:
        if name not in self.history:
            self.history[name] = np.full((len(self.members), width), np.nan, dtype)
        return self.history[name]

    def _note_diverged(self, loss: np.ndarray, start: int) -> None:
        """Marks trials whose loss `[lane, step]` is not finite; none left ends the run."""
        bad = ~np.isfinite(loss[:, : self.step - start])
        for lane, row in zip(self.members, bad, strict=True):
            if row.any():
                step = start + int(np.argmax(row)) + 1
                self._mark(lane, f"the loss of step {step} is not finite")
        self._end_if_all_diverged()

    def _mark(self, lane: Lane, reason: str) -> None:
        self.diverged.setdefault(
            lane.trial, f"{self.program.name}: {reason} (trial {lane.trial}, seed {lane.seed})"
        )

    def _end_if_all_diverged(self) -> None:
        if len(self.diverged) < self.program.num_trials:
            return
        if self._store is not None:
            self._store.wait()
        kept = "no checkpoint was kept"
        if self.saved_step >= 0:
            kept = f"the checkpoint of step {self.saved_step} is intact"
        raise DivergedError(f"{next(iter(self.diverged.values()))}; {kept}")

    def _evaluate_if_due(self) -> None:
        for name, steps in self._schedules.items():
            if self.step not in steps:
                continue
            place = steps.index(self.step)
            known = [v for key, v in self.history.items() if key.startswith(f"{name}/")]
            # A diverged lane's value is NaN though it was measured; others tell.
            if known and not np.isnan(known[0][:, place]).all():
                continue
            values = _measure(self.lanes, name, self.states, None)
            for key, value in values.items():
                self._record(f"{name}/{key}", len(steps), np.float32)[:, place] = value
            self._flush()
            self.observer.metrics(self.step, {f"{name}/{k}": v for k, v in values.items()})

    def _save_if_due(self) -> None:
        due = self.step % self.settings.checkpoint_every == 0 and self.step > 0
        if due or self.step == self.program.num_steps:
            self._save()

    def _save(self) -> None:
        if self._store is None or self.step == self.saved_step:
            return
        self._flush()
        state = self.lanes.stack(self.states)
        self._check_weights(state)
        layout = self.lanes.layout
        meta = {
            "fingerprint": self.program.fingerprint,
            "num_steps": self.program.num_steps,
            "trial_axis": layout.trial_axis,
            "steps_per_dispatch": layout.steps_per_dispatch,
            "seeds": list(self.seeds),
            "seconds": {
                kind: self.seconds_before[kind] + spent - self._spent_before[kind]
                for kind, spent in self.run.seconds().items()
            },
        }
        self._store.save(self.step, state, self.history, meta, best=self._best_value())
        self.saved_step = self.step

    def _check_weights(self, state: Any) -> None:
        """The loss of a step says nothing yet about the weights after it."""
        for lane, sound in zip(self.members, sound_lanes(state), strict=True):
            if not sound:
                self._mark(lane, f"the weights after step {self.step} are not finite")
        self._end_if_all_diverged()

    def _best_value(self) -> float | None:
        """The metric that marks the best checkpoint, averaged over lanes, if measured here."""
        name = self.program.best or ""
        steps = self._schedules.get(name.partition("/")[0], [])
        if name not in self.history or self.step not in steps:
            return None
        value = float(self.history[name][:, steps.index(self.step)].mean())
        return value if np.isfinite(value) else None

    def _leave(self, number: int) -> None:
        self._flush()
        self._save()
        if self._store is None:
            raise InterruptedRun(number, f"stopped at step {self.step}; nothing was kept")
        self._store.wait()
        raise InterruptedRun(number, f"stopped at step {self.step}; run the same command to resume")


@contextlib.contextmanager
def _naming_nans(step: int):
    """A NaN that debug mode located becomes the error of a diverged run."""
    try:
        yield
    except FloatingPointError as error:
        cause = str(error).splitlines()[0]
        raise DivergedError(f"NaN after step {step}: {cause}") from error


def _measure(
    lanes: Lanes,
    name: str,
    states: list[Any],
    peers: list[Any] | None,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, np.ndarray]:
    """An evaluation over all its batches: `[lane]` means or `[lane, batch]` values."""
    evaluation: Evaluation = lanes.program.evaluations[name]
    size = lanes.layout.steps_per_dispatch
    parts: list[dict[str, np.ndarray]] = []
    sent: tuple[list[Any], int] | None = None
    for start in range(0, evaluation.num_batches, size):
        count = min(size, evaluation.num_batches - start)
        found = lanes.measure(name, states, peers, start, count)
        if sent is not None:
            parts.append(lanes.fetch(*sent))
            progress(start)
        sent = (found, count)
    if sent is not None:
        parts.append(lanes.fetch(*sent))
    progress(evaluation.num_batches)
    whole = {key: np.concatenate([part[key] for part in parts], axis=1) for key in parts[0]}
    if evaluation.keep == "each":
        return whole
    return {key: value.mean(axis=1, dtype=np.float64) for key, value in whole.items()}


def _final_evaluations(
    lanes: Lanes,
    states: list[Any],
    replicates: int,
    observer: Observer,
    stop: Callable[[], int | None],
) -> dict[str, np.ndarray]:
    """The evaluations that run once, after training."""
    arrays: dict[str, np.ndarray] = {}
    for name, evaluation in lanes.program.evaluations.items():
        if evaluation.every is not None:
            continue
        total, spent = evaluation.num_batches, lanes.compile_seconds
        observer.begin(Phase(lanes.program.name, lanes.lanes, name, None, total, spent))

        def progress(done: int, name: str = name) -> None:
            observer.advance(done, None, lanes.compile_seconds)
            if (number := stop()) is not None:
                raise InterruptedRun(
                    number, f"stopped after training, in {name}; run the same command to resume"
                )

        peers = None
        if evaluation.peer is not None:
            peers = _peers(lanes, states, replicates, evaluation.peer)
        values = _measure(lanes, name, states, peers, progress)
        arrays |= {f"{name}/{key}": value for key, value in values.items()}
    return arrays


def _peers(
    lanes: Lanes, states: list[Any], replicates: int, peer: Callable[[int, int], int]
) -> list[Any]:
    """For every lane the state of its peer: another replicate of the same trial."""
    if replicates < 2:
        raise ValueError(f"replicates={replicates}: an evaluation with peer needs at least 2")
    separate = lanes.split(states)
    return lanes.join(
        [
            separate[i - i % replicates + peer(i % replicates, replicates)]
            for i in range(len(separate))
        ]
    )
