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


def test_one_diverged_trial_does_not_end_the_others(folder):
    """The second trial's loss becomes NaN at step 22; the others' numbers stay the same bits."""
    program = toy_program(rates=(0.05, 0.1, 0.2))
    step = program.step

    def poisoned(trial, state, batch):
        state, metrics = step(trial, state, batch)
        bad = (state.step == 22) & (trial["rate"][0] == np.float32(0.1))
        return state, {**metrics, "loss": jnp.where(bad, jnp.nan, metrics["loss"])}

    outcome = run(dataclasses.replace(program, step=poisoned), folder)
    assert outcome.diverged == [1]
    whole = run(program)
    assert whole.diverged == []
    for name, value in whole.arrays.items():
        np.testing.assert_array_equal(outcome.arrays[name][[0, 2]], value[[0, 2]], err_msg=name)
    # A resume knows it from the history.
    assert run(dataclasses.replace(program, step=poisoned), folder).diverged == [1]


def test_weights_that_are_not_finite_are_not_saved(folder):
    """The loss of a step is measured before its update: here only the weights are NaN yet."""
    program = toy_program()
    step = program.step

    def poisoned(trial, state, batch):
        state, metrics = step(trial, state, batch)
        params = jax.tree.map(lambda p: jnp.where(state.step == 20, jnp.nan, p), state.params)
        return state._replace(params=params), metrics

    evaluations = {"replay": program.evaluations["replay"]}
    bad = dataclasses.replace(program, step=poisoned, evaluations=evaluations, best=None)
    message = "the weights after step 20 are not finite .*the checkpoint of step 10 is intact"
    with pytest.raises(DivergedError, match=message):
        run(bad, folder)
    observer = Silent()
    run(dataclasses.replace(program, evaluations=evaluations, best=None), folder, observer=observer)
    assert observer.phases[0] == ("train", 10, 30)


@pytest.mark.parametrize("kept", [True, False])
def test_weights_after_the_last_step_are_checked(folder, kept):
    """The last update makes one trial's weights NaN: known with and without a folder, and again."""
    program = toy_program(rates=(0.05, 0.1))
    step = program.step

    def poisoned(trial, state, batch):
        state, metrics = step(trial, state, batch)
        bad = (state.step == 30) & (trial["rate"][0] == np.float32(0.1))
        params = jax.tree.map(lambda p: jnp.where(bad, jnp.nan, p), state.params)
        return state._replace(params=params), metrics

    program = dataclasses.replace(program, step=poisoned)
    for _ in range(2):
        assert run(program, folder if kept else None).diverged == [1]


def test_a_missing_cohort_is_named(folder):
    run(toy_program(), folder)
    (folder / "toy" / "replicates-00000-00002").rename(folder / "toy" / "replicates-00001-00002")
    with pytest.raises(UserError, match="the checkpoints of replicates 0 to 0 are missing"):
        run(toy_program(), folder)


def test_only_an_evaluated_checkpoint_can_be_the_best(folder):
    """Saved at 10, 20, 30, validated at 0, 20, 30: the one at 10 has no value of its own."""
    program = toy_program()
    evaluation = dataclasses.replace(program.evaluations["validation"], every=20)
    program = dataclasses.replace(
        program, evaluations={**program.evaluations, "validation": evaluation}
    )
    run(program, folder)
    steps = sorted(int(p.name) for p in (folder / "toy" / "replicates-00000-00002").iterdir())
    assert steps == [20, 30]


def test_seconds_add_up_over_starts(folder):
    asked = iter([None, None, 15, 15])
    with pytest.raises(InterruptedRun):
        run(toy_program(), folder, stop=lambda: next(asked))
    first = run(toy_program(), folder)
    again = run(toy_program(), folder)  # only the replay is left
    assert again.run_seconds > first.run_seconds * 0.5
    assert first.compile_seconds > 0


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
