"""Declarative figures: an experiment says what is to be seen, this module draws it.

An experiment returns a `Figure` of plain numbers; it needs no matplotlib and can be tested
without drawing. Drawing uses matplotlib's objects directly, never pyplot, so nothing global
changes and it works without a display and in threads other than the main one.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import re
import string
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from jaxlab.reporting.files import write_atomic

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

__all__ = ["Figure", "Panel", "Scale", "Series", "Style", "draw", "save", "to_png"]

Style = Literal["line", "dashed", "points", "steps", "bar"]
Scale = Literal["linear", "log"]

_DOTS_PER_INCH = 150
_PANEL_SIZE = (4.4, 3.1)  # inches, without the legend below
_LEGEND_LINE = 0.19  # inches
_MARKED_POINTS = 12  # lines of up to so many points show each of them

# Okabe and Ito's palette, which survives the common colour deficiencies; its yellow comes last
# because it is faint on white.
_COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#F0E442",
)
# Neighbours differ without colour as well.
_LINES: tuple[Any, ...] = (
    "solid",
    (0, (7, 1.5, 1.2, 1.5)),
    (0, (1.2, 1.2)),
    (0, (9, 2)),
    (0, (4, 1, 1, 1, 1, 1)),
)
_DASHES: tuple[Any, ...] = ((0, (4, 2)), (0, (2, 1.5)), (0, (6, 3)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo")
_SHADES = ("#E3E3E3", "#F6E7C8", "#D9E8F2", "#E6DCEB")
_NEUTRAL = "#8A8A8A"
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "figure.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#4D4D4D",
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 5),
    "axes.formatter.use_mathtext": True,
    "lines.linewidth": 1.7,
    "lines.markersize": 5,
    "hatch.linewidth": 0.7,
}


@dataclass(frozen=True)
class Series:
    """One set of points of a panel.

    Attributes:
      label: name in the legend. Equal labels share their colour throughout the figure; an empty
        label is drawn in grey and left out of the legend.
      x: positions, [n], n >= 1, or the names of categories.
      y: values, [n]; NaN leaves a gap.
      low: lower ends of the interval around `y`, [n], or None.
      high: upper ends, [n]; given together with `low`.
      style: `"line"`, `"dashed"` (baselines and references), `"points"`, `"steps"` (a value
        holds until the next position) or `"bar"`.

    Raises:
      ValueError: lengths differ, there is no point, only one of `low` and `high` is given, or
        an unknown style.
    """

    label: str
    x: Sequence[float] | Sequence[str] | np.ndarray
    y: Sequence[float] | np.ndarray
    low: Sequence[float] | np.ndarray | None = None
    high: Sequence[float] | np.ndarray | None = None
    style: Style = "line"

    def __post_init__(self) -> None:
        if self.style not in get_args(Style):
            raise ValueError(
                f"series {self.label!r}: style={self.style!r} is none of "
                f"{', '.join(map(repr, get_args(Style)))}"
            )
        if (self.low is None) != (self.high is None):
            raise ValueError(f"series {self.label!r}: low and high must be given together")
        count = np.shape(self.y)[0] if np.ndim(self.y) == 1 else 0
        if count == 0:
            raise ValueError(
                f"series {self.label!r}: y must be a vector that is not empty, got shape "
                f"{np.shape(self.y)}"
            )
        for field in ("x", "y", "low", "high"):
            given = getattr(self, field)
            if given is None:
                continue
            if np.shape(given) != (count,):
                raise ValueError(
                    f"series {self.label!r}: {field} has shape {np.shape(given)}, y has ({count},)"
                )
            names = field == "x" and np.asarray(given).dtype.kind == "U"
            plain = tuple(map(str if names else float, given))
            object.__setattr__(self, field, plain)  # the way to normalise a frozen dataclass

    @property
    def categorical(self) -> bool:
        """Whether `x` holds names."""
        return isinstance(self.x[0], str)


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
      xlabel: what lies along x, with its unit.
      ylabel: what lies along y, with its unit.
      series: what is drawn, in this order; at least one.
      title: above the panel.
      vertical_lines: marked positions, (x, label) each.
      shaded: marked ranges, (x0, x1, label) each.
      xscale: `"linear"` or `"log"`; a log axis leaves out what is not positive.
      yscale: as `xscale`.

    Raises:
      ValueError: no series, an unlabelled axis, an unknown scale, names and numbers mixed
        along x, or a log scale along x under bars or names.
    """

    xlabel: str
    ylabel: str
    series: Sequence[Series]
    title: str = ""
    vertical_lines: Sequence[tuple[float, str]] = ()
    shaded: Sequence[tuple[float, float, str]] = ()
    xscale: Scale = "linear"
    yscale: Scale = "linear"

    def __post_init__(self) -> None:
        for field in ("series", "vertical_lines", "shaded"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        if not self.series:
            raise ValueError(f"panel {self.title!r} has no series")
        if not (self.xlabel and self.ylabel):
            raise ValueError(f"panel {self.title!r}: both axes need a label")
        for field in ("xscale", "yscale"):
            if getattr(self, field) not in get_args(Scale):
                raise ValueError(
                    f"panel {self.title!r}: {field}={getattr(self, field)!r} is none of "
                    f"{', '.join(map(repr, get_args(Scale)))}"
                )
        if len({series.categorical for series in self.series}) == 2:
            raise ValueError(f"panel {self.title!r} mixes names and numbers along x")
        bars = any(series.style == "bar" for series in self.series)
        if self.xscale == "log" and (bars or self.series[0].categorical):
            raise ValueError(f"panel {self.title!r}: bars and names have no log scale along x")


@dataclass(frozen=True)
class Figure:
    """A picture of one or several panels.

    Attributes:
      name: file name without suffix: letters, digits, `.`, `_` and `-`.
      title: above the picture; may be empty.
      panels: at least one, at most three to a row. Several are lettered (a), (b), ...
      caption: what is to be seen, for the report below the picture.

    Raises:
      ValueError: a name that is no file name, or no panel.
    """

    name: str
    title: str
    panels: Sequence[Panel]
    caption: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "panels", tuple(self.panels))
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"figure name={self.name!r} must consist of letters, digits, '.', '_' and '-'"
            )
        if not self.panels:
            raise ValueError(f"figure {self.name!r} has no panel")

    def _repr_png_(self) -> bytes:
        return to_png(self)


