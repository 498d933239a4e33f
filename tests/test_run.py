"""The command line as a user meets it."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxlab import run


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(capsys, *words):
    code = run.main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_names_every_method_and_three_examples(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert "  trec  Predict from AdamW" in out
    examples = out.partition("examples:")[2]
    assert examples.count("python -m jaxlab.run") == 3


def test_help_of_a_method_lists_its_fields(capsys):
    code, out, _ = call(capsys, "method=trec", "--help")
    assert code == 0
    assert "*optimizer.peak_lr=0.003  Peak learning rate. [number > 0, <= 10]" in out
    assert " steps=600  Training steps. [whole number >= 2, <= 10000000]" in out
    assert "[d2z, constant, linear, cosine, step, wsd, inverse_sqrt, cyclic]" in out
    assert "fail_on_claims=False" in out


def test_help_shows_the_values_of_the_chosen_preset(capsys):
    code, out, _ = call(capsys, "method=trec", "variant=mlp", "preset=test", "--help")
    assert code == 0
    assert " steps=40  Training steps." in out
    assert " batch_size=16 " in out
    assert "*optimizer.clip_norm=null" not in out
    assert " optimizer.clip_norm=null " in out
    assert call(capsys, "method=trec", "stpes=3", "--help")[0] == 2


def test_help_of_the_board(capsys, in_folder):
    code, out, _ = call(capsys, "board", "--help")
    assert code == 0
    assert out.startswith("usage: python -m jaxlab.run board [DIR]")


def test_cfg_prints_the_settings_and_runs_nothing(capsys, in_folder):
    code, out, _ = call(capsys, "method=trec", "preset=test", "optimizer.tau=0.3", "--cfg", "job")
    assert code == 0
    assert "tau: 0.3" in out
    assert list(in_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["method=trek"],
            "jaxlab: method=trek: unknown method; did you mean trec? Allowed: trec, gnll, generate",
        ),
        (["stpes=3"], "jaxlab: stpes=3: unknown field; did you mean steps?"),
        (["steps=abc"], "jaxlab: steps=abc: must be a valid integer"),
        (["steps=0"], "jaxlab: steps=0: must be greater than or equal to 2"),
        (["-m", "optimizer.tau=0.1,-1"], "jaxlab: optimizer.tau=-1: must be greater than 0"),
        (
            ["--hepl"],
            "jaxlab: flag=--hepl: unknown; did you mean --help? Allowed: --help, --cfg, "
            "-m, --multirun",
        ),
        (["--cfg", "hydra"], "jaxlab: --cfg=hydra: allowed: job"),
        (
            ["hydra/launcher=vmpa"],
            "jaxlab: hydra/launcher=vmpa: unknown choice; did you mean vmap? Allowed: basic, vmap",
        ),
        (["board", "nowhere"], None),
        (["foo"], "jaxlab: argument=foo: not an assignment; write field=value"),
        (["-x"], "jaxlab: flag=-x: unknown; allowed: -h, -c job, -m"),
        (
            ["run_dir=file:///x"],
            "jaxlab: run_dir=file:///x: allowed: a folder's plain path, or gs://, s3://, az://, "
            "hf://",
        ),
        (["compilation_cache=/proc/y"], None),
        (["-m", "seed=1,2", "compilation_cache=/proc/y"], None),
        (["board", "a", "b"], "jaxlab: board=a b: one folder at most"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, in_folder, words, message):
    code, out, err = call(capsys, *words)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    if message is not None:
        assert err == message + "\n"
    assert list(in_folder.iterdir()) == []


def test_a_run_dir_under_a_file(capsys, in_folder):
    (in_folder / "file").write_text("")
    code, _, err = call(capsys, "preset=test", "run_dir=file/run")
    assert code == 2
    assert err.startswith("jaxlab: run_dir=file/run: ")
    assert "is a file, not a folder" in err
    assert [path.name for path in in_folder.iterdir()] == ["file"]


def test_a_store_whose_package_is_missing(capsys, in_folder, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for words in (["run_dir=gs://a/b"], ["-m", "seed=1,2", "run_dir=gs://a/b"]):
        code, out, err = call(capsys, *words)
        assert (code, out) == (2, "")
        message = "jaxlab: run_dir=gs://a/b: needs the package gcsfs: pip install 'jaxlab[gcs]'"
        assert err == message + "\n"
    assert call(capsys, "board", "gs://a/b")[0] == 2


def test_a_home_folder_is_found_by_the_board(capsys, in_folder, monkeypatch):
    monkeypatch.setenv("HOME", str(in_folder))
    (in_folder / "x").mkdir()
    code, out, _ = call(capsys, "board", "~/x")
    assert code == 0
    assert out.startswith(f"No results below {in_folder}/x")


def test_help_starts_without_jax():
    code = "import sys; from jaxlab.run import main; main(['--help']); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m jaxlab.run method=trec --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("trec: ")
    assert done.stderr == ""


@pytest.fixture(scope="module")
def first_run(run_cli, tmp_path_factory):
    """`preset=test` with the default folder, in a process of its own."""
    folder = tmp_path_factory.mktemp("cli")
    return run_cli("preset=test", cwd=folder), folder


def test_the_real_command_runs_to_its_table(first_run):
    done, folder = first_run
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "text train: 40/40" in done.stdout
    assert "trec.shape.text" in done.stdout
    paths = [line for line in done.stdout.splitlines() if line.startswith("runs/trec/")]
    assert len(paths) == 5
    assert all((folder / path).is_file() for path in paths)


def test_the_same_command_finds_its_own_run(first_run, run_cli):
    _, folder = first_run
    again = run_cli("preset=test", "quiet=true", cwd=folder)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    again = run_cli("preset=test", "fail_on_claims=true", cwd=folder)
    assert again.returncode == 4
    assert again.stdout.startswith("runs/trec/")
    assert "is finished already; this is what it found." in again.stdout.splitlines()[0]
    assert len(list((folder / "runs" / "trec").iterdir())) == 1


def test_the_board_lists_it(first_run, capsys):
    _, folder = first_run
    code, out, _ = call(capsys, "board", str(folder))
    assert code == 0
    assert "trec.argmin.text" in out
    assert "unclear" in out


def test_an_early_interrupt_is_one_line(capsys, monkeypatch):
    def interrupt(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_dispatch", interrupt)
    assert call(capsys, "preset=test") == (130, "", "jaxlab: stopped\n")
    # Until main is entered Python would print a traceback, so little is imported before.
    code = "import sys, jaxlab.run; print({'hydra', 'pydantic', 'numpy', 'jax'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_an_interrupted_command_resumes(run_cli, tmp_path, cache_folder):
    words = [
        "preset=test",
        "steps=4000",
        "run_dir=run",
        "checkpoint_every=1000",
        "num_bins=20",
        "eval_every=4000",
        "tensorboard=false",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxlab.run", *words],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache_folder)},
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size > 500):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert err.startswith("jaxlab: stopped")
    assert err.endswith("run the same command to resume\n")
    assert err.count("\n") == 1
    again = run_cli(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "resuming after" in again.stdout
    assert json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
