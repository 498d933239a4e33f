"""Trees and trained models: planted arrays through the conclusions, and small runs."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.experiments.composition import make_config
from jaxlab.experiments.gnll import closed_book, estimators, trees
from jaxlab.experiments.gnll.closed_book import world
from jaxlab.experiments.gnll.conclusions import STUDY_TASKS
from jaxlab.experiments.gnll.estimators import BASELINES, ESTIMATORS, Texts, estimate
from jaxlab.experiments.gnll.experiment import conclude
from jaxlab.experiments.runner import run
from jaxlab.methods import gnll
from jaxlab.models.decoder import Decoder
from jaxlab.models.generation import GenerationSettings
from jaxlab.training.driver import DriveSettings, drive
from jaxlab.training.host import drive_host
from tests.training.toy import Silent

SMALL = {"replicates": 3, "num_samples": 4, "world": {"num_entities": 30}}


@pytest.fixture(scope="module")
def config() -> Any:
    return make_config("gnll", preset="test", **SMALL)


def planted(config, quality):
    """Answers of which every third is wrong; `quality` scales how much their G-NLL tells of it."""
    rng = np.random.default_rng(0)
    found = {name: [] for name in ("tokens", "lengths", "log_probs")}
    drawn = {name: [] for name in ("tokens", "lengths", "log_probs")}
    for phrasing in STUDY_TASKS.values():
        for replicate in range(config.replicates):
            own = world(config, phrasing, config.seed + replicate)
            right = own.questions().right
            wrong = np.arange(len(right)) % 3 == 0
            answers = np.where(right < 0, 0, right)
            last = own.first_word + (right[:, 0] + 1 - own.first_word) % own.num_words
            answers[:, 0] = np.where(wrong, last, answers[:, 0])
            tokens = np.zeros((len(right), own.answer_length), np.int32)
            tokens[:, :3] = answers
            lengths = (tokens > 0).sum(axis=1) + 1
            nll = 2 + rng.uniform(0, 1, len(right)) + quality * wrong
            log_probs = np.where(np.arange(tokens.shape[1]) == 0, -nll[:, None], 0.0)
            found["tokens"].append(tokens)
            found["lengths"].append(lengths)
            found["log_probs"].append(log_probs)
            for name, value in (("tokens", tokens), ("lengths", lengths)):
                drawn[name].append(np.repeat(value[:, None], config.num_samples, axis=1))
            noise = rng.uniform(0, 1, (len(right), config.num_samples, 1))
            drawn["log_probs"].append(noise * np.where(np.arange(tokens.shape[1]) == 0, -1.0, 0.0))
    lead = (len(STUDY_TASKS), config.replicates)
    stacked = {f"greedy_{n}": np.reshape(v, (*lead, *np.shape(v)[1:])) for n, v in found.items()}
    stacked |= {f"sample_{n}": np.reshape(v, (*lead, *np.shape(v)[1:])) for n, v in drawn.items()}
    return stacked


def tree_arrays(config, greedy_error, entropy_error):
    """Errors of peaked chains; on flat ones they are the other way round."""
    shape = (len(config.tree.logit_stds), config.replicates, config.tree.num_chains)
    rng = np.random.default_rng(1)
    ones = np.ones(shape)
    peaked = np.array(config.tree.logit_stds)[:, None, None] >= config.tree.peaked_from
    greedy_error, entropy_error = (
        np.where(peaked, one, other)
        for one, other in ((greedy_error, entropy_error), (entropy_error, greedy_error))
    )
    return {
        "entropy": 2 * ones,
        "maximum": ones,
        "greedy": ones + greedy_error * rng.uniform(0.9, 1.1, shape),
        "beam": ones,
        "best": ones,
        "entropy_error": 2 * entropy_error * rng.uniform(0.9, 1.1, shape),
        "variance": ones,
    }


@pytest.mark.parametrize(
    ("quality", "errors", "verdicts"),
    [
        (2.0, (0.1, 0.5), ("holds", "holds", "holds", "holds")),
        (-2.0, (0.5, 0.1), ("fails", "fails", "fails", "fails")),
    ],
)
def test_planted_answers_give_their_verdicts(config, quality, errors, verdicts):
    arrays = {
        closed_book.NAME: planted(config, quality),
        trees.NAME: tree_arrays(config, *errors),
    }
    result = conclude(config, arrays)
    claims = {claim.id: claim for claim in result.claims}
    names = ("gnll.qa.auroc", "gnll.qa.auroc.entropy", "gnll.qa.auroc.sampled")
    assert tuple(claims[n].verdict for n in (*names, "gnll.tree.variance")) == verdicts
    assert result.metrics["short.accuracy"] == pytest.approx(2 / 3)
    assert result.metrics["short.auroc.g_nll"] == (1.0 if quality > 0 else 0.0)
    assert claims["gnll.tree.variance"].mean == pytest.approx(errors[1] - errors[0], abs=0.02)
    assert claims["gnll.tree.variance.flat"].mean == pytest.approx(errors[0] - errors[1], abs=0.02)
    of_tasks = [
        closed_book.scores(config, phrasing, {n: v[i] for n, v in arrays["closed_book"].items()})
        for i, phrasing in enumerate(STUDY_TASKS.values())
    ]
    best = [np.max([scores.auroc[n] for n in BASELINES], axis=0) for scores in of_tasks]
    own = [scores.auroc["g_nll"] for scores in of_tasks]
    assert claims["gnll.qa.auroc"].values == pytest.approx(np.mean(own, 0) - np.mean(best, 0))


def test_answers_that_are_all_right_are_said_and_never_an_error(config):
    """AUROC is undefined there: no claim holds, a note says why."""
    arrays = planted(config, 1.0)
    for task, phrasing in enumerate(STUDY_TASKS.values()):
        for replicate in range(config.replicates):
            right = world(config, phrasing, config.seed + replicate).questions().right
            arrays["greedy_tokens"][task, replicate, :, :3] = np.where(right < 0, 0, right)
    both = {closed_book.NAME: arrays, trees.NAME: tree_arrays(config, 0.1, 0.5)}
    result = conclude(config, both)
    assert any("AUROC is undefined" in note for note in result.notes)
    claims = {claim.id: claim for claim in result.claims}
    assert claims["gnll.qa.auroc"].verdict == "unclear"
    for name, claim in claims.items():
        assert name.startswith("gnll.tree.") == ("AUROC is undefined" not in claim.statement)
    assert np.isfinite(list(result.metrics.values())).all()
    assert result.metrics["short.accuracy"] == 1.0
    json.dumps(result.to_dict(), allow_nan=False)


def test_measures_are_those_of_the_method():
    """One question with two meanings, by hand."""
    greedy = Texts(np.array([[-0.5, -0.25, 0.0]]), np.array([2]))
    samples = Texts(
        np.log([[[0.5, 0.5, 1.0], [0.25, 1.0, 1.0], [0.5, 1.0, 1.0]]]), np.array([[2, 1, 1]])
    )
    found = estimate(greedy, samples, np.array([[0, 0, 1]]), beam=np.array([0.7]))
    assert list(found) == list(ESTIMATORS)
    log2 = np.log(2)
    expected = {
        "g_nll": 0.75,
        "ln_g_nll": 0.375,
        "beam_nll": 0.7,
        "sampled_nll": 2 * log2,
        "best_of_n_nll": log2,
        "pe": 5 / 3 * log2,
        "ln_pe": 4 / 3 * log2,
        "se": log2,  # each meaning has a mass of one half
        "d_se": np.log(3) - 2 / 3 * log2,
        "mcp": log2,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], [value], rtol=1e-12, err_msg=name)


def test_blocks_of_questions_change_nothing(monkeypatch):
    rng = np.random.default_rng(2)
    greedy = Texts(-rng.uniform(0, 2, (2, 5, 3)), rng.integers(1, 4, (2, 5)))
    samples = Texts(-rng.uniform(0, 2, (2, 5, 6, 3)), rng.integers(1, 4, (2, 5, 6)))
    clusters = rng.integers(0, 3, (2, 5, 6))
    whole = estimate(greedy, samples, clusters)
    monkeypatch.setattr(estimators, "_PAIRS_AT_ONCE", 3 * 36)
    for name, values in estimate(greedy, samples, clusters).items():
        np.testing.assert_array_equal(values, whole[name], err_msg=name)
        assert values.shape == (2, 5)


def test_trees_are_measured_exactly():
    """What the compiled program says of a chain, against its enumeration in float64."""
    full: Any = make_config("gnll", preset="test")
    config = full.tree
    program = trees.build(config)
    arrays = drive_host(program, [5], observer=Silent()).arrays
    assert arrays["entropy"].shape == (2, 1, config.num_chains)
    for name in ("greedy", "beam", "best"):
        assert (arrays[name] >= arrays["maximum"] - 1e-5).all(), name
    assert (arrays["maximum"] <= arrays["entropy"] + 1e-5).all()
    flat, peaked = arrays["entropy"].mean(axis=(1, 2))
    assert flat > peaked
    # The mean error of 10 samples is about sqrt(2 Var / (10 pi)).
    guess = np.sqrt(2 * arrays["variance"] / (10 * np.pi))
    ratio = arrays["entropy_error"].mean() / guess.mean()
    assert 0.7 < ratio < 1.3


@pytest.fixture(scope="module")
def finished(tmp_path_factory, run_cli):
    folder = tmp_path_factory.mktemp("gnll")
    done = run_cli("method=gnll", "preset=test", "run_dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout


def test_the_command_prints_its_table(finished):
    folder, out = finished
    assert "gnll.qa.auroc" in out
    assert "gnll.tree.variance" in out
    result = json.loads((folder / "result.json").read_text())
    assert {claim["id"] for claim in result["claims"] if claim["kind"] == "claim"} == {
        "gnll.qa.auroc",
        "gnll.qa.auroc.entropy",
        "gnll.qa.auroc.sampled",
        "gnll.tree.variance",
    }
    assert (folder / "figures" / "tree.png").exists()


def test_cached_log_probs_are_those_of_the_trained_model(monkeypatch):
    """The summary's log-probabilities are those of one pass over question and answer."""
    settings = []
    real = closed_book.start

    def noted(*args: Any, **options: Any) -> Any:
        settings.append(options["settings"])
        return real(*args, **options)

    monkeypatch.setattr(closed_book, "start", noted)
    config: Any = make_config("gnll", preset="test", steps=10, **SMALL)
    program = closed_book.build(config, ("even",))
    outcome = drive(program, [3], DriveSettings(), observer=Silent())
    own = world(config, "even", 3)
    greedy = GenerationSettings(own.answer_length, 1, 0.0, stop_ids=(0,))
    drawn = GenerationSettings(own.answer_length, config.num_samples, 1.0, stop_ids=(0,))
    assert set(settings) == {greedy, drawn}
    model = Decoder(
        vocab_size=own.vocab_size,
        width=config.network.width,
        num_layers=config.network.num_layers,
        num_heads=config.network.num_heads,
    )
    found = {name: value[0, 0] for name, value in outcome.arrays.items()}
    tokens = np.concatenate([found["greedy_tokens"][:, None], found["sample_tokens"]], axis=1)
    prompts = np.repeat(own.questions().prompts[:, None], tokens.shape[1], axis=1)
    rows = np.concatenate([prompts, tokens], axis=2).reshape(-1, prompts.shape[2] + tokens.shape[2])
    params = outcome.states[0].params
    logits = jax.jit(lambda x: model.apply({"params": params}, x))(jnp.asarray(rows))
    law = np.asarray(logits)[:, own.prompt_length - 1 : -1]
    expected = gnll.token_log_probs(law, rows[:, own.prompt_length :]).reshape(tokens.shape)
    for name, part in (("greedy", expected[:, 0]), ("sample", expected[:, 1:])):
        lengths = found[f"{name}_lengths"]
        mask = np.arange(tokens.shape[2]) < lengths[..., None]
        np.testing.assert_allclose(
            found[f"{name}_log_probs"], np.where(mask, part, 0), atol=1e-5, err_msg=name
        )
    best = np.asarray(logits)[:: tokens.shape[1], own.prompt_length - 1].argmax(-1)
    np.testing.assert_array_equal(found["greedy_tokens"][:, 0], best)


def test_stress_shows_where_the_measure_fails(tmp_path):
    config = make_config("gnll", variant="stress", preset="test", quiet=True, tensorboard=False)
    result = run(config, tmp_path / "run")
    assert [claim.id for claim in result.claims] == ["gnll.stress", "gnll.stress.g_nll"]
    assert all(claim.kind == "finding" for claim in result.claims)
