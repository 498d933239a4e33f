"""TREC's experiment: programs, conclusions from planted curves, and a whole tiny run."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxlab.data.text import Document
from jaxlab.data.tokenizers import BpeTokenizer
from jaxlab.errors import UserError
from jaxlab.experiments.composition import make_config
from jaxlab.experiments.trec.conclusions import conclude
from jaxlab.experiments.trec.config import Config
from jaxlab.experiments.trec.experiment import build
from jaxlab.methods import trec
from jaxlab.training.driver import DriveSettings, drive
from tests.training.toy import Silent


def configured(variant, preset, **changes) -> Config:
    config = make_config("trec", variant=variant, preset=preset, **changes)
    assert isinstance(config, Config)
    return config


def tiny(variant, **changes) -> Config:
    return configured(variant, "test", **changes)


@pytest.fixture(scope="module")
def mlp():
    """A program of ten steps with its outcome, for two seeds."""
    config = tiny("mlp", steps=20)
    (program,) = build(config)
    return config, program, drive(program, [100, 101], DriveSettings(), observer=Silent())


def test_the_trial_holds_the_schedule(mlp):
    config, program, _ = mlp
    rates, decay = program.trials["learning_rate"][0], program.trials["weight_decay"][0]
    expected = trec.schedule_values("d2z", 20, 1e-2, warmup_steps=2)
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    assert decay == pytest.approx(1 / (1e-2 * 20 * 0.2), rel=1e-6)
    assert trec.adamw_timescale(1e-2, decay, 20) == pytest.approx(config.optimizer.tau)


def test_the_optimiser_state_feeds_the_prediction(mlp):
    _, program, outcome = mlp
    alphas = program.trials["learning_rate"][0] * program.trials["weight_decay"][0]
    np.testing.assert_allclose(outcome.arrays["alphas"][0], [alphas] * 2, rtol=1e-6)
    kept = trec.ema_from_opt_state(outcome.states[0].opt_state)
    np.testing.assert_allclose(kept, trec.ema_coefficients(alphas.astype(np.float64)), rtol=1e-5)


def test_the_replay_is_the_measured_curve(mlp):
    """The evaluation in the driver and `compute_trec` in the graph measure the same."""
    _, program, outcome = mlp
    batches = np.stack([program.batches(0, 100, t) for t in range(20)])
    own, other = (state.params for state in outcome.states)

    def loss_fn(params, batch):
        state = outcome.states[0]._replace(params=params)
        return program.evaluations["validation"].function(None, state, batch)["loss"]

    curve = trec.compute_trec(
        loss_fn, own, lambda t: jax.numpy.asarray(batches)[t], 20, reference_params=other
    )
    measured = outcome.arrays["replay/loss"] - outcome.arrays["replay/reference_loss"]
    np.testing.assert_allclose(measured[0, 0], curve, atol=2e-6)


def test_replayed_batches_are_the_training_batches(mlp):
    _, program, _ = mlp
    replay = program.evaluations["replay"].batches
    for step in (0, 7, 19):
        np.testing.assert_array_equal(replay(0, 101, step), program.batches(0, 101, step))


def test_an_untrained_model_has_no_dip():
    """Without training the curve minus the reference scatters around a constant."""
    config = tiny("mlp", steps=200)
    (program,) = build(config)
    states = [program.init(program.trial(0), jax.random.key(seed)) for seed in (0, 1)]
    replay = jax.jit(program.evaluations["replay"].function)
    losses = [
        replay(program.trial(0), *states, program.batches(0, 100, step)) for step in range(200)
    ]
    curve = np.array([float(x["loss"] - x["reference_loss"]) for x in losses])
    bins, _ = trec.bin_curve(curve, 20)
    # The largest of 20 means of 10 exceeds 5 standard errors with probability below 2e-5.
    assert np.abs(bins - curve.mean()).max() < 5 * curve.std() / np.sqrt(10)


@pytest.mark.parametrize("variant", ["text", "mlp"])
def test_the_models_are_small(variant):
    (program,) = build(configured(variant, "cpu"))
    sizes = [leaf.size for leaf in jax.tree.leaves(program.abstract_state().params)]
    assert sum(sizes) == 17_056 if variant == "mlp" else 100_000 < sum(sizes) < 1_000_000


def test_replicates_read_different_text():
    (program,) = build(tiny("text"))
    first, second = program.batches(0, 100, 0), program.batches(0, 101, 0)
    assert first.shape == (4, 17)
    assert not np.array_equal(first, second)
    validation = program.evaluations["validation"].batches
    np.testing.assert_array_equal(validation(0, 100, 1), validation(0, 101, 1))


def test_too_little_text_names_its_field():
    with pytest.raises(UserError, match=r"^data\.max_bytes=10000: "):
        build(tiny("text", data={"max_bytes": 10_000}))


def planted(config, m, noise, replicates=8, dip=0.03, seed=0):
    """Arrays as a program leaves them, whose curves are predictions at `m` plus noise."""
    draw = np.random.default_rng(seed)
    alphas = trec.adamw_alphas(
        trec.schedule_values("d2z", config.steps, 1e-2, warmup_steps=config.steps // 10),
        trec.weight_decay_for_timescale(config.optimizer.tau, 1e-2, config.steps),
    )
    curve = trec.predict_trec(trec.ema_coefficients(alphas), m=m)
    curve = dip * (curve - curve.mean()) / np.ptp(curve)
    difficulty = draw.normal(2.0, 0.1, size=(replicates, config.steps))
    loss = difficulty + curve + noise * draw.normal(size=(replicates, config.steps))
    ones = np.ones((replicates, 3))
    arrays = {
        "train/loss": difficulty + 0.5,
        "validation/loss": 2 * ones,
        "replay/loss": loss,
        "replay/reference_loss": difficulty,
        "alphas": np.stack([alphas] * replicates),
    }
    return {config.variant: {name: value[None] for name, value in arrays.items()}}


def claims_of(result):
    return {claim.id: claim for claim in result.claims}


def test_a_planted_curve_is_found():
    config = dataclasses.replace(tiny("mlp"), steps=200, replicates=8)
    result = conclude(config, planted(config, m=2.0, noise=0.004))
    found = claims_of(result)
    assert set(found) == {
        "trec.shape.mlp",
        "trec.shape.mlp.gain",
        "trec.argmin.mlp",
        "trec.shape.mlp.without_reference",
    }
    assert {found[id].verdict for id in list(found)[:3]} == {"holds"}
    assert found["trec.shape.mlp"].mean > 0.98
    assert len(found["trec.shape.mlp"].values) == 8
    assert found["trec.shape.mlp.without_reference"].kind == "finding"
    assert found["trec.shape.mlp.without_reference"].mean < found["trec.shape.mlp"].mean
    assert result.metrics["m"] == pytest.approx(2.0, abs=0.3)
    assert result.metrics["predicted valley"] == pytest.approx(trec.d2z_valley(0.2, 2.0), abs=0.03)


def test_a_curve_of_noise_fails():
    """No dip is planted: correlation across halves is that of independent noise."""
    config = dataclasses.replace(tiny("mlp"), steps=200, replicates=8)
    found = claims_of(conclude(config, planted(config, m=2.0, noise=0.05, dip=0.0)))
    assert found["trec.shape.mlp"].verdict == "fails"


def test_coefficients_alone_need_no_exponent():
    """Where the curve is the EMA's own (m = 0), the training fraction adds nothing."""
    config = dataclasses.replace(tiny("mlp"), steps=200, replicates=8)
    found = claims_of(conclude(config, planted(config, m=0.0, noise=0.001)))
    assert found["trec.shape.mlp"].verdict == "holds"
    assert found["trec.shape.mlp.gain"].verdict == "fails"


