"""Questions to a pretrained model: one reading of a prompt, resumable, judged, reported."""

import contextlib
import csv
import dataclasses
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab import run as command_line
from jaxlab.data.questions import Question, few_shot_prompt
from jaxlab.errors import InterruptedRun, UserError
from jaxlab.evaluation.chat_client import UnclearReply
from jaxlab.evaluation.judges import SquadF1Judge
from jaxlab.experiments import machine
from jaxlab.experiments.composition import make_config
from jaxlab.experiments.generate.language_model import load_language_model
from jaxlab.experiments.gnll import pretrained
from jaxlab.experiments.gnll.pretrained import NAME, ask, asked_questions, build
from jaxlab.experiments.gnll.pretrained_results import conclude
from jaxlab.experiments.runner import run
from jaxlab.methods import gnll
from jaxlab.models.generation import GenerationSettings
from jaxlab.training.host import drive_host
from tests.experiments.tiny_language_model import END, write_tiny_model
from tests.training.toy import Silent

NUMBER = 6
STOPS = (*range(40), 95, END)  # so that some texts end early


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder):
    return load_language_model(folder)


def configured(folder: Path, path: Path | None, **changes: Any) -> Any:
    data = {"path": None if path is None else str(path), "num_examples": 0, "num_questions": None}
    data |= changes.pop("data", {})
    return make_config(
        "gnll",
        variant="model",
        preset="test",
        model=str(folder),
        data=data,
        quiet=True,
        compilation_cache="off",
        tensorboard=False,
        **changes,
    )


