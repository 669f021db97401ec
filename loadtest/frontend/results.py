"""The figures of one run, as JSON and as the tables people read."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncserve.token_path import IS_NATIVE
from loadtest.frontend.cost import Cost
from loadtest.frontend.streaming import spread

PEERS = {64: {"vLLM": 295, "llama.cpp": 667}, 256: {"vLLM": 209, "llama.cpp": 663}}
"""CPU µs per token of other servers over such a model of 49k tokens: streaming, 32 in and 128 out, on 2 cores
of an EPYC, in another run."""


@dataclass(slots=True)
class Row:
    """One setting, measured.

    Args:
        name: What was measured.
        costs: One per round.
        facts: What else is known, for the JSON file and, where the tables want it, by name.
    """

    name: str
    num_streams: int
    costs: Sequence[Cost]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_object(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "name": self.name,
            "num_streams": self.num_streams,
            "user_us": spread([cost.user_us for cost in self.costs]),
            "kernel_us": spread([cost.kernel_us for cost in self.costs]),
            "all_us": spread([cost.all_us for cost in self.costs]),
            "tokens_per_s": spread([cost.tokens_per_s for cost in self.costs]),
            "rounds": [cost.as_object() for cost in self.costs],
            **self.facts,
        }

    @property
    def all_us(self) -> float:
        """Median of the CPU µs per token."""
        return spread([cost.all_us for cost in self.costs])["median"]

    def cells(self) -> list[str]:
        """Return user, kernel, all, tokens per second: the median, and where rounds differ, their range."""
        return [
            _cell([cost.user_us for cost in self.costs]),
            _cell([cost.kernel_us for cost in self.costs]),
            _cell([cost.all_us for cost in self.costs]),
            _cell([cost.tokens_per_s for cost in self.costs], digits=0),
        ]


@dataclass(slots=True)
class Results:
    """All of one run, as far as it was asked for."""

    endpoint: str = "completions"
    streaming: list[Row] = field(default_factory=list)
    floors: list[Row] = field(default_factory=list)
    loops: list[dict[str, Any]] = field(default_factory=list)
    scheduling: dict[int, tuple[float, float]] = field(default_factory=dict)
    baseline: list[Row] = field(default_factory=list)
    whole: list[Row] = field(default_factory=list)

    def as_object(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "command": "python -m loadtest.frontend",
            "endpoint": self.endpoint,
            "machine": machine(),
            "streaming": [row.as_object() for row in self.streaming],
            "c_send": [row.as_object() for row in self.floors],
            "loop": self.loops,
            "scheduling_us_per_step": {
                str(number): {"plan": plan_us, "apply": apply_us}
                for number, (plan_us, apply_us) in self.scheduling.items()
            },
            "fastapi": [row.as_object() for row in self.baseline],
            "whole_server": [row.as_object() for row in self.whole],
        }

    def as_markdown(self) -> str:
        """Return the tables."""
        parts = [f"# What a streamed token costs\n\n`python -m loadtest.frontend`; {machine_line()}.\n"]
        parts.append("Median of the rounds, and their range. CPU in µs per token.\n")
        if self.streaming:
            parts.append(self._streaming())
        if self.loops:
            parts.append(self._loops())
        if self.scheduling:
            rows = [
                [str(number), f"{plan_us:.0f}", f"{apply_us:.0f}", f"{(plan_us + apply_us) / number:.2f}"]
                for number, (plan_us, apply_us) in self.scheduling.items()
            ]
            head = ["running requests", "plan, µs per step", "apply, µs per step", "both, µs per token"]
            parts.append("## The scheduler\n\n" + table(head, rows))
        if self.whole:
            parts.append(self._whole())
        return "\n".join(parts)

    def _streaming(self) -> str:
        floors = {row.num_streams: row for row in self.floors}
        rows = []
        for row in sorted([*self.streaming, *self.floors, *self.baseline], key=lambda each: each.num_streams):
            floor = floors.get(row.num_streams)
            ratio = "" if floor is None or floor is row else f"{row.all_us / floor.all_us:.2f}"
            rows.append(
                [str(row.num_streams), row.name, *row.cells(), ratio, str(row.facts.get("gap_ms", ""))]
            )
        head = ["streams", "", "user", "kernel", "all", "tokens/s", "to C send()", "gap p99, ms"]
        return (
            "## Streaming, the device side costing nothing\n\n"
            "Steps follow each other at once. *gap p99* is what a client waits between two reads, while all"
            " stream.\n\n" + table(head, rows)
        )

    def _loops(self) -> str:
        rows = [
            [
                each["name"],
                f"{1e3 * each['stalls_s']['median']:.2f}",
                f"{1e3 * each['stalls_s']['p99']:.2f}",
                f"{1e3 * each['stalls_s']['longest']:.2f}",
                f"{1e3 * each['longest_callback_s']:.2f} ({each['longest_callback']})",
            ]
            for each in self.loops
        ]
        head = ["", "lateness: median, ms", "p99, ms", "longest, ms", "longest callback, CPU ms"]
        return (
            "## The event loop at 256 streams\n\nLateness in steady streaming, by the clock; callbacks by CPU"
            " time, starts and ends of requests included. Median round.\n\n" + table(head, rows)
        )

    def _whole(self) -> str:
        rows = []
        for row in self.whole:
            peers = ", ".join(f"{name} {us}" for name, us in PEERS.get(row.num_streams, {}).items())
            rows.append([str(row.num_streams), *row.cells(), peers])
        head = ["streams", "user", "kernel", "all", "tokens/s", "others, all"]
        return (
            "## The whole server, over a random Llama of 1 layer, hidden size 64, 49,152 tokens\n\n"
            "Forward passes, prompts and all threads included; greedy. The others' figures are of another"
            " run, on such a machine.\n\n" + table(head, rows)
        )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "token_path": "native" if IS_NATIVE else "python",
        "busy": os.getloadavg()[0],
    }


def machine_line() -> str:
    """Return the same in words."""
    facts = machine()
    return (
        f"{facts['processor']}, {facts['cores']} cores, Linux {facts['kernel']}, Python {facts['python']},"
        f" token path {facts['token_path']}, load average {facts['busy']:.1f} at the end"
    )


def _processor() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cell(values: Sequence[float], digits: int = 2) -> str:
    figures = spread(values)
    middle = f"{figures['median']:,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({figures['least']:,.{digits}f} - {figures['greatest']:,.{digits}f})"
