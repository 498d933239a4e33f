"""The curve of a finished run, from its own checkpoint and data."""

import dataclasses
import os
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from jaxlab.errors import UserError
from jaxlab.experiments.composition import make_config
from jaxlab.experiments.runner import run
from jaxlab.experiments.trec.experiment import build
from jaxlab.run import main


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two seeds, with what it found."""
    folder = tmp_path_factory.mktemp("measured") / "run"
    config = make_config("trec", variant="mlp", preset="test", quiet=True)
    return folder, run(config, folder)


def measured(folder, **changes):
    config = make_config("trec", variant="measure", preset="test", run_dir=str(folder), **changes)
    return run(dataclasses.replace(config, quiet=True))


def test_it_finds_what_the_run_found(finished):
    folder, result = finished
    again = measured(folder, num_bins=20)
    for name in ("m", "r at m", "measured valley", "predicted valley"):
        assert again.metrics[name] == pytest.approx(result.metrics[name], abs=1e-4), name
    rows = again.files["trec.csv"].splitlines()
    assert rows[0] == "trial,step,loss,coefficient"
    assert len(rows) == 41


def test_the_length_of_an_item_changes_nothing(finished):
    folder, _ = finished
    whole, cut = (measured(folder, steps_per_item=n).files["trec.csv"] for n in (64, 7))
    one, two = (
        np.array([line.split(",") for line in text.splitlines()[1:]], np.float64)
        for text in (whole, cut)
    )
    np.testing.assert_allclose(one, two, atol=1e-6)


def test_without_a_reference_the_loss_itself_is_shown(finished):
    folder, _ = finished
    text = measured(folder, reference="none").files["trec.csv"]
    assert 2.5 < float(text.splitlines()[1].split(",")[2]) < 4.0


def test_steps_are_shared_by_eight_devices(finished, tmp_path):
    """The command line, in a process that has eight devices."""
    folder, _ = finished
    words = ["variant=measure", "preset=test", f"run_dir={folder}", "steps_per_item=16"]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxlab.run", *words, "compilation_cache=off"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "measured valley" in done.stdout
    (file,) = (folder / "trec").glob("*/files/trec.csv")
    rows, own = (
        np.array([line.split(",") for line in text.splitlines()[1:]], np.float64)
        for text in (file.read_text(), measured(folder).files["trec.csv"])
    )
    np.testing.assert_allclose(rows, own, atol=1e-6)
    assert main([*words, "quiet=true"]) == 0, "the same command finds its own result"


def test_every_trial_of_a_study_has_its_curve(tmp_path):
    folder = tmp_path / "study"
    study: Any = make_config("trec", variant="schedules", preset="test", quiet=True)
    result = run(study, folder)
    again = measured(folder)
    settings = [f"{schedule}, tau = {tau:g}" for schedule in study.schedules for tau in study.taus]
    for trial, name in enumerate(settings):
        value = result.metrics[f"{name}: m"]
        assert again.metrics[f"trial {trial}: m"] == pytest.approx(value, abs=1e-3), name


@pytest.mark.filterwarnings("ignore:checkpoint 40")
def test_measuring_never_trains(finished, tmp_path):
    """A run whose last checkpoint is damaged is refused, and left alone."""
    folder = tmp_path / "copy"
    shutil.copytree(finished[0], folder, ignore=shutil.ignore_patterns("trec"))
    for path in (folder / "checkpoints").glob("*/*/40/state/**/d/*"):
        path.write_bytes(b"damaged")
    before = sorted(path.name for path in (folder / "checkpoints").glob("*/*/*"))
    with pytest.raises(UserError, match="missing or damaged; resume the run first"):
        measured(folder)
    after = sorted(path.name for path in (folder / "checkpoints").glob("*/*/*"))
    assert "20" not in set(after) - set(before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bins": 7}, r"^num_bins=7: must divide the run's 40 steps"),
        ({"program": "mpl"}, r"^program=mpl: did you mean mlp\?"),
    ],
)
def test_what_does_not_fit_the_run_is_named(finished, changes, message):
    folder, _ = finished
    config = make_config("trec", variant="measure", preset="test", run_dir=str(folder), **changes)
    with pytest.raises(UserError, match=message):
        build(config)


def test_a_run_must_have_finished(finished, tmp_path, capsys):
    folder, _ = finished
    config = make_config("trec", variant="measure", preset="test")
    with pytest.raises(UserError, match=r"^run_dir=null: "):
        build(config)
    assert main(["variant=measure", f"run_dir={tmp_path}"]) == 2
    assert "holds no run" in capsys.readouterr().err
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.yaml").write_text((folder / "config.yaml").read_text())
    assert main(["variant=measure", f"run_dir={half}"]) == 2
    assert "has not finished" in capsys.readouterr().err
    assert sorted(path.name for path in half.iterdir()) == ["config.yaml"], "nothing left behind"
    shutil.copy(folder / "result.json", half)
    assert main(["variant=measure", f"run_dir={half}"]) == 2
    assert "has no checkpoints" in capsys.readouterr().err