def draw(figure: Figure) -> matplotlib.figure.Figure:
    """The picture as a matplotlib figure, which can still be changed before it is saved.

    One legend lies below the panels if they share labels, else each panel has its own below it.
    """
    from matplotlib.figure import Figure as Canvas

    with _own_settings():
        canvas = Canvas(layout="constrained", dpi=_DOTS_PER_INCH)
        _draw_canvas(canvas, figure)
    return canvas


def to_png(figure: Figure) -> bytes:
    """The picture as the content of a PNG file of 150 dots per inch.

    It neither depends on the user's matplotlib settings nor alters them.
    """
    buffer = io.BytesIO()
    with _own_settings():
        draw(figure).savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
    return buffer.getvalue()


def save(figure: Figure, path: os.PathLike[str] | str) -> None:
    """Writes the picture as a PNG file of 150 dots per inch, whole or not at all.

    Raises:
      jaxlab.errors.StorageError: the file could not be written.
    """
    write_atomic(path, to_png(figure))


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def _draw_canvas(canvas: matplotlib.figure.Figure, figure: Figure) -> None:
    count = len(figure.panels)
    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    width, height = columns * _PANEL_SIZE[0], rows * _PANEL_SIZE[1]
    if figure.title:
        title = textwrap.fill(figure.title, int(10 * width))
        canvas.suptitle(title, fontweight="bold")
        height += 0.22 * (title.count("\n") + 1)
    labels = [_labels(panel) for panel in figure.panels]
    union = list(dict.fromkeys(itertools.chain(*labels)))
    separate = count > 1 and sum(map(len, labels)) == len(union)
    areas = (label for panel in figure.panels for _, _, label in panel.shaded)
    shades = {label: n for n, label in enumerate(dict.fromkeys(areas))}
    axes, keys = [], []
    for i, panel in enumerate(figure.panels):
        ax = canvas.add_subplot(rows, columns, i + 1)
        letter = f"({string.ascii_lowercase[i]}) " if 1 < count <= 26 else ""
        title = textwrap.fill(letter + panel.title, 48).strip()
        ax.set_title(title, loc="left" if letter else "center")
        looks = {label: n for n, label in enumerate(labels[i] if separate else union)}
        axes.append(ax)
        keys.append(_draw_panel(ax, panel, looks, shades))
    if separate:
        canvas.set_size_inches(width, height)
        canvas.draw_without_rendering()  # places the tick labels that the legends go below
        lines = [_legend_below(ax, key) for ax, key in zip(axes, keys, strict=True)]
        extra = sum(max(lines[i : i + columns]) for i in range(0, count, columns))
    else:
        merged = {}
        for label, handle in itertools.chain.from_iterable(key.items() for key in keys):
            merged.setdefault(label, handle)
        extra = _legend(canvas, merged, width, loc="outside lower center")
    canvas.set_size_inches(width, height + _LEGEND_LINE * extra)


