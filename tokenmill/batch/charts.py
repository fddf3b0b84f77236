"""Plots of a report as inline SVG: lines over time, and bars. They know figures and nothing of jobs.

Only shapes are drawn in SVG, stretched to the width that there is. Labels are text of the page around them,
so that they are readable at any width; what is plotted stands in a table below, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill.batch.elements import Element, add, element, table
from tokenmill.batch.progress import clock, short

_WIDTH, _HEIGHT = 1000.0, 200.0
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot; None where nothing is known. `style` is its class in the style sheet."""

    name: str
    style: str
    values: Sequence[float | None]


def line_chart(
    name: str, title: str, unit: str, series: Sequence[Series], *, ends: Sequence[float], of: Format = short
) -> Element:
    """Steps over time; value `i` holds until second `ends[i]`. Fractions are told with `of`."""
    highest = nice_ceiling(max((v for each in series for v in each.values if v is not None), default=0.0))
    starts = [0.0, *ends[:-1]]
    plot = _plot(f"{title}, {unit}, over time")
    for each in series:
        for points in _steps(each.values, starts, ends, highest):
            add(plot, element("polyline", points=points, class_=f"line {each.style}"))
    texts = [_texts(series, index, of) for index in range(len(ends))]
    for start, end, text in zip(starts, ends, texts, strict=True):
        add(plot, _hover(start / ends[-1], end / ends[-1], f"{clock(start)} to {clock(end)}: {text}"))
    marks = [(position, clock(position * ends[-1])) for position in (0.0, 0.5, 1.0)]
    rows = [
        [_span(start, end), *("" if each.values[i] is None else of(each.values[i] or 0) for each in series)]
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    legend = element("ul", *(element("li", each.name, class_=each.style) for each in series), class_="legend")
    return _figure(
        name,
        element("figcaption", element("strong", title), " ", element("span", unit, class_="unit")),
        legend if len(series) > 1 else None,
        _framed(plot, of(highest), of(highest / 2), marks),
        _as_table(["time", *(each.name for each in series)], rows),
    )


def histogram(
    name: str, title: str, unit: str, bins: Sequence[tuple[float, float, int]], *, note: str, of: Format
) -> Element:
    """Bars of equal width for bins that grow; `note` says the main figures in words."""
    highest = nice_ceiling(max(count for *_, count in bins), whole=True)
    plot = _plot(f"{title}: {note}")
    width = _WIDTH / len(bins)
    for index, (low, high, count) in enumerate(bins):
        bar = element(
            "rect",
            element("title", f"{of(low)} to {of(high)} {unit}: {count:,}"),
            x=_number(index * width + 0.08 * width),
            y=_number(_HEIGHT * (1 - count / highest)),
            width=_number(0.84 * width),
            height=_number(_HEIGHT * count / highest),
            class_="bar",
        )
        add(plot, bar)
    rows = [[f"{of(low)} to {of(high)}", f"{count:,}"] for low, high, count in bins]
    return _figure(
        name,
        element("figcaption", element("strong", title), " ", element("span", unit, class_="unit")),
        element("p", note, class_="note"),
        _framed(plot, f"{highest:,.0f}", "", _bin_marks(bins, of)),
        _as_table([unit, "rows"], rows),
    )


def bars(name: str, title: str, items: Sequence[tuple[str, int]]) -> Element:
    """A bar for each of a few named counts, as long as its share of the largest."""
    highest = max(count for _, count in items)
    rows = [
        element(
            "li",
            element("span", label, class_="label"),
            element("span", f"{count:,}", class_="count"),
            element("span", class_="length", style=f"width: {100 * count / highest:.1f}%"),
        )
        for label, count in items
    ]
    return _figure(name, element("figcaption", element("strong", title)), element("ul", *rows, class_="bars"))


def nice_ceiling(value: float, *, whole: bool = False) -> float:
    """1, 2, 2.5 or 5 times a power of ten, not below the value; `whole`: a whole number, at least 1."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    ceiling = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-9))
    return max(1.0, math.ceil(ceiling)) if whole else ceiling


# ── inside ────────────────────────────────────────────────────────────────────────────────────


def _figure(name: str, *children: Element | None) -> Element:
    return element("figure", *children, id=name, class_="chart")


def _plot(label: str) -> Element:
    return element(
        "svg",
        element("title", label),
        element("line", x1="0", x2="1000", y1="100", y2="100", class_="grid"),
        element("line", x1="0", x2="1000", y1="0", y2="0", class_="grid"),
        element("line", x1="0", x2="1000", y1="200", y2="200", class_="axis"),
        viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}",
        preserveAspectRatio="none",
        role="img",
    )


def _steps(
    values: Sequence[float | None], starts: Sequence[float], ends: Sequence[float], highest: float
) -> list[str]:
    """Corners of a line; where values are missing it is cut."""
    lines: list[list[str]] = [[]]
    for value, start, end in zip(values, starts, ends, strict=True):
        if value is None:
            lines.append([])
            continue
        y = _number(_HEIGHT * (1 - value / highest))
        lines[-1] += [f"{_number(_WIDTH * x / ends[-1])},{y}" for x in (start, end)]
    return [" ".join(line) for line in lines if line]


def _hover(left: float, right: float, text: str) -> Element:
    """A strip of a plot that tells its values to a pointer."""
    place = {"x": _number(left * _WIDTH), "width": _number((right - left) * _WIDTH)}
    return element("rect", element("title", text), **place, y="0", height=_number(_HEIGHT), class_="hover")


def _texts(series: Sequence[Series], index: int, of: Format) -> str:
    known = [(each.name, each.values[index]) for each in series]
    return ", ".join(f"{name} {of(value)}" for name, value in known if value is not None) or "nothing"


def _framed(plot: Element, top: str, middle: str, marks: Sequence[tuple[float, str]]) -> Element:
    """The plot with its labels: heights at the left, `marks` (position from 0 to 1, text) below."""
    heights = [element("span", text, class_=f"at-{i}") for i, text in enumerate((top, middle, "0"))]
    below = [
        element("span", text, class_=_alignment(position), style=f"left: {100 * position:.2f}%")
        for position, text in marks
    ]
    return element(
        "div",
        element("div", *heights, class_="heights"),
        plot,
        element("div", *below, class_="marks"),
        class_="plot",
    )


def _alignment(position: float) -> str:
    return "first" if position < 0.05 else "last" if position > 0.95 else "middle"


def _bin_marks(bins: Sequence[tuple[float, float, int]], of: Format) -> list[tuple[float, str]]:
    """The edges of the bins: first, last, and two between where there is room."""
    edges = [low for low, *_ in bins] + [bins[-1][1]]
    count = len(bins)
    places = sorted({0, count} | ({count // 3, 2 * count // 3} if count >= 6 else set()))
    return [(place / count, of(edges[place])) for place in places]


def _as_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Element:
    return element("details", element("summary", "As a table"), table(head, rows))


def _span(start: float, end: float) -> str:
    return f"{start:g} to {end:g} s" if end < 100 else f"{clock(start)} to {clock(end)}"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
