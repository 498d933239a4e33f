"""The curve of any finished run of this package, from its own checkpoint and data."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import signal
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlab.errors import InterruptedRun, UserError
from jaxlab.experiments import composition, registry
from jaxlab.experiments.base import RunConfig, identity_digest
from jaxlab.experiments.runner import load_result
from jaxlab.experiments.trec.programs import reference_replicate
from jaxlab.experiments.trec.scoring import bin_centres, fit_affine
from jaxlab.experiments.trec.tool_config import MeasureConfig
from jaxlab.methods import trec
from jaxlab.reporting.directory import own_directory
from jaxlab.reporting.figures import Figure, Panel, Series
from jaxlab.reporting.report import Result
from jaxlab.reporting.writers import Observers
from jaxlab.training.driver import DriveSettings, drive
from jaxlab.training.host import HostProgram, ItemFunction
from jaxlab.training.program import Program

__all__ = ["build", "conclude"]

_MAX_PANELS = 6


class _Run(NamedTuple):
    """A finished run.

    Attributes:
      config: its settings.
      program: the chosen one of its programs.
      loss: `(trial, state, batch) -> {"loss": scalar}`, the program's own evaluation.
      folder: where it lies.
    """

    config: RunConfig
    program: Program
    loss: Callable[..., Mapping[str, Any]]
    folder: epath.Path

    @property
    def lanes(self) -> int:
        """Trials times replicates."""
        return self.program.num_trials * self.config.replicates

    def name(self, config: MeasureConfig) -> str:
        """Names the items: another length of theirs, or a run that was extended, has others."""
        run = f"{identity_digest(self.config)}-{self.lanes}x{self.program.num_steps}"
        return f"{run}-{config.steps_per_item}"


def build(config: MeasureConfig) -> list[HostProgram]:
    """One host program, whose items are stretches of steps, lane by lane.

    Raises:
      UserError: the folder holds no finished run, or one whose batches cannot be replayed.
    """
    run = _find_run(config)
    steps = run.program.num_steps
    chunks = math.ceil(steps / config.steps_per_item)
    return [
        HostProgram(
            name=run.name(config),
            num_trials=1,
            num_items=run.lanes * chunks,
            prepare=lambda: _prepare(config, run, chunks),
            fingerprint=run.program.fingerprint,
            examples_per_item=config.steps_per_item * run.program.examples_per_step,
        )
    ]


def _find_run(config: MeasureConfig) -> _Run:
    if config.run_dir is None:
        raise UserError("run_dir", "null", "variant=measure needs a finished run's folder")
    folder = epath.Path(config.run_dir)
    if "://" not in config.run_dir:
        folder = folder.absolute()
    measured = composition.load_config(folder)
    if measured is None:
        raise UserError("run_dir", config.run_dir, "holds no run (no config.yaml)")
    if load_result(measured, folder) is None:
        raise UserError("run_dir", config.run_dir, "its run has not finished; resume it first")
    if not (folder / "checkpoints").exists():
        problem = (
            "has no checkpoints: a trial of a sweep keeps them with the other trials; run it by "
            "itself to measure it"
        )
        raise UserError("run_dir", config.run_dir, problem)
    if jax.process_count() > 1:
        raise UserError("distributed", jax.process_count(), "variant=measure runs in one process")
    if config.reference == "next" and measured.replicates < 2:
        problem = "needs a run of at least 2 replicates; allowed for this one: none"
        raise UserError("reference", config.reference, problem)
    program = _find_program(config, measured)
    if program.num_steps % config.num_bins:
        problem = f"must divide the run's {program.num_steps} steps"
        raise UserError("num_bins", config.num_bins, problem)
    return _Run(measured, program, _loss(program), folder)


def _find_program(config: MeasureConfig, measured: RunConfig) -> Program:
    built = registry.experiment_module(measured.method).build(measured)
    programs = {program.name: program for program in built if isinstance(program, Program)}
    if not programs:
        raise UserError("run_dir", config.run_dir, "its study trains nothing")
    if config.program is None:
        return next(iter(programs.values()))
    if config.program not in programs:
        problem = registry.nearest(config.program, list(programs))
        raise UserError("program", config.program, problem)
    return programs[config.program]


def _loss(program: Program) -> Callable[..., Mapping[str, Any]]:
    """The program's own loss of a batch: that of its first evaluation on held-out data."""
    for evaluation in program.evaluations.values():
        if evaluation.peer is None and evaluation.keep == "mean":
            return evaluation.function
    raise UserError("program", program.name, "has no evaluation whose loss could be replayed")


