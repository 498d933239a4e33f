"""Figures are validated when they are declared, and drawn legibly."""

from __future__ import annotations

import io
import itertools
import os
import struct
import subprocess
import sys
from typing import Any, cast

import matplotlib
import matplotlib.figure
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.image import imread
from matplotlib.legend import Legend

from jaxlab.reporting.figures import Figure, Panel, Series, draw, save, to_png

BLUE, VERMILION = "#0072B2", "#D55E00"


def figure(*panels: Panel, title: str = "") -> Figure:
    return Figure("demo", title, panels, "A caption.")


def panel(*series: Series, **fields: Any) -> Panel:
    return Panel("training step", "loss (nats)", series, **fields)


def count_pixels(png: bytes, color: str) -> int:
    pixels = imread(io.BytesIO(png))[..., :3]
    return int((np.abs(pixels - np.array(to_rgb(color))).max(axis=-1) < 0.02).sum())


@pytest.mark.parametrize("style", ["line", "dashed", "points", "steps", "bar"])
def test_each_style_is_drawn_with_its_interval(style):
    x, y = np.arange(1.0, 9.0), np.linspace(2.0, 1.0, 8)
    plain = to_png(figure(panel(Series("ours", x, y, style=style))))
    width, height = struct.unpack(">II", plain[16:24])
    assert 600 < width < 700
    assert 450 < height < 550
    assert count_pixels(plain, BLUE) > 300
    assert count_pixels(plain, "#FFFFFF") > 0.5 * width * height
    banded = to_png(figure(panel(Series("ours", x, y, y - 0.2, y + 0.2, style=style))))
    changed = imread(io.BytesIO(plain)) != imread(io.BytesIO(banded))
    assert changed.any(axis=-1).sum() > 300


def test_save_writes_what_the_notebook_shows(tmp_path):
    picture = figure(panel(Series("ours", [1, 2], [3, 4])))
    save(picture, tmp_path / "demo.png")
    assert os.listdir(tmp_path) == ["demo.png"]
    assert (tmp_path / "demo.png").read_bytes() == picture._repr_png_()


def test_look_is_independent_of_the_users_settings():
    picture = figure(panel(Series("ours", [1, 2], [3, 4])), title="Title")
    expected = to_png(picture)
    with matplotlib.rc_context({"text.color": "red", "font.size": 30, "axes.grid": True}):
        before = dict(matplotlib.rcParams)
        assert to_png(picture) == expected
        assert dict(matplotlib.rcParams) == before