def _labels(panel: Panel) -> list[str]:
    return list(dict.fromkeys(series.label for series in panel.series if series.label))


def _draw_panel(
    ax: Axes, panel: Panel, looks: dict[str, int], shades: dict[str, int]
) -> dict[str, Any]:
    """Draws into `ax`; returns what the legend shows, by label."""
    ax.set(xlabel=panel.xlabel, ylabel=panel.ylabel, xscale=panel.xscale, yscale=panel.yscale)
    ax.grid(axis="y", color="#E5E5E5", linewidth=0.7)
    keys: dict[str, Any] = {}
    for start, end, label in panel.shaded:
        color = _SHADES[shades[label] % len(_SHADES)]
        area = ax.axvspan(start, end, color=color, linewidth=0, zorder=0)
        keys.setdefault(label, area)
    names: dict[str, int] = {}
    if panel.series[0].categorical:
        for name in itertools.chain.from_iterable(series.x for series in panel.series):
            names.setdefault(str(name), len(names))
        _name_ticks(ax, list(names))
    elif 0 < len(_bar_places(panel)) <= 10:
        ax.set_xticks(_bar_places(panel))
    offsets, width = _side_by_side(panel)
    drawn: dict[str, Any] = {}
    for series, offset in zip(panel.series, offsets, strict=True):
        x = np.array([names[str(v)] if names else v for v in series.x], dtype=np.float64)
        x = _visible(x + offset, panel.xscale)
        y, low, high = (
            None if v is None else _visible(np.asarray(v), panel.yscale)
            for v in (series.y, series.low, series.high)
        )
        handle = _draw_series(ax, series.style, x, y, looks.get(series.label), width)
        if low is not None and high is not None:
            _draw_interval(ax, series.style, x, low, high, looks.get(series.label))
        drawn.setdefault(series.label, handle)
    for position, label in panel.vertical_lines:
        _mark(ax, position, label)
    if panel.xscale == "log":
        _log_ticks(ax.xaxis, [float(v) for series in panel.series for v in series.x])
    if panel.yscale == "log":
        _log_ticks(ax.yaxis)
    return {label: handle for label, handle in (drawn | keys).items() if label}


def _draw_series(
    ax: Axes, style: Style, x: np.ndarray, y: Any, look: int | None, width: float
) -> Any:
    """One series in the colour, line and marker number `look`; grey for None."""
    color, number = _color(look), look or 0
    if style == "bar":
        hatch = _HATCHES[number % len(_HATCHES)]
        return ax.bar(x, y, width, color=color, edgecolor="white", linewidth=0.6, hatch=hatch)
    marker = _MARKERS[number % len(_MARKERS)]
    if style == "points":
        dense = len(x) > 200
        return ax.plot(
            x,
            y,
            linestyle="none",
            marker=marker,
            markersize=3 if dense else 6,
            alpha=0.6 if dense else 1,
            color=color,
            markeredgewidth=0,
            zorder=3,
        )[0]
    cycle = _DASHES if style == "dashed" else _LINES
    return ax.plot(
        x,
        y,
        color=color,
        linestyle=cycle[number % len(cycle)],
        drawstyle="steps-post" if style == "steps" else "default",
        marker=marker if style == "line" and len(x) <= _MARKED_POINTS else None,
    )[0]


def _draw_interval(
    ax: Axes, style: Style, x: np.ndarray, low: np.ndarray, high: np.ndarray, look: int | None
) -> None:
    """A band around lines, a bar with end marks through points and bars."""
    if style in ("points", "bar"):
        color = "#333333" if style == "bar" else _color(look)
        ax.vlines(x, low, high, color=color, linewidth=1.2, zorder=4)
        for end in (low, high):
            ax.plot(x, end, linestyle="none", marker="_", color=color, markersize=6, zorder=4)
        return
    step = "post" if style == "steps" else None
    ax.fill_between(x, low, high, step=step, color=_color(look), alpha=0.18, linewidth=0)


