"""`python -m loadtest.frontend`: measure everything, print the tables, write JSON and Markdown."""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import loadtest.frontend
from loadtest.frontend.machine import Sockets
from loadtest.frontend.results import Results, Row
from loadtest.frontend.scheduling import measure_scheduling
from loadtest.frontend.streaming import Measured, Setting, bytes_per_event, measure
from loadtest.frontend.whole import measure_whole

DEMO_MODEL = Path("models/SmolLM2-135M-Instruct.Q4_1.gguf")
PARTS = ("streaming", "loop", "scheduling", "baseline", "whole")
LOOP_STREAMS = 256
TOKENS_OF = {1: 4000, 16: 3000, 64: 1500, 256: 800, 1024: 400, 4096: 400}
"""Tokens of each stream, by the number of streams: enough for a second, and for all to stream at once."""


def tokens_of(num_streams: int) -> int:
    """Return how many tokens each of so many streams gets."""
    return next((tokens for number, tokens in TOKENS_OF.items() if number >= num_streams), num_streams // 10)


class Benchmark:
    """Measures what is asked for, and tells on stderr how far it is."""

    def __init__(self, arguments: argparse.Namespace, sockets: Sockets) -> None:
        self._arguments = arguments
        self._sockets = sockets
        self.results = Results(endpoint=arguments.endpoint)

    def run(self, parts: Sequence[str]) -> None:
        """Measure some parts."""
        if "streaming" in parts:
            for num_streams in self._arguments.streams:
                self._streaming(num_streams)
        if "loop" in parts:
            self._loop()
        if "scheduling" in parts:
            for num_requests in (256, 1024):
                self._say(f"scheduler, {num_requests} requests")
                self.results.scheduling[num_requests] = measure_scheduling(num_requests)
        if "baseline" in parts:
            self._baseline()
        if "whole" in parts:
            for num_streams in (64, 256):
                self._say(f"whole server, {num_streams} streams")
                costs = measure_whole(
                    self._sockets,
                    tokenizer=self._arguments.model,
                    num_streams=num_streams,
                    num_rounds=self._arguments.rounds,
                )
                self.results.whole.append(Row("whole server", num_streams, costs))

    def _setting(self, num_streams: int, **fields: Any) -> Setting:
        return Setting(
            num_streams=num_streams,
            num_tokens=self._arguments.tokens or tokens_of(num_streams),
            endpoint=self._arguments.endpoint,
            **fields,
        )

    def _measure(self, setting: Setting, num_rounds: int, **options: Any) -> list[Measured]:
        return measure(self._sockets, setting, model=self._arguments.model, num_rounds=num_rounds, **options)

    def _streaming(self, num_streams: int) -> None:
        num_rounds = self._arguments.rounds if num_streams <= 1024 else 1
        event_bytes = 0.0
        for name, interval in (("a write for each token", 1), ("4 ms clock", None)):
            self._say(f"{num_streams} streams, {name}")
            setting = self._setting(num_streams, stream_interval=interval)
            rounds = self._measure(setting, num_rounds)
            event_bytes = event_bytes or bytes_per_event(rounds)
            self.results.streaming.append(
                Row(
                    name,
                    num_streams,
                    [each.cost for each in rounds],
                    {
                        "bytes_per_event": bytes_per_event(rounds),
                        "gap_us": [each.seen.gap_us for each in rounds],
                        "gap_ms": f"{statistics.median(each.seen.gap_us[1] for each in rounds) / 1000:.1f}",
                    },
                )
            )
        self._say(f"{num_streams} streams, C send()")
        num_chunks = max(100, 200_000 // num_streams)
        floors = [self._sockets.send(num_streams, round(event_bytes), num_chunks) for _ in range(num_rounds)]
        self.results.floors.append(Row("C send()", num_streams, floors, {"bytes": round(event_bytes)}))

    def _loop(self) -> None:
        for name, interval, step_ms in (
            ("a write for each token, steps at once", 1, 0.0),
            ("4 ms clock, steps at once", None, 0.0),
            ("4 ms clock, a step each 5 ms", None, 5.0),
        ):
            self._say(f"the loop: {name}")
            setting = self._setting(LOOP_STREAMS, stream_interval=interval, step_ms=step_ms)
            rounds = self._measure(setting, self._arguments.rounds, probes=True)
            figures = sorted((each.figures for each in rounds), key=lambda each: each["stalls_s"]["p99"])
            middle = figures[len(figures) // 2]
            longest = [max(each["longest_callbacks_s"].items(), key=lambda one: one[1]) for each in figures]
            longest.sort(key=lambda one: one[1])
            what, cpu_s = longest[len(longest) // 2]
            self.results.loops.append(
                {
                    "name": name,
                    "stalls_s": middle["stalls_s"],
                    "longest_callback": what,
                    "longest_callback_s": cpu_s,
                    "rounds": figures,
                }
            )

    def _baseline(self) -> None:
        if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
            self._say("no FastAPI here: pip install fastapi uvicorn httptools")
            return
        for num_streams in (64, 256):
            self._say(f"FastAPI, {num_streams} streams")
            setting = Setting(num_streams=num_streams, num_tokens=12_800 // num_streams)
            rounds = self._measure(setting, self._arguments.rounds, module="loadtest.frontend.baseline")
            self.results.baseline.append(
                Row("FastAPI StreamingResponse", num_streams, [each.cost for each in rounds])
            )

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Measure; exit status 2 if something that is needed is not there, or a round could not be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.frontend", description=loadtest.frontend.__doc__
    )
    parser.add_argument(
        "--streams",
        type=int,
        nargs="+",
        default=list(TOKENS_OF),
        help="Numbers of streams. Default: 1 to 4096.",
    )
    parser.add_argument("--tokens", type=int, default=None, help="Tokens of each stream. Default: enough.")
    parser.add_argument("--rounds", type=int, default=3, help="Rounds that count. Default: 3.")
    parser.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="Default: all.")
    parser.add_argument("--model", default=str(DEMO_MODEL), help="Where the tokenizer comes from.")
    parser.add_argument("--output", type=Path, default=None, help="Write NAME.json and NAME.md.")
    arguments = parser.parse_args()
    if not Path(arguments.model).exists():
        print(f"{arguments.model} is missing: run `make model`", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            sockets = Sockets(Path(folder))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 2
        benchmark = Benchmark(arguments, sockets)
        status = 0
        try:
            benchmark.run(arguments.parts)
        except ConnectionError as error:
            print(f"{error}; what was measured before:", file=sys.stderr)
            status = 2
    results = benchmark.results
    print(results.as_markdown())
    if arguments.output is not None:
        arguments.output.with_suffix(".json").write_text(json.dumps(results.as_object(), indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(results.as_markdown())
    return status


if __name__ == "__main__":
    sys.exit(main())