def test_drawing_needs_neither_pyplot_nor_a_display():
    code = (
        "import sys\n"
        "from jaxlab.reporting.figures import Figure, Panel, Series, to_png\n"
        "assert 'matplotlib' not in sys.modules\n"
        "to_png(Figure('a', '', [Panel('x', 'y', [Series('s', [1, 2], [1, 2])])], ''))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "DISPLAY"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


def legends(canvas: matplotlib.figure.Figure) -> list[Legend]:
    found = [*canvas.legends, *(axes.get_legend() for axes in canvas.axes)]
    return [legend for legend in found if legend is not None]


@pytest.mark.parametrize("shared", [True, False])
def test_legends_stay_outside_the_axes_and_inside_the_picture(shared):
    x = np.arange(5)
    names = [f"a rather long name of arm {i}" for i in range(7)]
    shift = 0 if shared else 7
    panels = [
        panel(*(Series(name, x, x + i) for i, name in enumerate(names)), title="First"),
        panel(*(Series(f"{name[:-1]}{i + shift}", x, x) for i, name in enumerate(names))),
        panel(Series("", list("abc"), [1, 2, 3], style="bar"), shaded=[(0, 1, "area")]),
    ]
    canvas = draw(figure(*panels, title="A title"))
    canvas.draw_without_rendering()
    found = legends(canvas)
    assert len(found) == (1 if shared else 3)
    for legend in found:
        box = legend.get_window_extent()
        assert all(not box.overlaps(axes.bbox) for axes in canvas.axes)
        assert canvas.bbox.x0 <= box.x0 < box.x1 <= canvas.bbox.x1
        assert canvas.bbox.y0 <= box.y0 < box.y1 <= canvas.bbox.y1
    for axes in canvas.axes:  # not squeezed away by the legends
        assert axes.bbox.height > 200
        assert axes.bbox.width > 400


def legend_labels(legend: Legend) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def test_equal_labels_share_a_colour_and_one_entry():
    first = panel(
        Series("ours", [1, 2], [1, 2]), Series("ours", [1, 2], [2, 1]), Series("old", [1], [1])
    )
    second = panel(Series("old", [1, 2], [1, 2]), Series("ours", [1, 2], [2, 3], style="bar"))
    canvas = draw(figure(first, second))
    (legend,) = legends(canvas)
    assert legend_labels(legend) == ["ours", "old"]
    ours, again, old = canvas.axes[0].lines
    assert to_hex(ours.get_color()) == to_hex(again.get_color()) == BLUE.lower()
    assert to_hex(old.get_color()) == VERMILION.lower()
    assert to_hex(canvas.axes[1].lines[0].get_color()) == VERMILION.lower()
    assert to_hex(canvas.axes[1].patches[0].get_facecolor()) == BLUE.lower()


def test_lines_differ_without_colour():
    lines = [Series(f"arm {i}", range(50), range(50)) for i in range(5)]
    canvas = draw(figure(panel(*lines)))
    styles = {str(line._unscaled_dash_pattern) for line in cast(Any, canvas.axes[0].lines)}
    assert len(styles) == 5


def test_unlabelled_series_is_grey_and_without_a_legend():
    canvas = draw(figure(panel(Series("", [0, 1], [0, 1], style="dashed"))))
    assert legends(canvas) == []
    assert to_hex(canvas.axes[0].lines[0].get_color()) == "#8a8a8a"


def test_bars_stand_beside_one_another_and_names_are_merged():
    bars = panel(
        Series("a", ["x", "y"], [1, 2], style="bar"),
        Series("b", ["y", "z"], [3, 4], style="bar"),
        Series("best", ["x", "z"], [5, 5], style="points"),
    )
    axes = draw(figure(bars)).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["x", "y", "z"]
    spans = sorted((p.get_x(), p.get_x() + p.get_width()) for p in cast(Any, axes.patches))
    assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(spans))
    assert [round(start + 0.2) for start, _ in spans] == [0, 1, 1, 2]
    np.testing.assert_allclose(cast(Any, axes.lines[-1].get_xdata()), [0, 2])


def test_numeric_bars_keep_their_distance():
    bars = panel(*(Series(name, [10, 20, 40], [1, 2, 3], style="bar") for name in "ab"))
    axes = draw(figure(bars)).axes[0]
    widths = [patch.get_width() for patch in cast(Any, axes.patches)]
    np.testing.assert_allclose(widths, 4.0)
    assert axes.get_xticks().tolist() == [10, 20, 40]


def test_points_over_names_do_not_hide_each_other():
    points = panel(*(Series(name, ["x", "y"], [1, 2], style="points") for name in "ab"))
    first, second = draw(figure(points)).axes[0].lines
    np.testing.assert_allclose(np.asarray(second.get_xdata()) - np.asarray(first.get_xdata()), 0.4)


@pytest.mark.parametrize(
    ("x", "labels"),
    [
        ([8, 16, 32, 64], ["8", "16", "32", "64"]),
        (np.geomspace(1, 60, 40), ["1", "2", "5", "10", "20", "50"]),
        (np.linspace(1.0, 3.0, 40), ["1", "1.5", "2", "2.5", "3"]),
    ],
)
def test_log_ticks_are_plain_numbers(x, labels):
    canvas = draw(figure(panel(Series("a", x, x), xscale="log")))
    canvas.draw_without_rendering()
    axis = canvas.axes[0].xaxis
    low, high = axis.get_view_interval()
    shown = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    assert [label.get_text() for place, label in shown if low <= place <= high] == labels


