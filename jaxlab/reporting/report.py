"""The result of an experiment, as data for result.json, as a table and as a page to read."""

from __future__ import annotations

import base64
import html
import io
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxlab.reporting.claims import Claim, format_number
from jaxlab.reporting.figures import Figure, to_png
from jaxlab.reporting.files import to_plain

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "VERDICT_STYLES",
    "Result",
    "claim_table",
    "claim_table_text",
    "make_table",
    "report_markdown",
    "result_text",
    "table_text",
    "verdict_summary",
]

VERDICT_STYLES = {"holds": "green", "fails": "red", "unclear": "yellow", "finding": "cyan"}

_CLAIM_COLUMNS = ("id", "statement", "paper", "ours (95 % interval)", "bound", "verdict")
_LEAST_WIDTH = 60
_RESULT_KEYS = ("method", "variant", "metrics", "claims", "figures", "notes", "files")


@dataclass(frozen=True)
class Result:
    """What an experiment concludes from its measurements.

    In a notebook it shows itself: claims, figures, metrics and notes.

    Attributes:
      method: name of the method, e.g. `"trec"`.
      variant: which of the method's studies; may be empty.
      metrics: single numbers by name.
      claims: what was re-tested, with verdicts; ids are unique.
      figures: pictures; names are unique.
      notes: sentences that a reader of the numbers must know.
      files: texts by file name, for other programs to read: tables, data mixtures.
      provenance: where the numbers come from; the runner adds `compile_seconds`, `run_seconds`,
        `peak_memory_bytes` (by memory kind), `examples_seen`, `seeds` and `machine`.

    Raises:
      ValueError: two claims or two figures share a name, or `provenance` uses the name of
        another attribute.
    """

    method: str
    variant: str
    metrics: dict[str, float]
    claims: tuple[Claim, ...] = ()
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {"claims": [c.id for c in self.claims], "figures": [f.name for f in self.figures]}
        for kind, found in names.items():
            twice = [name for name, count in Counter(found).items() if count > 1]
            if twice:
                raise ValueError(f"{kind} of {self.method} share a name: {', '.join(twice)}")
        for name in self.files:
            if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
                raise ValueError(f"files of {self.method}: {name!r} is no plain file name")
        taken = [key for key in self.provenance if key in _RESULT_KEYS]
        if taken:
            raise ValueError(f"provenance must not use the names {', '.join(taken)}")

    def to_dict(self) -> dict[str, Any]:
        """The content of result.json, in the types of JSON.

        Besides the attributes, with the provenance's fields at the top level, every claim has
        its `holds` and `verdict`; figures are named by their path in the run directory. Numbers
        that are not finite become None.
        """
        return to_plain(
            {
                "method": self.method,
                "variant": self.variant,
                "metrics": self.metrics,
                "claims": [claim.to_dict() for claim in self.claims],
                "figures": [_figure_path(figure) for figure in self.figures],
                "notes": self.notes,
                "files": [_file_path(name) for name in self.files],
                **self.provenance,
            }
        )

    def _repr_html_(self) -> str:
        parts = [f"<h3>{html.escape(_title(self))}</h3>", f"<p>{verdict_summary(self)}</p>"]
        if self.claims:
            parts.append(_html_table(_CLAIM_COLUMNS, map(_claim_cells, self.claims)))
        for figure in self.figures:
            data = base64.b64encode(to_png(figure)).decode("ascii")
            parts.append(
                f'<figure><img alt="{html.escape(figure.name)}" style="max-width:100%" '
                f'src="data:image/png;base64,{data}">'
                f"<figcaption>{html.escape(figure.caption)}</figcaption></figure>"
            )
        if self.metrics:
            parts.append(_html_table(("metric", "value"), _metric_rows(self)))
        parts += [f"<p>{html.escape(note)}</p>" for note in self.notes]
        return "\n".join(parts)


