"""Runs and their folders: written, found again, resumed, extended, refused."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import pytest
import yaml
from etils import epath

import jaxlab
from jaxlab.errors import DivergedError, InterruptedRun, UserError
from jaxlab.experiments import machine, registry, runner
from jaxlab.experiments.composition import make_config
from jaxlab.reporting.directory import own_directory
from jaxlab.training.program import Program

ENABLED = "jax_enable_compilation_cache"
CACHE = "jax_compilation_cache_dir"
QUIET = {"quiet": True, "tensorboard": False, "compilation_cache": "off"}


def config(**changes):
    return make_config("trec", variant="mlp", preset="test", **{**QUIET, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two replicates with its folder."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return runner.run(config(), folder), folder


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished run, to be changed."""
    return shutil.copytree(finished[1], tmp_path / "run")


def test_a_run_leaves_its_files(finished):
    result, folder = finished
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "result.json",
        "report.md",
        "figures",
        "checkpoints",
    }
    assert {path.name for path in (folder / "figures").iterdir()} == {
        f"{figure.name}.png" for figure in result.figures
    }
    data = json.loads((folder / "result.json").read_text())
    assert data["seeds"] == [100, 101]
    assert data["examples_seen"] == 2 * 40 * 16
    assert data["peak_memory_bytes"]["host"] > 1e7
    assert [claim["id"] for claim in data["claims"]] == [claim.id for claim in result.claims]
    (environment,) = json.loads((folder / "environment.json").read_text())["sessions"]
    assert environment["packages"]["jax"]
    assert environment["matmul_precision"] == "highest"
    assert environment["seeds"] == [100, 101]
    assert yaml.safe_load((folder / "config.yaml").read_text())["variant"] == "mlp"
    assert (
        "python -m jaxlab.run method=trec variant=mlp preset=test"
        in (folder / "report.md").read_text()
    )


def test_nothing_is_left_half_written(finished):
    hidden = [path.name for path in finished[1].rglob(".*")]
    assert hidden == [".lock"]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = jaxlab.run_experiment("trec", variant="mlp", preset="test", quiet=True)
    assert list(tmp_path.iterdir()) == []
    assert "<table" in result._repr_html_()


def test_without_a_folder_the_numbers_are_the_same(finished):
    again = runner.run(config())
    assert again.metrics == finished[0].metrics
    assert again.claims == finished[0].claims


def test_a_finished_run_is_found(copy, finished):
    before = (copy / "result.json").stat().st_mtime_ns
    again = runner.run(config(), copy)
    assert again.provenance["finished_before"]
    assert again.claims == finished[0].claims
    assert (copy / "result.json").stat().st_mtime_ns == before


def test_execution_fields_may_change(copy):
    again = runner.run(config(log_every=3, trial_axis="vmap", checkpoint_every=5), copy)
    assert again.provenance["finished_before"]


def test_another_identity_is_refused_by_name(copy):
    message = r"optimizer\.tau=0\.4: the run in .* has 0\.2; choose another run_dir"
    with pytest.raises(UserError, match=message):
        runner.run(config(optimizer={"tau": 0.4}), copy)
    with pytest.raises(UserError, match=r"seed=7: the run in .* has 100 \(1 more fields differ\)"):
        runner.run(config(seed=7, power=1.0), copy)


def test_other_steps_are_refused_where_the_schedule_differs(copy):
    with pytest.raises(UserError, match="steps=60: this run has 40 steps and cannot be continued"):
        runner.run(config(steps=60), copy)


def test_more_replicates_extend_a_finished_run(copy):
    more = runner.run(config(replicates=3), copy)
    whole = runner.run(config(replicates=3))
    assert more.metrics == whole.metrics
    assert more.claims == whole.claims
    with pytest.raises(UserError, match=r"replicates=2: the run in .* has 3; allowed: as many or"):
        runner.run(config(), copy)


def test_a_lost_result_is_made_again_from_the_checkpoint(copy, finished):
    (copy / "result.json").unlink()
    again = runner.run(config(), copy)
    assert again.claims == finished[0].claims
    assert "finished_before" not in again.provenance


def test_a_garbled_result_is_made_again(copy, finished):
    (copy / "result.json").write_text("{")
    assert runner.run(config(), copy).claims == finished[0].claims


