"""A page of results files: plots, tables, what ran where. One file, no script, nothing fetched.

Takes rows of results files by the name they are to have, gives HTML. Everything is drawn from the rows:
a report can be made at any time of any results file, alone or several side by side.
"""

import html
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from loadtest import pareto, svg
from loadtest.comparison import METRICS, MORE_IS_BETTER, Comparison, Difference
from loadtest.figures import Row, Rows
from loadtest.report import LATENCIES, by_kind, without_numbers
from loadtest.results import Point, families, points
from loadtest.svg import Axis, Bar, Chart, Line, figure

Files = Mapping[str, Rows]
STYLE_FILE = Path(__file__).parent / "html_report.css"
MOST_LINES = svg.NUM_COLOURS
"""Lines in one chart; of more points, as many are drawn, evenly chosen."""
MOST_OVER_TIME = 12
MOST_WARNINGS = 3
"""Of one kind in as many loads, each is told; of more, one as an example."""
PERCENTILE_TICKS = (0, 50, 75, 90, 95, 99, 99.9)
DEFINITIONS = {
    "TTFT": "time to first token: from sending a request to the first event with content",
    "TPOT": "time per output token: (E2EL - TTFT) / (output tokens - 1) of each request",
    "ITL": "inter-token latency: gaps between successive events with content, of all requests together; an "
    "event may carry several tokens and a read several events",
    "E2EL": "end-to-end latency: from sending a request to the last event of its answer",
    "Tokens/s per user": "1000 / the median TPOT in ms",
    "Goodput": "requests per second that were answered in full and kept every limit",
    "Ceiling": "output tokens/s at which the client would have no CPU time left, measured with a server that "
    "costs next to nothing",
    "Median (lowest - highest)": "over the repeats of one load; a single run has no spread",
}


def write(path: Path, files: Files, *, title: str, comparison: Comparison | None = None) -> None:
    """Write the page.

    Args:
        path: Where to.
        files: What a file is called → its rows; with one alone the name is not shown.
        title: Of the page.
        comparison: Of the two files, to be shown first.

    Raises:
        ValueError: There is not a single row.
    """
    path.write_text(page(files, title=title, comparison=comparison), encoding="utf-8")


def page(files: Files, *, title: str, comparison: Comparison | None = None) -> str:
    """Return the page; see `write`."""
    if not any(files.values()):
        raise ValueError("there is no run to report")
    found = _Pages(files)
    sections = [
        ("compared", "Compared", "" if comparison is None else _compared(comparison, list(files))),
        ("summary", "Summary", found.summary()),
        ("pareto", "Throughput against speed per user", found.pareto()),
        ("points", "Latency by load", found.by_load()),
        ("percentiles", "Percentiles", found.percentiles()),
        ("time", "Throughput over time", found.over_time()),
        ("goodput", "Goodput", found.goodput()),
        ("turns", "Turns of conversations", found.turns()),
        ("errors", "Errors", found.errors()),
        ("client", "The client", found.client()),
        ("runs", "What ran where", found.facts()),
        ("definitions", "Definitions", _definitions()),
    ]
    sections = [section for section in sections if section[2]]
    style = svg.page_style() + STYLE_FILE.read_text(encoding="utf-8")
    links = " ".join(f'<a href="#{anchor}">{heading}</a>' for anchor, heading, _ in sections)
    body = "".join(
        f'<section id="{anchor}"><h2>{heading}</h2>{content}</section>'
        for anchor, heading, content in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{style}</style></head><body>"
        f"<header><h1>{_text(title)}</h1>{found.subtitle()}<nav>{links}</nav></header>"
        f"<main>{found.warnings()}{body}</main></body></html>\n"
    )