def _prepare(config: MeasureConfig, run: _Run, chunks: int) -> ItemFunction:
    """Restores the final states and compiles the replay of a stretch of steps."""
    states = _final_states(run)
    mesh = _step_mesh()
    replay = _compile_replay(run, mesh)
    replicates, size = run.config.replicates, config.steps_per_item

    def item(_: int, __: int, index: int) -> dict[str, np.ndarray]:
        lane, chunk = divmod(index, chunks)
        trial, replicate = divmod(lane, replicates)
        # Whole stretches share one program; what lies beyond the run is cut off later.
        last = run.program.num_steps - 1
        steps = np.minimum(np.arange(chunk * size, (chunk + 1) * size), last)
        seed = run.config.seed + replicate
        batches = _stack([run.program.batches(trial, seed, int(step)) for step in steps])
        arrays = run.program.trial(trial)
        unknown = np.full(size, np.nan)
        found = {"loss": replay(arrays, states[lane], batches), "alphas": unknown, "lrs": unknown}
        if config.reference == "next":
            peer = trial * replicates + reference_replicate(replicate, replicates)
            found["reference_loss"] = replay(arrays, states[peer], batches)
        alphas, rates = _alphas(states[lane]), _rates(arrays, run.program.num_steps)
        if alphas is not None:
            found["alphas"] = alphas[steps].astype(np.float64)
        if rates is not None:
            found["lrs"] = rates[steps].astype(np.float64)
        return found

    return item


def _final_states(run: _Run) -> list[Any]:
    """One state for each lane, trial-major, from the newest checkpoint; nothing is trained.

    Raises:
      UserError: the newest checkpoint is not that of the last step, or cannot be read.
    """
    during = {k: e for k, e in run.program.evaluations.items() if e.every is not None}
    program = dataclasses.replace(run.program, evaluations=during, summarize=None, best=None)
    seeds = [run.config.seed + r for r in range(run.config.replicates)]
    folder = run.folder / "checkpoints"
    quiet = Observers()
    try:
        with own_directory(run.folder):
            # The stop is only asked for when a step is missing.
            found = drive(
                program,
                seeds,
                DriveSettings(),
                observer=quiet,
                folder=folder,
                stop=lambda: signal.SIGTERM,
            )
    except InterruptedRun:
        problem = "its last checkpoint is missing or damaged; resume the run first"
        raise UserError("run_dir", run.folder, problem) from None
    return found.states


def _step_mesh() -> Mesh:
    """All devices in one row: every one replays steps of its own."""
    devices = np.array(jax.devices())
    return Mesh(devices, ("steps",), axis_types=(AxisType.Auto,))


def _compile_replay(run: _Run, mesh: Mesh) -> Callable[[Any, Any, Any], np.ndarray]:
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("steps"))

    def stretch(trial: Any, state: Any, batches: Any) -> jax.Array:
        return jax.lax.map(lambda batch: run.loss(trial, state, batch)["loss"], batches)

    compiled = jax.jit(
        jax.shard_map(
            stretch,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("steps")),
            out_specs=PartitionSpec("steps"),
            check_vma=False,
        ),
        out_shardings=whole,
    )

    def replay(trial: Any, state: Any, batches: Any) -> np.ndarray:
        count = len(jax.tree.leaves(batches)[0])
        # Whole rounds of the devices: the last batch again, cut off below.
        missing = -count % mesh.size
        batches = jax.tree.map(
            lambda leaf: np.concatenate([leaf, np.repeat(leaf[-1:], missing, axis=0)]), batches
        )
        parts = jax.tree.map(
            lambda leaf: jax.make_array_from_callback(leaf.shape, split, lambda i: leaf[i]), batches
        )
        placed = jax.device_put((trial, state), whole)
        return np.asarray(compiled(*placed, parts)).astype(np.float64)[:count]

    return replay


