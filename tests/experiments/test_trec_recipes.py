"""Recipe files: what they may say, how mistakes are named, and mixtures made of windows."""

from __future__ import annotations

import numpy as np
import pytest

from jaxlab.data.mixing import read_mixture
from jaxlab.errors import UserError
from jaxlab.experiments.trec.recipe_files import (
    load_recipe,
    shipped_recipes,
    write_mixture_text,
)
from jaxlab.methods import trec

FULL = """
name: A plan
source: nowhere
assumed: |
  everything,
  as it is a test
parameters: 1.5B
parameter_kind: non-embedding
num_experts: 8
experts_per_token: 2
high_quality: [[10M, 20M], [4e7, 4.5e7]]
high_quality_unit: tokens
b1: 0.95
phases:
  - schedule: wsd
    steps: 1.2k
    horizon: 2000
    peak_lr: 1e-3
    start_lr: 1e-4
    final_lr: 1e-5
    warmup_steps: 0.1k
    weight_decay: 1e-1
    batch_tokens: [[0, 10k], [5M, 20_000]]
    decay_fraction: .5
    high_quality: false
  - schedule: step
    tokens: 30M
    weight_decay: 0
    batch_tokens: 40e3
    final_lr: 1e-6
    step_at: 0.6
    decay_scaled_by_lr: false
    high_quality: true
"""

