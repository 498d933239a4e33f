"""Every notebook is well formed, carries clean outputs, and runs from top to bottom.

`python tests/test_notebooks.py FILE` runs one without Jupyter: its code cells in order, in one
namespace, as plain Python.
"""

import ast
import io
import json
import linecache
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAGIC = re.compile(r"^( *)[%!].*$", re.MULTILINE)
GUARD = 'if importlib.util.find_spec("jaxlab") is None:'
HOSTS = {"arxiv.org"}
ABSOLUTE = re.compile(r"(?<![\w.:/<])/\w[\w.-]*/\w|\b[A-Z]:\\|file://")
REACHED = 'raise AssertionError("jaxlab is importable, so nothing may be installed")'


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text_of(value):
    return value if isinstance(value, str) else "".join(value)


def run_notebook(path):
    """Runs the code cells; a cell that fails is shown with its source.

    Returns:
      0, or 1 if a cell failed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(json.loads(path.read_text("utf-8"))), start=1):
        source = MAGIC.sub(rf"\1{REACHED}", text_of(cell["source"]))
        name = f"<{path.name}, code cell {number}>"
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        try:
            show(run_cell(source, name, namespace))
            for figure in map(plt.figure, plt.get_fignums()):
                figure.savefig(io.BytesIO())
        except Exception:  # whatever the cell raises is shown, and fails the notebook
            print(f"{name}:\n{source}\n{traceback.format_exc()}", file=sys.stderr)
            return 1
        plt.close("all")
    return 0


def run_cell(source, name, namespace):
    """Executes a cell of this repository's own notebooks, as Jupyter would.

    Returns:
      The value of an expression at its end, or None.
    """
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), name, "eval"), namespace)


def show(value):
    """Asks for all that a notebook would show of a value."""
    for kind in ("_repr_html_", "_repr_png_"):
        if hasattr(value, kind):
            assert getattr(value, kind)()


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return json.loads(path.read_text("utf-8"))


def test_the_file_is_notebook_format_4(notebook):
    assert notebook["nbformat"] == 4
    assert notebook["nbformat_minor"] >= 5
    assert set(notebook) == {"nbformat", "nbformat_minor", "metadata", "cells"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", cell["id"])
        assert text_of(cell["source"]).strip(), cell["id"]
        keys = {"id", "cell_type", "metadata", "source"}
        if cell["cell_type"] == "code":
            keys |= {"execution_count", "outputs"}
        assert cell["cell_type"] in ("code", "markdown")
        assert set(cell) == keys, cell["id"]


def test_cells_are_few_and_explained(notebook):
    assert 1 <= len(code_cells(notebook)) <= 12
    kinds = [cell["cell_type"] for cell in notebook["cells"]]
    before = [kinds[i - 1] for i, kind in enumerate(kinds) if kind == "code"]
    assert kinds[0] == "markdown"
    assert set(before) == {"markdown"}


def test_magics_are_guarded(notebook):
    for cell in code_cells(notebook):
        source = text_of(cell["source"])
        for magic in MAGIC.finditer(source):
            assert magic[1], f"{cell['id']}: {magic[0]}"
            assert source[: magic.start()].endswith(f"{GUARD}\n"), f"{cell['id']}: {magic[0]}"


def test_outputs_are_clean(notebook):
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            kind = output["output_type"]
            assert kind in ("stream", "display_data", "execute_result"), cell["id"]
            if kind == "stream":
                assert output["name"] == "stdout", f"{cell['id']}: {text_of(output['text'])}"
                assert "\r" not in text_of(output["text"]), cell["id"]
                assert "Warning" not in text_of(output["text"]), cell["id"]


def test_outputs_are_of_one_run_from_top_to_bottom(notebook):
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    shown = [data for cell in cells for out in cell["outputs"] for data in out.get("data", {})]
    assert "image/png" in shown


def test_a_notebook_is_small(path):
    assert path.stat().st_size < 1_000_000


def test_no_place_of_one_machine_is_named(notebook):
    for text in texts_of(notebook):
        assert not ABSOLUTE.search(text), text
        hosts = re.findall(r"https?://([\w.-]+)", text)
        assert set(hosts) <= HOSTS, hosts
        assert "index-url" not in text


def texts_of(tree):
    """All texts of a notebook but encoded pictures."""
    if isinstance(tree, str):
        yield re.sub(r"data:image/png;base64,[A-Za-z0-9+/=\s]+", "", tree)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if key != "image/png":
                yield from texts_of(value)
    elif isinstance(tree, list):
        if all(isinstance(item, str) for item in tree):
            yield from texts_of("".join(tree))
        else:
            for item in tree:
                yield from texts_of(item)


def execute(path, cwd, cache_folder=None):
    environment = {
        "JAXLAB_PRESET": "test",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # programs this small compile longer than they run
    }
    if cache_folder is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache_folder)
    return subprocess.run(
        [sys.executable, "-P", "-W", "error", __file__, str(path)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_notebook_runs(path, tmp_path, cache_folder):
    done = execute(path, tmp_path, cache_folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def write_notebook(folder, *sources):
    cells = [{"cell_type": "code", "source": source} for source in sources]
    path = folder / "made.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    return path


def test_a_cell_that_fails_is_shown(tmp_path):
    path = write_notebook(tmp_path, "a = 1", "b = a\nb / 0  # here")
    done = execute(path, tmp_path)
    assert done.returncode == 1
    assert "code cell 2" in done.stderr
    assert done.stderr.count("b / 0  # here") >= 2  # the source, and the traceback's line
    assert "ZeroDivisionError" in done.stderr


def test_a_magic_that_is_reached_fails(tmp_path):
    done = execute(write_notebook(tmp_path, "if True:\n    %pip install other"), tmp_path)
    assert done.returncode == 1
    assert "nothing may be installed" in done.stderr


def test_what_a_cell_shows_is_asked_for(tmp_path):
    source = "class A:\n    def _repr_html_(self):\n        raise ValueError('broken')\n\nA()"
    done = execute(write_notebook(tmp_path, source), tmp_path)
    assert done.returncode == 1
    assert "ValueError: broken" in done.stderr


if __name__ == "__main__":
    sys.exit(run_notebook(Path(sys.argv[1])))
