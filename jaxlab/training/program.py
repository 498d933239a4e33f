"""What an experiment hands to the driver: pure functions over trials and replicates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlab.errors import UserError

__all__ = ["Evaluation", "Metrics", "Program", "check_extension", "merge_trials"]

Metrics = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Measures a state on batches, without changing it.

    Attributes:
      function: `(trial, state, batch) -> {name: scalar}`, or with `peer`
        `(trial, state, peer_state, batch) -> {name: scalar}`; pure and traceable.
      batches: `(trial_index, seed, index) -> batch` of NumPy arrays; a pure function.
      num_batches: how many batches there are.
      every: training steps between two evaluations; None for once, after training.
      keep: `mean` over the batches, or `each` batch's value.
      peer: `(replicate, replicates) -> replicate`, whose state `function` also gets, trained by
        the same trial on other data: a control variate. None for no peer.
    """

    function: Callable[..., Metrics]
    batches: Callable[[int, int, int], Any]
    num_batches: int
    every: int | None = None
    keep: Literal["mean", "each"] = "mean"
    peer: Callable[[int, int], int] | None = None

    def __post_init__(self) -> None:
        if self.num_batches < 1 or (self.every is not None and self.every < 1):
            raise ValueError(f"num_batches={self.num_batches}, every={self.every}: both at least 1")
        if self.peer is not None and self.every is not None:
            raise ValueError("an evaluation with peer runs once, after training: every=None")


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program: one compiled step, run for every trial and replicate.

    A trial is one setting, given as arrays; a replicate is one seed. All functions but `batches`
    are pure and traceable, and see one trial and one replicate.

    Attributes:
      name: names its checkpoints and metrics.
      trials: pytree of arrays `[trial, ...]`.
      num_steps: training steps T.
      init: `(trial, key) -> state`.
      step: `(trial, state, batch) -> (state, {name: float32 scalar})`; the metrics must include
        `loss`, and a value of `loss` that is not finite stops the run.
      batches: `(trial_index, seed, step) -> batch` of NumPy arrays with fixed shapes, a pure
        function, so that any batch can be replayed; step counts from 0.
      evaluations: by name.
      summarize: `(trial, state) -> {name: array}`, once after training: what the conclusions need
        of the final state.
      best: `evaluation/metric` whose smallest value marks the best checkpoint; None keeps only
        the newest.
      examples_per_step: sequences, images, ... in a batch, for the report.
      shardings: `mesh -> pytree of shardings` of one replicate's state; None keeps states whole on
        every device.
      fingerprint: names the data; a resume on other data is refused.
      loop_friendly: False for networks with convolutions, which are many times slower inside a
        compiled loop on CPUs.
    """

    name: str
    trials: Any
    num_steps: int
    init: Callable[[Any, jax.Array], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Metrics]]
    batches: Callable[[int, int, int], Any]
    evaluations: Mapping[str, Evaluation] = dataclasses.field(default_factory=dict)
    summarize: Callable[[Any, Any], Mapping[str, Any]] | None = None
    best: str | None = None
    examples_per_step: int = 1
    shardings: Callable[[Mesh], Any] | None = None
    fingerprint: str = ""
    loop_friendly: bool = True

    def __post_init__(self) -> None:
        sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(self.trials)}
        if len(sizes) != 1 or () in sizes:
            raise ValueError(f"trials: every leaf needs the same leading trial axis, got {sizes}")
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps}: at least 1")
        if self.best is not None and self.best.partition("/")[0] not in self.evaluations:
            raise ValueError(f"best={self.best}: its evaluation is not among the evaluations")

    @property
    def num_trials(self) -> int:
        """How many trials there are."""
        return len(jax.tree.leaves(self.trials)[0])

    def trial(self, index: int) -> Any:
        """The arrays of one trial."""
        return jax.tree.map(lambda leaf: leaf[index], self.trials)

    def abstract_state(self) -> Any:
        """Shapes and dtypes of one replicate's state."""
        return jax.eval_shape(self.init, self.trial(0), jax.random.key(0))


def merge_trials(programs: list[Program]) -> Program:
    """One program whose trials are those of all the programs, in order.

    The programs must be one structure with different numbers: same name, steps, shapes and
    evaluations. Batches are still read by each trial's own program.

    Raises:
      ValueError: the programs are of different structure.
    """
    first = programs[0]
    owners = [(program, i) for program in programs for i in range(program.num_trials)]
    for other in programs[1:]:
        same = (
            other.name == first.name
            and other.num_steps == first.num_steps
            and other.evaluations.keys() == first.evaluations.keys()
            and jax.tree.structure(other.trials) == jax.tree.structure(first.trials)
            and other.abstract_state() == first.abstract_state()
        )
        if not same:
            raise ValueError(f"program {first.name}: its trials differ in structure")

    def of_evaluation(name: str) -> Evaluation:
        def batches(trial: int, seed: int, index: int) -> Any:
            program, own = owners[trial]
            return program.evaluations[name].batches(own, seed, index)

        return dataclasses.replace(first.evaluations[name], batches=batches)

    def batches(trial: int, seed: int, step: int) -> Any:
        program, own = owners[trial]
        return program.batches(own, seed, step)

    return dataclasses.replace(
        first,
        trials=jax.tree.map(lambda *leaves: np.concatenate(leaves), *[p.trials for p in programs]),
        batches=batches,
        evaluations={name: of_evaluation(name) for name in first.evaluations},
        fingerprint="+".join(dict.fromkeys(program.fingerprint for program in programs)),
    )


def check_extension(old: Program, new: Program) -> None:
    """Whether a finished run of `old` can go on as `new`, which has more steps.

    It can if the first steps would have been the same: every array of the trials is unchanged, or
    has `old` as its beginning along the step axis, and the state has the same shapes.

    Raises:
      UserError: naming `steps`.
    """
    problem = f"this run has {old.num_steps} steps and cannot be continued: "
    if new.num_steps < old.num_steps:
        raise UserError("steps", new.num_steps, problem + "allowed are more steps, not fewer")
    if old.abstract_state() != new.abstract_state():
        raise UserError("steps", new.num_steps, problem + "its state has another shape")
    for step in (0, old.num_steps - 1):
        pair = (jax.tree.leaves(program.batches(0, 0, step)) for program in (old, new))
        if not all(np.array_equal(a, b) for a, b in zip(*pair, strict=True)):
            raise UserError("steps", new.num_steps, problem + "its batches would have differed")
    for before, after in zip(jax.tree.leaves(old.trials), jax.tree.leaves(new.trials), strict=True):
        before, after = np.asarray(before), np.asarray(after)
        if after.shape[1:2] == (new.num_steps,) and before.shape[1:2] == (old.num_steps,):
            after = after[:, : old.num_steps]
        if not np.array_equal(before, after):
            raise UserError("steps", new.num_steps, problem + "its schedule would have differed")