def verdict_summary(result: Result) -> str:
    """The verdicts counted, in words.

    >>> verdict_summary(Result("demo", "", {}))
    'No claims.'
    """
    if not result.claims:
        return "No claims."
    counts = Counter(claim.verdict for claim in result.claims)
    return ", ".join(f"{word}: {counts[word]}" for word in VERDICT_STYLES if counts[word]) + "."


def claim_table(result: Result, width: int | None = None) -> Table:
    """The claims as a table for a terminal, ids above statements; the verdicts are coloured.

    Args:
      result: what to show.
      width: columns of the terminal, for a better layout; None leaves it to rich.
    """
    cells = [_claim_cells(claim) for claim in result.claims]
    columns = ("claim", *_CLAIM_COLUMNS[2:])
    rows = [(f"{id}\n{statement}", *rest) for id, statement, *rest in cells]
    table = make_table(_title(result), columns, rows, verdict_column=4, width=width)
    table.caption = verdict_summary(result)
    return table


def claim_table_text(result: Result, width: int = 100) -> str:
    """The claims as plain text of at most `width` columns, wrapped, never cut.

    Args:
      result: what to show.
      width: columns, at least 60; fewer count as 60.
    """
    return table_text(claim_table(result, width), width)


def result_text(result: Result, width: int = 100) -> str:
    """What a terminal shows of a result: its claims, or without any its metrics and notes.

    Args:
      result: what to show.
      width: columns, at least 60; fewer count as 60.
    """
    if result.claims:
        return claim_table_text(result, width)
    rows = _metric_rows(result)
    longest = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:<{longest}}  {value}" for name, value in rows]
    notes = [
        textwrap.fill(_one_line(note), max(width, _LEAST_WIDTH), subsequent_indent="  ")
        for note in result.notes
    ]
    return "\n".join([_title(result), *lines, *notes])


def report_markdown(result: Result, command: str) -> str:
    """The page report.md of a run directory.

    Args:
      result: what to show.
      command: the command line that repeats the run.

    Returns:
      Markdown with the command, the claims, the figures (as `figures/NAME.png`, relative to the
      run directory), the metrics, the notes and the environment.
    """
    fence = "```"
    while fence in command:
        fence += "`"
    blocks = [f"# {_escape(_title(result))}", f"{fence}bash\n{command}\n{fence}", "## Claims"]
    blocks.append(verdict_summary(result))
    if result.claims:
        blocks.append(_markdown_table(_CLAIM_COLUMNS, map(_claim_cells, result.claims)))
        blocks.append(
            "A claim holds or fails if its estimate and the whole 95 % interval lie on one side "
            "of the bound, and is unclear otherwise. The interval is Student's t over seeds, or "
            "a bootstrap over seeds, texts or prompts. Findings are reported without a verdict."
        )
    if result.figures:
        blocks.append("## Figures")
        for figure in result.figures:
            blocks.append(f"![{_escape(figure.title or figure.name)}]({_figure_path(figure)})")
            blocks.append(_paragraph(figure.caption))
    if result.files:
        links = [f"- [{_escape(name)}]({_file_path(name)})" for name in result.files]
        blocks += ["## Files", "\n".join(links)]
    if result.metrics:
        blocks += ["## Metrics", _markdown_table(("metric", "value"), _metric_rows(result))]
    if result.notes:
        blocks += ["## Notes", "\n".join(f"- {_paragraph(note)}" for note in result.notes)]
    if result.provenance:
        rows = _flat_rows("", to_plain(result.provenance))
        blocks += ["## Environment", _markdown_table(("field", "value"), rows)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def make_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    verdict_column: int,
    width: int | None = None,
) -> Table:
    """A rich table of plain cells that wraps long ones and cuts nothing.

    Args:
      title: above the table.
      columns: headings, [columns].
      rows: cells, each [columns], of one or several lines; nothing in them is markup.
      verdict_column: index of the column that `VERDICT_STYLES` colours.
      width: columns of the terminal, at least 60 (fewer count as 60); given, words are kept
        whole where they fit and the rows are kept low. None leaves the layout to rich.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = [["\n".join(map(_one_line, cell.split("\n"))) for cell in row] for row in rows]
    # ASCII borders: the same table goes to terminals, logs and files of any encoding.
    table = Table(title=Text(title), box=box.ASCII2, show_lines=True, title_justify="left")
    table.caption_justify = "left"
    contents = list(zip(columns, *rows, strict=True))
    widths = [None] * len(columns) if width is None else _fit(contents, max(width, _LEAST_WIDTH))
    for column, fitted in zip(columns, widths, strict=True):
        table.add_column(Text(column), overflow="fold", width=fitted)
    for row in rows:
        cells = [Text(cell) for cell in row]
        cells[verdict_column].style = VERDICT_STYLES.get(row[verdict_column], "")
        table.add_row(*cells)
    return table


def table_text(table: Table, width: int) -> str:
    """A rich table as plain text of at most `max(width, 60)` columns, no colours."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(
        file=file, width=max(width, _LEAST_WIDTH), color_system=None, force_jupyter=False
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _fit(contents: Sequence[Sequence[str]], width: int) -> list[int]:
    """Widths of the columns of a table `width` wide, borders and padding taken off."""
    from rich.cells import cell_len

    longest_words = [max(cell_len(w) for cell in c for w in cell.split() or [""]) for c in contents]
    longest_lines = [max(cell_len(x) for cell in c for x in cell.split("\n")) for c in contents]
    widths = [max(1, min(word, 40)) for word in longest_words]
    spare = width - 3 * len(widths) - 1 - sum(widths)
    for _ in range(-spare):  # too narrow: fold words of the widest column
        widths[widths.index(max(widths))] -= 1
    for _ in range(spare):  # room: shorten the highest column
        crowding = [line / fitted for line, fitted in zip(longest_lines, widths, strict=True)]
        if max(crowding) <= 1:
            break
        widths[crowding.index(max(crowding))] += 1
    return widths


