"""What a soak found, as JSON and as Markdown."""

import datetime
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.soak.ledger import Equation

EVENTS = {
    "steps": "iteration_tokens_total_count",
    "tokens generated": "generation_tokens_total",
    "preemptions": "num_preemptions_total",
    "pauses of slow readers": "num_pauses_total",
    "deadlines missed": "deadlines_missed_total",
    "steps failed": "failed_steps_total",
    "steps retried by halves": "retried_steps_total",
    "sequences replayed": "replayed_sequences_total",
    "sequences that failed alone": "failed_sequences_total",
    "device restarts": "device_restarts_total",
}
"""What the server counted → its metric."""


def to_markdown(found: Mapping[str, Any]) -> str:
    """Return the tables of a soak, those of each scheduling policy below a title of their own."""
    lines = [
        f"# Soak of {sum(part['seconds'] for part in found['parts']):.0f} s, {found['date'][:10]}",
        "",
        "```",
        f"{found['command']}",
        "```",
        "",
        f"asyncserve {found['version']}, {found['model']}, {found['guests']} guests at once; faults:"
        f" `{found['faults']}`.",
    ]
    for part in found["parts"]:
        lines += ["", f"## Scheduling policy {part['policy']}, {part['seconds']:.0f} s", "", *_tables(part)]
    return "\n".join(lines) + "\n"


def _tables(found: Mapping[str, Any]) -> list[str]:
    requests = found["requests"]
    return [
        *_table(
            ("requests", ""),
            [
                ("sent", requests["sent"]),
                *((name, count) for name, count in requests["ends"].items()),
                ("answered wrongly", requests["wrong"]),
                *found["server"].items(),
            ],
        ),
        "",
        *_table(
            ("the server counted", "", "the clients say"),
            [(row["name"], row["counted"], _range(row["least"], row["most"])) for row in found["equations"]],
        ),
        "",
        "Where a client left, the server may have counted any end of its request, once, or none if it never"
        " read it: so the range.",
        "",
        *_table(
            ("afterwards", ""),
            [
                ("left behind", ", ".join(f"{k}: {v}" for k, v in found["leaks"].items()) or "nothing"),
                ("at rest", ", ".join(f"{k} {v:g}" for k, v in found["at_rest"].items())),
                (
                    "most memory after warm-up, at the end, ever",
                    "{first_mib} MiB, {last_mib} MiB, {most_mib} MiB".format(**found["memory"]),
                ),
                ("growth of memory", f"{found['memory']['growth_percent']:.2f} %"),
                ("idle, share of a core", _percent(found["idle_percent"])),
                ("the server's share of a core meanwhile", f"{found['busy_percent']:.0f} %"),
                ("/live, ms: median, p99, most", _times(found["live_ms"])),
            ],
        ),
        "",
        *_table(
            ("kind of visit", "how many ended how"),
            [
                (kind, ", ".join(f"{end} {count}" for end, count in counts.items()))
                for kind, counts in found["kinds"].items()
            ],
        ),
        "",
        "Wrong: " + ("; ".join(f"{n} x {what}" for what, n in found["complaints"].items()) or "nothing."),
    ]


def write(found: Mapping[str, Any], path: Path) -> None:
    """Write `path` with .json and .md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(to_markdown(found), encoding="utf-8")


def command_line(argv: Sequence[str]) -> str:
    """Return the command that makes it again."""
    return shlex.join(["python", "-m", "loadtest.soak", *argv])


def today() -> str:
    """Return the time, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def plain(equation: Equation) -> dict[str, Any]:
    """Return a row for the file."""
    return {
        "name": equation.name,
        "counted": equation.counted,
        "least": equation.least,
        "most": equation.most,
    }


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} %"


def _range(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least} to {most}"


def _times(values: Mapping[str, float]) -> str:
    return f"{values['median']:.2f}, {values['p99']:.2f}, {values['most']:.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
