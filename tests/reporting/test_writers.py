"""Metrics on disk, progress on screen."""

import dataclasses
import io
import json

import numpy as np
import pytest
from etils import epath

from jaxlab.reporting.writers import JsonLines, Observers, Progress, TensorBoard


@dataclasses.dataclass(frozen=True)
class FakeLane:
    trial: int
    seed: int


@dataclasses.dataclass(frozen=True)
class FakePhase:
    lanes: list
    done: int | None = None
    total: int = 100
    program: str = "toy"
    name: str = "train"
    compile_seconds: float = 0.0


LANES = [FakeLane(0, 100), FakeLane(0, 101)]


def write(writer, steps, lanes=LANES, begin=None):
    writer.begin(FakePhase(lanes, begin))
    for step in steps:
        writer.metrics(step, {"train/loss": np.array([step, 2 * step], np.float32)})


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return epath.Path(tmp_path) / "metrics.jsonl"


def test_one_line_a_step(path):
    writer = JsonLines(path)
    write(writer, [10, 20])
    writer.close()
    assert lines(path)[1] == {
        "step": 20,
        "program": "toy",
        "seeds": [100, 101],
        "trials": [0, 0],
        "train/loss": [20.0, 40.0],
    }


def test_a_resume_drops_what_came_after_its_checkpoint(path):
    write(JsonLines(path), [10, 20, 30])
    with open(path, "a") as file:
        file.write('{"step": 40, "pro')  # a crash in the middle of a line
    writer = JsonLines(path)
    write(writer, [30], begin=20)
    assert [line["step"] for line in lines(path)] == [10, 20, 30]


def test_a_fresh_start_drops_all_lines(path):
    write(JsonLines(path), [0, 10])
    write(JsonLines(path), [0])
    assert [line["step"] for line in lines(path)] == [0]
    write(JsonLines(path), [10], begin=0)
    assert [line["step"] for line in lines(path)] == [0, 10]


def test_other_replicates_keep_their_lines(path):
    write(JsonLines(path), [10, 20])
    write(JsonLines(path), [10], lanes=[FakeLane(0, 102)])
    assert [(line["step"], line["seeds"]) for line in lines(path)] == [
        (10, [100, 101]),
        (20, [100, 101]),
        (10, [102]),
    ]


def test_not_finite_becomes_null(path):
    writer = JsonLines(path)
    writer.begin(FakePhase(LANES, total=10))
    writer.metrics(1, {"train/loss": np.array([np.nan, 1.0])})
    assert lines(path)[0]["train/loss"] == [None, 1.0]


def test_tensorboard_has_a_curve_for_each_seed(tmp_path):
    writer = TensorBoard(epath.Path(tmp_path))
    write(writer, [1, 2])
    writer.close()
    (file,) = tmp_path.glob("toy/seeds-100-101/events*")
    data = file.read_bytes()
    assert b"train/loss/seed100" in data
    assert b"train/loss/seed101" in data


def test_tensorboard_keeps_programs_and_replicates_apart(tmp_path):
    writer = TensorBoard(epath.Path(tmp_path))
    write(writer, [1])
    write(writer, [1], lanes=[FakeLane(0, 102), FakeLane(0, 103)])
    writer.begin(FakePhase(LANES, program="other"))
    writer.metrics(1, {"train/loss": np.ones(2)})
    write(writer, [2], begin=1)  # within the same second
    writer.close()
    folders = sorted(str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("events*"))
    assert folders == [
        "other/seeds-100-101",
        "toy/seeds-100-101",
        "toy/seeds-100-101",
        "toy/seeds-102-103",
    ]


def test_progress_is_plain_where_there_is_no_terminal():
    stream = io.StringIO()
    progress = Progress(stream)
    progress.begin(FakePhase(LANES, compile_seconds=1.0))
    for done in range(5, 101, 5):
        progress.advance(done, 0.5, 1.0)
    progress.close()
    text = stream.getvalue().splitlines()
    assert len(text) == 10
    assert text[0].startswith("toy train: 10/100, loss 0.5000, ")
    assert text[-1].startswith("toy train: 100/100")


def test_progress_says_where_it_resumes():
    stream = io.StringIO()
    Progress(stream).begin(FakePhase(LANES, done=40))
    assert stream.getvalue() == "toy train: resuming after 40 of 100\n"


def test_progress_draws_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    progress = Progress(stream)
    progress.begin(FakePhase(LANES, total=10))
    progress.advance(10, 0.25, 0.0)
    progress.close()
    assert "toy train" in stream.getvalue()
    assert "10/10" in stream.getvalue()
    assert "loss 0.2500" in stream.getvalue()


def test_observers_pass_everything_on(path):
    stream = io.StringIO()
    both = Observers(Progress(stream), JsonLines(path))
    write(both, [5])
    both.advance(100, None, 0.0)
    both.close()
    assert lines(path)[0]["step"] == 5
    assert "100/100" in stream.getvalue()
