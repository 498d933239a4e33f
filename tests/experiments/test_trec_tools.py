"""`variant=plan` and `variant=recipes` through the command line."""

import json

import numpy as np
import pytest

from jaxlab.data.mixing import read_mixture
from jaxlab.run import main

RECIPE = """\
name: mine
parameters: 100M
phases:
  - schedule: step
    steps: 1000
    peak_lr: 1e-2
    final_lr: {final_lr}
    weight_decay: 0.5
    batch_tokens: 1M
"""


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe and gives the words that plan by it."""
    file = tmp_path / "mine.yaml"

    def write(final_lr="1e-4"):
        file.write_text(RECIPE.format(final_lr=final_lr))
        return ["variant=plan", f"recipe={file}", f"run_dir={tmp_path / 'plan'}", "m=2"]

    return write


def test_a_window_becomes_a_mixture(recipe, tmp_path, capsys):
    assert main([*recipe(), "fraction=0.1"]) == 0
    assert "best window start" in capsys.readouterr().out
    ids = read_mixture(tmp_path / "plan" / "files" / "mixture.json", num_sources=2)
    # Just before the drop, which comes after 0.7 of the steps.
    np.testing.assert_array_equal(np.flatnonzero(ids), np.arange(600, 700))
    assert {path.name for path in (tmp_path / "plan" / "figures").iterdir()} == {
        "plan.png",
        "sensitivity.png",
    }


def test_a_changed_recipe_is_read_again(recipe, tmp_path, capsys):
    result = tmp_path / "plan" / "result.json"
    assert main(recipe()) == 0
    first = json.loads(result.read_text())["metrics"]["best window stop"]
    assert main(recipe(final_lr="1e-2")) == 0
    second = json.loads(result.read_text())["metrics"]["best window stop"]
    assert (first, second) == (0.7, 1.0)
    assert "finished already" not in capsys.readouterr().out


def test_the_mixture_has_the_steps_that_are_asked_for(recipe, tmp_path):
    assert main([*recipe(), "mixture_steps=50"]) == 0
    ids = read_mixture(tmp_path / "plan" / "files" / "mixture.json")
    np.testing.assert_array_equal(np.flatnonzero(ids), np.arange(30, 35))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["phase=1"], "phase=1: must be below the recipe's number of phases, 1"),
        (["recipe=olmo2-31b"], "recipe=olmo2-31b: there is no such file"),
        (["fraction=0"], "fraction=0: must be greater than 0"),
    ],
)
def test_a_mistake_leaves_nothing_behind(recipe, tmp_path, capsys, words, message):
    assert main([*recipe(), *words]) == 2
    assert capsys.readouterr().err.startswith(f"jaxlab: {message}")
    assert not (tmp_path / "plan").exists()


def test_published_recipes_are_analysed(tmp_path, capsys):
    assert main(["variant=recipes", f"run_dir={tmp_path / 'recipes'}"]) == 0
    assert "Llama 3 405B" in capsys.readouterr().out
    assert (tmp_path / "recipes" / "figures" / "recipes.png").exists()
