"""The server that is measured: `python -m loadtest.frontend.server`, started by `loadtest.frontend`.

The real application and engine over a `ReplayDevice`. Prints its port, then one JSON line for each round: the
cost of the span in which every stream decodes, and with `--probes` the loop's stalls and longest callbacks.
Ends when its standard input does.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import uvloop
from aiohttp import web

from asyncserve.checkpoint import open_checkpoint
from asyncserve.garbage import settle_collector
from asyncserve.http.app import build_app, make_runner
from asyncserve.loop.engine import Engine
from asyncserve.loop.tokenizer import load_tokenizer
from asyncserve.metrics.exposition import new_registry
from asyncserve.metrics.observer import PrometheusObserver
from asyncserve.observer import NullObserver, ObserverGroup, RequestTimeline
from asyncserve.request import FinishReason
from asyncserve.step import StepOutput, StepPlan
from loadtest.frontend.cost import Stopwatch
from loadtest.frontend.device import ReplayDevice
from loadtest.frontend.machine import pin, raise_open_files
from loadtest.frontend.probes import CallbackTimes, StallProbe, TimedLoop
from tests.fakes.executor import fake_info

PROMPT_LEN = 64
"""Room for a prompt, in tokens."""
BLOCK_LEN = 16


class RoundObserver(NullObserver):
    """Prints the figures of each round: from the first step with every stream until the first end.

    The longest callback is that of the whole round, so starts and ends of requests are in it.
    """

    def __init__(self, num_streams: int, times: CallbackTimes | None) -> None:
        self._num_streams = num_streams
        self._times = times
        self._stopwatch: Stopwatch | None = None
        self._probe: StallProbe | None = None
        self._figures: dict[str, Any] = {}
        self._num_tokens = 0
        self._num_finished = 0

    def step_applied(
        self, plan: StepPlan, output: StepOutput, inter_token_s: Sequence[float], now_s: float
    ) -> None:
        """Count the step's tokens once every stream decodes."""
        if self._stopwatch is not None:
            self._num_tokens += len(output.token_ids)
        elif self._num_finished == 0 and len(plan.sequences) == len(inter_token_s) == self._num_streams:
            self._stopwatch = Stopwatch()
            if self._times is not None:
                self._probe = StallProbe()

    def request_finished(self, timeline: RequestTimeline, reason: FinishReason) -> None:
        """End the span at the first end, and the round at the last."""
        if self._stopwatch is not None:
            self._figures = {"cost": self._stopwatch.cost(self._num_tokens).as_object()}
            self._stopwatch, self._num_tokens = None, 0
            if self._probe is not None:
                self._probe.stop()
                self._figures["stalls_s"] = _percentiles(self._probe.late_s)
                self._probe = None
        self._num_finished += 1
        if self._num_finished == self._num_streams:
            self._num_finished = 0
            # Later, when the last answers have been written, too.
            asyncio.get_running_loop().call_later(0.02, self._end_round)

    def _end_round(self) -> None:
        if self._times is not None:
            longest = sorted(self._times.longest.items(), key=lambda each: -each[1])
            self._figures["longest_callbacks_s"] = dict(longest[:5])
            self._times.clear()
        print(json.dumps(self._figures), flush=True)
        self._figures = {}

    def request_rejected(self, error: Exception) -> None:
        """Tell of it: the round will not end."""
        print(f"refused: {error}", file=sys.stderr)


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {
        "median": ordered[len(ordered) // 2],
        "p99": ordered[len(ordered) * 99 // 100],
        "longest": ordered[-1],
    }


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until standard input ends."""
    tokenizer = load_tokenizer(open_checkpoint(arguments.model), chat_template=None)
    num_streams = arguments.streams
    blocks_each = (PROMPT_LEN + arguments.tokens) // BLOCK_LEN + 8
    info = fake_info(
        num_slots=num_streams,
        num_blocks=num_streams * blocks_each + 1,
        block_len=BLOCK_LEN,
        max_model_len=BLOCK_LEN * blocks_each,
        vocab_size=tokenizer.vocab_size,
        max_num_batched_tokens=max(8192, num_streams),
    )
    loop = asyncio.get_running_loop()
    times = loop.times if isinstance(loop, TimedLoop) else None
    prometheus = PrometheusObserver(new_registry(), "fake")
    engine = Engine(
        executor=ReplayDevice(info, tokenizer, step_s=arguments.step_ms / 1000),
        tokenizer=tokenizer,
        observer=ObserverGroup([prometheus, RoundObserver(num_streams, times)]),
        max_num_queued_requests=2 * num_streams,
    )
    app = build_app(
        engine,
        model_names=["fake"],
        metrics_renderer=_nothing,
        access_log=False,
        stream_interval=arguments.stream_interval,
    )
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=num_streams).start()
    await engine.start()
    settle_collector()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await engine.stop()
    await runner.cleanup()


async def _nothing() -> bytes:
    return b""


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--stream-interval", type=int, default=None)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--probes", action="store_true")
    arguments = parser.parse_args()
    pin(0)
    raise_open_files()
    with asyncio.Runner(loop_factory=TimedLoop if arguments.probes else uvloop.new_event_loop) as runner:
        runner.run(serve(arguments))


if __name__ == "__main__":
    main()
