"""The trial axis: how the lanes of a program (its trials times replicates) share the devices.

Three ways compute the same mathematics:

* `loop`: one compiled program of one lane, called for each lane in turn. Bit-equal to single
  runs and compiled at single-run cost; the rule on one CPU device, where batching lanes was
  measured to be no faster.
* `vmap`: all lanes in one program, the lane axis sharded over the devices, in groups that the
  memory of the device allows; the rule on accelerators and on several devices.
* on a mesh: one lane at a time on all devices, its batch and its state sharded; where the user
  asks for a mesh, and on several processes.

Several steps go into one dispatch of a compiled loop whose trip count is an argument, so any
interval between evaluations or checkpoints uses the same compiled program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlab.training.placement import ByLane, OneDevice, OnMesh, Placement, Role
from jaxlab.training.program import Evaluation, Program

__all__ = ["Lane", "Lanes", "Layout", "choose_layout", "sound_lanes"]

_WORK_PER_DISPATCH = 4e9  # state elements times batch elements: about 0.1 s on a CPU
_MAX_STEPS_PER_DISPATCH = 50
_MEMORY_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class Layout:
    """How lanes are dispatched; stored with the first checkpoint and kept by every resume.

    Attributes:
      trial_axis: see the module's text.
      steps_per_dispatch: the most training steps in one call.

    A user's explicit choice on a resume wins over what is stored.
    """

    trial_axis: Literal["loop", "vmap"]
    steps_per_dispatch: int


@dataclasses.dataclass(frozen=True)
class Lane:
    """One trial with one seed."""

    trial: int
    seed: int


def choose_layout(
    program: Program,
    trial_axis: Literal["auto", "loop", "vmap"] = "auto",
    steps_per_dispatch: int | Literal["auto"] = "auto",
) -> Layout:
    """Fixes the layout by rule, never by timing, so that it is the same on every start."""
    on_cpu = jax.default_backend() == "cpu"
    if trial_axis == "auto":
        trial_axis = "loop" if on_cpu and jax.device_count() == 1 else "vmap"
    if steps_per_dispatch == "auto":
        if on_cpu and not program.loop_friendly:
            steps_per_dispatch = 1
        else:
            batch = program.batches(0, 0, 0)
            work = _num_elements(program.abstract_state()) * _num_elements(batch)
            steps_per_dispatch = int(np.clip(_WORK_PER_DISPATCH / work, 1, _MAX_STEPS_PER_DISPATCH))
    return Layout(trial_axis, steps_per_dispatch)


def _num_elements(tree: Any) -> int:
    return max(1, sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree)))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A function of one lane, with what its arguments and results are."""

    name: str
    function: Callable[..., Any]
    roles: tuple[Role, ...]
    results: tuple[Role, ...]
    donate: tuple[int, ...] = ()