def test_a_garbled_configuration_is_refused(copy):
    (copy / "config.yaml").write_text("method: trec\nstepz: 3\n")
    with pytest.raises(UserError, match=r"run_dir=.*config.yaml cannot be read by this version"):
        runner.run(config(), copy)


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"run_dir=.*holds other files \(thesis.tex"):
        runner.run(config(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_locked_folder_is_refused(copy):
    # The lock belongs to an open file, so a second one in this process is refused as well.
    expected = f"in use by process {os.getpid()} on"
    with own_directory(epath.Path(copy)), pytest.raises(UserError, match=expected):
        runner.run(config(replicates=3), copy)
    with own_directory(epath.Path(copy)):  # what is finished may always be read
        assert runner.run(config(), copy).provenance["finished_before"]


@pytest.mark.parametrize(
    "changes",
    [
        {"variant": "text", "context": 100_000},  # too few tokens for a batch
        {"variant": "text", "data": {"max_bytes": 10_000}},
        {"compilation_cache": "/proc/nowhere"},
        {"mesh": {"data": 3}},
        {"mesh": {"model": -1, "data": -1}},
    ],
    ids=str,
)
def test_a_late_mistake_leaves_nothing(tmp_path, changes):
    settings = make_config("trec", **{"variant": "mlp", "preset": "test", **QUIET, **changes})
    with pytest.raises(UserError) as caught:
        runner.run(settings, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_each_start_is_noted(tmp_path):
    settings = config(steps_per_dispatch=5)
    asked = iter([None, 15, 15, 15])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            machine, "stop_requests", lambda _: contextlib.nullcontext(lambda: next(asked))
        )
        with pytest.raises(InterruptedRun):
            runner.run(settings, tmp_path / "run")
    seconds = runner.run(settings, tmp_path / "run").provenance["run_seconds"]
    sessions = json.loads((tmp_path / "run" / "environment.json").read_text())["sessions"]
    assert len(sessions) == 2
    assert seconds > 0


def test_a_bad_value_leaves_nothing(tmp_path):
    with pytest.raises(UserError):
        runner.run(config(steps=0), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_diverged_run_keeps_its_folder_and_can_go_on(tmp_path, monkeypatch, finished):
    module = registry.experiment_module("trec")
    build = module.build

    def poisoned(settings):
        (program,) = build(settings)

        def step(trial, state, batch):
            state, metrics = program.step(trial, state, batch)
            loss = jnp.where(state.step == 25, jnp.nan, metrics["loss"])
            return state, {**metrics, "loss": loss}

        return [dataclasses.replace(program, step=step)]

    monkeypatch.setattr(module, "build", poisoned)
    with pytest.raises(DivergedError, match=r"step 25 is not finite.*step 20 is intact") as caught:
        runner.run(config(), tmp_path / "run")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "run" / "result.json").exists()
    monkeypatch.setattr(module, "build", build)
    assert runner.run(config(), tmp_path / "run").metrics["m"] == finished[0].metrics["m"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_resumes(tmp_path, monkeypatch, finished, number):
    module = registry.experiment_module("trec")
    build = module.build

    def interrupting(settings):
        (program,) = build(settings)

        def batches(trial, seed, step):
            if (seed, step) == (100, 15):  # the first lane's batches are made by this thread
                signal.raise_signal(number)
            return program.batches(trial, seed, step)

        return [dataclasses.replace(program, batches=batches)]

    monkeypatch.setattr(module, "build", interrupting)
    settings = config(steps_per_dispatch=5)
    with pytest.raises(InterruptedRun, match="stopped at step 20; run the same") as caught:
        runner.run(settings, tmp_path / "run")
    assert caught.value.exit_code == 128 + number
    monkeypatch.setattr(module, "build", build)
    again = runner.run(settings, tmp_path / "run")
    assert again.claims == runner.run(settings).claims


def test_signals_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with machine.stop_requests(True) as stop:
        assert stop() is None
        signal.raise_signal(signal.SIGTERM)
        assert stop() == signal.SIGTERM
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_compilation_cache_folder_is_checked(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = getattr(jax.config, CACHE)
    file = tmp_path / "file"
    file.write_text("")
    bad = machine.compilation_cache(str(file / "cache"))
    with pytest.raises(UserError, match=r"compilation_cache=.*cannot be written"), bad:
        pass
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with machine.compilation_cache("auto"):  # no cache is no error
        assert getattr(jax.config, CACHE) == before
    with machine.compilation_cache(str(tmp_path / "cache")):
        assert getattr(jax.config, CACHE) == str(tmp_path / "cache")
    with machine.compilation_cache("off"):
        assert not getattr(jax.config, ENABLED)
    assert getattr(jax.config, ENABLED)
    assert getattr(jax.config, CACHE) == before


def test_profile_needs_a_folder():
    with pytest.raises(UserError, match="profile=True: needs a run_dir"):
        runner.run(config(profile=True))


def test_debug_finds_the_same_metrics():
    small = {"steps": 8, "num_bins": 4, "batch_size": 2, "eval_every": 8, "eval_batches": 1}
    plain = runner.run(config(**small, steps_per_dispatch=1))
    debug = runner.run(config(**small, steps_per_dispatch=1, debug=True))
    assert debug.metrics["validation loss (nats)"] == pytest.approx(
        plain.metrics["validation loss (nats)"], rel=1e-4
    )


def test_programs_are_what_the_runner_expects():
    assert all(isinstance(program, Program) for program in runner._build([config()]))