class _Pages:
    """The sections that show the rows."""

    def __init__(self, files: Files) -> None:
        # One file alone needs no name beside everything.
        self._files = files if len(files) > 1 else {"": next(iter(files.values()), [])}
        self._points = [(name, point) for name, rows in self._files.items() for point in points(rows)]
        self._rows = [row for rows in self._files.values() for row in rows]
        self._has_names = len(files) > 1

    def _said(self, name: str, point: Point) -> str:
        return f"{name}: {point.name}" if self._has_names else point.name

    def _chosen(self) -> list[tuple[str, Point]]:
        """Return the points that are drawn where not all can be."""
        if len(self._points) <= MOST_LINES:
            return self._points
        last = len(self._points) - 1
        return [self._points[round(last * number / (MOST_LINES - 1))] for number in range(MOST_LINES)]

    def _colours(self, chosen: Sequence[tuple[str, Point]]) -> list[str]:
        """Return colours with an order for loads that have one, and others for others."""
        is_ordered = len(self._files) == 1 and len(chosen) > 2
        step = (svg.NUM_COLOURS - 1) / max(len(chosen) - 1, 1)
        return [f"o{round(step * number)}" if is_ordered else f"c{number}" for number in range(len(chosen))]

    def subtitle(self) -> str:
        """Say what ran, and when."""
        first = self._rows[0]
        dates = sorted(row["date"] for row in self._rows)
        span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        words = [first["model"], f"{len(self._rows)} runs", span]
        words += sorted({row["label"] for row in self._rows if row.get("label")})
        return f'<p class="soft">{_text(" · ".join(words))}</p>'

    def warnings(self) -> str:
        """Say what makes figures doubtful."""
        told: dict[str, list[tuple[str, str]]] = {}
        for name, point in self._points:
            for row in point.rows:
                for warning in (row["client"] or {}).get("warnings", ()):
                    told.setdefault(without_numbers(warning), []).append((self._said(name, point), warning))
        found = []
        for warned in told.values():
            by_load = dict(warned)
            if len(by_load) > MOST_WARNINGS:
                name, warning = warned[-1]
                found.append(f"{len(warned)} runs of {len(by_load)} loads; {name}: {warning}")
                continue
            for name, warning in by_load.items():
                count = sum(other == name for other, _ in warned)
                found.append(f"{name}: {warning}" + (f" ({count} runs)" if count > 1 else ""))
        wrong = sum(row["num_wrong_length"] for row in self._rows)
        if wrong:
            found.append(f"{wrong} answers had another length than was asked for")
        uncounted = sum(row["num_without_usage"] for row in self._rows)
        if uncounted:
            found.append(f"{uncounted} answers came without usage: their tokens were counted in events")
        if not found:
            return ""
        items = "".join(f"<li>{_text(warning)}</li>" for warning in found)
        return f'<div class="warning" role="note"><strong>To be read with care</strong><ul>{items}</ul></div>'

    def summary(self) -> str:
        """One row per load."""
        columns = [
            ("output_throughput", "output tok/s"),
            ("user_throughput", "tok/s per user"),
            ("request_throughput", "requests/s"),
        ]
        if any(row["goodput"] is not None for row in self._rows):
            columns.append(("good_share", "within limits"))
        if any(row["prefix_cache_hit_rate"] for row in self._rows):
            columns.append(("prefix_cache_hit_rate", "prefix hits"))
        latencies = [
            (f"{latency}_{kind}", f"{latency.upper()} {kind}")
            for latency in LATENCIES
            for kind in ("median", "p99")
        ]
        head = ["load", "runs", *(title for _, title in columns), "failed"]
        body = [
            [
                cells[0],
                str(len(point.rows)),
                *cells[1:],
                str(sum(sum(row["failures"].values()) for row in point.rows)),
            ]
            for cells, (_, point) in zip(self._figures(columns), self._points, strict=True)
        ]
        heads = ["load, latencies in ms", *(title for _, title in latencies)]
        said = "".join(f"<li>{_text(line)}</li>" for line in self._conclusions())
        short = f"<ul>{said}</ul>" if said else ""
        return f"{short}{_table(head, body)}<br>{_table(heads, self._figures(latencies))}"

    def _conclusions(self) -> list[str]:
        """What a sweep has shown, of each file that is one."""
        found = []
        for name, rows in self._files.items():
            swept = points(row for row in rows if row["command"] == "sweep")
            found += [f"{name}: {line}" if name else line for line in pareto.conclusions(swept)]
        return found

    def _figures(self, columns: Sequence[tuple[str, str]]) -> list[list[str]]:
        """Return one row per load: its name, and each metric with its spread."""
        body = []
        for name, point in self._points:
            cells = [_text(self._said(name, point))]
            for metric, _ in columns:
                is_share = metric in ("good_share", "prefix_cache_hit_rate")
                cells.append(_spread(point.values(metric), _percent if is_share else figure))
            body.append(cells)
        return body

    def pareto(self) -> str:
        """Tokens/s against tokens/s per user."""
        lines = []
        drawn = {name: found for name, found in pareto.lines(self._files).items() if len(found) > 1}
        for number, (name, found) in enumerate(drawn.items()):
            best = pareto.on_front(found)
            colour = f"c{number % svg.NUM_COLOURS}"
            lines.append(
                Line(
                    label=f"{name}: best",
                    points=[(trade.user.median, trade.total.median) for trade in best],
                    colour=colour,
                    dash=number % len(svg.DASHES),
                )
            )
            lines.append(
                Line(
                    label=f"{name}: each load",
                    points=[(trade.user.median, trade.total.median) for trade in found],
                    names=[trade.label for trade in found],
                    shown=True,
                    colour=colour,
                    marks=number,
                    has_line=False,
                    low=[(trade.user.lowest, trade.total.median) for trade in found]
                    + [(trade.user.median, trade.total.lowest) for trade in found],
                    high=[(trade.user.highest, trade.total.median) for trade in found]
                    + [(trade.user.median, trade.total.highest) for trade in found],
                )
            )
        left_out = [(self._said(name, point), pareto.why_none(point)) for name, point in self._points]
        missing = "".join(f"<li>{_text(f'{name}: {why}')}</li>" for name, why in left_out if why)
        not_drawn = f"<p>Not drawn:</p><ul>{missing}</ul>" if missing and len(self._points) > 1 else ""
        if not lines:
            return not_drawn
        chart = Chart(
            title="Output tokens/s against output tokens/s per user",
            x=Axis("output tokens/s per user (1000 / median TPOT)"),
            y=Axis("output tokens/s"),
            lines=lines,
            width=760,
            height=420,
        )
        return (
            "<p>Up is more for all, right is more for each. Numbers at the points are requests at once, or "
            "requests per second; thin bars span the repeats. The lines join the loads that no other beats "
            f"in both.</p>{chart.to_html()}{not_drawn}"
        )

    def by_load(self) -> str:
        """Percentiles against what was varied."""
        fields = ["concurrency", "rate"]
        charts = []
        for field in fields:
            varied = self._varied(field)
            if not varied:
                continue
            title = "requests at once" if field == "concurrency" else "requests per second"
            ticks = sorted({value for found in varied.values() for value, _ in found})
            x = Axis(title, "log", ticks=ticks if len(ticks) <= 12 else None)
            for latency, text in LATENCIES.items():
                lines = [
                    _line_of(found, f"{latency}_{kind}", name or kind, kind, number)
                    for number, (name, found) in enumerate(varied.items())
                    for kind in ("median", "p90", "p99")
                ]
                y = Axis("ms", "log")
                charts.append(Chart(title=f"{text} ({latency.upper()})", x=x, y=y, lines=lines).to_html())
            throughput = [
                _line_of(found, "output_throughput", name or "output tok/s", "", number)
                for number, (name, found) in enumerate(varied.items())
            ]
            chart = Chart(title="Output tokens/s", x=x, y=Axis("output tokens/s"), lines=throughput)
            charts.append(chart.to_html())
            shares = [
                _line_of(found, "good_share", name or "share within the limits", "", number, factor=100)
                for number, (name, found) in enumerate(varied.items())
            ]
            chart = Chart(
                title="Requests within the limits", x=x, y=Axis("%", least=0, greatest=103), lines=shares
            )
            charts.append(chart.to_html())
        return _charts(charts)

    def _varied(self, field: str) -> dict[str, list[tuple[float, Point]]]:
        """Return loads that differ only in how many requests come when, by a field that several have."""
        found: dict[str, list[tuple[float, Point]]] = {}
        for name, rows in self._files.items():
            kinds = families(points(rows))
            for kind, members in kinds.items():
                label = ": ".join(part for part in (name, kind if len(kinds) > 1 else "") if part)
                pairs = [(point.rows[0]["load"].get(field), point) for point in members]
                line = [(float(value), point) for value, point in pairs if value is not None]
                # Of one concurrency and several rates, the rates are what was varied.
                if len({value for value, _ in line}) > 1:
                    found[label] = sorted(line, key=lambda pair: pair[0])
        return found

    def percentiles(self) -> str:
        """The percentile curves."""
        chosen = self._chosen()
        colours = self._colours(chosen)
        charts = []
        for latency, text in LATENCIES.items():
            lines = [
                Line(
                    label=self._said(name, point),
                    points=curve,
                    colour=colour,
                    dash=_dash(colour, number),
                )
                for number, ((name, point), colour) in enumerate(zip(chosen, colours, strict=True))
                if (curve := _curve(point, latency))
            ]
            x = Axis("percentile", "nines", least=0, ticks=PERCENTILE_TICKS)
            y = Axis("ms", "log")
            charts.append(Chart(title=f"{text} ({latency.upper()})", x=x, y=y, lines=lines).to_html())
        if not any(charts):
            return ""
        return (
            "<p>How many of all values lie below how many milliseconds; median over the repeats. Each curve "
            f"ends where less than one value lies beyond.</p>{_charts(charts)}"
        )

    def over_time(self) -> str:
        """Tokens/s in each interval, one chart a load."""
        with_series = [(name, point) for name, point in self._points if point.rows[0]["over_time"]]
        charts = []
        for name, point in with_series[:MOST_OVER_TIME]:
            lines = [
                Line(
                    label=f"run {number + 1}",
                    points=_rates(row["over_time"]),
                    colour=f"c{number % svg.NUM_COLOURS}",
                    dash=number % len(svg.DASHES),
                    is_step=True,
                )
                for number, row in enumerate(point.rows[: svg.NUM_COLOURS])
                if row["over_time"]
            ]
            charts.append(
                Chart(
                    title=self._said(name, point),
                    x=Axis("s since the first request"),
                    y=Axis("output tokens/s"),
                    lines=lines,
                    width=400,
                    height=240,
                ).to_html()
            )
        left_out = len(with_series) - len(charts)
        more = f"<p>{left_out} more loads are not drawn.</p>" if left_out > 0 else ""
        return _charts(charts, is_small=True) + more

    def goodput(self) -> str:
        """Goodput, and how it moves with the limits."""
        limited = [(name, point) for name, point in self._points if point.rows[0]["goodput"] is not None]
        if not limited:
            return ""
        limits = {_limits(row["limits_ms"]) for _, point in limited for row in point.rows}
        body = [
            [
                _text(self._said(name, point)),
                _spread(point.values("goodput")),
                _spread(point.values("request_throughput")),
                _spread(point.values("good_share"), _percent),
            ]
            for name, point in limited
        ]
        table = _table(["load", "goodput, requests/s", "answered, requests/s", "share of requests"], body)
        chosen = [pair for pair in self._chosen() if pair[1].rows[0]["goodput_by_scale"]]
        lines = [
            Line(
                label=self._said(name, point),
                points=_goodput_curve(point),
                colour=colour,
                dash=_dash(colour, number),
                marks=number,
            )
            for number, ((name, point), colour) in enumerate(zip(chosen, self._colours(chosen), strict=True))
        ]
        chart = Chart(
            title="Goodput, all limits multiplied by a factor",
            x=Axis("factor", "log", ticks=(0.1, 0.2, 0.5, 1, 2, 5, 10)),
            y=Axis("requests/s"),
            lines=lines,
            at=1.0,
            width=760,
        )
        return f"<p>Limits: {_text('; '.join(sorted(limits)))}.</p>{table}<br>{chart.to_html()}"

    def turns(self) -> str:
        """Turn by turn, where there are conversations."""
        body = []
        for name, point in self._points:
            rows = [row["turns"] for row in point.rows if row["turns"]]
            for turn in range(max(map(len, rows), default=0)):
                found = [row[turn] for row in rows if len(row) > turn]
                body.append(
                    [
                        _text(self._said(name, point)),
                        str(turn + 1),
                        str(sum(one["num_requests"] for one in found)),
                        _spread([one["mean_prompt_tokens"] for one in found if one["mean_prompt_tokens"]]),
                        _spread(
                            [
                                one["prefix_cache_hit_rate"]
                                for one in found
                                if one["prefix_cache_hit_rate"] is not None
                            ],
                            _percent,
                        ),
                        _spread([one["ttft_median"] for one in found if one["ttft_median"] is not None]),
                        _spread([one["ttft_p99"] for one in found if one["ttft_p99"] is not None]),
                    ]
                )
        head = [
            "load",
            "turn",
            "requests",
            "mean prompt tokens",
            "prefix hits",
            "TTFT median, ms",
            "TTFT p99, ms",
        ]
        return _table(head, body) if body else ""

    def errors(self) -> str:
        """What went wrong, and when."""
        body = []
        charts = []
        for name, point in self._points:
            counts: Counter[str] = Counter()
            for row in point.rows:
                counts.update(row["failures"])
            num_requests = sum(row["num_requests"] for row in point.rows)
            for message, count, num_alike in by_kind(counts):
                alike = f" (and the like: {num_alike} messages)" if num_alike > 1 else ""
                cells = [str(count), _percent(count / num_requests), _text(message + alike)]
                body.append([_text(self._said(name, point)), *cells])
            if counts:
                charts.append(self._failures(name, point))
        if not body:
            num_requests = sum(row["num_requests"] for row in self._rows)
            return f"<p>None of {num_requests:,} requests failed.</p>"
        table = _table(["load", "requests", "share", "error"], body, text_columns=(3,))
        return f"{table}<br>{_charts(charts[:MOST_OVER_TIME], is_small=True)}"

    def _failures(self, name: str, point: Point) -> str:
        lines = [
            Line(
                label=f"run {number + 1}",
                points=_steps(row["over_time"]["failed"], row["over_time"]["interval_s"]),
                colour=f"c{number % svg.NUM_COLOURS}",
                is_step=True,
            )
            for number, row in enumerate(point.rows)
            if row["over_time"] and row["failures"]
        ]
        x, y = Axis("s since the first request"), Axis("failed requests")
        title = f"{self._said(name, point)}: failures"
        return Chart(title=title, x=x, y=y, lines=lines, width=400, height=220).to_html()

    def client(self) -> str:
        """What the client could take, and whether it kept up."""
        body = []
        for name, rows in self._files.items():
            for row in rows:
                client = row["client"]
                if client is None:
                    continue
                most = client["ceiling"]
                share = None if most is None or not most["tps"] else row["output_throughput"] / most["tps"]
                body.append(
                    [
                        _text(self._said(name, Point(row["name"], [row]))),
                        str(client["num_processes"]),
                        _percent(client["cpu_share"]),
                        figure(client["lag_p99_ms"]),
                        figure(client["lag_max_ms"]),
                        figure(row["output_throughput"]),
                        "-"
                        if most is None
                        else f"{figure(most['tps'])}<small>{most['concurrency']} streams</small>",
                        "-" if share is None else _percent(share),
                    ]
                )
        late = ("loop late p99, ms", "highest, ms")
        head = ["run", "processes", "busiest", *late, "output tok/s", "ceiling, tok/s", "share of it"]
        return _table(head, body) if body else "<p>These files say nothing of the client.</p>"

    def facts(self) -> str:
        """Commands, machines, versions."""
        parts = []
        for name, rows in self._files.items():
            facts: list[tuple[str, Iterable[str]]] = [
                ("command", (f"<code>{_text(row['argv'])}</code>" for row in rows if row["argv"])),
                ("label", (_text(row["label"]) for row in rows if row.get("label"))),
                ("scenario", (_text(row["scenario"]) for row in rows if row.get("scenario"))),
                ("server", (_text(_server(row)) for row in rows)),
                ("commit of the client", (_text(row["commit"]) for row in rows if row["commit"])),
                ("machine of the client", (_text(_joined(row["machine"])) for row in rows if row["machine"])),
                ("versions", (_text(_joined(row["versions"])) for row in rows if row["versions"])),
                ("limits", (_text(_limits(row["limits_ms"])) for row in rows if row["limits_ms"])),
                ("seeds", (str(row["load"]["seed"]) for row in rows if "seed" in row["load"])),
            ]
            lines = []
            for title, values in facts:
                different = list(dict.fromkeys(values))
                if different:
                    lines.append(f"<tr><th>{title}</th><td>{'<br>'.join(different)}</td></tr>")
            heading = f"<h3>{_text(name)}</h3>" if self._has_names else ""
            parts.append(f'{heading}<table class="facts">{"".join(lines)}</table>')
        return "".join(parts)