@pytest.fixture(scope="module")
def asked(folder, tmp_path_factory) -> Path:
    """Questions of which the model answers every other one right, by construction."""
    path = tmp_path_factory.mktemp("asked") / "questions.jsonl"
    lines = [{"question": f"Number {n}?", "answers": ["?"]} for n in range(NUMBER)]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = run(configured(folder, path))
    said = [json.loads(line) for line in found.files["questions.jsonl"].splitlines()]
    for entry, answer in list(zip(lines, said, strict=True))[::2]:
        entry["answers"] = [answer["answer"]]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_the_files_hold_every_measure_of_every_question(folder, asked, tmp_path):
    result = run(configured(folder, asked), tmp_path / "run")
    lines = (tmp_path / "run" / "files" / "questions.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["right"] for entry in entries] == [True, False] * (NUMBER // 2)
    names = set(entries[0]["measures"])
    assert {"g_nll", "pe", "d_se"} < names
    assert len(entries[0]["samples"]) == 4
    table = (tmp_path / "run" / "files" / "measures.csv").read_text().splitlines()
    assert len(table) == 1 + len(names)
    aurocs = {row["measure"]: row for row in csv.DictReader(table)}
    for claim in result.claims[1:]:
        name = claim.id.rpartition(".")[2]
        less = float(aurocs["g_nll"]["auroc"]) - claim.mean
        assert float(aurocs[name]["less_g_nll"]) == pytest.approx(-less, abs=1e-5)
        assert f"G-NLL's less this: {less:z.3f} [" in claim.statement
    assert {claim.id.rpartition(".")[2] for claim in result.claims} == names
    assert all(claim.kind == "finding" and claim.unit == "prompt" for claim in result.claims)
    assert (tmp_path / "run" / "figures" / "reliability.png").exists()
    assert result.metrics["accuracy"] == 0.5
    (figure,) = (figure for figure in result.figures if figure.name == "reliability")
    for series, name in zip(figure.panels[1].series, ("g_nll", "d_se"), strict=False):
        order = sorted((entry["measures"][name], entry["right"]) for entry in entries)
        for share, accuracy in zip(series.x, series.y, strict=True):
            given = round(float(share) * NUMBER)
            assert share == pytest.approx(given / NUMBER)
            assert given == NUMBER or order[given - 1][0] < order[given][0], "ties stay together"
            assert accuracy == pytest.approx(np.mean([right for _, right in order[:given]]))
    rows = list(csv.DictReader((tmp_path / "run" / "files" / "questions.csv").open()))
    assert [row["right"] for row in rows] == ["1", "0"] * (NUMBER // 2)
    for row, entry in zip(rows, entries, strict=True):
        assert row["question"] == entry["question"]
        for name, value in entry["measures"].items():
            assert float(row[name]) == pytest.approx(value, abs=1e-6)


def test_the_command_line_finds_the_study_by_its_model(folder, asked, tmp_path, capsys):
    words = ["method=gnll", f"model={folder}", f"data.path={asked}", "data.num_examples=0"]
    words += ["data.num_questions=null", "preset=test", "num_beams=2", "compilation_cache=off"]
    assert command_line.main([*words, f"run_dir={tmp_path / 'run'}"]) == 0
    out = capsys.readouterr().out
    assert "gnll: model" in out
    assert "gnll.model.beam_nll" in out
    assert "measures.csv" in out


def asked_once(model, config, width=64, seed=3):
    prompt = model.tokenizer.encode("Q: Who?\nA:")
    key = jax.random.key(seed)
    return prompt, ask(model, prompt, key, config, stop_tokens=STOPS, width=width)


def test_log_probs_are_those_of_teacher_forcing(model, folder):
    """Through cache, padding and shared prompt, against one forward pass of the whole text."""
    prompt, found = asked_once(model, configured(folder, None))
    whole = np.concatenate([np.tile(prompt, (len(found.tokens), 1)), found.tokens], axis=1)
    apply = jax.jit(lambda tokens: model.model.apply({"params": model.params}, tokens))
    logits = apply(jnp.asarray(whole))[:, len(prompt) - 1 : -1]
    expected = gnll.token_log_probs(np.asarray(logits), found.tokens)
    mask = np.arange(found.tokens.shape[1]) < found.lengths[:, None]
    assert not mask.all(), "some texts end early"
    np.testing.assert_allclose(found.log_probs, np.where(mask, expected, 0), atol=1e-5)
    best = np.asarray(logits)[0].argmax(-1)
    np.testing.assert_array_equal(found.tokens[0][mask[0]], best[mask[0]], "the greedy one first")


def test_padding_changes_nothing(model, folder):
    config = configured(folder, None)
    _, short = asked_once(model, config)
    _, wide = asked_once(model, config, width=80)
    np.testing.assert_array_equal(short.tokens, wide.tokens)
    np.testing.assert_allclose(short.log_probs, wide.log_probs, atol=1e-5)
    more = np.pad(short.log_probs, ((0, 0), (0, 5)))
    mask = np.arange(more.shape[1]) < short.lengths[:, None]
    np.testing.assert_array_equal(
        gnll.g_nll(more.astype(np.float64), mask),
        gnll.g_nll(short.log_probs.astype(np.float64), mask[:, :-5]),
    )


def test_the_prompt_is_read_once(model, folder, monkeypatch):
    """However many samples, drawn from the model's own law: one pass over the prompt."""
    calls, laws = [], []
    real = pretrained.prefill

    def counted(*args: Any, **options: Any):
        calls.append(args[2].shape)
        return real(*args, **options)

    begin = pretrained.start

    def noted(*args: Any, **options: Any):
        laws.append(options["settings"])
        return begin(*args, **options)

    monkeypatch.setattr(pretrained, "prefill", counted)
    monkeypatch.setattr(pretrained, "start", noted)
    _, found = asked_once(model, configured(folder, None, num_samples=5))
    assert calls == [(1, 64)]
    common: Any = {"max_new_tokens": 8, "stop_ids": STOPS, "vocab_size": 97}
    drawn = GenerationSettings(num_samples=5, temperature=1.0, **common)
    greedy = GenerationSettings(num_samples=1, temperature=0.0, **common)
    assert set(laws) == {drawn, greedy}
    assert found.tokens.shape[0] == 6


def test_a_stop_keeps_every_question(folder, asked, tmp_path, monkeypatch):
    """Stopped after the second question; the next start asks the other four."""
    config = configured(folder, asked)
    seen: list[int] = []
    real = pretrained.ask

    def counted(*args: Any, **options: Any):
        seen.append(1)
        return real(*args, **options)

    monkeypatch.setattr(pretrained, "ask", counted)
    requests = machine.stop_requests

    @contextlib.contextmanager
    def after_two(*args: Any, **options: Any):
        with requests(*args, **options):
            yield lambda: signal.SIGTERM if len(seen) == 2 else None

    monkeypatch.setattr(machine, "stop_requests", after_two)
    with pytest.raises(InterruptedRun, match="run the same command to resume"):
        run(config, tmp_path / "run")
    monkeypatch.setattr(machine, "stop_requests", requests)
    resumed = run(config, tmp_path / "run")
    assert len(seen) == NUMBER
    whole = run(config)
    assert resumed.files == whole.files


def test_an_unreachable_judge_loses_no_answer(folder, asked, tmp_path, monkeypatch):
    """Said once; what was judged before stays, and the run goes on when the judge is back."""
    judged: list[str] = []

    class Failing(SquadF1Judge):
        def judge(self, question, answer, references):
            if len(judged) == 3:
                raise UserError("judge.base_url", "http://127.0.0.1:1", "cannot be reached")
            judged.append(question)
            return super().judge(question, answer, references)

    config = configured(folder, asked)
    monkeypatch.setattr(pretrained, "SquadF1Judge", Failing)
    with pytest.raises(UserError, match="cannot be reached"):
        run(config, tmp_path / "run")
    monkeypatch.setattr(pretrained, "SquadF1Judge", SquadF1Judge)
    result = run(config, tmp_path / "run")
    assert result.metrics["accuracy"] == 0.5
    assert judged == [f"Number {n}?" for n in range(3)]


def test_a_judge_that_moved_is_asked_there(folder, asked, tmp_path, monkeypatch):
    """A wrong address is put right, and the same run goes on."""
    monkeypatch.setattr(
        "jaxlab.evaluation.judges.OpenAICompatibleJudge.judge",
        lambda self, question, *_: int(question[-2]) % 2 == 0 or refuse(self.base_url),
    )

    def refuse(url):
        if url.endswith(":1"):
            raise UserError("judge.base_url", url, "cannot be reached")
        return False

    judge = {"kind": "openai", "model": "m", "base_url": "http://localhost:1"}
    with pytest.raises(UserError, match="cannot be reached"):
        run(configured(folder, asked, judge=judge), tmp_path / "run")
    judge["base_url"] = "http://localhost:2"
    result = run(configured(folder, asked, judge=judge), tmp_path / "run")
    assert result.metrics["accuracy"] == 0.5


def test_answers_are_read_with_the_questions_that_were_asked(folder, asked):
    """Also where the file is another one by then, or gone."""
    config = configured(folder, asked)
    arrays = drive_host(build(config), [config.seed], observer=Silent()).arrays
    gone = dataclasses.replace(config, data=dataclasses.replace(config.data, path="gone.jsonl"))
    (line, *_) = conclude(gone, {NAME: arrays}).files["questions.jsonl"].splitlines()
    assert json.loads(line)["question"] == "Number 0?"


def test_a_finished_run_is_not_taken_for_one_of_other_questions(folder, asked, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(asked.read_text())
    config = configured(folder, path)
    first = run(config, tmp_path / "run")
    assert run(config, tmp_path / "run").files == first.files
    path.write_text(asked.read_text().replace("Number 0", "Number 9"))
    with pytest.raises(UserError, match=r"was started on other data .*; use another run_dir"):
        run(config, tmp_path / "run")


def test_a_run_does_not_go_on_with_another_model(folder, asked, tmp_path):
    """The same folder, trained further in between."""
    own = shutil.copytree(folder, tmp_path / "model")
    config = configured(own, asked)
    run(config, tmp_path / "run")
    weights = bytearray((own / "model.safetensors").read_bytes())
    weights[-1000:] = weights[-2000:-1000]
    (own / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match="was started on other data"):
        run(config, tmp_path / "run")


def test_fewer_facts_than_usual_are_all_asked(folder):
    config = configured(folder, None, data={"topics": ("letters",), "num_examples": 5})
    assert 100 < len(asked_questions(config.data)) < 240


def test_a_judge_without_an_answer_stops_the_run_or_counts_as_wrong(
    folder, asked, tmp_path, monkeypatch
):
    class Mumbling(SquadF1Judge):
        def judge(self, question, answer, references):
            if question == "Number 2?":
                raise UnclearReply("judge.model", "m", "replied twice without an answer")
            return super().judge(question, answer, references)

    monkeypatch.setattr(pretrained, "SquadF1Judge", Mumbling)
    with pytest.raises(UserError, match="replied twice"):
        run(configured(folder, asked), tmp_path / "one")
    result = run(configured(folder, asked, judge={"unclear": "wrong"}), tmp_path / "two")
    assert result.metrics["accuracy"] == pytest.approx(2 / 6)
    assert any(note.startswith("1 times the judge gave no answer") for note in result.notes)


def test_one_class_is_said(folder, tmp_path):
    path = tmp_path / "hard.jsonl"
    lines = [{"question": f"Hard {n}?", "answers": ["nobody says this"]} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, lines)))
    result = run(configured(folder, path), tmp_path / "run")
    assert result.claims == ()
    assert any("All 3 greedy answers are wrong: AUROC is undefined" in n for n in result.notes)
    assert "measures.csv" not in result.files
    assert len(result.files["questions.jsonl"].splitlines()) == 3


def test_examples_are_of_the_topic_and_never_asked(folder):
    config = configured(folder, None, data={"num_examples": 3, "num_questions": 40})
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, topics=("capitals", "letters"))
    )
    rounds = asked_questions(config.data)
    assert len(rounds) == 40
    shown = {example.question for one in rounds for example in one.examples}
    assert not shown & {one.question.question for one in rounds}
    for one in rounds:
        assert {example.topic for example in one.examples} == {one.question.topic}
        assert few_shot_prompt(*one).count("Q: ") == 4