def _side_by_side(panel: Panel) -> tuple[list[float], float]:
    """Shift of each series along x and the width of a bar.

    Bars of one panel, or else points over names, stand beside one another.
    """
    bars = [series.style == "bar" for series in panel.series]
    names = panel.series[0].categorical
    moved = bars if any(bars) or not names else [s.style == "points" for s in panel.series]
    spacing = 1.0
    if not names:
        gaps = np.diff(_bar_places(panel))
        spacing = float(gaps.min()) if gaps.size else 1.0
    share = 0.8 * spacing / max(1, sum(moved))
    places = itertools.count()
    middle = (sum(moved) - 1) / 2
    return [(next(places) - middle) * share if move else 0.0 for move in moved], share


def _bar_places(panel: Panel) -> np.ndarray:
    return np.unique([float(x) for s in panel.series if s.style == "bar" for x in s.x])


def _name_ticks(ax: Axes, names: list[str]) -> None:
    room = max(6, 44 // len(names))  # characters beside one another below a panel
    wrapped = [textwrap.fill(name, room, break_long_words=False) for name in names]
    ax.set_xticks(range(len(names)), wrapped)
    ax.set_xlim(-0.6, len(names) - 0.4)
    if max(len(line) for name in wrapped for line in name.split("\n")) > room:
        ax.set_xticks(range(len(names)), names)
        ax.tick_params(axis="x", rotation=30)
        for label in ax.get_xticklabels():
            label.set(horizontalalignment="right", rotation_mode="anchor")


def _log_ticks(axis: Axis, positions: Sequence[float] = ()) -> None:
    """Ticks at the positions if they are few and apart, else at round numbers of a short range."""
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
        LogLocator,
        MaxNLocator,
        NullFormatter,
    )

    start, end = axis.get_view_interval()
    decades = math.log10(end / start)
    axis.set_minor_formatter(NullFormatter())
    places = np.unique([v for v in positions if v > 0 and math.isfinite(v)])
    if 2 <= len(places) <= 8 and np.diff(np.log10(places)).min() > 0.09 * decades:
        axis.set_major_locator(FixedLocator(places.tolist()))
        axis.set_minor_locator(FixedLocator([]))
    elif decades < 0.8:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axis.set_minor_locator(FixedLocator([]))
    elif decades < 2.5:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        return
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))


def _mark(ax: Axes, position: float, label: str) -> None:
    """A vertical line, named along its upper end."""
    from matplotlib.patheffects import withStroke

    ax.axvline(position, color="#4D4D4D", linewidth=1, linestyle=(0, (3, 2)), zorder=1.5)
    ax.annotate(
        label,
        (position, 1),
        xytext=(-2, -2),
        xycoords=ax.get_xaxis_transform(),
        textcoords="offset points",
        rotation=90,
        fontsize=8,
        color="#333333",
        horizontalalignment="right",
        verticalalignment="top",
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
        zorder=5,
    )


def _legend(owner: Any, keys: dict[str, Any], width: float, **place: Any) -> int:
    """Adds a legend `width` inches wide to an axes or a figure; returns its number of lines."""
    if not keys:
        return 0
    room = int(13 * width)  # characters of the legend's font
    labels = [textwrap.fill(label, room - 8) for label in keys]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    lines = -(-len(labels) // max(1, room // (longest + 8)))
    owner.legend(
        list(keys.values()),
        labels,
        ncols=-(-len(labels) // lines),
        frameon=False,
        handlelength=2.6,
        columnspacing=1.6,
        borderpad=0.1,
        borderaxespad=0.3,
        **place,
    )
    return lines + sum(label.count("\n") for label in labels)


def _legend_below(ax: Axes, keys: dict[str, Any]) -> int:
    """A legend below the axis label of `ax`; returns its number of lines."""
    from matplotlib.transforms import ScaledTranslation

    canvas = ax.get_figure(root=True)
    axis = ax.xaxis.get_tightbbox()
    assert canvas is not None
    drop = 0 if axis is None else (axis.y0 - ax.bbox.y0) / canvas.dpi
    return _legend(
        ax,
        keys,
        _PANEL_SIZE[0],
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        bbox_transform=ax.transAxes + ScaledTranslation(0, drop, canvas.dpi_scale_trans),
    )


def _color(look: int | None) -> str:
    return _NEUTRAL if look is None else _COLORS[look % len(_COLORS)]


def _visible(values: np.ndarray, scale: Scale) -> np.ndarray:
    """`values` with NaN where the axis cannot show them."""
    shown = np.isfinite(values) & ((values > 0) | (scale == "linear"))
    return np.where(shown, values, np.nan)
