"""Line charts and scatter plots as HTML: curves in a stretched SVG, words as text beside it.

Text inside a stretched SVG would be distorted and unreadable on a phone. As positioned HTML it
keeps its size, and the same markup fits every width without a script. Colours are CSS variables
(``--c0`` ...), so that one chart serves light and dark mode.

No library draws them, because a report is one file of some 60 KB, read offline and without scripts:
plotly.js's smallest bundle has 1.2 MB. uPlot (51 KB) needs a script for every curve, and would save
some 100 lines here: it names neither dots nor events, for which `trainer.report.elements` is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from trainer.report import elements
from trainer.report.elements import Box, Floats, Scale

SIZE = 1000  # width and height in the SVG's own coordinates

Formatter = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """A curve: `steps` [N], ascending, and `values` [N]; non-finite values leave a gap."""

    name: str
    colour: int
    steps: Floats
    values: Floats

    def thinned(self) -> Series:
        """This curve with no more points than a screen can show."""
        return Series(self.name, self.colour, *elements.thin(self.steps, self.values))


@dataclass(frozen=True)
class Axis:
    """A choice of x axis, such as tokens read, onto which steps are mapped."""

    unit: str
    of_steps: Callable[[Floats], Floats]


@dataclass(frozen=True)
class Level:
    """A horizontal reference line."""

    name: str
    value: float


@dataclass(frozen=True)
class Mark:
    """An event at a step; without a name it is drawn as a short stroke at the bottom."""

    name: str
    step: float


@dataclass(frozen=True)
class LineChart:
    """A titled chart of curves over steps; `shares`: whether the values are shares (percent)."""

    title: str
    note: str
    series: Sequence[Series]
    form: Formatter
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    from_zero: bool = False
    shares: bool = False

    @property
    def has_lines(self) -> bool:
        """Whether any curve has two points; one dot is no picture of anything."""
        return any(len(line.steps) > 1 for line in self.series)


@dataclass(frozen=True)
class Point:
    """A named dot of a scatter plot."""

    name: str
    colour: int
    x: float
    y: float


def line_chart(chart: LineChart, axes: Sequence[Axis]) -> str:
    """`chart`, drawn once for each of `axes`; the page shows the one that the reader chooses."""
    series = [line.thinned() for line in chart.series]
    levels = np.array([level.value for level in chart.levels])
    values = np.concatenate([*(line.values for line in series), levels])
    low, high = elements.padded(values, from_zero=chart.from_zero)
    y = Scale(high, low)
    plots = "".join(_plot(chart, series, axis, y) for axis in axes)
    entries = [_legend_entry(line, chart.form) for line in series]
    entries += [_legend_level(level, chart.form) for level in chart.levels]
    legend = "".join(entries)
    hover = json.dumps(_hover(chart, series, axes, y), separators=(",", ":"))
    return (
        f'<figure class="chart" data-hover="{escape(hover)}">{_caption(chart.title, chart.note)}'
        f'<div class="legend">{legend}</div>{plots}</figure>'
    )


def scatter(
    title: str, note: str, points: Sequence[Point], level: Level | None, unit: str, form: Formatter
) -> str:
    """Named points, with shares on y and a log scale on x, and an optional reference line."""
    left, right = min(point.x for point in points) / 1.8, max(point.x for point in points) * 1.8
    x = Scale(math.log10(left), math.log10(right))
    heights = np.array([point.y for point in points])
    low, high, fits = elements.around_points(heights, level.value if level else None)
    levels = [level] if level and fits else []
    note += f"; {level.name}: {elements.percent(level.value)}" if level and not fits else ""
    y = Scale(high, low)
    ticks = elements.nice_ticks(low, high)
    places = [(x(math.log10(point.x)), y(point.y)) for point in points]
    named_at = _heights_of_names(points, places, [y(line.value) for line in levels])
    rules = [_rule(y(tick), "grid") for tick in ticks]
    rules += [_rule(y(line.value), "level") for line in levels]
    inside = [
        _svg([*rules, *map(_leader, points, places, named_at)]),
        *(_y_label(_tick(tick, shares=True), y(tick)) for tick in ticks),
        *(_x_label(form(tick), x(math.log10(tick))) for tick in elements.log_ticks(left, right)),
        *(_level_label(line.name, y(line.value)) for line in levels),
        *(_dot(*dot, form) for dot in zip(points, places, named_at, strict=True)),
    ]
    plot = _frame(title, "", inside, unit)
    return f'<figure class="chart">{_caption(title, note)}{plot}</figure>'


def cloud(title: str, note: str, points: Sequence[Sequence[float]], colour: int) -> str:
    """Many dots [N, 2] on equal scales: the right number on x, the predicted one on y."""
    low, high = elements.padded(np.array(points, dtype=np.float64))
    x, y, ticks = Scale(low, high), Scale(high, low), elements.nice_ticks(low, high, 5)
    dots = "".join(f"M{SIZE * x(right):.0f} {SIZE * y(told):.0f}h0" for right, told in points)
    inside = [
        _svg(
            [
                *(_rule(y(tick), "grid") for tick in ticks),
                f'<line class="level" x1="0" y1="{SIZE}" x2="{SIZE}" y2="0"/>',
                f'<path class="dots" style="--c:var(--c{colour})" d="{dots}"/>',
            ]
        ),
        *(_y_label(elements.short(tick), y(tick)) for tick in ticks),
        *(_x_label(elements.short(tick), x(tick)) for tick in ticks),
    ]
    plot = _frame(title, "", inside, "right")
    return f'<figure class="chart">{_caption(title, note)}{plot}</figure>'


def _plot(chart: LineChart, series: Sequence[Series], axis: Axis, y: Scale) -> str:
    x = Scale(0.0, _right_end(series, axis))
    ticks = elements.nice_ticks(y.end, y.start)
    curves = [
        f'<path style="--c:var(--c{line.colour})" '
        f'd="{curve(x(axis.of_steps(line.steps)), y(line.values))}"/>'
        for line in series
    ]
    rules = [_rule(y(tick), "grid") for tick in ticks]
    levels = [_rule(y(level.value), "level") for level in chart.levels]
    inside = [
        _svg([*rules, *levels, *curves]),
        *(_y_label(_tick(tick, chart.shares), y(tick)) for tick in ticks),
        *(_x_label(elements.short(tick), x(tick)) for tick in elements.nice_ticks(0, x.end, 5)),
    ]
    # A chart of evaluations ends before what has happened since the last one.
    marks = [(mark, place) for mark in chart.marks if (place := x(_place(axis, mark.step))) <= 1]
    named = [(mark, place) for mark, place in marks if mark.name]
    rows = elements.rows_of_names([(place, mark.name) for mark, place in named])
    inside += [_mark(mark, place, row) for (mark, place), row in zip(named, rows, strict=True)]
    inside += [_stroke(place) for mark, place in marks if not mark.name]
    above = 1 + max((row for row in rows if row is not None), default=-1)
    return _frame(chart.title, axis.unit, inside, axis.unit, above)


def _hover(
    chart: LineChart, series: Sequence[Series], axes: Sequence[Axis], y: Scale
) -> dict[str, Any]:
    """The data with which the page's script shows the values under the pointer."""
    return {
        "top": y.start,
        "bottom": y.end,
        "shares": chart.shares,
        "curves": [
            {"name": line.name, "colour": line.colour, "y": _rounded(line.values)}
            for line in series
        ],
        "axes": {
            axis.unit: {
                "unit": axis.unit,
                "end": _right_end(series, axis),
                "x": [_rounded(axis.of_steps(line.steps)) for line in series],
            }
            for axis in axes
        },
    }