def test_few_questions_of_a_topic_share_their_examples(tmp_path, folder):
    path = tmp_path / "mixed.jsonl"
    lines = [{"question": f"{n}?", "answers": "x", "topic": f"t{n % 3}"} for n in range(6)]
    path.write_text("\n".join(map(json.dumps, lines)))
    rounds = asked_questions(configured(folder, path, data={"num_examples": 2}).data)
    assert len(rounds) == 4
    assert len({one.examples for one in rounds}) == 1


@pytest.mark.parametrize(
    ("lines", "words", "message"),
    [
        (["{}"], [], "has no field 'question'"),
        (['{"question": "a?", "answers": []}'], [], "answers must be a text or a list"),
        (['{"question": "a?", "answers": [""]}'], [], "answers[0] is empty"),
        ([], [], "holds no questions"),
        (
            ['{"question": "a?", "answers": "b"}'],
            [],
            "data.num_questions=1: there are 1 questions besides 0 examples; at least 2",
        ),
        (
            ['{"question": "a?", "answers": "b"}'] * 2,
            ["data.num_examples=7"],
            "data.num_examples=7: must lie in [0, 2)",
        ),
        (None, ["judge.kind=openai"], "judge.base_url=null: needed"),
        (
            None,
            ["judge.kind=openai", "judge.model=m", "judge.base_url=http://me:secret@localhost/v1"],
            "judge.base_url=(not shown): holds a user, a password or a query",
        ),
        (
            None,
            ["judge.kind=openai", "judge.model=m", "judge.base_url=http://localhost?key=secret"],
            "judge.base_url=(not shown): ",
        ),
        (
            None,
            ["judge.api_key_variable=sk-secret"],
            "judge.api_key_variable=(not shown): allowed: the name of an environment variable",
        ),
        (None, ["judge.kind=f2"], "judge.kind=f2: did you mean f1?"),
        (None, ["max_new_tokens=600"], "max_new_tokens=600: must be at most "),
        (None, ["data.topics=[capitals,capitals]"], "data.topics="),
        (None, ["data.topics=[capital]"], "did you mean capitals?"),
        (None, ["variant=study"], "model="),
    ],
)
def test_bad_input_is_one_line(lines, words, message, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["method=gnll", f"model={folder}", "preset=test", "compilation_cache=off"]
    if lines is not None:
        Path("q.jsonl").write_text("\n".join(lines))
        given += ["data.path=q.jsonl", "data.num_questions=null"]
        given += [] if any("num_examples" in word for word in words) else ["data.num_examples=0"]
    before = set(tmp_path.iterdir())
    assert command_line.main([*given, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert "secret" not in line
    assert set(tmp_path.iterdir()) == before, "nothing is left behind"


def test_too_many_samples_are_refused_before_anything_starts(folder, asked, monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: 2_000_000)
    with pytest.raises(UserError, match=r"num_samples=1000: would take .* GB of memory") as info:
        run(configured(folder, asked, num_samples=1000))
    most = int(str(info.value).rpartition(" ")[2])
    assert run(configured(folder, asked, num_samples=most)).metrics["accuracy"] == 0.5


@pytest.mark.pretrained
def test_a_real_model_answers_from_its_cache_as_without():
    """SmolLM2's cached log-probabilities against one pass over the whole text."""
    model = load_language_model("smollm2-135m")
    config = configured(Path("smollm2-135m"), None)
    shown = [Question("What is the capital of France?", ("Paris",), "0")]
    prompt = model.tokenizer.encode(few_shot_prompt("What is the capital of Hungary?", shown))
    options: Any = {"stop_tokens": pretrained.line_ends(model.tokenizer), "width": 48}
    found = ask(model, prompt, jax.random.key(0), config, **options)
    whole = np.concatenate([np.tile(prompt, (len(found.tokens), 1)), found.tokens], axis=1)
    logits = model.model.apply({"params": model.params}, jnp.asarray(whole))
    expected = gnll.token_log_probs(np.asarray(logits)[:, len(prompt) - 1 : -1], found.tokens)
    mask = np.arange(found.tokens.shape[1]) < found.lengths[:, None]
    np.testing.assert_allclose(found.log_probs, np.where(mask, expected, 0), atol=1e-4)
    said = model.tokenizer.decode(found.tokens[0][: found.lengths[0] - 1])
    assert said.strip() == "Budapest"
