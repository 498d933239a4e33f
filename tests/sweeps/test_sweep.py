"""Sweeps: which trials share a program, and what a whole one leaves."""

import json

import pytest

from jaxlab.experiments.composition import make_config
from jaxlab.sweeps.launcher import group_trials
from jaxlab.sweeps.sweep import sweep_directory


def config(**changes):
    return make_config("trec", variant="mlp", preset="test", **changes)


def test_trials_that_differ_in_traced_fields_share_a_program():
    configs = [
        config(optimizer={"tau": 0.1}),
        config(optimizer={"tau": 0.2, "schedule": "constant"}),
        config(batch_size=8),
        config(optimizer={"tau": 0.1}),
    ]
    groups = group_trials(configs)
    assert [len(group) for group in groups] == [2, 1]
    assert groups[0] == configs[:2]


def test_the_default_folder_is_that_of_the_set_of_trials():
    one, two = config(optimizer={"tau": 0.1}), config(optimizer={"tau": 0.2})
    assert sweep_directory([one, two]) == sweep_directory([two, one, one])
    assert sweep_directory([one, two]) != sweep_directory([one])
    assert sweep_directory([one]).startswith("runs/trec/sweep-")


@pytest.fixture(scope="module")
def swept(run_cli, tmp_path_factory):
    """Two values of a traced field and two of another: two programs of two trials."""
    folder = tmp_path_factory.mktemp("sweep")
    words = [
        "-m",
        "variant=mlp",
        "preset=test",
        "optimizer.tau=0.1,0.2",
        "batch_size=8,16",
        "run_dir=my sweep",
        "tensorboard=false",
    ]
    return run_cli(*words, cwd=folder), folder, words


def test_a_sweep_runs_two_programs_for_four_trials(swept):
    done, folder, _ = swept
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "program 1 of 2: 2 trials" in done.stdout
    rows = json.loads((folder / "my sweep" / "sweep.json").read_text())
    settings = {(row["settings"]["optimizer.tau"], row["settings"]["batch_size"]) for row in rows}
    assert settings == {(0.1, 8), (0.1, 16), (0.2, 8), (0.2, 16)}
    for row in rows:
        assert (folder / "my sweep" / row["folder"] / "report.md").is_file()
    assert sorted(path.name for path in folder.iterdir()) == ["my sweep"]


def test_a_trial_of_a_sweep_is_its_single_run(swept, run_cli):
    _, folder, _ = swept
    rows = json.loads((folder / "my sweep" / "sweep.json").read_text())
    row = next(r for r in rows if r["settings"] == {"optimizer.tau": 0.1, "batch_size": 8})
    words = ["variant=mlp", "preset=test", "optimizer.tau=0.1", "batch_size=8"]
    done = run_cli(*words, "run_dir=single", "quiet=true", cwd=folder)
    assert done.returncode == 0, done.stderr
    single = json.loads((folder / "single" / "result.json").read_text())
    assert single["metrics"] == row["metrics"]


def test_a_finished_sweep_is_found(swept, run_cli):
    _, folder, words = swept
    again = run_cli(*words, cwd=folder)
    assert again.returncode == 0, again.stderr
    assert "train:" not in again.stdout
    assert "trec.shape.mlp" in again.stdout


def test_any_of_hydras_launchers_runs_the_trials(run_cli, tmp_path):
    words = [
        "-m",
        "hydra/launcher=basic",
        "variant=mlp",
        "preset=test",
        "optimizer.tau=0.1,0.2",
        "run_dir=basic",
        "quiet=true",
        "tensorboard=false",
    ]
    done = run_cli(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "basic" / "sweep.json").read_text())) == 2