class Lanes:
    """A program compiled for a list of lanes.

    States are kept as a list with one pytree a group of lanes: in the `loop` layout every lane is
    a group of its own without a leading axis; in the `vmap` layout a group has one.

    Args:
      program: what to run.
      lanes: trial-major.
      layout: from `choose_layout`.
      mesh: run each lane on all of these devices; the layout's trial axis must be `loop`.
      debug: run without compilation, so that values can be printed and NaNs located.
      group_size: lanes in one call of the `vmap` layout; by default all of them.

    Attributes:
      compile_seconds: spent in tracing and compilation so far.
    """

    def __init__(
        self,
        program: Program,
        lanes: Sequence[Lane],
        layout: Layout,
        *,
        mesh: Mesh | None = None,
        debug: bool = False,
        group_size: int | None = None,
    ) -> None:
        self.program, self.lanes, self.layout = program, list(lanes), layout
        self.compile_seconds = 0.0
        self._debug, self._mesh = debug, mesh
        self._compiled: dict[tuple[str, int], Callable[..., Any]] = {}
        self._place: Placement = ByLane() if layout.trial_axis == "vmap" else OneDevice()
        if mesh is not None:
            if layout.trial_axis == "vmap":
                raise ValueError("trial_axis=vmap: on a mesh lanes run one by one (loop)")
            self._place = OnMesh(mesh, program)
        threads = min(len(self.lanes), _num_processors())
        parallel = isinstance(self._place, OneDevice) and jax.default_backend() == "cpu"
        self._pool = ThreadPoolExecutor(threads) if parallel and threads > 1 and not debug else None
        together = group_size or len(self.lanes)
        self._set_groups(together if self._place.lanes_together else 1)

    @property
    def group_size(self) -> int:
        """Lanes in one call."""
        return len(self._groups[0])

    def _set_groups(self, size: int) -> None:
        order = list(range(len(self.lanes)))
        self._groups = [order[i : i + size] for i in range(0, len(order), size)]
        self._trials = [
            self._group(group, lambda lane: self.program.trial(lane.trial), "trial")
            for group in self._groups
        ]

    def _group(self, group: Sequence[int], of_lane: Callable[[Lane], Any], role: Role) -> Any:
        return self._place.group([of_lane(self.lanes[i]) for i in group], role)

    def _count(self, count: int) -> Any:
        if isinstance(self._place, OnMesh):
            return self._place.group([np.int32(count)], "count")
        return np.int32(count)

    def _call(self, call: _Call, *args: Any) -> Any:
        if self._debug:
            with jax.disable_jit(), jax.debug_nans(True):
                return self._place.over(call.function, call.roles)(*args)
        return self._compile(call, *args)(*args)

    def _compile(self, call: _Call, *args: Any) -> Callable[..., Any]:
        """Traces and compiles, once for each group size.

        What is returned is a finished executable: a later call with another shape or type is an
        error, never a silent second trace.
        """
        size = len(jax.tree.leaves(args[0])[0]) if self._place.lanes_together else 1
        if (call.name, size) not in self._compiled:
            start = time.perf_counter()
            shardings: dict[str, Any] = {}
            if not isinstance(self._place, OneDevice):
                ins = tuple(self._place.sharding(role, size) for role in call.roles)
                outs = [self._place.sharding(role, size) for role in call.results]
                shardings["in_shardings"] = ins
                shardings["out_shardings"] = tuple(outs) if len(outs) > 1 else outs[0]
            over = self._place.over(call.function, call.roles)
            jitted = jax.jit(over, donate_argnums=call.donate, **shardings)
            with self._mesh_in_use(call.name):
                self._compiled[call.name, size] = jitted.lower(*args).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[call.name, size]

    def _mesh_in_use(self, name: str) -> Any:
        """Lets networks place their activations. Not while they make their parameters: there Flax
        would take it as a wish to have them whole on every device."""
        if self._mesh is None or name == "init":
            return contextlib.nullcontext()
        return jax.set_mesh(self._mesh)

    def init(self) -> list[Any]:
        """The states before the first step, each from its lane's seed alone."""

        def one(trial: Any, seed: jax.Array) -> Any:
            return self.program.init(trial, jax.random.key(seed))

        call = _Call("init", one, ("trial", "trial"), ("state",))
        states = []
        for group, trial in zip(self._groups, self._trials, strict=True):
            seeds = self._group(group, lambda lane: np.uint32(lane.seed), "trial")
            states.append(self._call(call, trial, seeds))
        return states

    def fit_memory(self, states: list[Any]) -> list[Any]:
        """Halves the groups of a batched layout until the compiled step fits the device.

        Does nothing where the device's limit is not known, or where lanes are not batched.
        """
        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        while limit and self.group_size > 1 and not self._debug:
            batches = self._batches(self.program.batches, self._groups[0], 0, 1)
            args = (self._trials[0], states[0], batches, self._count(1))
            compiled = self._compile(self._step_call(), *args)
            usage = compiled.memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
            arguments = usage.argument_size_in_bytes * len(self._groups)
            # Saving and evaluating copy all states twice on one device.
            copies = 2 * sum(leaf.nbytes for state in states for leaf in jax.tree.leaves(state))
            if usage.temp_size_in_bytes + arguments + copies <= _MEMORY_SHARE * limit:
                break
            lanes = self.split(states)
            self._set_groups((self.group_size + 1) // 2)
            states = self.join(lanes)
        return states

    def split(self, states: list[Any]) -> list[Any]:
        """One pytree a lane."""
        return [lane for state in states for lane in self._place.split(state)]

    def join(self, lanes: Sequence[Any]) -> list[Any]:
        """The inverse of `split`."""
        return [self._place.group([lanes[i] for i in group], "state") for group in self._groups]

    def stack(self, states: list[Any]) -> Any:
        """One pytree with a leading lane axis: what a checkpoint holds, whatever the layout."""
        lanes = self.split(states)
        return self._place.stack(lanes) if isinstance(self._place, OnMesh) else _stack(*lanes)

    def unstack(self, stacked: Any) -> list[Any]:
        """The inverse of `stack`."""
        if isinstance(self._place, OnMesh):
            return [self._place.take(stacked, i) for i in range(len(self.lanes))]
        lanes = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(len(self.lanes))]
        return self.join(lanes)

    def abstract_stacked(self) -> Any:
        """Shapes, dtypes and, on a mesh, shardings of `stack`'s result."""
        count = len(self.lanes)
        return self._place.stacked(
            jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype),
                self.program.abstract_state(),
            )
        )

    def _batches(
        self, source: Callable[[int, int, int], Any], group: Sequence[int], start: int, count: int
    ) -> Any:
        """`count` batches for each lane of a group, padded to the dispatch's fixed size."""
        size = self.layout.steps_per_dispatch

        def of_lane(lane: Lane) -> Any:
            items = [source(lane.trial, lane.seed, start + i) for i in range(count)]
            items += [items[-1]] * (size - count)
            return jax.tree.map(lambda *leaves: np.stack(leaves), *items)

        return self._group(group, of_lane, "batch")

    def _step_call(self) -> _Call:
        step, size = self.program.step, self.layout.steps_per_dispatch

        def many(trial: Any, state: Any, batches: Any, count: jax.Array) -> tuple[Any, Any]:
            return _repeat(lambda s, batch: step(trial, s, batch), state, batches, count, size)

        roles: tuple[Role, ...] = ("trial", "state", "batch", "count")
        return _Call("step", many, roles, ("state", "result"), donate=(1,))

    def advance(self, states: list[Any], start: int, count: int) -> tuple[list[Any], list[Any]]:
        """Dispatches training steps `start` to `start + count` without waiting for them.

        Args:
          states: consumed; their buffers are donated.
          start: steps done so far.
          count: at most `steps_per_dispatch`.

        Returns:
          The new states, and for each group the metrics `[lane, step]`, still being computed.
        """
        call = self._step_call()

        def one(i: int) -> tuple[Any, Any]:
            batches = self._batches(self.program.batches, self._groups[i], start, count)
            return self._call(call, self._trials[i], states[i], batches, self._count(count))

        done = self._each_group(one)
        return [state for state, _ in done], [metrics for _, metrics in done]

    def _each_group(self, one: Callable[[int], Any]) -> list[Any]:
        """`one(i)` for every group: the first alone, since it compiles, the others side by side.

        Small networks leave most processors idle; lanes are independent, so on a CPU they run in
        as many threads as there are processors. Every lane's numbers stay the same bits.
        """
        first = [one(0)]
        if self._pool is None:
            return first + [one(i) for i in range(1, len(self._groups))]
        return first + list(self._pool.map(one, range(1, len(self._groups))))

    def fetch(self, metrics: list[Any], count: int) -> dict[str, np.ndarray]:
        """Waits for `advance`'s or `measure`'s metrics: name to array `[lane, count]`."""
        host = jax.device_get(metrics)
        lift = (lambda x: x) if self._place.lanes_together else (lambda x: x[None])
        return {
            name: np.concatenate([lift(np.asarray(group[name]))[:, :count] for group in host])
            for name in host[0]
        }

    def measure(
        self, name: str, states: list[Any], peers: list[Any] | None, start: int, count: int
    ) -> list[Any]:
        """Dispatches an evaluation on its batches `start` to `start + count`.

        Returns:
          For each group the values `[lane, batch]`, still being computed.
        """
        evaluation, size = self.program.evaluations[name], self.layout.steps_per_dispatch
        with_peer: tuple[Role, ...] = () if peers is None else ("state",)
        call = _Call(
            f"evaluate {name}",
            _evaluation_function(evaluation, size),
            ("trial", "state", *with_peer, "batch", "count"),
            ("result",),
        )

        def one(i: int) -> Any:
            batches = self._batches(evaluation.batches, self._groups[i], start, count)
            peer = () if peers is None else (peers[i],)
            return self._call(call, self._trials[i], states[i], *peer, batches, self._count(count))

        return self._each_group(one)

    def summarize(self, states: list[Any]) -> dict[str, np.ndarray]:
        """`Program.summarize` of every lane: name to array `[lane, ...]`."""
        if self.program.summarize is None:
            return {}
        summarize = self.program.summarize

        def one(trial: Any, state: Any) -> Any:
            return dict(summarize(trial, state))

        call = _Call("summarize", one, ("trial", "state"), ("result",))
        found = [
            self._call(call, trial, state)
            for trial, state in zip(self._trials, states, strict=True)
        ]
        lanes = self.split(jax.device_get(found))
        return {name: np.stack([lane[name] for lane in lanes]) for name in lanes[0]}


