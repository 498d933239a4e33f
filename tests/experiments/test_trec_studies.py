"""TREC's studies: their settings, and conclusions from planted measurements."""

import dataclasses
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from jaxlab.experiments.composition import make_config
from jaxlab.experiments.runner import run
from jaxlab.experiments.trec.experiment import build, conclude
from jaxlab.experiments.trec.scoring import seed_resamples
from jaxlab.experiments.trec.studies.placement import target_examples
from jaxlab.methods import trec

STUDIES = ("schedules", "collapse", "law", "placement", "cpt")


def study(variant, preset="cpu", **changes) -> Any:
    return make_config("trec", variant=variant, preset=preset, **changes)


def claims_of(result):
    return {claim.id: claim for claim in result.claims}


def planted_curves(program, replicates, exponents, noise=0.0, seed=0, dip=0.03):
    """What a program leaves if its curves are predictions with these exponents, plus noise."""
    draw = np.random.default_rng(seed)
    rates, decay = program.trials["learning_rate"], program.trials["weight_decay"]
    alphas = rates * (decay if decay.ndim == 2 else decay[:, None])
    shapes = []
    for own, m in zip(alphas.astype(np.float64), exponents, strict=True):
        curve = trec.predict_trec(trec.ema_coefficients(own), m=m)
        shapes.append(dip * (curve - curve.mean()) / np.ptp(curve))
    trials, steps = alphas.shape
    reference = draw.normal(2.0, 0.1, size=(trials, replicates, steps))
    scatter = noise * draw.normal(size=reference.shape)
    return {
        "replay/loss": reference + np.stack(shapes)[:, None] + scatter,
        "replay/reference_loss": reference,
        "alphas": np.repeat(alphas[:, None], replicates, axis=1),
    }


@pytest.mark.parametrize(
    ("variant", "trials"),
    [
        ("schedules", [24]),
        ("collapse", [5, 1, 1]),
        ("law", [4, 4, 4, 6]),
        ("placement", [36]),
        ("cpt", [12]),
    ],
)
def test_all_settings_of_a_shape_share_a_program(variant, trials):
    assert [program.num_trials for program in build(study(variant))] == trials


def test_settings_of_one_time_scale_have_one_trace():
    """Rate and decay change against each other; only their product counts."""
    program = build(study("collapse"))[0]
    alphas = program.trials["learning_rate"] * program.trials["weight_decay"][:, None]
    np.testing.assert_allclose(alphas[1:3], alphas[[0, 0]], rtol=1e-6)
    assert not np.allclose(alphas[3], alphas[0])
    rates = program.trials["learning_rate"].max(axis=1)
    np.testing.assert_allclose(rates[1:3] / rates[0], [0.5, 2.0], rtol=1e-6)


def test_the_batch_changes_with_the_steps():
    sizes = {
        program.num_steps * len(program.batches(0, 1, 0)) for program in build(study("collapse"))
    }
    assert sizes == {128_000}


def test_every_placement_has_the_same_good_examples():
    (program,) = build(study("placement", "test"))
    (base,) = build(study("schedules", "test"))
    places = 6  # 4 segments, even, none
    seen = []
    for trial in range(places):
        rows = []
        for step in range(program.num_steps):
            batch, plain = program.batches(trial, 7, step), base.batches(0, 7, step)
            rows += [row for row, same in zip(batch, plain, strict=True) if (row != same).any()]
        seen.append(np.array(rows))
    assert len(seen[-1]) == 0
    for rows in seen[:-1]:
        assert len(rows) == 160
        np.testing.assert_array_equal(rows, seen[0])


def test_the_budget_is_equal_and_even():
    for steps, segments, size in ((40, 4, 16), (1000, 10, 128), (30, 3, 1)):
        budget = steps // segments * size
        for place in (0, segments - 1, "even"):
            counts = target_examples(place, steps, segments, size)
            assert counts.sum() == budget
            assert counts.max() <= size
        assert np.ptp(target_examples("even", steps, segments, size)) <= 1


def test_continued_pretraining_has_two_phases():
    config = study("cpt")
    (program,) = build(config)
    rates, decay = (program.trials[name][0] for name in ("learning_rate", "weight_decay"))
    assert rates.shape == decay.shape == (1400,)
    # A tenth of the peak, then up again.
    assert rates[999] == pytest.approx(1e-3, rel=1e-5)
    assert rates[1039] == pytest.approx(1e-2, rel=1e-5)
    assert decay[0] == pytest.approx(1 / (1e-2 * 1000 * 0.2))
    assert decay[-1] == pytest.approx(1 / (1e-2 * 400 * 0.2))