def _compared(found: Comparison, names: Sequence[str]) -> str:
    parts = []
    if found.about:
        rows = [[_text(name), _text(one), _text(other)] for name, one, other in found.about]
        parts.append(_table(["", *map(_text, names)], rows, text_columns=(1, 2)))
    for load in found.loads:
        parts.append(f"<h3>{_text(load.before.name)}</h3>")
        parts += [f"<p>{_text(remark)}</p>" for remark in load.remarks]
        bars = [
            Bar(
                METRICS[one.metric],
                one.ratio,
                one.least if one.has_spread else one.ratio,
                one.greatest if one.has_spread else one.ratio,
                _verdict_colour(one),
            )
            for one in load.differences
        ]
        chart = svg.ranges(
            f"{names[1]} over {names[0]}", bars, axis_title="ratio (bars: what the repeats allow)", at=1.0
        )
        body = [
            [
                f"{METRICS[one.metric]} {'↑' if one.metric in MORE_IS_BETTER else '↓'}",
                figure(one.before),
                figure(one.after),
                f"{one.ratio:.3f}",
                f"{one.least:.3f} - {one.greatest:.3f}".replace("inf", "∞") if one.has_spread else "-",
                f'<span class="{one.verdict.partition(" ")[0]}">{one.verdict}</span>',
            ]
            for one in load.differences
        ]
        head = ["", *map(_text, names), "ratio", "lowest - highest", ""]
        parts.append(f'<div class="charts">{chart}{_table(head, body)}</div>')
    for text, loads in (("Only in the first", found.only_before), ("Only in the second", found.only_after)):
        if loads:
            parts.append(f"<p>{text}: {_text(', '.join(loads))}.</p>")
    parts.append(
        '<p class="soft">↑ more is better, ↓ less is better. Same: some repeat of the one lies within the '
        "other's range.</p>"
    )
    return "".join(parts)


