"""Charts as SVG text that stands in an HTML page: lines, bars of time, ranges. No library and no script.

Takes numbers and says nothing of what they mean. Colours are classes (`c0`, `c1`, … for things, `o0` … `o7`
for things that have an order), which the page gives their values in light, dark and print. A mark says its
value when the mouse rests on it. `page_style` is what the page needs.
"""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STYLE_FILE = Path(__file__).parent / "svg.css"
NUM_COLOURS = 8
MARKS = ("circle", "square", "diamond", "triangle")
DASHES = ("", "7 4", "2 3", "9 3 2 3")
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 44
_LABEL_WIDTH = 30.0
"""Labels below the horizontal axis that would stand nearer than this are left out."""


def page_style() -> str:
    """Return the style sheet that charts need."""
    return STYLE_FILE.read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a chart.

    Args:
        title: What it shows, with its unit.
        kind: `linear` from 0, `log`, or `nines` for percentiles below 100: 90, 99 and 99.9 are equally far
            from one another.
        least: Where it begins; None for 0 or the least value.
        greatest: Where it ends; None for the greatest value.
        ticks: Values to be labelled; None for round ones.
    """

    title: str
    kind: str = "linear"
    least: float | None = None
    greatest: float | None = None
    ticks: Sequence[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart.

    Args:
        label: What it is called in the legend and in tips.
        points: Its (x, y), in order; those an axis cannot show are left out.
        colour: Class of its colour.
        dash: Index in `DASHES`.
        marks: Index in `MARKS`; None for none.
        has_line: Whether the points are joined.
        is_step: Whether they are joined by steps.
        names: Said of each point in its tip; may be empty.
        shown: Whether the names stand beside the points, too.
        low: Lower ends of bars, (x, y), in order; may be empty.
        high: Upper ends.
    """

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    dash: int = 0
    marks: int | None = None
    has_line: bool = True
    is_step: bool = False
    names: Sequence[str] = ()
    shown: bool = False
    low: Sequence[tuple[float, float]] = ()
    high: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of lines.

    Args:
        title: What it shows.
        x: Its horizontal axis.
        y: Its vertical axis.
        lines: What is drawn.
        width: Of its drawing, px; a page may show it in another size.
        height: The same.
        at: A vertical line at this x; None for none.
    """

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line] = field(default_factory=list)
    width: int = 560
    height: int = 340
    at: float | None = None

    def to_svg(self) -> str:
        """Return the drawing, without legend; "" if there is nothing to draw."""
        points = [point for line in self.lines for point in (*line.points, *line.low, *line.high)]
        x = _Scale(self.x, [point[0] for point in points], _LEFT, self.width - _RIGHT)
        y = _Scale(self.y, [point[1] for point in points], self.height - _BOTTOM, _TOP)
        if x.is_empty or y.is_empty:
            return ""
        parts = [
            _opening(self.title, self.width, self.height),
            *_grid(self, x, y),
        ]
        if self.at is not None and x.shows(self.at):
            parts.append(
                f'<line class="at" x1="{x(self.at):.1f}" x2="{x(self.at):.1f}" y1="{_TOP}" '
                f'y2="{self.height - _BOTTOM}"/>'
            )
        parts += [_drawn(line, x, y) for line in self.lines]
        return "".join([*parts, "</svg>"])

    def legend(self) -> str:
        """Return its legend as HTML; "" if there is but one line."""
        if len(self.lines) < 2:
            return ""
        items = [f"<li>{_sample(line)}{html.escape(line.label)}</li>" for line in self.lines]
        return f'<ul class="legend">{"".join(items)}</ul>'

    def to_html(self) -> str:
        """Return a figure: title, drawing, legend; "" if there is nothing to draw."""
        drawing = self.to_svg()
        if not drawing:
            return ""
        return f"<figure><figcaption>{html.escape(self.title)}</figcaption>{drawing}{self.legend()}</figure>"


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a chart of ranges.

    Args:
        label: What it is called.
        value: Its mark.
        low: Where its bar begins.
        high: Where it ends.
        colour: Class of its colour.
    """

    label: str
    value: float
    low: float
    high: float
    colour: str