def test_a_planted_law_transfers():
    config = study("law", replicates=4)
    law = trec.PowerLaw(C=0.3, mu_tpp=0.8, mu_tau=-0.5)
    sizes = 32 * 16 + 97 * 128 + 129 * 32, 32 * 16 + 97 * 256 + 257 * 32
    arrays = {}
    for program in build(config):
        larger = program.name == "law-larger"
        taus = [0.15, 0.3, 0.6, 0.3, 0.3, 0.3] if larger else config.taus
        tpp = program.num_steps * 128 / sizes[larger]
        exponents = [law(tpp, tau) for tau in taus]
        arrays[program.name] = planted_curves(program, 4, exponents, noise=0.002)
    result = conclude(config, arrays)
    assert result.metrics["law: C"] == pytest.approx(0.3, abs=0.05)
    assert result.metrics["law: exponent of TPP"] == pytest.approx(0.8, abs=0.07)
    assert result.metrics["law: exponent of tau"] == pytest.approx(-0.5, abs=0.07)
    claims = claims_of(result)
    assert claims["trec.law.transfer"].verdict == "holds"
    # With the small model's tokens per parameter it would be 0.98.
    assert claims["trec.law.transfer"].mean > 0.99
    assert {"trec.law.transfer.gain", "trec.law.transfer.wsd"} <= set(claims)
    assert [figure.name for figure in result.figures] == ["law", "transfer"]


def test_a_wrong_law_does_not_transfer():
    """The larger model's curves peak where no law of the small one's would put them."""
    config = study("law", replicates=4)
    arrays = {}
    for program in build(config):
        larger = program.name == "law-larger"
        exponents = [0.0] * 6 if larger else [8 * tau**0.3 for tau in config.taus]
        arrays[program.name] = planted_curves(program, 4, exponents, noise=0.001)
    claims = claims_of(conclude(config, arrays))
    assert claims["trec.law.transfer"].verdict == "fails"
    assert claims["trec.law.transfer.gain"].verdict == "fails"


def test_without_a_law_nothing_is_claimed():
    config = study("law", replicates=4)
    arrays = {
        program.name: planted_curves(program, 4, [12.0] * program.num_trials)
        for program in build(config)
    }
    result = conclude(config, arrays)
    assert claims_of(result)["trec.law.transfer"].verdict == "unclear"
    assert "there is no law" in " ".join(result.notes)


def collapse_arrays(config, exponent_of, noise):
    return {
        program.name: planted_curves(
            program, config.replicates, exponent_of(program), noise=noise, seed=i
        )
        for i, program in enumerate(build(config))
    }


def test_curves_of_one_time_scale_collapse():
    config = study("collapse")
    # m falls with tau, as a law would have it.
    exponents = {5: [2.5, 2.5, 2.5, 5.0, 1.2], 1: [2.5]}
    arrays = collapse_arrays(config, lambda program: exponents[program.num_trials], 0.004)
    claims = claims_of(conclude(config, arrays))
    assert claims["trec.collapse"].verdict == "holds"
    assert claims["trec.collapse.same"].mean > 0.95
    assert len(claims["trec.collapse"].values) == config.replicates


