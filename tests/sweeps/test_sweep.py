"""Sweeps: which trials share a program, and what a whole one leaves."""

import json

import pytest

from jaxlab import run
from jaxlab.errors import DivergedError, InterruptedRun, UserError
from jaxlab.experiments import runner
from jaxlab.experiments.base import config_fields, flatten, identity_digest, to_dict
from jaxlab.experiments.composition import make_config, prepare_overrides
from jaxlab.reporting.claims import claim_from_values
from jaxlab.reporting.directory import own_directory
from jaxlab.sweeps.launcher import group_trials, program_name
from jaxlab.sweeps.outcome import claims_code
from jaxlab.sweeps.sweep import plan_sweep, sweep_directory


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
    assert sorted(groups[0], key=identity_digest) == groups[0]
    assert {identity_digest(c) for c in groups[0]} == {identity_digest(c) for c in configs[:2]}
    again = group_trials(configs[::-1])
    assert sorted(map(program_name, again)) == sorted(map(program_name, groups))


def test_the_default_folder_is_that_of_the_set_of_trials():
    one, two = config(optimizer={"tau": 0.1}), config(optimizer={"tau": 0.2})
    assert sweep_directory([one, two]) == sweep_directory([two, one, one])
    assert sweep_directory([one, two]) != sweep_directory([one])
    assert sweep_directory([one]).startswith("runs/trec/sweep-")


def test_combinations_that_compute_the_same():
    words = ["variant=mlp", "preset=test", "seed=1,2,1"]
    assert [t.config.seed for t in plan_sweep(prepare_overrides(words, multirun=True))] == [1, 2]
    words = ["variant=mlp", "preset=test,cpu", "steps=40", "batch_size=16"]
    words += ["eval_every=20", "eval_batches=2"]
    with pytest.raises(UserError, match=r"^preset=test,cpu: these trials compute the same"):
        plan_sweep(prepare_overrides(words, multirun=True))


def claim(values, bound=0.5):
    return claim_from_values(
        "x.y",
        values,
        bound=bound,
        direction=">=",
        statement="Something is large.",
        source="Table 1",
    )


def test_only_a_claim_that_holds_passes():
    strict = config(fail_on_claims=True)
    assert claims_code([claim([0.9, 0.91, 0.92])], strict) == 0
    unclear = claim([0.1, 0.9, 0.9])
    assert unclear.holds
    assert unclear.verdict == "unclear"
    assert claims_code([claim([0.9, 0.91, 0.92]), unclear], strict) == 4
    assert claims_code([unclear], config()) == 0