def _verdict_colour(one: Difference) -> str:
    return {"better": "c2", "worse": "c4"}.get(one.verdict, "c0")


def _line_of(
    found: Sequence[tuple[float, Point]],
    metric: str,
    label: str,
    kind: str,
    number: int,
    factor: float = 1.0,
) -> Line:
    shown = [
        (x, [factor * value for value in values]) for x, point in found if (values := point.values(metric))
    ]
    kinds = ("median", "p90", "p99")
    return Line(
        label=label if not kind or label == kind else f"{label}: {kind}",
        points=[(x, median(values)) for x, values in shown],
        colour=f"c{number % svg.NUM_COLOURS}",
        dash=kinds.index(kind) if kind in kinds else 0,
        marks=kinds.index(kind) if kind in kinds else number,
        low=[(x, min(values)) for x, values in shown],
        high=[(x, max(values)) for x, values in shown],
    )


def _curve(point: Point, latency: str) -> list[tuple[float, float]]:
    rows = [row for row in point.rows if row["percentiles"] and row["percentiles"][latency]]
    if not rows:
        return []
    count = median(row["latencies"][latency]["count"] for row in rows)
    values = [median(column) for column in zip(*(row["percentiles"][latency] for row in rows), strict=True)]
    return [
        (percentile, value)
        for percentile, value in zip(rows[0]["percentiles"]["at"], values, strict=True)
        if count * (1 - percentile / 100) >= 1
    ]


