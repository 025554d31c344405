"""Plots as inline SVG: pure functions from numbers to text, with no plotting library.

Colours are classes of the page's style sheet (`m0`, `m1`, ... for methods, `plain` for plain decoding, those of a
report's own style for parts of a step), text takes the page's colour, so that one drawing serves light and dark.
Knows nothing of runs or files.
"""

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 400, 280
LEFT, RIGHT, TOP, BOTTOM = 36, 14, 36, 42
STYLES = 7
MARKERS = (
    "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0Z",
    "M-4,-4H4V4H-4Z",
    "M0,-5.2L5,4H-5Z",
    "M0,-5.8L5.8,0L0,5.8L-5.8,0Z",
    "M0,5.2L5,-4H-5Z",
    "M-4.5,-1.6H-1.6V-4.5H1.6V-1.6H4.5V1.6H1.6V4.5H-1.6V1.6H-4.5Z",
    "M0,-5.4L5.1,-1.7L3.2,4.4H-3.2L-5.1,-1.7Z",
)
PLAIN_MARKER = "M-5.5,0a5.5,5.5 0 1,0 11,0a5.5,5.5 0 1,0 -11,0ZM-2.2,0a2.2,2.2 0 1,1 4.4,0a2.2,2.2 0 1,1 -4.4,0Z"


@dataclass(frozen=True)
class Style:
    """How one method is drawn everywhere: a colour class, a marker, and dashes for its line."""

    css: str
    marker: str
    dash: str


@dataclass(frozen=True)
class Series:
    """Points (x, y) of one method; `notes` says what each is, for the pointer and the screen reader."""

    name: str
    style: Style
    points: Sequence[tuple[float, float]]
    notes: Sequence[str]


@dataclass(frozen=True)
class Axis:
    """A linear axis from `low` to `high` with a label at each of `ticks`."""

    title: str
    low: float
    high: float
    ticks: Sequence[float]


@dataclass(frozen=True)
class Bar:
    """A named bar of (class, length, note) parts, with its value written at the end of the line above it."""

    name: str
    value: str
    parts: Sequence[tuple[str, float, str]]


def style(index: int | None) -> Style:
    """The style of the `index`-th method; None is plain decoding's."""
    if index is None:
        return Style("plain", PLAIN_MARKER, "1 4")
    dashes = ("none", "8 3", "3 3", "9 3 2 3", "5 2", "12 4", "2 2 6 2")
    return Style(f"m{index % STYLES}", MARKERS[index % STYLES], dashes[index % STYLES])


def element(tag: str, content: str = "", **attributes: object) -> str:
    """An SVG element; an underscore at the end of a name is dropped, one inside becomes a hyphen."""
    written = [f'{k.rstrip("_").replace("_", "-")}="{html.escape(_written(v))}"' for k, v in attributes.items()]
    opening = " ".join([tag, *written])
    return f"<{opening}>{content}</{tag}>" if content else f"<{opening}/>"


def _written(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def drawing(label: str, height: float, parts: Sequence[str]) -> str:
    return element("svg", "".join(parts), viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=label)


def nice_axis(title: str, values: Sequence[float], from_zero: bool = False) -> Axis:
    """An axis around `values` with four to eight round ticks, and a margin on each side that has no zero."""
    low, high = (0.0 if from_zero else min(values)), max(values)
    span = (high - low) or abs(high) or 1.0
    low, high = low - (0.0 if from_zero else 0.1 * span), high + 0.1 * span
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (5, 2.5, 2, 1) if (high - low) / (step * factor) >= 4)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(title, low, high, [step * n for n in range(first, last + 1)])


def scatter(label: str, x: Axis, y: Axis, series: Sequence[Series], under: Sequence[str] = ()) -> str:
    """A marker for each point, the points of one series joined by a thin line; `under` is drawn beneath them."""
    lines = [polyline(x, y, one.points, one.style.css + " thin") for one in series if len(one.points) > 1]
    markers = [marker for one in series for marker in _markers(x, y, one)]
    return drawing(label, HEIGHT, [frame(x, y), *under, *lines, *markers])


def line_chart(label: str, x: Axis, y: Axis, series: Sequence[Series], under: Sequence[str] = ()) -> str:
    """A line for each series, with a marker at each point where they are few."""
    parts = [frame(x, y), *under]
    for one in series:
        parts.append(polyline(x, y, one.points, one.style.css, one.style.dash))
        if len(one.points) <= 16:
            parts += _markers(x, y, one)
    return drawing(label, HEIGHT, parts)


def polyline(x: Axis, y: Axis, points: Sequence[tuple[float, float]], css: str, dash: str = "none") -> str:
    placed = " ".join(f"{_across(x, a):.1f},{_up(y, b):.1f}" for a, b in points)
    return element("polyline", points=placed, class_=f"line {css}", stroke_dasharray=dash)