def ranges(title: str, bars: Sequence[Bar], *, axis_title: str, at: float) -> str:
    """Return a figure of one range below the other, on a logarithmic axis with a line at a value."""
    width, row, left = 560, 24, 150
    height = _TOP + row * len(bars) + _BOTTOM
    values = [value for bar in bars for value in (bar.low, bar.value, bar.high) if 0 < value < math.inf]
    if not values:
        return ""
    # As much to either side, and never so little that noise looks large.
    reach = min(max(*(abs(math.log(value / at)) for value in values), math.log(1.1)) * 1.1, math.log(50))
    axis = Axis(axis_title, "log", least=at * math.exp(-reach), greatest=at * math.exp(reach))
    x = _Scale(axis, values, left, width - _RIGHT)
    end = height - _BOTTOM
    parts = [_opening(title, width, height)]
    for tick in x.ticks():
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{_TOP}" y2="{end}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{end + 16}" text-anchor="middle">{figure(tick)}</text>')
    parts.append(f'<line class="at" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{end}"/>')
    middle = (left + width - _RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle}" y="{height - 8}" text-anchor="middle">'
        f"{html.escape(axis_title)}</text>"
    )
    for number, bar in enumerate(bars):
        y = _TOP + row * (number + 0.5)
        low, mark, high = (
            x(min(max(value, x.least), x.greatest)) for value in (bar.low, bar.value, bar.high)
        )
        tip = html.escape(f"{bar.label}: {figure(bar.value)} ({figure(bar.low)} - {figure(bar.high)})")
        parts.append(
            f'<g class="{bar.colour}"><title>{tip}</title>'
            f'<text x="{left - 10}" y="{y + 4:.1f}" text-anchor="end">{html.escape(bar.label)}</text>'
            f'<line class="line" x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<circle class="mark" cx="{mark:.1f}" cy="{y:.1f}" r="4.5"/></g>'
        )
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{''.join(parts)}</svg></figure>"


def figure(value: float) -> str:
    """Write a number for people, with three digits that matter."""
    if value != value or math.isinf(value):
        return "-"
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    digits = 2 if abs(value) < 9.995 else 1
    if abs(value) < 0.0995:
        digits = 4
    elif abs(value) < 0.995:
        digits = 3
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _opening(title: str, width: float, height: float) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}">'


class _Scale:
    """Values → px."""

    def __init__(self, axis: Axis, values: Sequence[float], begin: float, end: float) -> None:
        self._axis = axis
        maps: dict[str, Callable[[float], float]] = {"linear": float, "log": math.log, "nines": _nines}
        self._map = maps[axis.kind]
        # What the axis can show at all: from the least possible value, below another.
        self._least_possible = {"linear": -math.inf, "log": 5e-324, "nines": 0.0}[axis.kind]
        self._below = 100.0 if axis.kind == "nines" else math.inf
        found = [value for value in values if self._is_possible(value)]
        self.is_empty = not found
        self._begin, self._end = begin, end
        if self.is_empty:
            self.least, self.greatest = 0.0, 1.0
            return
        least, greatest = min(found), max(found)
        if axis.kind == "linear":
            least, greatest = min(least, 0.0), greatest * 1.06
        elif axis.kind == "log":
            least, greatest = (
                (least / 1.4, greatest * 1.4) if least == greatest else (least / 1.1, greatest * 1.1)
            )
        self.least = least if axis.least is None else axis.least
        self.greatest = greatest if axis.greatest is None else axis.greatest
        if self.greatest <= self.least:
            self.greatest = self.least + 1

    def __call__(self, value: float) -> float:
        low, high = self._map(self.least), self._map(self.greatest)
        return self._begin + (self._map(value) - low) / (high - low) * (self._end - self._begin)

    def _is_possible(self, value: float) -> bool:
        return self._least_possible <= value < self._below and value != -math.inf

    def shows(self, value: float) -> bool:
        """Whether a value can be drawn."""
        if not self._is_possible(value):
            return False
        tiny = 1e-9 * max(abs(self.least), abs(self.greatest))
        return self.least - tiny <= value <= self.greatest + tiny

    def ticks(self) -> list[float]:
        """Return values to be labelled."""
        if self._axis.ticks is not None:
            found = list(self._axis.ticks)
        elif self._axis.kind == "linear":
            found = _round_steps(self.least, self.greatest)
        elif self._axis.kind == "nines":
            found = [0, 50, 75, 90, 95, 99, 99.9, 99.99]
        else:
            found = _round_factors(self.least, self.greatest)
        return [value for value in found if self.shows(value)]


def _nines(percentile: float) -> float:
    return -math.log10(1 - percentile / 100)