def _title(result: Result) -> str:
    return f"{result.method}: {result.variant}" if result.variant else result.method


def _figure_path(figure: Figure) -> str:
    return f"figures/{figure.name}.png"


def _file_path(name: str) -> str:
    return f"files/{name}"


def _claim_cells(claim: Claim) -> tuple[str, ...]:
    estimate = claim.estimate_text
    if claim.values:
        plural = "" if len(claim.values) == 1 else "s"
        estimate += f", {len(claim.values)} {claim.unit}{plural}"
    texts = (_one_line(text) for text in (claim.id, claim.statement, claim.source))
    return (*texts, estimate, claim.bound_text, claim.verdict)


def _metric_rows(result: Result) -> list[tuple[str, str]]:
    return [(name, format_number(float(value))) for name, value in result.metrics.items()]


def _flat_rows(prefix: str, value: Any) -> list[tuple[str, str]]:
    """Nested mappings as rows with dotted names."""
    if isinstance(value, Mapping):
        return [
            row
            for key, item in value.items()
            for row in _flat_rows(f"{prefix}.{key}" if prefix else key, item)
        ]
    if isinstance(value, list):
        return [(prefix, ", ".join(map(str, value)))]
    if isinstance(value, float):
        return [(prefix, format_number(value))]
    if isinstance(value, int) and "bytes" in prefix:
        return [(prefix, f"{value} ({value / 2**20:.1f} MiB)")]
    return [(prefix, "-" if value is None else str(value))]


def _one_line(text: str) -> str:
    """`text` without line breaks and control characters, which would break a table."""
    return "".join(c if c.isprintable() else " " for c in text)


def _escape(text: str) -> str:
    """`text` for Markdown, on one line, so that it shows as it is inside a line."""
    text = re.sub(r"[\\|`*<$~]|&(?=#|\w+;)", r"\\\g<0>", _one_line(text))
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)  # inside words it is plain already
    return text.replace("](", "]\\(")


def _paragraph(text: str) -> str:
    """`text` for Markdown as a paragraph, whatever it starts with."""
    return re.sub(r"^(\d*)(?=[#>+=-]|(?<=\d)[.)]\s)", r"\1\\", _escape(text.strip()))


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(_one_line(cell))}</td>' for cell in row)}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