@pytest.mark.filterwarnings("error")
def test_what_an_axis_cannot_show_is_left_out():
    series = [
        Series("zero", [1, 2, 3], [0.0, -1.0, 5.0], [0.0, -2.0, 4.0], [1.0, 0.0, 6.0]),
        Series("nothing", [1, 2], [np.nan, -1.0]),
        Series("one seed", [1, 2], [1.0, 2.0], [-np.inf] * 2, [np.inf] * 2, style="points"),
    ]
    canvas = draw(figure(panel(*series, yscale="log"), panel(Series("none", [1], [np.nan]))))
    canvas.draw_without_rendering()
    low, high = canvas.axes[0].get_ylim()
    assert 0.5 < low < high < 10


def test_marks_and_shades():
    marked = panel(
        Series("a", [0, 10], [0, 1]),
        vertical_lines=[(3, "switch")],
        shaded=[(5, 8, "decay"), (8, 10, "rest")],
    )
    canvas = draw(figure(marked, title="Title"))
    axes: Axes = canvas.axes[0]
    assert [text.get_text() for text in axes.texts] == ["switch"]
    assert legend_labels(canvas.legends[0]) == ["a", "decay", "rest"]
    assert len({to_hex(patch.get_facecolor()) for patch in axes.patches}) == 2


def test_several_panels_are_lettered_and_titles_wrapped():
    one = panel(Series("a", [0], [0]), title="word " * 20)
    canvas = draw(figure(*[one] * 4))
    assert [axes.get_title(loc="left")[:3] for axes in canvas.axes] == ["(a)", "(b)", "(c)", "(d)"]
    assert canvas.axes[0].get_title(loc="left").count("\n") == 2
    assert canvas.axes[3].get_subplotspec().get_gridspec().get_geometry() == (2, 2)  # type: ignore[union-attr]
    assert draw(figure(one)).axes[0].get_title().startswith("word")


def test_declarations_are_plain_and_comparable():
    series = Series("a", np.arange(3), np.ones(3, np.float32))
    assert series == Series("a", (0.0, 1.0, 2.0), [1, 1, 1])
    assert not series.categorical
    assert Series("a", np.array(["x", "y"]), [1, 2]).categorical


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": [1, 2], "y": [1]}, r"x has shape \(2,\), y has \(1,\)"),
        ({"x": [1], "y": [1], "low": [1, 2], "high": [1]}, "low has shape"),
        ({"x": [1], "y": [1], "low": [1]}, "together"),
        ({"x": [], "y": []}, "not empty"),
        ({"x": [[1]], "y": [[1]]}, r"shape \(1, 1\)"),
        ({"x": [1], "y": [1], "style": "pie"}, "style='pie'"),
        ({"x": [1], "y": ["high"]}, "could not convert"),
    ],
)
def test_misused_series(arguments, message):
    with pytest.raises(ValueError, match=message):
        Series("a", **arguments)


@pytest.mark.parametrize(
    ("series", "fields", "message"),
    [
        ([], {}, "no series"),
        ([Series("a", [1], [1])], {"yscale": "cubic"}, "yscale='cubic'"),
        ([Series("a", [1], [1]), Series("b", ["x"], [1])], {}, "mixes names and numbers"),
        ([Series("a", [1], [1], style="bar")], {"xscale": "log"}, "log scale along x"),
        ([Series("a", ["x"], [1])], {"xscale": "log"}, "log scale along x"),
    ],
)
def test_misused_panel(series, fields, message):
    with pytest.raises(ValueError, match=message):
        panel(*series, **fields)


def test_misused_axes_and_figure():
    one = Series("a", [1], [1])
    with pytest.raises(ValueError, match="both axes"):
        Panel("", "y", [one])
    for name in ("", "a/b", "..", "a b", ".hidden"):
        with pytest.raises(ValueError, match="figure name="):
            Figure(name, "", [panel(one)], "")
    with pytest.raises(ValueError, match="no panel"):
        Figure("a", "", [], "")