SMALL = """
parameters: 1M
phases:
  - {schedule: d2z, steps: 100, peak_lr: 1e-2, weight_decay: 0.1, batch_tokens: 1000}
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problem(path):
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    text = str(caught.value)
    assert text.startswith(f"recipe={path}: ")
    assert "\n" not in text
    return text.removeprefix(f"recipe={path}: ")


def test_every_field_is_read(write):
    expected = trec.Recipe(
        name="A plan",
        source="nowhere",
        assumed="everything, as it is a test",
        parameters=1.5e9,
        parameter_kind="non-embedding",
        num_experts=8,
        experts_per_token=2,
        high_quality=((1e7, 2e7), (4e7, 4.5e7)),
        high_quality_unit="tokens",
        b1=0.95,
        phases=(
            trec.Phase(
                schedule="wsd",
                steps=1200,
                horizon=2000.0,
                peak_lr=1e-3,
                start_lr=1e-4,
                final_lr=1e-5,
                warmup_steps=100,
                weight_decay=0.1,
                batch_tokens=((0.0, 1e4), (5e6, 2e4)),
                decay_fraction=0.5,
            ),
            trec.Phase(
                schedule="step",
                tokens=3e7,
                weight_decay=0.0,
                batch_tokens=4e4,
                final_lr=1e-6,
                step_at=0.6,
                decay_scaled_by_lr=False,
                high_quality=True,
            ),
        ),
    )
    assert load_recipe(write(FULL)) == expected


def test_a_small_file_has_defaults(write):
    recipe = load_recipe(str(write(SMALL)))
    assert recipe.name == "mine"
    assert recipe.parameters == 1e6
    assert recipe.phases[0].peak_lr == 0.01
    assert trec.analyze_recipe(recipe).num_steps == 100


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("peak_lr: 1e-3", "peak_lr: x", "phases[0].peak_lr is 'x': must be a number, e.g. 3e-4"),
        ("peak_lr: 1e-3", "peak_lr: 3M", "phases[0].peak_lr is '3M': must be a number"),
        ("peak_lr: 1e-3", "peak_lr: true", "phases[0].peak_lr is True: must be a number"),
        ("peak_lr: 1e-3", "peak_lr: .nan", "phases[0].peak_lr is nan: must be a number"),
        ("peak_lr: 1e-3", "peak_lr: -1", "phases[0].peak_lr is -1.0: must be positive and finite"),
        ("peak_lr: 1e-3", "peak: 1e-3", "phases[0].peak is no field of a recipe; did you mean"),
        ("steps: 1.2k", "steps: 1.5", "phases[0].steps is 1.5: must be a whole number"),
        ("steps: 1.2k", "steps: 1e999", "phases[0].steps is '1e999': must be finite"),
        ("    steps: 1.2k\n", "", "phases[0].steps is None: exactly one of steps and tokens"),
        ("steps: 1.2k", "tokens: 5 T", "phases[0].horizon is 2000.0: must be at least the phase"),
        (
            "tokens: 30M",
            "tokens: 30X",
            "phases[1].tokens is '30X': must be a number,",
        ),
        ("weight_decay: 0\n", "\n", "phases[1].weight_decay is missing"),
        ("weight_decay: 0\n", "weight_decay:\n", "phases[1].weight_decay is missing"),
        ("schedule: step", "schedule: stop", "phases[1].schedule is stop: must be one of"),
        ("schedule: step", "schedule: [1]", "phases[1].schedule is [1]: must be a text"),
        (
            "[[0, 10k]",
            "[[1, 10k]",
            "phases[0].batch_tokens is ((1.0, 10000.0), (5000000.0",
        ),
        ("[[0, 10k]", "[[10k]", "phases[0].batch_tokens is [['10k']"),
        ("b1: 0.95", "b1: 1", "b1 is 1.0: must be in [0, 1)"),
        ("parameters: 1.5B", "parameters: many", "parameters is 'many': must be a number"),
        ("parameters: 1.5B\n", "", "parameters is missing"),
        ("[4e7, 4.5e7]", "[4e7, 3e7]", "high_quality is ((10000000.0, 20000000.0)"),
        (
            "[4e7, 4.5e7]",
            "[4e7, 5e8]",
            "high_quality is (40000000.0, 500000000.0): must lie",
        ),
        (
            "num_experts: 8",
            "num_experts: 1",
            "experts_per_token is 2: must be in",
        ),
        (
            "scaled_by_lr: false",
            "scaled_by_lr: 0",
            "phases[1].decay_scaled_by_lr is 0: must",
        ),
        (
            "final_lr: 1e-6",
            "final_lr: 1e-2",
            "phases[1].final_lr is 0.01: must be at most",
        ),
        ("weight_decay: 1e-1", "weight_decay: 1e4", "phases[0].alphas is 1."),
        (
            "b1: 0.95",
            "b1: 0.95\nb1: 0.9",
            "is not YAML (line 14 column 1: the key b1 is given",
        ),
        ("b1: 0.95", "b1: [", "is not YAML (line 15 column 3: expected"),
        (
            "b1: 0.95",
            "b1: !!python/object:os.system {}",
            "is not YAML (line 13 column 5: ",
        ),
        ("b1: 0.95", "[1, 2]: 3", "is not YAML (line 13 column 1: found unhashable key)"),
        ("b1: 0.95", "phase: 1", "phase is no field of a recipe; did you mean phases?"),
    ],
)
def test_mistakes_name_file_and_place(write, old, new, message):
    assert FULL.count(old) == 1
    assert problem(write(FULL.replace(old, new))).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is None: must hold name,"),
        ("- 1", "the file is [1]: must hold name,"),
        ("parameters: 1\nphases: 5", "phases is 5: must be a list"),
        ("parameters: 1\nphases: []", "phases is (): must hold at least one phase"),
        ("parameters: 1\nphases: [4]", "phases[0] is 4: must hold schedule,"),
        ("\tparameters: 1", "is not YAML (line 1 column 1: "),
        (
            "a: &a [1, 1, 1, 1, 1, 1]\n"
            + "\n".join(
                f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 6)}]"
                for i in range(24)
            ),
            "a is no field of a recipe",
        ),
    ],
)
def test_what_is_no_recipe(write, text, message):
    assert problem(write(text)).startswith(message)


def test_files_that_cannot_be_read(tmp_path, write):
    missing = problem("olmo2-13")
    assert missing.startswith("there is no such file, and no shipped recipe of that name; did you")
    assert "olmo2-13b" in missing
    assert problem(tmp_path).startswith("cannot be read (")
    assert problem("x" * 5000).startswith("cannot be read (")
    path = write("")
    path.write_bytes(b"\xff\xfe\x00")
    assert problem(path) == "is not YAML in UTF-8"
    path.write_bytes(b"#" * 1_000_001)
    assert problem(path).startswith("is larger than 1000000 bytes")


def test_shipped_recipes_are_complete():
    assert shipped_recipes() == ("feng-two-phase", "llama3-405b", "olmo2-13b", "olmo2-7b")
    for name in shipped_recipes():
        recipe = load_recipe(name)
        assert recipe.source.startswith("arXiv ")
        assert recipe.assumed
        assert trec.recipe_steps(recipe).high_quality


def test_shipped_recipes_give_the_known_numbers():
    llama = trec.analyze_recipe(load_recipe("llama3-405b"), m=2.0)
    assert (llama.num_steps, round(llama.tau, 3), round(llama.ema_peak, 3)) == (
        1_200_003,
        0.104,
        0.571,
    )
    olmo = trec.analyze_recipe(load_recipe("olmo2-13b"), m=2.0)
    assert olmo.ema_peak == olmo.high_quality[0].fractions[0] == pytest.approx(0.943, abs=5e-4)
    assert olmo.high_quality[0].mass == pytest.approx(0.148, abs=1e-3)


@pytest.mark.parametrize(
    ("window", "num_steps", "steps"),
    [
        ((0.6, 0.7), 1000, (600, 700)),
        ((0.0, 1.0), 7, (0, 7)),
        ((0.999, 1.0), 10, (9, 10)),
        ((0.50001, 0.50002), 100, (50, 51)),
    ],
)
def test_mixture_text_is_read_back(tmp_path, window, num_steps, steps):
    path = tmp_path / "mixture.json"
    path.write_text(write_mixture_text(window, num_steps))
    ids = read_mixture(path, num_sources=2)
    np.testing.assert_array_equal(ids, trec.curriculum(num_steps, *steps))


def test_mixture_of_a_plan_is_its_window(tmp_path):
    report = trec.analyze_recipe(load_recipe("feng-two-phase"), m=2.0, fraction=0.123)
    path = tmp_path / "mixture.json"
    path.write_text(write_mixture_text(report.best.fractions, report.num_steps))
    expected = trec.curriculum(report.num_steps, report.best.start, report.best.stop)
    np.testing.assert_array_equal(read_mixture(path), expected)


def test_mixture_misuse():
    with pytest.raises(ValueError, match=r"window=\(0\.5, 0\.5\): must satisfy 0 <= start < stop"):
        write_mixture_text((0.5, 0.5), 10)
    with pytest.raises(ValueError, match="num_steps=0: must be at least 1"):
        write_mixture_text((0.5, 0.6), 0)
