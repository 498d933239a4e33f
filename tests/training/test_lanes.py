"""The layouts agree, and each compiles once."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.training.driver import DriveSettings, drive
from jaxlab.training.lanes import Layout, choose_layout
from tests.training.toy import Silent, toy_program


def final_weights(program, seeds, **settings):
    outcome = drive(program, seeds, DriveSettings(**settings), observer=Silent())
    return outcome.arrays


@pytest.fixture(scope="module")
def three_by_two():
    return final_weights(toy_program(rates=(0.05, 0.1, 0.2)), [100, 101])


def test_a_lane_is_bit_equal_to_its_single_run(three_by_two):
    single = final_weights(toy_program(rates=(0.1,)), [100, 101])
    for name, value in single.items():
        np.testing.assert_array_equal(value[0], three_by_two[name][1], err_msg=name)


def test_any_split_into_dispatches_is_bit_equal(three_by_two):
    program = toy_program(rates=(0.05, 0.1, 0.2))
    for size in (2, 7, 30):
        other = final_weights(program, [100, 101], steps_per_dispatch=size)
        np.testing.assert_array_equal(other["w"], three_by_two["w"])
        np.testing.assert_array_equal(other["train/loss"], three_by_two["train/loss"])


def test_one_step_a_dispatch_gives_the_same_numbers(three_by_two):
    # Another program (no loop around the step): XLA may round differently.
    program = toy_program(rates=(0.05, 0.1, 0.2))
    other = final_weights(program, [100, 101], steps_per_dispatch=1)
    np.testing.assert_allclose(other["w"], three_by_two["w"], rtol=1e-4)


def test_vmap_agrees_with_the_loop_in_the_norm(three_by_two):
    other = final_weights(toy_program(rates=(0.05, 0.1, 0.2)), [100, 101], trial_axis="vmap")
    for name, value in other.items():
        assert value.shape == three_by_two[name].shape
        distance = np.linalg.norm(value - three_by_two[name])
        assert distance <= 1e-5 * np.linalg.norm(three_by_two[name]), name


@pytest.mark.parametrize("axis", ["loop", "vmap"])
def test_the_step_is_traced_for_one_program_only(axis):
    calls = []
    program = toy_program(25, rates=(0.05, 0.1))

    def counted(trial, state, batch):
        calls.append(1)
        return program.step(trial, state, batch)

    many = dataclasses.replace(program, step=counted)
    drive(many, [100, 101], DriveSettings(trial_axis=axis, steps_per_dispatch=4), observer=Silent())
    # Once for the shapes of the metrics, once for the loop's body.
    assert len(calls) == 2


def test_states_are_donated():
    from jaxlab.training.lanes import Lane, Lanes

    lanes = Lanes(toy_program(), [Lane(0, 100)], Layout("loop", 4))
    before = lanes.init()
    leaves = jax.tree.leaves(before)
    lanes.advance(before, 0, 4)
    assert all(leaf.is_deleted() for leaf in leaves)


def test_debug_runs_without_compilation(three_by_two):
    program = toy_program(6, rates=(0.1,))
    plain = final_weights(program, [100, 101], steps_per_dispatch=1)
    debug = final_weights(program, [100, 101], steps_per_dispatch=1, debug=True)
    np.testing.assert_allclose(debug["w"], plain["w"], rtol=1e-5)


def test_groups_are_halved_to_fit_the_memory(monkeypatch):
    from jaxlab.training.lanes import Lane, Lanes

    program = toy_program(rates=(0.05, 0.1))
    members = [Lane(t, seed) for t in range(2) for seed in (100, 101)]
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1})
    free = Lanes(program, members, Layout("vmap", 4))
    states = free.fit_memory(free.init())
    assert free.group_size == 4
    tight = Lanes(program, members, Layout("vmap", 4))
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    stacked = tight.stack(tight.fit_memory(tight.init()))
    assert tight.group_size == 1
    for a, b in zip(
        jax.tree.leaves(free.stack(states).params), jax.tree.leaves(stacked.params), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    # A restored state is fitted like a fresh one.
    again = Lanes(program, members, Layout("vmap", 4))
    again.fit_memory(again.unstack(stacked))
    assert again.group_size == 1


def test_layout_is_chosen_by_rule():
    small = toy_program()
    assert choose_layout(small) == Layout("loop", 50)
    convolutional = dataclasses.replace(small, loop_friendly=False)
    assert choose_layout(convolutional) == Layout("loop", 1)
    large = dataclasses.replace(
        small, init=lambda trial, key: jnp.zeros(10_000_000), evaluations={}, best=None
    )
    assert choose_layout(large).steps_per_dispatch == 10
    assert choose_layout(small, "vmap", 3) == Layout("vmap", 3)
