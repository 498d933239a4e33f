"""What the README shows works as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlab.experiments.registry import METHODS
from jaxlab.experiments.trec.recipe_files import load_recipe

README = Path(__file__).parents[1] / "README.md"
BLOCKS = [
    pytest.param(
        block,
        id=f"block {number}",
        marks=[pytest.mark.pretrained] if "smollm2" in block else [],
    )
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_python_block_runs(block, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_there_are_blocks():
    assert len(BLOCKS) == 3


def test_every_registered_method_has_a_row():
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", README.read_text(), re.MULTILINE)
    rows = [row for row in rows if row[0] in METHODS or row[2] == "planned"]
    assert len(rows) == 19
    assert {slug for slug, _, status in rows if status != "planned"} == set(METHODS)


def test_pictures_exist():
    for path in re.findall(r"!\[.*?\]\((.*?)\)", README.read_text()):
        assert (README.parent / path).is_file(), path


def test_the_recipe_is_one(tmp_path):
    (block,) = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    file = tmp_path / "my_recipe.yaml"
    file.write_text(block)
    recipe = load_recipe(file)
    assert [phase.high_quality for phase in recipe.phases] == [False, True]


def test_every_study_has_a_row():
    rows = re.findall(r"^\| `(\w+)` \| .+? \| .+? \|$", README.read_text(), re.MULTILINE)
    assert {"schedules", "collapse", "law", "placement", "cpt", "recipes"} <= set(rows)
