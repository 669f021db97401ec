import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from loadtest.svg import Axis, Bar, Chart, Line, figure, page_style, ranges


def chart(*lines: Line, x: Axis | None = None, y: Axis | None = None, at: float | None = None) -> Chart:
    return Chart(title="a & b", x=x or Axis("x"), y=y or Axis("y"), lines=lines, at=at)


def marks(drawing: str) -> list[tuple[float, float]]:
    found = re.findall(r'<circle class="mark" cx="([\d.]+)" cy="([\d.]+)"', drawing)
    return [(float(x), float(y)) for x, y in found]


def test_points_stand_where_their_values_are() -> None:
    line = Line(label="l", points=[(0, 0), (5, 50), (10, 100)], colour="c0", marks=0)
    axes = Axis("x", least=0, greatest=10), Axis("y", least=0, greatest=100)
    (left, bottom), middle, (right, top) = marks(chart(line, x=axes[0], y=axes[1]).to_svg())
    assert middle == pytest.approx(((left + right) / 2, (bottom + top) / 2), abs=0.1)
    assert left < right
    assert top < bottom  # as people draw it


def test_logarithmic_and_nines_axes_have_equal_steps_for_equal_factors() -> None:
    line = Line(label="l", points=[(90, 1), (99, 10), (99.9, 100)], colour="c0", marks=0)
    found = marks(chart(line, x=Axis("x", "nines", least=0), y=Axis("y", "log")).to_svg())
    (x0, y0), (x1, y1), (x2, y2) = found
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)


def test_what_an_axis_cannot_show_is_left_out() -> None:
    values = [(1.0, 0.0), (2.0, 5.0), (3.0, math.nan), (4.0, math.inf), (5.0, 7.0)]
    line = Line(label="l", points=values, colour="c0", marks=0)
    assert len(marks(chart(line, y=Axis("y", "log")).to_svg())) == 2
    assert chart(Line(label="l", points=[], colour="c0")).to_html() == ""


@pytest.mark.parametrize("kind", ["linear", "log"])
@pytest.mark.parametrize("values", [(1.0, 1.0), (0.001, 0.002), (3.0, 90_000.0), (0.0, 0.0), (-3.0, 4.0)])
def test_every_chart_is_well_formed_and_its_axes_have_labels(kind: str, values: tuple[float, float]) -> None:
    line = Line(
        label="<l>", points=list(enumerate(values)), colour="c1", marks=1, names=("1", "2"), shown=True
    )
    drawing = chart(line, y=Axis("y & z", kind), at=0.5).to_html()
    if kind == "log" and values[0] <= 0 and values[1] <= 0:
        assert drawing == ""
        return
    tree = ElementTree.fromstring(drawing)
    labels = [text.text for text in tree.iter("text")]
    assert "y & z" in labels
    assert len(labels) >= 6


def test_lines_are_told_apart_without_their_colour_too() -> None:
    lines = [
        Line(label=f"l{number}", points=[(1, 1), (2, 2)], colour="c0", dash=number, marks=number)
        for number in range(4)
    ]
    legend = chart(*lines).legend()
    assert len(set(re.findall(r"<li>(<svg.*?</svg>)", legend))) == 4
    assert chart(lines[0]).legend() == ""


def test_steps_stay_on_their_value_until_the_next() -> None:
    line = Line(label="l", points=[(0, 1), (1, 3), (2, 3)], colour="c0", is_step=True)
    (path,) = re.findall(r'<path class="line" d="([^"]+)"', chart(line).to_svg())
    assert re.fullmatch(r"M[\d.]+ [\d.]+H[\d.]+V[\d.]+H[\d.]+V[\d.]+", path)


def test_ranges_stand_around_their_line() -> None:
    bars = [Bar("slower", 1.2, 1.1, 1.3, "c4"), Bar("gone", 0.0, 0.0, math.inf, "c0")]
    drawing = ranges("a < b", bars, axis_title="ratio", at=1.0)
    tree = ElementTree.fromstring(drawing)
    (line,) = (line for line in tree.iter("line") if line.get("class") == "at")
    slower, gone = (float(mark.get("cx", "nan")) for mark in tree.iter("circle"))
    assert gone < float(line.get("x1", "nan")) < slower
    assert ranges("none", [], axis_title="ratio", at=1.0) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00012, "1.2e-04"),
        (0.0123, "0.0123"),
        (0.5, "0.5"),
        (0.1234, "0.123"),
        (1.005, "1"),
        (9.87, "9.87"),
        (12.34, "12.3"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (math.nan, "-"),
    ],
)
def test_numbers_have_the_digits_that_matter(value: float, text: str) -> None:
    assert figure(value) == text


def test_every_colour_has_its_value_in_light_and_dark() -> None:
    style = page_style()
    for name in [f"{kind}{number}" for kind in "co" for number in range(8)]:
        assert style.count(f"--{name}:") == 2, name
        assert f".{name} {{" in style
