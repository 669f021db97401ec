import re
from html.parser import HTMLParser
from typing import Any

import pytest

from loadtest import html_report, pareto
from loadtest.comparison import compare
from loadtest.results import points
from tests.loadtest.records import paced, record, row
from tests.loadtest.test_results import VERSION_1

LIMITS = {"ttft": 500.0, "tpot": 30.0}
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Outline(HTMLParser):
    """Checks that tags are closed in order, and collects what could bring something from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(page: str) -> Outline:
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    return outline


def client(**fields: Any) -> dict[str, Any]:
    most = {"tps": 100.0, "replayed_tps": 50.0, "num_processes": 1, "concurrency": 4, "cpu_share": 0.5}
    return {
        "num_processes": 1,
        "cpu_share": 0.5,
        "lag_p99_ms": 1.0,
        "lag_max_ms": 2.0,
        "num_reconnects": 0,
        "ceiling": {**most, "is_sound": True},
        "warnings": [],
        **fields,
    }


def sweep(factor: float = 1.0, **fields: Any) -> list[dict[str, Any]]:
    return [
        paced(
            factor * 10 * users + turn,
            num_requests=4 * users,
            repeat=turn + 1,
            command="sweep",
            concurrency=users,
            limits_ms=LIMITS,
            client=client(**fields),
        )
        for users in (1, 2, 4)
        for turn in (0, 1)
    ]


def cells(page: str, section: str) -> list[str]:
    part = page.partition(f'<section id="{section}">')[2].partition("</section>")[0]
    return [re.sub("<[^>]+>", " ", cell).strip() for cell in re.findall("<td.*?</td>", part)]


def test_a_page_needs_nothing_from_outside_and_runs_no_script() -> None:
    page = html_report.page({"one": sweep()}, title="A <title>")
    outline = checked(page)
    assert not outline.tags & {"script", "link", "img", "iframe"}
    assert all(reference.startswith("#") for reference in outline.references)
    assert "url(" not in page
    assert "@import" not in page
    assert "<title>A &lt;title&gt;</title>" in page


def test_every_link_of_the_page_has_its_section() -> None:
    page = html_report.page({"one": sweep()}, title="t")
    sections = re.findall('<section id="([^"]+)">', page)
    assert [reference.lstrip("#") for reference in checked(page).references] == sections
    assert {"summary", "pareto", "points", "percentiles", "time", "goodput", "errors", "runs"} <= {*sections}


def test_the_figures_of_the_summary_are_those_of_the_rows() -> None:
    rows = [paced(tpot_ms, repeat=number, limits_ms=LIMITS) for number, tpot_ms in enumerate((20, 25, 40), 1)]
    found = cells(html_report.page({"": rows}, title="t"), "summary")
    # 44 tokens in 0.3, 0.35 and 0.5 s; 40, 50 and 25 per user.
    assert found[1:4] == ["3", "126 88 - 147", "40 25 - 50"]
    assert found[5] == "100% 0% - 100%"  # of the limits, one repeat keeps none
    assert "25 20 - 40" in found[6:]


def test_a_sweep_is_drawn_by_load_and_two_files_side_by_side() -> None:
    one = html_report.page({"one": sweep()}, title="t")
    two = html_report.page({"fast": sweep(), "slow": sweep(3.0)}, title="t")
    assert "Time to first token (TTFT)" in one
    assert one.count("<figure>") == two.count("<figure>") - 3  # tokens over time, of three loads more
    assert "fast: p99" in two
    assert "slow: each load" in two
    assert "one: " not in one


def test_a_sweep_says_first_what_it_has_shown() -> None:
    rows = sweep()
    summary = html_report.page({"one": rows}, title="t").partition('<section id="summary">')[2]
    lines = [f"<li>{line}</li>" for line in pareto.conclusions(points(rows))]
    assert summary.partition("<table")[0].count("<li>") == len(lines) == 2
    assert all(line in summary for line in lines)
    assert "<li>one: most" in html_report.page({"one": rows, "two": rows}, title="t")
    alone = html_report.page({"": [paced(20)]}, title="t")
    assert "most output" not in alone


def test_loads_without_a_pace_are_named_where_they_would_be_drawn() -> None:
    rows = [paced(0, concurrency=users, command="sweep") for users in (1, 2)]
    page = html_report.page({"one": rows}, title="t")
    checked(page)
    assert page.count("all tokens of an answer came in one read") == 2
    assert "Not drawn" not in html_report.page({"one": sweep()}, title="t")


def test_warnings_stand_at_the_top_once_for_all_repeats() -> None:
    page = html_report.page({"one": sweep(warnings=["the loop ran 7.1 ms late"])}, title="t")
    assert page.count("the loop ran 7.1 ms late (2 runs)") == 3
    many = {"one": sweep(warnings=["late by 1 ms"]), "two": sweep(warnings=["late by 2 ms"])}
    together = html_report.page(many, title="t")
    assert "12 runs of 6 loads; two: random 128+128, concurrency 4: late by 2 ms" in together
    assert together.count("late by") == 1
    assert "To be read with care" in page
    assert "To be read with care" not in html_report.page({"one": sweep()}, title="t")


def test_the_share_of_the_ceiling_is_shown() -> None:
    found = cells(html_report.page({"": sweep()[:1]}, title="t"), "client")
    # 44 tokens in 0.2 s, of a ceiling of 100.
    assert found[-3:] == ["220", "100 4 streams", "220%"]


def test_errors_are_told_with_their_messages_and_escaped() -> None:
    rows = [row([record(), record(error="<b>HTTP 500</b>"), record(error="lost")])]
    page = html_report.page({"": rows}, title="t")
    checked(page)
    found = cells(page, "errors")
    assert found[1:4] == ["1", "33.3%", "&lt;b&gt;HTTP 500&lt;/b&gt;"]
    clean = html_report.page({"": [row([record()])]}, title="t")
    assert "None of 1 requests failed" in clean


def test_turns_of_conversations_have_a_table_of_their_own() -> None:
    rows = [row([record(cached=0), record(cached=10, turn=1)], workload="multi-turn")]
    found = cells(html_report.page({"": rows}, title="t"), "turns")
    assert [found[1], found[4], found[8], found[11]] == ["1", "0%", "2", "50%"]


def test_a_comparison_comes_first_with_its_verdicts() -> None:
    before, after = sweep(), sweep(2.0)
    page = html_report.page({"old": before, "new": after}, title="t", comparison=compare(before, after))
    outline = checked(page)
    assert outline.references[0] == "#compared"
    assert '<span class="worse">worse</span>' in page
    assert "new over old" in page


def test_old_files_and_failures_alone_still_make_a_page() -> None:
    old = {
        **VERSION_1,
        "command": "run",
        "point": "p",
        "client": None,
        "percentiles": None,
        "over_time": None,
    }
    more = {"limits_ms": {}, "goodput_by_scale": None, "turns": None, "argv": None, "machine": None}
    last = {"versions": None, "commit": None, "url": None, "user_throughput": 50.0, "good_share": None}
    server = {"server": {"version": None, "max_model_len": None}}
    checked(html_report.page({"old": [{**old, **more, **last, **server}]}, title="t"))
    failed = html_report.page({"": [row([record(error="boom")], limits_ms=LIMITS)]}, title="t")
    checked(failed)
    assert "boom" in failed
    with pytest.raises(ValueError, match="no run"):
        html_report.page({"": []}, title="t")
