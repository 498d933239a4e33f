"""Run by `test_devices` in a process with eight CPU devices: `lanes`, `mesh` or `float64`."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxlab.experiments.composition import make_config
from jaxlab.experiments.trec import experiment
from jaxlab.experiments.trec.config import Config
from jaxlab.models.decoder import Decoder
from jaxlab.parallel.mesh import make_mesh
from jaxlab.training.driver import DriveSettings, drive
from jaxlab.training.lanes import Lane, Lanes, Layout, choose_layout
from jaxlab.training.program import Program
from tests.training.toy import Silent, toy_program


def lanes_share_the_devices() -> None:
    """Eight devices compute what one does, each its own lanes, in one program."""
    program = toy_program(10, rates=(0.05, 0.1, 0.15, 0.2))
    layout = choose_layout(program)
    assert layout.trial_axis == "vmap"
    seeds = [100, 101, 102, 103]
    lanes = Lanes(program, [Lane(t, seed) for t in range(4) for seed in seeds], layout)
    (state,) = lanes.init()
    shards = state.params["w"].addressable_shards
    assert {shard.data.shape for shard in shards} == {(2, 4)}
    assert len({shard.device for shard in shards}) == 8
    traces = []

    def counted(trial, state, batch):
        traces.append(1)
        return program.step(trial, state, batch)

    many = drive(
        dataclasses.replace(program, step=counted),
        seeds,
        DriveSettings(steps_per_dispatch=4),
        observer=Silent(),
    )
    assert len(traces) == 2, "once for the metrics' shapes, once for the loop"
    one = drive(program, seeds, DriveSettings(trial_axis="loop"), observer=Silent())
    for name, value in one.arrays.items():
        distance = np.linalg.norm(many.arrays[name] - value)
        assert distance <= 1e-5 * np.linalg.norm(value), (name, distance)
    odd = drive(program, seeds[:3], DriveSettings(), observer=Silent())  # 12 lanes on 6 devices
    assert np.isfinite(odd.arrays["train/loss"]).all()
    # Groups of five and four lanes lie on five and four devices.
    uneven = Lanes(program, lanes.lanes[:9], layout, group_size=5)
    stacked = uneven.stack(uneven.init())
    again = uneven.stack(uneven.unstack(stacked))
    np.testing.assert_array_equal(stacked.params["w"], again.params["w"])


def decoder_program(steps: int) -> Program:
    """The byte decoder of `method=trec`, small, without its replay."""
    config = make_config(
        "trec",
        preset="test",
        steps=steps,
        batch_size=8,
        replicates=2,
        num_bins=4,
        model={"num_kv_heads": 2},
    )
    assert isinstance(config, Config)
    (program,) = experiment.build(config)
    evaluations = {"validation": program.evaluations["validation"]}
    return dataclasses.replace(program, evaluations=evaluations)


def losses(program: Program, mesh: Any, folder: epath.Path | None = None) -> np.ndarray:
    """Training losses `[replicate, step]` on a mesh, or without one."""
    settings = DriveSettings(mesh=mesh, trial_axis="loop", steps_per_dispatch=5, checkpoint_every=5)
    outcome = drive(program, [100, 101], settings, observer=Silent(), folder=folder)
    return outcome.arrays["train/loss"][0]


def largest_share(tree: Any) -> float:
    """The largest part of the arrays of two and more axes that one device holds."""
    shares = [
        max(shard.data.size for shard in leaf.addressable_shards) / leaf.size
        for leaf in jax.tree.leaves(tree)
        if leaf.ndim >= 2
    ]
    return max(shares)


def a_mesh_computes_what_one_device_does() -> None:
    """2 x 2 x 2 devices: the same losses, one trace, everything large really split."""
    program = decoder_program(20)
    mesh = make_mesh(2, 2, 2)
    traces = []

    def counted(trial, state, batch):
        traces.append(1)
        return program.step(trial, state, batch)

    with tempfile.TemporaryDirectory() as name:
        folder = epath.Path(name)
        many = losses(dataclasses.replace(program, step=counted), mesh, folder)
        assert len(traces) == 2, len(traces)
        one = losses(program, None)
        np.testing.assert_allclose(many, one, rtol=0, atol=1e-5)
        # A checkpoint of the mesh goes on without one, and on another mesh.
        for other in (None, make_mesh(4, 2, 1)):
            np.testing.assert_array_equal(losses(program, other, folder), many)
    lanes = Lanes(program, [Lane(0, 100)], Layout("loop", 5), mesh=mesh)
    (state,) = lanes.init()
    assert largest_share(state.params) <= 0.25
    assert largest_share(state.opt_state) <= 0.25
    assert len({shard.device for shard in state.params["embedding"].addressable_shards}) == 8


def a_mesh_agrees_in_float64() -> None:
    """100 steps in float64: within 1e-9."""
    jax.config.update("jax_enable_x64", True)
    # The settings offer no float64 network.
    replacement: Any = lambda **sizes: Decoder(**{**sizes, "dtype": jnp.float64})  # noqa: E731
    experiment.Decoder = replacement
    program = decoder_program(100)
    init = program.init

    def wide(trial, key):
        def widen(leaf):
            inexact = jnp.issubdtype(leaf.dtype, jnp.floating)
            return leaf.astype(jnp.float64) if inexact else leaf

        return jax.tree.map(widen, init(trial, key))

    program = dataclasses.replace(program, init=wide)
    many, one = losses(program, make_mesh(2, 2, 2)), losses(program, None)
    assert np.abs(many - one).max() <= 1e-9, np.abs(many - one).max()


def main() -> None:
    """Runs the named check."""
    assert jax.device_count() == 8
    checks = {
        "lanes": lanes_share_the_devices,
        "mesh": a_mesh_computes_what_one_device_does,
        "float64": a_mesh_agrees_in_float64,
    }
    checks[sys.argv[1]]()


if __name__ == "__main__":
    main()