def _right_end(series: Sequence[Series], axis: Axis) -> float:
    ends = [_place(axis, line.steps[-1]) for line in series if len(line.steps)]
    return max(ends, default=1.0) or 1.0


def _place(axis: Axis, step: float) -> float:
    return float(axis.of_steps(np.array([step], dtype=np.float64))[0])


def _rounded(values: Floats) -> list[float | None]:
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values.tolist()]


def curve(x: Floats, y: Floats) -> str:
    """SVG path commands for coordinates in 0..1; a new piece begins after each gap.

    The empty line at the start of each piece makes a piece of one point visible, as a dot.
    """
    commands, drawing = [], False
    for across, down in zip((x * SIZE).tolist(), (y * SIZE).tolist(), strict=True):
        if math.isfinite(down):
            place = f"{across:.1f} {down:.1f}"
            commands.append(f"L{place}" if drawing else f"M{place}h0")
        drawing = math.isfinite(down)
    return "".join(commands)


def _frame(title: str, axis: str, inside: Sequence[str], unit: str, above: int = 0) -> str:
    """The frame of a plot, with its content.

    `axis` is the unit of the x axis that shows this plot; an empty one always shows it. `above` is
    the number of rows of words above the plot.
    """
    choice = f' by by-{axis}" data-axis="{axis}' if axis else ""
    return (
        f'<div class="plot{choice}" style="--rows:{above}" role="img" aria-label="{escape(title)}">'
        f'<div class="area">{"".join(inside)}</div><div class="unit">{escape(unit)}</div></div>'
    )