def _round_steps(least: float, greatest: float) -> list[float]:
    rough = (greatest - least) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(least / step - 1e-9)
    return [step * number for number in range(first, math.floor(greatest / step + 1e-9) + 1)]


def _round_factors(least: float, greatest: float) -> list[float]:
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(greatest)) + 1)
    found: list[float] = []
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        found = [factor * 10.0**decade for decade in decades for factor in factors]
        found = [value for value in found if least <= value <= greatest]
        if len(found) >= 4:
            return found
    # Less than a factor of two or so: steps are as good.
    return _round_steps(least, greatest)


def _grid(chart: Chart, x: _Scale, y: _Scale) -> list[str]:
    right, bottom = chart.width - _RIGHT, chart.height - _BOTTOM
    parts = []
    for tick in y.ticks():
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{figure(tick)}</text>')
    labelled = -_LABEL_WIDTH
    for tick in x.ticks():
        place = x(tick)
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        if place >= labelled + _LABEL_WIDTH:
            labelled = place
            parts.append(
                f'<text x="{place:.1f}" y="{bottom + 16}" text-anchor="middle">{figure(tick)}</text>'
            )
    across, down = (_LEFT + right) / 2, (_TOP + bottom) / 2
    parts.append(
        f'<text class="axis" x="{across}" y="{chart.height - 8}" text-anchor="middle">'
        f"{html.escape(chart.x.title)}</text>"
    )
    parts.append(
        f'<text class="axis" transform="translate(13 {down}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(chart.y.title)}</text>"
    )
    return parts


def _drawn(line: Line, x: _Scale, y: _Scale) -> str:
    shown = [
        (number, point) for number, point in enumerate(line.points) if x.shows(point[0]) and y.shows(point[1])
    ]
    places = [(x(point[0]), y(point[1])) for _, point in shown]
    parts = [f'<g class="{line.colour}"><title>{html.escape(line.label)}</title>']
    for low, high in zip(line.low, line.high, strict=True):
        if all(x.shows(end[0]) and y.shows(end[1]) for end in (low, high)):
            parts.append(
                f'<line class="bar" x1="{x(low[0]):.1f}" y1="{y(low[1]):.1f}" '
                f'x2="{x(high[0]):.1f}" y2="{y(high[1]):.1f}"/>'
            )
    if line.has_line and len(places) > 1:
        dash = f' stroke-dasharray="{DASHES[line.dash]}"' if DASHES[line.dash] else ""
        parts.append(f'<path class="line" d="{_path(places, line.is_step)}"{dash}/>')
    if line.marks is not None:
        for (number, point), place in zip(shown, places, strict=True):
            name = f"{line.names[number]}: " if line.names else ""
            tip = f"{line.label}, {name}{figure(point[0])}, {figure(point[1])}"
            parts.append(_mark(line.marks, place, tip))
            if line.names and line.shown:
                parts.append(
                    f'<text class="name" x="{place[0] + 7:.1f}" y="{place[1] - 6:.1f}">'
                    f"{html.escape(line.names[number])}</text>"
                )
    return "".join([*parts, "</g>"])


def _path(places: Sequence[tuple[float, float]], is_step: bool) -> str:
    (x, y), *rest = places
    path = f"M{x:.1f} {y:.1f}"
    for x, y in rest:
        path += f"H{x:.1f}V{y:.1f}" if is_step else f"L{x:.1f} {y:.1f}"
    return path


def _mark(kind: int, place: tuple[float, float], tip: str = "") -> str:
    x, y = place
    title = f"<title>{html.escape(tip)}</title>" if tip else ""
    match MARKS[kind % len(MARKS)]:
        case "circle":
            return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>'
        case "square":
            shape = f"M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7z"
        case "diamond":
            shape = f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"
        case _:
            shape = f"M{x:.1f} {y - 5:.1f}l4.8 8.5h-9.6z"
    return f'<path class="mark" d="{shape}">{title}</path>'


def _sample(line: Line) -> str:
    """Return a piece of a line for the legend."""
    dash = f' stroke-dasharray="{DASHES[line.dash]}"' if DASHES[line.dash] else ""
    stroke = f'<path class="line" d="M1 7H27"{dash}/>' if line.has_line else ""
    mark = "" if line.marks is None else _mark(line.marks, (14, 7))
    return f'<svg viewBox="0 0 28 14" aria-hidden="true" class="{line.colour}">{stroke}{mark}</svg>'
