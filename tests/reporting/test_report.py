"""Results as data, as tables that lose nothing, and as pages that show text as it was."""

from __future__ import annotations

import base64
import json
import math
import re
from typing import Any

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from jaxlab.reporting.claims import Claim, claim_from_values
from jaxlab.reporting.figures import Figure, Panel, Series
from jaxlab.reporting.report import (
    Result,
    claim_table,
    claim_table_text,
    report_markdown,
    verdict_summary,
)

NASTY = "a|b *c* _d_ `e` <b>f</b> $g$ \\h [bold]i[/bold] [j](k) &amp; l_m_n ~~o~~ #1"


def claim(name: str = "demo.gain", values: Any = (0.30, 0.31, 0.32), **changes: Any) -> Claim:
    fields: dict[str, Any] = {
        "bound": 0.1,
        "direction": ">=",
        "statement": "Placing the good data where the curve is lowest gains at least 0.1 nats.",
        "source": "Table 2: 0.21 nats (610M parameters, 82B tokens)",
    }
    return claim_from_values(name, values, **{**fields, **changes})


def result(*claims: Claim, **changes: Any) -> Result:
    picture = Figure("loss_by_step", "Loss", [Panel("step", "loss (nats)", [_SERIES])], "It falls.")
    fields: dict[str, Any] = {
        "method": "trec",
        "variant": "placement",
        "metrics": {"loss": 1.23456, "accuracy": math.nan},
        "claims": claims,
        "figures": (picture,),
        "notes": ("The data are synthetic.",),
        "provenance": {
            "compile_seconds": 3.25,
            "run_seconds": 58.5,
            "peak_memory_bytes": {"device": 2**20, "pinned_host": None},
            "examples_seen": 64_000,
            "seeds": [100, 101],
            "machine": "2 cores",
        },
    }
    return Result(**{**fields, **changes})


_SERIES = Series("ours", [1, 2], [2, 1])


def test_to_dict_is_strict_json():
    first = claim()
    data = json.loads(json.dumps(result(first).to_dict(), allow_nan=False))
    assert data == {
        "method": "trec",
        "variant": "placement",
        "metrics": {"loss": 1.23456, "accuracy": None},
        "claims": [first.to_dict()],
        "figures": ["figures/loss_by_step.png"],
        "notes": ["The data are synthetic."],
        "files": [],
        "compile_seconds": 3.25,
        "run_seconds": 58.5,
        "peak_memory_bytes": {"device": 2**20, "pinned_host": None},
        "examples_seen": 64_000,
        "seeds": [100, 101],
        "machine": "2 cores",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"claims": (claim(), claim())}, "claims of trec share a name: demo.gain"),
        ({"figures": result().figures * 2}, "figures of trec share a name: loss_by_step"),
        ({"provenance": {"metrics": 1}}, "metrics"),
    ],
)
def test_ambiguous_results_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        result(**changes)


def test_verdict_summary():
    claims = [
        claim("a"),
        claim("b"),
        claim("c", bound=1.0),
        claim("d", values=[0.3]),
        claim("e", kind="finding", bound=None),
    ]
    assert verdict_summary(result(*claims)) == "holds: 2, fails: 1, unclear: 1, finding: 1."


def squeeze(text: str) -> str:
    return re.sub(r"\s", "", text)


def read_table(text: str) -> list[list[str]]:
    """Cells of an ASCII table, their lines joined, without white space."""
    rows: list[list[str]] = []
    fresh = True
    for line in text.splitlines():
        if line.startswith("+"):
            fresh = True
        elif line.startswith("|"):
            cells = [squeeze(cell) for cell in line.strip("|").split("|")]
            rows = [*rows, cells] if fresh else [*rows[:-1], _joined(rows[-1], cells)]
            fresh = False
    return rows


def _joined(above: list[str], below: list[str]) -> list[str]:
    return [a + b for a, b in zip(above, below, strict=True)]