def _dash(colour: str, number: int) -> int:
    """Return what else tells lines apart: nothing where their colours have an order."""
    return 0 if colour.startswith("o") else number % len(svg.DASHES)


def _goodput_curve(point: Point) -> list[tuple[float, float]]:
    found = [row["goodput_by_scale"] for row in point.rows if row["goodput_by_scale"]]
    values = [median(column) for column in zip(*(one["goodput"] for one in found), strict=True)]
    return list(zip(found[0]["scales"], values, strict=True))


def _rates(over_time: Mapping[str, Any]) -> list[tuple[float, float]]:
    interval_s = over_time["interval_s"]
    return _steps([tokens / interval_s for tokens in over_time["output_tokens"]], interval_s)


def _steps(values: Sequence[float], interval_s: float) -> list[tuple[float, float]]:
    """Return the corners of steps: each value from the beginning of its interval to the end."""
    found = [(number * interval_s, value) for number, value in enumerate(values)]
    return [*found, (len(values) * interval_s, values[-1])] if found else []


def _spread(values: Sequence[float], write: Callable[[float], str] = figure) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return write(values[0])
    return f"{write(median(values))}<small>{write(min(values))} - {write(max(values))}</small>"


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%" if value < 0.9995 or value == 1 else f"{100 * value:.4g}%"


