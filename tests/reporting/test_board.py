"""The board reads every result, reports what it cannot read and starts fast."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from jaxlab.errors import UserError
from jaxlab.reporting.board import board_table, board_text, collect
from jaxlab.reporting.claims import claim_from_values
from jaxlab.reporting.files import write_json
from jaxlab.reporting.report import Result


def put(folder: Path, method: str = "trec", ids: tuple[str, ...] = ("b", "a"), **changes: Any):
    claims = tuple(
        claim_from_values(
            name,
            [0.3, 0.31, 0.32],
            bound=0.1,
            direction=">=",
            statement="It gains.",
            source="Table 2: 0.21 nats",
        )
        for name in ids
    )
    provenance = {"run_seconds": 58.52, "machine": "2 cores", **changes}
    result = Result(method, "placement", {}, claims=claims, provenance=provenance)
    folder.mkdir(parents=True)
    write_json(folder / "result.json", result.to_dict())


def test_rows_are_complete_and_sorted(tmp_path):
    put(tmp_path / "trec" / "1", ids=("b", "a"))
    put(tmp_path / "freekv" / "deep" / "er", method="freekv", ids=("z",), run_seconds=None)
    put(tmp_path / "generate", method="generate", ids=())
    rows = collect(tmp_path)
    assert [(row["method"], row["claim"]) for row in rows] == [
        ("freekv", "z"),
        ("generate", "-"),
        ("trec", "a"),
        ("trec", "b"),
    ]
    assert rows[0]["seconds"] is None
    assert rows[2] == {
        "method": "trec",
        "variant": "placement",
        "claim": "a",
        "paper": "Table 2: 0.21 nats",
        "ours": "0.31 [0.2852, 0.3348]",
        "verdict": "holds",
        "seconds": 58.52,
        "machine": "2 cores",
        "path": str(tmp_path / "trec" / "1" / "result.json"),
    }


def test_text_shows_one_table(tmp_path):
    put(tmp_path / "1")
    text = board_text(tmp_path, 100)
    assert max(map(len, text.splitlines())) <= 100
    header = next(line for line in text.splitlines() if "verdict" in line)
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "method",
        "claim",
        "paper",
        "ours (95 % interval)",
        "verdict",
        "seconds",
        "machine",
    ]
    (line,) = (line for line in text.splitlines() if line.split("|")[2:3] == [" a     "])
    for part in ("trec", "holds", "58.52", "2 cores"):
        assert part in line
    assert "warning" not in text


def test_a_run_directory_is_a_root_too(tmp_path):
    put(tmp_path / "1")
    assert len(collect(str(tmp_path / "1"))) == 2


def test_several_runs_of_one_study_are_told_apart(tmp_path):
    put(tmp_path / "1a2b3c4d", ids=("a",))
    put(tmp_path / "5e6f7a8b", ids=("a",))
    text = board_text(tmp_path, 140)
    assert "trec placement (1a2b3c4d)" in text
    assert "trec placement (5e6f7a8b)" in text


BROKEN = {
    "cut": ('{"method": "trec", "cla', "is not valid JSON"),
    "binary": ("\x00\x01", "is not valid JSON"),
    "list": ("[1, 2]", "names no method"),
    "foreign": ('{"method": "POST", "status": 200}', "no list of claims"),
    "number": ('{"method": 3, "claims": []}', "names no method"),
    "claims": ('{"method": "trec", "claims": [{"id": "a"}]}', "a claim lacks"),
    "text": ('{"method": "trec", "claims": ["a"]}', "wrong type"),
    "nested": ("[" * 100_000, "is not valid JSON"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_and_foreign_files_are_one_line(tmp_path, kind):
    content, reason = BROKEN[kind]
    put(tmp_path / "good", ids=("a",))
    (tmp_path / kind).mkdir()
    path = tmp_path / kind / "result.json"
    path.write_text(content)
    rows = collect(tmp_path)
    assert rows[0]["claim"] == "a"
    assert rows[1]["path"] == str(path)
    assert reason in rows[1]["warning"]
    (line,) = (line for line in board_text(tmp_path, 60).splitlines() if "warning" in line)
    assert line.startswith(f"warning: {path}: ")
    assert reason in line
    assert line in str(board_table(rows).caption)


def test_what_is_no_file_and_what_is_in_checkpoints_is_passed_over(tmp_path):
    put(tmp_path / "good", ids=("a",))
    put(tmp_path / "good" / "checkpoints" / "100", ids=("hidden",))
    (tmp_path / "folder" / "result.json").mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "result.json")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert [row.get("claim") for row in collect(tmp_path)] == ["a"]


def test_unreadable_file_is_a_warning(tmp_path, monkeypatch):
    put(tmp_path / "good")

    def refuse(path: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("jaxlab.reporting.board.read_json", refuse)
    (row,) = collect(tmp_path)
    assert row["warning"] == "cannot be read: Permission denied"


def test_missing_root_is_the_users_error(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(UserError) as caught:
            board_text(root)
        assert (caught.value.field, caught.value.value) == ("board", str(root))
        assert "\n" not in str(caught.value)


def test_empty_root_says_how_to_fill_it(tmp_path):
    text = board_text(tmp_path)
    assert text == f"No results below {tmp_path}; a run writes them: python -m jaxlab.run"
    (tmp_path / "result.json").write_text("{")
    assert len(board_text(tmp_path).splitlines()) == 2


def test_remote_roots_are_searched(tmp_path):
    put(tmp_path / "runs" / "trec" / "1", ids=("a",))
    put(tmp_path / "runs" / "checkpoints", ids=("hidden",))

    def local(original: Any, path: Any, *rest: Any) -> Any:
        return original(str(path).replace("gs://bucket", str(tmp_path)), *rest)

    def listed(original: Any, path: Any) -> list[str]:
        return ["", *local(original, path)]  # as some stores do, with the folder itself

    with epath.testing.mock_epath(open=local, isdir=local, listdir=listed):
        (row,) = collect(epath.Path("gs://bucket/runs"))
    assert row["claim"] == "a"
    assert row["path"] == "gs://bucket/runs/trec/1/result.json"


def test_start_needs_no_heavy_library():
    code = (
        "import sys\n"
        "from jaxlab.reporting import board, claims, figures, files, report\n"
        "heavy = {'jax', 'flax', 'matplotlib', 'scipy', 'rich', 'orbax', 'tensorboardX'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
