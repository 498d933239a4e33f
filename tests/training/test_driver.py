"""The loop: order, resume, extension, divergence and stops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from jaxlab.errors import DivergedError, InterruptedRun, UserError
from jaxlab.training.driver import DriveSettings, drive, evaluation_steps
from tests.training.toy import Silent, toy_batch, toy_program

SEEDS = [100, 101]
SETTINGS = DriveSettings(checkpoint_every=10, log_every=5, steps_per_dispatch=7)


def run(program, folder=None, seeds=SEEDS, settings=SETTINGS, **arguments):
    arguments.setdefault("observer", Silent())
    return drive(program, seeds, settings, folder=folder, **arguments)


def assert_same(first, second):
    assert first.arrays.keys() == second.arrays.keys()
    for name, value in first.arrays.items():
        np.testing.assert_array_equal(value, second.arrays[name], err_msg=name)
    for a, b in zip(jax.tree.leaves(first.states), jax.tree.leaves(second.states), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def undisturbed():
    return run(toy_program())


@pytest.fixture
def folder(tmp_path):
    return epath.Path(tmp_path) / "checkpoints"


def test_training_learns_the_regression():
    outcome = run(toy_program(300))
    assert outcome.arrays["train/loss"].shape == (1, 2, 300)
    np.testing.assert_allclose(outcome.arrays["w"][0], [[1, 2, 3, 4]] * 2, atol=0.2)
    assert outcome.examples == 2 * 300 * 8


def test_the_validation_runs_on_its_grid_and_at_the_end(undisturbed):
    assert evaluation_steps(25, 10) == [0, 10, 20, 25]
    assert undisturbed.arrays["validation/loss"].shape == (1, 2, 4)
    state = undisturbed.states[1]
    batches = [toy_batch(10_000, i) for i in range(3)]
    losses = [np.mean((b["x"] @ np.asarray(state.params["w"]) - b["y"]) ** 2) for b in batches]
    assert undisturbed.arrays["validation/loss"][0, 1, -1] == pytest.approx(np.mean(losses), 1e-5)


def test_the_replay_sees_the_training_batches_and_the_next_replicate():
    outcome = run(toy_program(), seeds=[100, 101, 102])
    weights = [np.asarray(state.params["w"]) for state in outcome.states]
    for r, seed in enumerate([100, 101, 102]):
        batch = toy_batch(seed, 17)
        own, peer = (np.mean((batch["x"] @ weights[i] - batch["y"]) ** 2) for i in (r, (r + 1) % 3))
        assert outcome.arrays["replay/loss"][0, r, 17] == pytest.approx(own, rel=1e-4)
        assert outcome.arrays["replay/gap"][0, r, 17] == pytest.approx(own - peer, rel=1e-3)


def test_metrics_are_reported_in_order():
    observer = Silent()
    run(toy_program(), observer=observer)
    steps = [step for step, values in observer.lines if "train/loss" in values]
    assert steps == [5, 10, 15, 20, 25, 30]
    evaluated = [step for step, values in observer.lines if "validation/loss" in values]
    assert evaluated == [0, 10, 20, 30]
    assert [step for step, _ in observer.lines] == sorted(step for step, _ in observer.lines)


@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_a_stopped_run_resumes_bit_equal(undisturbed, folder, stop_after):
    asked = iter([None] * stop_after + [15] * 99)
    with pytest.raises(InterruptedRun, match=r"stopped at step \d+; run the same") as caught:
        run(toy_program(), folder, stop=lambda: next(asked))
    assert caught.value.exit_code == 143
    observer = Silent()
    assert_same(run(toy_program(), folder, observer=observer), undisturbed)
    assert observer.phases[0] == ("train", {0: 0, 1: 7, 3: 17}[stop_after], 30)


def test_a_stop_in_the_replay_keeps_the_training(undisturbed, folder):
    asked = iter([None] * 6 + [2] * 99)
    with pytest.raises(InterruptedRun, match="stopped after training, in replay") as caught:
        run(toy_program(), folder, stop=lambda: next(asked))
    assert caught.value.exit_code == 130
    observer = Silent()
    assert_same(run(toy_program(), folder, observer=observer), undisturbed)
    assert observer.phases[0] == ("train", 30, 30)


def test_without_a_folder_a_stop_says_that_nothing_was_kept():
    with pytest.raises(InterruptedRun, match="nothing was kept"):
        run(toy_program(), stop=lambda: 2)


def test_a_finished_run_takes_more_replicates(folder):
    run(toy_program(), folder)
    observer = Silent()
    more = run(toy_program(), folder, seeds=[*SEEDS, 102], observer=observer)
    assert [phase for phase in observer.phases if phase[0] == "train"] == [
        ("train", 30, 30),
        ("train", None, 30),
    ]
    assert_same(more, run(toy_program(), seeds=[*SEEDS, 102]))


def test_more_replicates_keep_the_trial_order(folder):
    rates = (0.05, 0.1)
    run(toy_program(rates=rates), folder)
    more = run(toy_program(rates=rates), folder, seeds=[*SEEDS, 102])
    assert_same(more, run(toy_program(rates=rates), seeds=[*SEEDS, 102]))


def test_a_finished_run_takes_more_steps(folder):
    run(toy_program(25), folder)
    observer = Silent()
    longer = run(toy_program(40), folder, observer=observer)
    assert observer.phases[0] == ("train", 25, 40)
    whole = run(toy_program(40))
    np.testing.assert_array_equal(longer.arrays["train/loss"], whole.arrays["train/loss"])
    np.testing.assert_array_equal(longer.arrays["w"], whole.arrays["w"])
    np.testing.assert_array_equal(longer.arrays["validation/loss"], whole.arrays["validation/loss"])


def test_a_loss_that_is_not_finite_stops_and_names_its_step(folder):
    program = toy_program(nan_at=22)
    observer = Silent()
    with pytest.raises(DivergedError, match=r"step 23 is not finite .*seed 100.*step 20 is intact"):
        run(program, folder, observer=observer)
    assert max(step for step, _ in observer.lines) <= 20
    # The batch repaired, the run goes on from there.
    observer = Silent()
    run(toy_program(), folder, observer=observer)
    assert observer.phases[0] == ("train", 20, 30)


def test_divergence_is_noticed_one_dispatch_late_at_most():
    seen = []
    program = toy_program(100, nan_at=10)
    batches = program.batches
    program = dataclasses.replace(
        program, batches=lambda t, s, i: (seen.append(i), batches(t, s, i))[1]
    )
    settings = DriveSettings(checkpoint_every=1000, steps_per_dispatch=5)
    evaluations = {"replay": program.evaluations["replay"]}
    with pytest.raises(DivergedError, match="no checkpoint was kept"):
        run(dataclasses.replace(program, evaluations=evaluations, best=None), settings=settings)
    # Step 11 is in the dispatch of steps 10 to 14; one more was sent before its loss came back.
    assert max(seen) == 19


def test_other_data_is_refused(folder):
    asked = iter([None, 15, 15])
    with pytest.raises(InterruptedRun):
        run(toy_program(), folder, stop=lambda: next(asked))
    with pytest.raises(UserError, match="data=other: the run was started on other data"):
        run(toy_program(fingerprint="other"), folder)


def test_a_resume_keeps_the_layout_of_the_start(folder):
    asked = iter([None, 15, 15])
    with pytest.raises(InterruptedRun):
        run(toy_program(), folder, stop=lambda: next(asked))
    calls = []
    program = toy_program()
    counted = dataclasses.replace(
        program, batches=lambda t, s, i: (calls.append(i), program.batches(t, s, i))[1]
    )
    automatic = dataclasses.replace(SETTINGS, steps_per_dispatch="auto")
    observer = Silent()
    run(counted, folder, settings=automatic, observer=observer)
    # Fifty steps would fit into a dispatch; seven is what the run began with.
    assert calls.index(14) - calls.index(7) >= 3


def test_a_single_replicate_has_no_peer():
    with pytest.raises(ValueError, match="replicates=1"):
        run(toy_program(), seeds=[100])


def test_profile_writes_a_trace(tmp_path):
    settings = dataclasses.replace(SETTINGS, profile=epath.Path(tmp_path) / "profile")
    run(toy_program(), settings=settings)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