def test_noise_that_a_half_shares_counts_as_noise():
    """Seeds share their data between settings: only curves of different halves are compared."""
    config = study("collapse")
    arrays = collapse_arrays(config, lambda program: [2.5] * program.num_trials, 0.0)
    draw = np.random.default_rng(1)
    for found in arrays.values():
        steps = found["replay/loss"].shape[-1]
        common = 0.05 * draw.normal(size=(2, config.num_bins))
        noise = np.repeat(np.repeat(common, steps // config.num_bins, axis=1), 4, axis=0)
        found["replay/loss"] = found["replay/loss"] + noise
    assert claims_of(conclude(config, arrays))["trec.collapse.itself"].mean < 0.6


def test_curves_that_ignore_the_time_scale_do_not_collapse():
    config = study("collapse")
    arrays = collapse_arrays(config, lambda program: [2.5] * program.num_trials, 0.004)
    for name in ("collapse-small-batch", "collapse-large-batch"):
        # The batch size now moves the curve, and the time scale hardly does.
        arrays[name] = {k: v[..., ::-1] if "replay" in k else v for k, v in arrays[name].items()}
    assert claims_of(conclude(config, arrays))["trec.collapse"].verdict == "fails"


def placement_arrays(config, best, depth=0.8, noise=0.01):
    """Losses whose dip lies at `best[schedule]` (from 0)."""
    (program,) = build(config)
    draw = np.random.default_rng(0)
    schedules = getattr(config, "schedules", ("d2z",))
    rows = []
    for schedule in schedules:
        segments = np.full(config.num_segments, 3.4)
        segments[best[schedule]] -= depth
        rows += [*segments, 3.0, 3.5]
    loss = np.array(rows)[:, None] + noise * draw.normal(size=(len(rows), config.replicates))
    rates, decay = program.trials["learning_rate"], program.trials["weight_decay"]
    alphas = rates * (decay if decay.ndim == 2 else decay[:, None])
    return {
        "placement": {
            "target/loss": loss,
            "validation/loss": np.full_like(loss, 1.9),
            "alphas": np.repeat(alphas[:, None], config.replicates, axis=1),
        }
    }


def test_a_dip_before_the_drop_is_found():
    config = study("placement")
    result = conclude(config, placement_arrays(config, {"d2z": 8, "step": 6, "wsd": 9}))
    claims = claims_of(result)
    assert claims["trec.placement.step"].verdict == "holds"
    assert claims["trec.placement.step"].mean == pytest.approx(0.8, abs=0.03)
    assert claims["trec.placement.step.even"].mean == pytest.approx(0.4, abs=0.03)
    assert claims["trec.placement.predicted"].verdict == "holds"
    assert result.metrics["step: predicted segment"] == result.metrics["step: best segment"] == 7
    lines = result.files["losses.csv"].splitlines()
    assert len(lines) == 1 + 36 * config.replicates
    assert lines[1].startswith("d2z,1,0,")


def test_a_dip_at_the_end_fails():
    config = study("placement")
    result = conclude(config, placement_arrays(config, {"d2z": 9, "step": 9, "wsd": 9}))
    claims = claims_of(result)
    assert claims["trec.placement.step"].verdict == "fails"
    assert claims["trec.placement.predicted"].verdict == "fails"


def test_continued_pretraining_compares_with_its_end():
    config = study("cpt")
    result = conclude(config, placement_arrays(config, {"d2z": 8}))
    # From the coefficients of all 1,400 steps it would be the last.
    assert result.metrics["d2z: predicted segment"] == 9
    good = claims_of(result)
    bad = claims_of(conclude(config, placement_arrays(config, {"d2z": 9})))
    assert good["trec.cpt"].verdict == "holds"
    assert good["trec.cpt.predicted"].mean == 0
    assert bad["trec.cpt"].verdict == "fails"


def test_a_prediction_of_the_end_is_no_evidence():
    config = study("cpt", tau=0.01)
    result = conclude(config, placement_arrays(config, {"d2z": 9}))
    assert result.metrics["d2z: predicted segment"] == 10
    assert claims_of(result)["trec.cpt"].verdict == "unclear"
    assert "nothing to compare" in " ".join(result.notes)


def test_a_few_segments_claim_no_distance():
    config = study("placement", num_segments=2, optimizer={"step_at": 0.5})
    claims = claims_of(conclude(config, placement_arrays(config, {"d2z": 0, "step": 1, "wsd": 0})))
    assert claims["trec.placement.predicted"].kind == "finding"
    assert claims["trec.placement.predicted"].low >= 0


def test_planted_schedules_are_scored():
    config = study("schedules")
    (program,) = build(config)
    exponents = np.repeat(np.linspace(1.0, 4.5, 8), 3)
    result = conclude(config, {"schedules": planted_curves(program, 4, exponents, noise=0.002)})
    for schedule, m in (("d2z", 1.0), ("linear", 1.5), ("cyclic", 4.5)):
        assert result.metrics[f"{schedule}, tau = 0.2: m"] == pytest.approx(m, rel=0.1)
    claims = claims_of(result)
    assert len(claims) == 2 * len(config.schedules)
    assert all(claim.kind == "finding" for claim in claims.values())
    assert claims["trec.schedules.cosine"].mean > 0.97
    assert claims["trec.schedules.cosine.gap"].mean < 0.05
    assert len(result.figures[0].panels) == len(config.schedules)


def test_resamples_have_unit_weight_and_cover_every_draw():
    weights, place = seed_resamples([2, 3])
    assert [part.shape[1] for part in weights] == [2, 3]
    for part in weights:
        np.testing.assert_allclose(part.sum(axis=1), 1)
    # 3 multisets of 2 seeds times 10 of 3.
    assert len(weights[0]) == 30
    assert set(place.tolist()) == set(range(30))


def test_held_out_seeds_do_not_choose_the_exponent():
    """Halves with different curves: fitted to itself each would correlate perfectly."""
    config = study("schedules", replicates=4, taus=(0.2,), schedules=("d2z",))
    (program,) = build(config)
    one, two = (planted_curves(program, 2, [m]) for m in (0.5, 6.0))
    arrays = {name: np.concatenate([one[name], two[name]], axis=1) for name in one}
    claims = claims_of(conclude(config, {"schedules": arrays}))
    assert claims["trec.schedules.d2z"].mean < 0.9


def test_a_study_runs_on_a_mesh(tmp_path):
    """On two devices in a process of its own, and it finds what one device finds."""
    words = ["variant=placement", "preset=test", "schedules=[d2z]", "quiet=true"]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-m", "jaxlab.run", *words, "mesh.data=2", "compilation_cache=off"]
    done = subprocess.run(
        [*command, f"run_dir={tmp_path / 'run'}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    alone = run(dataclasses.replace(study("placement", "test", schedules=("d2z",)), quiet=True))
    rows, own = (
        np.array([line.split(",")[3:] for line in text.splitlines()[1:]], np.float64)
        for text in ((tmp_path / "run/files/losses.csv").read_text(), alone.files["losses.csv"])
    )
    np.testing.assert_allclose(rows, own, atol=1e-4)


@pytest.mark.parametrize("variant", STUDIES)
def test_a_study_runs(variant):
    config = dataclasses.replace(study(variant, "test"), quiet=True)
    result = run(config)
    assert result.claims
    assert result.figures or variant == "law"
    assert all(np.isfinite(value) for value in result.metrics.values())