class FakeRunner:
    """Stands for `run_trials`: writes results, and raises what it is told to for some trials."""

    def __init__(self):
        self.programs = []
        self.problems = {}

    def __call__(self, configs, folders, work):
        self.programs.append((sorted(self.name(c) for c in configs), work.name))
        found = [self.problems[self.name(c)] for c in configs if self.name(c) in self.problems]
        if found and not isinstance(found[0], DivergedError):
            raise found[0]
        work.mkdir(parents=True, exist_ok=True)
        for one, folder in zip(configs, folders, strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            if self.name(one) not in self.problems:
                (folder / "result.json").write_text(json.dumps(self.result(one)))
        if found:
            raise found[0]

    def name(self, one):
        return f"{one.optimizer.tau}/{one.batch_size}"

    def result(self, one):
        fields = config_fields(type(one))
        flat = flatten(to_dict(one))
        return {
            "method": one.method,
            "variant": one.variant,
            "settings": {k: v for k, v in flat.items() if fields[k].role != "execution"},
            "metrics": {"m": one.optimizer.tau},
            "claims": [claim([0.9, 0.91, 0.92]).to_dict()],
            "notes": [],
        }


@pytest.fixture
def fake(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    fake = FakeRunner()
    monkeypatch.setattr(runner, "run_trials", fake)
    return fake


def sweep(*words):
    return run.main(["-m", "variant=mlp", "preset=test", "run_dir=s", *words])


def statuses(folder):
    rows = json.loads((folder / "s" / "sweep.json").read_text())
    return {
        f"{row['settings']['optimizer.tau']}/{row['settings']['batch_size']}": row["status"]
        for row in rows
    }


def test_a_reordered_sweep_resumes_its_programs(fake, tmp_path, capsys):
    fake.problems = {"0.1/8": InterruptedRun(15, "stopped")}
    (tmp_path / "s").mkdir()
    assert sweep("optimizer.tau=0.1,0.2", "batch_size=8,16") == 143
    fake.problems = {}
    assert sweep("batch_size=16,8", "optimizer.tau=0.2,0.1") == 0
    assert fake.programs[0] in fake.programs[1:]
    # A new value trains nothing but its own trial; what is finished is left alone.
    del fake.programs[:]
    assert sweep("batch_size=8", "optimizer.tau=0.2,0.1,0.3") == 0
    assert [names for names, _ in fake.programs] == [["0.3/8"]]
    assert sweep("batch_size=8", "optimizer.tau=0.2,0.1,0.3") == 0
    assert len(fake.programs) == 1


def test_a_diverged_program_does_not_end_the_sweep(fake, tmp_path, capsys):
    fake.problems = {"0.1/8": DivergedError("1 of 2 trials diverged")}
    assert sweep("optimizer.tau=0.1,0.2", "batch_size=8,16") == 3
    captured = capsys.readouterr()
    assert captured.err == "jaxlab: 1 of 2 trials diverged\n"
    assert "diverged" in captured.out
    assert statuses(tmp_path) == {
        "0.1/8": "diverged",
        "0.2/8": "finished",
        "0.1/16": "finished",
        "0.2/16": "finished",
    }


@pytest.mark.parametrize("launcher", ["vmap", "basic"])
def test_an_interrupted_sweep_writes_its_table(fake, tmp_path, capsys, launcher):
    fake.problems = {f"{tau}/16": InterruptedRun(2, "stopped") for tau in (0.1, 0.2)}
    words = [f"hydra/launcher={launcher}", "batch_size=8,16,32", "optimizer.tau=0.1,0.2"]
    assert sweep(*words) == 130
    captured = capsys.readouterr()
    assert captured.err == "jaxlab: stopped\n"
    assert statuses(tmp_path) == {
        "0.1/8": "finished",
        "0.2/8": "finished",
        "0.1/16": "not finished",
        "0.2/16": "not finished",
        "0.1/32": "not finished",
        "0.2/32": "not finished",
    }


def test_other_launchers_go_on_after_a_divergence(fake, tmp_path, capsys):
    fake.problems = {"0.1/8": DivergedError("it diverged")}
    words = ["hydra/launcher=basic", "batch_size=8,16", "optimizer.tau=0.1,0.2"]
    assert sweep(*words) == 3
    assert sorted(statuses(tmp_path).values()) == ["diverged", "finished", "finished", "finished"]
    fake.problems = {}
    del fake.programs[:]
    assert sweep(*words) == 0
    assert [names for names, _ in fake.programs] == [["0.1/8"]]


def test_an_unexpected_error_ends_after_the_table(fake, tmp_path, capsys):
    fake.problems = {"0.1/16": RuntimeError("a bug")}
    with pytest.raises(RuntimeError, match="a bug"):
        sweep("batch_size=8,16", "optimizer.tau=0.1,0.2")
    assert statuses(tmp_path)["0.2/8"] == "finished"


def test_a_mistake_that_shows_late_leaves_nothing(fake, tmp_path, capsys):
    fake.problems = {"0.1/8": UserError("mesh", "99", "too many")}
    words = ["-m", "variant=mlp", "preset=test", "batch_size=8", "optimizer.tau=0.1,0.2"]
    assert run.main(words) == 2
    assert capsys.readouterr().err == "jaxlab: mesh=99: too many\n"
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_keeps_out_of_foreign_folders(fake, tmp_path, capsys):
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "thesis.tex").write_text("")
    assert sweep("optimizer.tau=0.1,0.2") == 2
    assert "holds other files (thesis.tex, ...)" in capsys.readouterr().err
    (folder / "thesis.tex").rename(folder / "config.yaml")
    assert sweep("optimizer.tau=0.1,0.2") == 2
    assert "a single run's folder" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]
    assert fake.programs == []


def test_two_sweeps_do_not_share_a_folder(fake, tmp_path, capsys):
    with own_directory(tmp_path / "s"):
        assert sweep("optimizer.tau=0.1,0.2") == 2
    assert "in use by process" in capsys.readouterr().err
    assert fake.programs == []


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