def _num_processors() -> int:
    """Processors that this process may use; not every system knows about affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@jax.jit
def _sound(stacked: Any) -> jax.Array:
    """For each lane, whether its weights are finite and nothing else is NaN."""
    params = {id(leaf) for leaf in jax.tree.leaves(getattr(stacked, "params", None))}
    found = []
    for leaf in jax.tree.leaves(stacked):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            good = jnp.isfinite(leaf) if id(leaf) in params else ~jnp.isnan(leaf)
            found.append(good.reshape(leaf.shape[0], -1).all(axis=1))
    if not found:
        return jnp.ones(jax.tree.leaves(stacked)[0].shape[0], jnp.bool_)
    return jnp.stack(found).all(axis=0)


def sound_lanes(stacked: Any) -> np.ndarray:
    """For each lane of `Lanes.stack`'s result, whether it is worth keeping: `[lane]` booleans.

    The weights (`params`, where the state has them) must be finite, and nothing may be NaN.
    """
    return np.asarray(_sound(stacked))


@jax.jit
def _stack(*lanes: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *lanes)


def _evaluation_function(evaluation: Evaluation, size: int) -> Callable[..., Any]:
    def many(*args: Any) -> Any:
        *fixed, batches, count = args

        def one(carry: tuple[()], batch: Any) -> tuple[tuple[()], Any]:
            return carry, evaluation.function(*fixed, batch)

        return _repeat(one, (), batches, count, size)[1]

    return many


def _repeat(
    function: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    batches: Any,
    count: jax.Array,
    size: int,
) -> tuple[Any, dict[str, jax.Array]]:
    """Runs `function` on the first `count` of `size` batches and collects its metrics `[size]`.

    Unlike a scan, the trip count is an argument, so one compiled program serves any interval.
    With `size` 1 there is no loop at all.
    """
    if size == 1:
        carry, metrics = function(carry, jax.tree.map(lambda leaf: leaf[0], batches))
        return carry, {name: value[None] for name, value in metrics.items()}

    def body(i: jax.Array, loop: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, found = loop
        batch = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, 0, False), batches)
        carry, metrics = function(carry, batch)
        return carry, {name: found[name].at[i].set(value) for name, value in metrics.items()}

    first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batches)
    shapes = jax.eval_shape(function, carry, first)[1]
    buffers = {name: jnp.zeros((size, *leaf.shape), leaf.dtype) for name, leaf in shapes.items()}
    return jax.lax.fori_loop(jnp.int32(0), count, body, (carry, buffers))