def test_two_replicates_have_no_interval():
    config = dataclasses.replace(tiny("mlp"), steps=200, replicates=2)
    result = conclude(config, planted(config, m=2.0, noise=0.001, replicates=2))
    assert {claim.verdict for claim in result.claims} == {"unclear", "finding"}
    assert any("at least 4" in note for note in result.notes)


def test_without_reference_models():
    config = dataclasses.replace(tiny("mlp"), steps=200, replicates=4, reference="none")
    arrays = planted(config, m=2.0, noise=0.001, replicates=4)
    del arrays["mlp"]["replay/reference_loss"]
    found = claims_of(conclude(config, arrays))
    assert "trec.shape.mlp.without_reference" not in found
    single = {name: value[:, :1] for name, value in arrays["mlp"].items()}
    alone = dataclasses.replace(config, replicates=1)
    assert conclude(alone, {"mlp": single}).claims == ()


def test_the_figures_are_drawn():
    config = dataclasses.replace(tiny("mlp"), steps=200, replicates=4)
    figures = conclude(config, planted(config, m=2.0, noise=0.01, replicates=4)).figures
    assert [figure.name for figure in figures] == ["trec", "training", "coefficients"]
    for figure in figures:
        assert figure._repr_png_().startswith(b"\x89PNG")
        assert all(
            "(nats" in panel.ylabel or "/" in panel.ylabel or "EMA" in panel.ylabel
            for panel in figure.panels
        )


@pytest.fixture
def own_text(tmp_path, monkeypatch):
    """Two hundred lines of JSONL, one of them broken."""
    monkeypatch.setenv("JAXLAB_DATA_CACHE", str(tmp_path / "cache"))
    lines = [json.dumps({"text": f"line {i} of a text of one's own. " * 5}) for i in range(200)]
    lines[17] = '{"text": 3}'
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(lines))
    return file


def test_one_s_own_text(own_text):
    with pytest.raises(UserError, match=r"own\.jsonl line 18"):
        build(tiny("text", data={"path": str(own_text)}))
    config = tiny("text", data={"path": str(own_text), "skip_bad": True})
    with pytest.warns(UserWarning, match=r"1 bad lines or files skipped, first own\.jsonl line 18"):
        (program,) = build(config)
    text = bytes(program.batches(0, 100, 0)[0].astype(np.uint8))
    assert b"of" in text
    assert program.fingerprint.startswith("text ")


def test_another_tokenizer(own_text, tmp_path):
    BpeTokenizer.train([Document("a", b"a text of one's own " * 50)], 300).save(tmp_path / "t.json")
    data = {"path": str(own_text), "skip_bad": True, "tokenizer": str(tmp_path / "t.json")}
    with pytest.warns(UserWarning, match="skipped"):
        (program,) = build(tiny("text", data=data))
    vocabulary = program.abstract_state().params["embedding"].shape[0]
    assert 256 < vocabulary <= 300
    assert program.batches(0, 100, 0).max() < vocabulary


def test_memory_savers_change_rounding_only():
    """Recomputation and accumulation: the same step."""
    found = []
    for changes in ({}, {"remat": True, "accumulate": 2}):
        (program,) = build(tiny("text", **changes))
        state = program.init(program.trial(0), jax.random.key(0))
        step = jax.jit(program.step)
        for i in range(2):
            state, metrics = step(program.trial(0), state, program.batches(0, 100, i))
        found.append(float(metrics["loss"]))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