def _charts(charts: Sequence[str], *, is_small: bool = False) -> str:
    shown = "".join(charts)
    return f'<div class="charts{" small" if is_small else ""}">{shown}</div>' if shown else ""


def _table(head: Sequence[str], body: Sequence[Sequence[str]], *, text_columns: Sequence[int] = ()) -> str:
    """Return a table; cells are HTML."""
    titles = "".join(
        f'<th scope="col"{" class=text" if number in text_columns else ""}>{title}</th>'
        for number, title in enumerate(head)
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td class="text">{cell}</td>' if number in text_columns else f"<td>{cell}</td>"
            for number, cell in enumerate(row)
        )
        + "</tr>"
        for row in body
    )
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table></div>'


def _definitions() -> str:
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>" for name, text in DEFINITIONS.items())
    return f"<dl>{items}</dl>"


def _server(row: Row) -> str:
    server = row["server"]
    words = [row["url"] or "", f"model {row['model']}"]
    words += [f"version {server['version']}"] if server["version"] else []
    words += [f"{server['max_model_len']:,} tokens at most"] if server["max_model_len"] else []
    return ", ".join(word for word in words if word)


def _joined(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in (None, "none"))


def _limits(limits_ms: Mapping[str, float]) -> str:
    return ", ".join(f"{name.upper()} {value:g} ms" for name, value in limits_ms.items())


def _text(value: object) -> str:
    return html.escape(str(value))