def _stack(batches: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def _alphas(state: Any) -> np.ndarray | None:
    """What the optimiser recorded of itself, if it did."""
    trace = trec.find_trace(state)
    return None if trace is None else np.asarray(trace.alphas)


def _rates(trial: Any, num_steps: int) -> np.ndarray | None:
    """The trial's learning rates, if it has them under their usual name."""
    found = trial.get("learning_rate") if isinstance(trial, Mapping) else None
    return None if found is None or np.shape(found) != (num_steps,) else np.asarray(found)


class _Curve(NamedTuple):
    """One trial's curve: the loss `[T]`, mean over replicates, and its coefficients if known."""

    loss: np.ndarray
    coefficients: np.ndarray | None


def conclude(config: MeasureConfig, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Result:
    """The curve of every trial of the run, with the prediction where its optimiser recorded it.

    Args:
      config: all settings.
      arrays: of the one host program, `[1, 1, item, steps_per_item]`.

    Returns:
      Metrics, a figure with a panel for each of the first trials, and `trec.csv` with all curves.
    """
    run = _find_run(config)
    curves = _curves(run, arrays[run.name(config)], config.reference == "next")
    metrics: dict[str, float] = {}
    panels = []
    for trial, curve in enumerate(curves):
        name = f"trial {trial}: " if len(curves) > 1 else ""
        found, lines = _describe(config, curve)
        metrics |= {name + key: value for key, value in found.items()}
        panels.append(
            Panel(
                "training fraction t/T",
                "loss minus reference (nats)" if config.reference == "next" else "loss (nats)",
                lines,
                title=f"trial {trial}" if len(curves) > 1 else "",
            )
        )
    notes = [
        f"Measured: {composition.command_of(run.config)}; program {run.program.name}; mean over "
        f"{run.config.replicates} replicates."
    ]
    if any(curve.coefficients is None for curve in curves):
        notes.append("The optimiser's state holds no trace of its schedule: nothing is predicted.")
    poor = [name for name, value in metrics.items() if name.endswith("r at m") and value <= 0]
    if poor:
        notes.append(f"No exponent fits {len(poor)} of the curves: r at m is not positive.")
    if len(panels) > _MAX_PANELS:
        notes.append(f"The figure shows the first {_MAX_PANELS} of {len(panels)} trials.")
    figure = Figure(
        "measured",
        f"TREC of {run.config.method}, {run.config.variant}",
        panels[:_MAX_PANELS],
        "Loss of the final weights on the batches of each part of training, and the prediction, "
        "scaled and shifted, since only the shape is predicted.",
    )
    return Result(
        method=config.method,
        variant=config.variant,
        metrics=metrics,
        figures=(figure,),
        notes=tuple(notes),
        files={"trec.csv": _table(curves)},
    )


def _curves(run: _Run, found: Mapping[str, np.ndarray], reference: bool) -> list[_Curve]:
    shape = (run.program.num_trials, run.config.replicates, -1)
    steps = run.program.num_steps

    def lanes(name: str) -> np.ndarray:
        return found[name][0, 0].reshape(shape)[..., :steps]

    loss, alphas, rates = lanes("loss"), lanes("alphas")[:, 0], lanes("lrs")[:, 0]
    if reference:
        loss = loss - lanes("reference_loss")
    return [
        _Curve(own.mean(axis=0), _coefficients(kept, lrs))
        for own, kept, lrs in zip(loss, alphas, rates, strict=True)
    ]


def _coefficients(alphas: np.ndarray, lrs: np.ndarray) -> np.ndarray | None:
    """The weight of every update, or None where the optimiser has not recorded itself."""
    if np.isnan(alphas).any():
        return None
    # Where the weight decay changes between phases, updates compare and targets do not.
    known = not np.isnan(lrs).any()
    return trec.update_coefficients(lrs, alphas) if known else trec.ema_coefficients(alphas)


def _describe(config: MeasureConfig, curve: _Curve) -> tuple[dict[str, float], list[Series]]:
    measured = trec.bin_curve(curve.loss, config.num_bins)[0]
    centres = bin_centres(config.num_bins)
    lines = [Series("measured", centres, measured, style="points")]
    metrics = {
        "measured valley": float(trec.valley(measured, num_steps=len(curve.loss))),
        "depth of the dip (nats)": float(np.ptp(measured)),
    }
    start, stop = trec.place_block(measured, 0.1)
    share = f"best {(stop - start) / config.num_bins:.2g} of the run"
    metrics |= {
        f"{share}, start": start / config.num_bins,
        f"{share}, stop": stop / config.num_bins,
    }
    if curve.coefficients is not None:
        fit = trec.fit_training_fraction(
            curve.loss, curve.coefficients, p=config.power, num_bins=config.num_bins
        )
        predicted = trec.predict_trec(curve.coefficients, m=fit.m, p=config.power)
        metrics |= {"m": fit.m, "r at m": fit.r, "predicted valley": float(trec.valley(predicted))}
        scaled = fit_affine(trec.bin_curve(predicted, config.num_bins)[0], measured)
        lines.append(Series("predicted, m fitted", centres, scaled))
    return metrics, lines


def _table(curves: list[_Curve]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "step", "loss", "coefficient"])
    for trial, curve in enumerate(curves):
        kept = curve.coefficients
        known = [""] * len(curve.loss) if kept is None else kept.tolist()
        for step, row in enumerate(zip(curve.loss.tolist(), known, strict=True), start=1):
            writer.writerow([trial, step, *row])
    return text.getvalue()