def band(x: Axis, y: Axis, places: Sequence[float], lows: Sequence[float], highs: Sequence[float], css: str) -> str:
    """The area between two curves over the same places."""
    there = [f"{_across(x, a):.1f},{_up(y, b):.1f}" for a, b in zip(places, highs, strict=True)]
    back = [f"{_across(x, a):.1f},{_up(y, b):.1f}" for a, b in zip(places, lows, strict=True)]
    return element("polygon", points=" ".join(there + back[::-1]), class_=f"band {css}")


def whiskers(x: Axis, y: Axis, place: float, interval: tuple[float, float], css: str) -> str:
    """An upright line over an interval."""
    return polyline(x, y, [(place, interval[0]), (place, interval[1])], css + " thin")


def whole_axis(title: str, numbers: Sequence[int]) -> Axis:
    """An axis over whole numbers such as layers, half a step wider on each side, with ten labels or fewer."""
    low, high = min(numbers), max(numbers)
    stride = -(-(high - low + 1) // 10)
    return Axis(title, low - 0.5, high + 0.5, list(range(low, high + 1, stride)))


def picture(x: Axis, y: Axis, png: bytes, note: str) -> str:
    """A picture that fills the plot on a blank ground, its pixels kept sharp, with the axes around it."""
    data = base64.b64encode(png).decode()
    size = {"width": WIDTH - LEFT - RIGHT, "height": HEIGHT - BOTTOM - TOP}
    href = f"data:image/png;base64,{data}"
    title = element("title", html.escape(note))
    image = element("image", title, href=href, x=LEFT, y=TOP, **size, preserveAspectRatio="none", class_="pixels")
    return frame(x, y) + element("rect", x=LEFT, y=TOP, **size, class_="blank") + image


def guide_across(y: Axis, value: float) -> str:
    """A dotted line at one height."""
    place = _up(y, value)
    return element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=place, y2=place, class_="guide")


def guide_up(x: Axis, value: float, text: str) -> str:
    """A dotted line at one place of the horizontal axis, named above the plot."""
    place = _across(x, value)
    line = element("line", x1=place, x2=place, y1=TOP, y2=HEIGHT - BOTTOM, class_="guide")
    return line + element("text", html.escape(text), x=place, y=TOP - 5, class_="soft middle")


def frame(x: Axis, y: Axis) -> str:
    """Grid, tick labels and axis titles."""
    base, parts = HEIGHT - BOTTOM, []
    for value in y.ticks:
        place = _up(y, value)
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=place, y2=place, class_="grid"))
        parts.append(element("text", f"{value:g}", x=LEFT - 7, y=place + 4, class_="end"))
    for value in x.ticks:
        place = _across(x, value)
        parts.append(element("line", x1=place, x2=place, y1=base, y2=base + 4, class_="tick"))
        parts.append(element("text", f"{value:g}", x=place, y=base + 17, class_="middle"))
    parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=base, y2=base, class_="tick"))
    parts.append(element("text", html.escape(x.title), x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6, class_="middle"))
    parts.append(element("text", html.escape(y.title), x=0, y=12))
    return "".join(parts)


def bar_chart(label: str, bars: Sequence[Bar], full: float) -> str:
    """Stacked horizontal bars, `full` being the length that spans the drawing; names and values above each."""
    row, parts = 40, []
    for index, bar in enumerate(bars):
        top = index * row
        parts.append(element("text", html.escape(bar.name), x=0, y=top + 14))
        parts.append(element("text", html.escape(bar.value), x=WIDTH, y=top + 14, class_="end"))
        parts.append(element("rect", x=0, y=top + 20, width=WIDTH, height=12, class_="track"))
        parts += _segments(bar, top + 20, WIDTH / full if full else 0.0)
    return drawing(label, len(bars) * row, parts)


def _segments(bar: Bar, top: float, scale: float) -> list[str]:
    segments, start = [], 0.0
    for css, length, text in bar.parts:
        width = max(length, 0.0) * scale
        gap = 1.0 if width > 3 else 0.0
        title = element("title", html.escape(f"{bar.name}: {text}"))
        segments.append(element("rect", title, x=start, y=top, width=width - gap, height=12, class_=css))
        start += width
    return segments


def swatch(css: str, marker: str = "M-5,-5H5V5H-5Z") -> str:
    """A legend's sample: a marker in its colour, hidden from the screen reader (the name stands beside it)."""
    sample = element("path", d=marker, class_=f"marker {css}")
    return element("svg", sample, viewBox="-8 -8 16 16", width=18, height=18, aria_hidden="true")


def _markers(x: Axis, y: Axis, series: Series) -> list[str]:
    markers = []
    for (a, b), text in zip(series.points, series.notes, strict=True):
        title = element("title", html.escape(f"{series.name}: {text}"))
        place = f"translate({_across(x, a):.1f} {_up(y, b):.1f})"
        css = f"marker {series.style.css}"
        markers.append(element("path", title, d=series.style.marker, transform=place, class_=css))
    return markers


def _across(axis: Axis, value: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (value - axis.low) / (axis.high - axis.low)


def _up(axis: Axis, value: float) -> float:
    base = HEIGHT - BOTTOM
    return base - (base - TOP) * (value - axis.low) / (axis.high - axis.low)