@pytest.mark.parametrize("width", [10, 60, 100, 160])
def test_claim_table_fits_and_loses_nothing(width):
    claims = [
        claim("trec.the_low_region_beats_a_late_placement_by_a_margin"),
        claim("trec.b", values=[0.3], source="Section 4 " + "x" * 120),
        claim("trec.c", kind="finding", bound=None, statement="Wide 漢字 and é [bold] [/] text."),
    ]
    text = claim_table_text(result(*claims), width)
    lines = text.splitlines()
    assert lines[0] == "trec: placement"
    assert max(map(len, lines)) <= max(width, 60)
    assert "\x1b" not in text
    rows = read_table(text)
    assert len(rows) == 4
    for row, shown in zip(rows[1:], claims, strict=True):
        assert row[0] == squeeze(shown.id + shown.statement)
        assert row[1] == squeeze(shown.source)
        assert row[2].startswith(squeeze(shown.estimate_text))
        assert row[3:] == [squeeze(shown.bound_text), shown.verdict]


def test_words_stay_whole_where_they_fit():
    text = claim_table_text(result(claim("trec.low_region_beats_late_placement")), 100)
    for word in ("trec.low_region_beats_late_placement", "parameters,", "holds", "[0.2852,"):
        assert word in text


def test_control_characters_do_not_reach_the_terminal():
    text = claim_table_text(result(claim(statement="a\x1b[31mb\rc\x07")), 100)
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)


def test_rich_table_colours_verdicts_and_fits_any_terminal():
    console = Console(width=70, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(claim_table(result(claim(), claim("demo.b", bound=9.0))))
    shown = capture.get()
    assert "\x1b[32mholds" in shown
    assert "\x1b[31mfails" in shown
    assert "…" not in shown
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines())) <= 70


def rendered(markdown: str) -> str:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown)


def test_report_has_every_part():
    page = report_markdown(result(claim()), "python -m jaxlab.run method=trec")
    assert page.startswith("# trec: placement\n\n```bash\npython -m jaxlab.run method=trec\n```\n")
    row = (
        "| demo.gain | Placing the good data where the curve is lowest gains at least 0.1 nats. "
        "| Table 2: 0.21 nats (610M parameters, 82B tokens) "
        "| 0.31 [0.2852, 0.3348], 3 seeds | >= 0.1 | holds |\n"
    )
    assert row in page
    assert "![Loss](figures/loss_by_step.png)\n\nIt falls.\n" in page
    assert "| loss | 1.235 |\n| accuracy | nan |\n" in page
    assert "## Notes\n\n- The data are synthetic.\n" in page
    assert "| peak_memory_bytes.device | 1048576 (1.0 MiB) |\n" in page
    assert "| peak_memory_bytes.pinned_host | - |\n" in page
    assert "| seeds | 100, 101 |\n" in page
    assert page.endswith("|\n")
    assert rendered(page).count("<table>") == 3


def test_empty_result_has_no_empty_sections():
    page = report_markdown(Result("trec", "", {}), "command")
    assert page == "# trec\n\n```bash\ncommand\n```\n\n## Claims\n\nNo claims.\n"
    assert "No claims." in claim_table_text(Result("trec", "", {}))


def unescaped(cell: str) -> str:
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        cell = cell.replace(entity, character)
    return cell


def test_markdown_shows_text_as_it_was():
    """Dollar signs, which only some renderers interpret, show as escaped characters do."""
    page = report_markdown(result(claim(statement=NASTY), notes=(NASTY, "1. one", "# two")), "x")
    html = rendered(page)
    cells = [unescaped(cell) for cell in re.findall(r"<td>(.*?)</td>", html)]
    assert cells[1] == NASTY
    items = [unescaped(item) for item in re.findall(r"<li>(.*?)</li>", html)]
    assert items == [NASTY, "1. one", "# two"]
    assert r"\$g\$" in page


@pytest.mark.parametrize("start", ["# a", "- a", "+ a", "> a", "1. a", "12) a", "=== a", "* a"])
def test_captions_are_paragraphs_whatever_they_start_with(start):
    picture = Figure("a", "", [Panel("x", "y", [_SERIES])], start)
    html = rendered(report_markdown(result(figures=(picture,)), "command"))
    assert f"<p>{start}</p>" in html.replace("&gt;", ">")


def test_command_with_backquotes_stays_one_block():
    command = "python -m jaxlab.run prompt='```'"
    assert f'<pre><code class="language-bash">{command}\n</code></pre>' in rendered(
        report_markdown(result(), command)
    )


def test_notebook_shows_claims_and_figures():
    html = result(claim(statement="<script>1</script> & more"), claim("b"))._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;1&lt;/script&gt; &amp; more" in html
    (data,) = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    assert base64.b64decode(data).startswith(b"\x89PNG")
    assert "<figcaption>It falls.</figcaption>" in html
    assert html.count("<tr>") == 3 + 3
