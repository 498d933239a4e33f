"""Run by `test_devices` in a process with eight CPU devices."""

import dataclasses

import jax
import numpy as np

from jaxlab.training.driver import DriveSettings, drive
from jaxlab.training.lanes import Lane, Lanes, choose_layout
from tests.training.toy import Silent, toy_program


def main() -> None:
    """Asserts that eight devices compute what one does, each its own lanes, in one program."""
    assert jax.device_count() == 8
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


if __name__ == "__main__":
    main()
