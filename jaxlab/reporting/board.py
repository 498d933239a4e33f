"""The board: every claim of every finished run below a folder, in one table."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from jaxlab.errors import UserError
from jaxlab.reporting.claims import Claim, format_number
from jaxlab.reporting.files import is_remote, read_json
from jaxlab.reporting.report import make_table, table_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["board_table", "board_text", "collect"]

_FILE = "result.json"
_COLUMNS = ("method", "claim", "paper", "ours (95 % interval)", "verdict", "seconds", "machine")
_NOT_SEARCHED = "checkpoints"  # thousands of files, no results


def collect(root: os.PathLike[str] | str) -> list[dict[str, Any]]:
    """Reads every result.json below `root`.

    Args:
      root: a folder, local or remote; a single run directory is one as well.

    Returns:
      One dict per claim, sorted by method, variant, claim and path, with the texts `method`,
      `variant`, `claim`, `paper`, `ours`, `verdict`, `machine` and `path`, and with `seconds`
      (float, of running, without compilation; None if unknown). A run without claims has one
      dict with the claim `"-"`. What cannot be read or was written by something else gives a
      dict with `path` and `warning`, at the end.

    Raises:
      jaxlab.errors.UserError: `root` is no folder.
    """
    folder = epath.Path(root)
    if not folder.is_dir():
        raise UserError("board", os.fspath(root), "a folder that holds run directories")
    rows: list[dict[str, Any]] = []
    warnings: list[dict[str, Any]] = []

    def warn(path: str, reason: str) -> None:
        warnings.append({"path": path, "warning": " ".join(reason.split())})

    for path in _result_files(folder, warn):
        try:
            rows += _rows(read_json(path), path)
        except OSError as error:
            warn(path, f"cannot be read: {error.strerror or error}")
        except ValueError as error:
            warn(path, str(error).removeprefix(f"{path} "))
    rows.sort(key=lambda row: tuple(row[k] for k in ("method", "variant", "claim", "path")))
    return rows + sorted(warnings, key=lambda row: row["path"])


def board_table(rows: Sequence[Mapping[str, Any]], width: int | None = None) -> Table:
    """The rows of `collect` as a table for a terminal; warnings are listed below it.

    Args:
      rows: see `collect`.
      width: columns of the terminal, for a better layout; None leaves it to rich.
    """
    good = [row for row in rows if "warning" not in row]
    runs = {(row["method"], row["variant"], row["path"]) for row in good}
    twins = Counter(run[:2] for run in runs)
    cells = []
    for row in good:
        name = f"{row['method']} {row['variant']}".strip()
        if twins[row["method"], row["variant"]] > 1:  # several runs: say which
            name += f" ({os.path.basename(os.path.dirname(row['path']))})"
        seconds = "-" if row["seconds"] is None else format_number(row["seconds"])
        texts = (row[key] for key in ("claim", "paper", "ours", "verdict"))
        cells.append((name, *texts, seconds, row["machine"]))
    table = make_table("Claims", _COLUMNS, cells, verdict_column=4, width=width)
    table.caption = "\n".join(_warnings(rows)) or None
    return table


def board_text(root: os.PathLike[str] | str, width: int = 100) -> str:
    """What `python -m jaxlab.run board ROOT` prints.

    Args:
      root: see `collect`.
      width: columns of the table, at least 60; fewer count as 60. Warnings keep one line each, so
        that their paths can be copied.

    Raises:
      jaxlab.errors.UserError: `root` is no folder.
    """
    rows = collect(root)
    warnings = _warnings(rows)
    if len(rows) == len(warnings):
        empty = f"No results below {os.fspath(root)}; a run writes them: python -m jaxlab.run"
        return "\n".join([empty, *warnings])
    table = board_table(rows, width)
    table.caption = None
    return "\n".join([table_text(table, width), *warnings])


def _warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"warning: {row['path']}: {row['warning']}" for row in rows if "warning" in row]


def _result_files(folder: epath.Path, warn: Callable[[str, str], None]) -> Iterator[str]:
    """Paths of the files named result.json below `folder`; links to folders are not followed."""
    if is_remote(folder):
        yield from _remote_files(folder)
        return

    def unreadable(error: OSError) -> None:
        warn(str(error.filename), f"cannot be read: {error.strerror}")

    for parent, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if name != _NOT_SEARCHED]
        path = os.path.join(parent, _FILE)
        if _FILE in files and os.path.isfile(path):  # a pipe would block
            yield path


def _remote_files(folder: epath.Path) -> Iterator[str]:
    for child in folder.iterdir():
        # Some stores list a folder among its own children.
        if child == folder or child.name == _NOT_SEARCHED:
            continue
        if child.is_dir():
            yield from _remote_files(child)
        elif child.name == _FILE:
            yield os.fspath(child)


def _rows(data: Any, path: str) -> list[dict[str, Any]]:
    """The rows of one result.json; ValueError if something else wrote it."""
    if not isinstance(data, dict) or not isinstance(data.get("method"), str):
        raise ValueError("was not written by jaxlab: it names no method")
    if not isinstance(data.get("claims"), list):
        raise ValueError("was not written by jaxlab: it has no list of claims")
    seconds = data.get("run_seconds")
    run = {
        "method": data["method"],
        "variant": _text(data.get("variant", "")),
        "seconds": float(seconds) if isinstance(seconds, int | float) else None,
        "machine": _text(data.get("machine", "-")),
        "path": path,
    }
    claims = [Claim.from_dict(claim) for claim in data["claims"]]
    if not claims:
        return [{**run, "claim": "-", "paper": "-", "ours": "-", "verdict": "-"}]
    return [
        {
            **run,
            "claim": claim.id,
            "paper": claim.source,
            "ours": claim.estimate_text,
            "verdict": claim.verdict,
        }
        for claim in claims
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