def _svg(inside: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(inside)}</svg>"
    )


def _caption(title: str, note: str) -> str:
    return f"<figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p></figcaption>"


def _legend_entry(series: Series, form: Formatter) -> str:
    finite = series.values[np.isfinite(series.values)]
    last = form(float(finite[-1])) if len(finite) else ""
    words = f"<i></i>{escape(series.name)} <b>{last}</b>"
    return f'<span style="--c:var(--c{series.colour})">{words}</span>'


def _legend_level(level: Level, form: Formatter) -> str:
    words = f"{escape(level.name)} <b>{form(level.value)}</b>"
    return f'<span><i class="level"></i>{words}</span>'


def _tick(value: float, shares: bool) -> str:
    return f"{elements.short(100 * value)}%" if shares else elements.short(value)


def _rule(y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="0" x2="{SIZE}" y1="{y * SIZE:.1f}" y2="{y * SIZE:.1f}"/>'


def _y_label(text: str, y: float) -> str:
    return f'<span class="y" style="top:{y:.2%}">{escape(text)}</span>'


def _x_label(text: str, x: float) -> str:
    return f'<span class="x" style="left:{x:.2%}">{escape(text)}</span>'


def _level_label(text: str, y: float) -> str:
    return f'<span class="beat" style="top:{y:.2%}">{escape(text)}</span>'


def _mark(mark: Mark, x: float, row: int | None) -> str:
    """A line at `x`, with its name in a `row` above the plot if there is room for it."""
    if row is None:
        return f'<span class="mark" style="left:{x:.2%};--row:-1"></span>'
    side = "before" if elements.is_before(x) else "after"
    place = f"left:{x:.2%};--row:{row}"
    words = f'<em title="{escape(mark.name)}">{escape(elements.shortened(mark.name))}</em>'
    return f'<span class="mark {side}" style="{place}">{words}</span>'


def _stroke(x: float) -> str:
    return f'<span class="stroke" style="left:{x:.2%}"></span>'


def _heights_of_names(
    points: Sequence[Point], places: Sequence[tuple[float, float]], levels: Sequence[float]
) -> list[float]:
    named = [
        (*place, f"{_name(point)} {elements.percent(point.y)}")
        for point, place in zip(points, places, strict=True)
    ]
    return elements.free_heights(named, [Box(0.7, 1.0, y - elements.LINE, y) for y in levels])


def _name(point: Point) -> str:
    return elements.shortened(point.name, elements.LONGEST_OF_DOT)


def _leader(point: Point, place: tuple[float, float], words_at: float) -> str:
    """A line from a dot to its name, if the name was moved."""
    x, y = place
    if abs(words_at - y) < elements.LINE:
        return ""
    end = x + elements.GAP * (-0.5 if elements.is_before(x) else 0.5)
    ends = zip(("x1", "y1", "x2", "y2"), (x, y, end, words_at), strict=True)
    drawn = " ".join(f'{name}="{SIZE * value:.1f}"' for name, value in ends)
    return f'<line class="leader" style="--c:var(--c{point.colour})" {drawn}/>'


def _dot(point: Point, place: tuple[float, float], words_at: float, form: Formatter) -> str:
    x, y = place
    side = "before" if elements.is_before(x) else "after"
    words = f"<b>{escape(_name(point))}</b> {elements.percent(point.y)}"
    style = f"--c:var(--c{point.colour});left:{x:.2%};top:"
    return (
        f'<span class="dot" style="{style}{y:.2%}"><i></i></span>'
        f'<span class="dot {side}" title="{escape(point.name)}: {form(point.x)}" '
        f'style="{style}{words_at:.2%}"><em>{words}</em></span>'
    )
