"""How a server ends: `python -m loadtest.endings --model MODEL`, run in the repository's root.

Two things. A server under load gets SIGTERM: every request that was under way must come to its whole answer,
later ones are refused, and the process ends with 0. A server under load gets SIGKILL and is started again at
once on the same port: how long until it is live, ready, and has given a token? Prints Markdown, and writes it
with JSON beside it if asked. Exit status 1 if a request was cut.
"""

import argparse
import asyncio
import datetime
import json
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

import asyncserve
from loadtest.client import CannotConnect, Client, ConnectionLost, Record, error_message
from loadtest.server_process import ServerFailed, ServerProcess, free_port, running
from loadtest.workload import Sample, text

DEMO_MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
SERVER: Mapping[str, Any] = {"device": "cpu", "max_num_seqs": 64, "shutdown_timeout": 120}
START_LIMIT_S = 120.0
STOP_LIMIT_S = 150.0
REFUSED_STATUS = 503
PLAIN_SHARE = 3
"""Every third client does not stream."""


@dataclass(slots=True)
class Stopped:
    """What became of the requests of a server that got SIGTERM.

    Args:
        in_flight: Requests under way when it came.
        whole: Of those, how many came to their whole answer.
        crossed: Of those, how many were still on their way to the server, and got 503 or no connection.
        cut: What became of the others, and of those sent later that were accepted and then broke off.
        refused: Requests sent later that got 503, or no connection at all.
        served_later: Requests sent later that were answered all the same.
    """

    in_flight: int = 0
    whole: int = 0
    crossed: int = 0
    cut: list[str] = field(default_factory=list)
    refused: int = 0
    served_later: int = 0


class Crowd:
    """Clients that send one request after the other until they are refused.

    Args:
        url: Of the server.
        num_clients: At once.
        samples: What they send, in turns.
    """

    def __init__(self, url: str, num_clients: int, samples: Sequence[Sample]) -> None:
        self.stopped = Stopped()
        self.num_answered = 0
        self._client = Client(url)
        self._samples = samples
        self._num_clients = num_clients
        self._num_under_way = 0
        self._has_stopped = False

    async def run(self, stop: Any, when: Awaitable[object]) -> Stopped:
        """Send requests, call `stop` when the time has come, and return what became of all."""
        self._client.model = (await self._client.served_model())[0]
        clients = [asyncio.create_task(self._live(number)) for number in range(self._num_clients)]
        await when
        self.stopped.in_flight = self._num_under_way
        self._has_stopped = True
        stop()
        await asyncio.gather(*clients)
        self._client.close()
        return self.stopped

    async def _live(self, number: int) -> None:
        turn = number
        while True:
            sample = self._samples[turn % len(self._samples)]
            turn += self._num_clients
            is_later = self._has_stopped
            self._num_under_way += 1
            try:
                async with asyncio.timeout(self._client.timeout_s):
                    status, error = await (self._plain if number % PLAIN_SHARE == 0 else self._stream)(sample)
                is_refused = status == REFUSED_STATUS
            except (ConnectionLost, TimeoutError) as lost:
                error = str(lost) or f"no answer within {self._client.timeout_s:g} s"
                is_refused = isinstance(lost, CannotConnect)
            finally:
                self._num_under_way -= 1
            if is_later:
                if error is None:
                    self.stopped.served_later += 1
                elif is_refused:
                    self.stopped.refused += 1
                    return
                else:
                    self.stopped.cut.append(f"sent later: {error}")
                    return
            elif error is not None:
                if self._has_stopped and is_refused:
                    self.stopped.crossed += 1
                else:
                    self.stopped.cut.append(error)
                return
            elif self._has_stopped:
                self.stopped.whole += 1
            else:
                self.num_answered += 1

    async def _stream(self, sample: Sample) -> tuple[int, str | None]:
        """Return the status of an answer, and what is wrong with it."""
        record = Record(num_asked_tokens=sample.max_tokens)
        body = self._client.body(sample)
        await self._client.on_connection(lambda connection: self._client.stream(connection, body, record))
        return record.status, record.error or _shortage(record.num_output_tokens, sample)

    async def _plain(self, sample: Sample) -> tuple[int, str | None]:
        body = self._client.body(sample, stream=False)
        answer = await self._client.ask("POST", "/v1/completions", body)
        if answer.status != 200:
            return answer.status, f"HTTP {answer.status}: {error_message(answer.body)}"
        return answer.status, _shortage(answer.json()["usage"]["completion_tokens"], sample)


def _shortage(num_tokens: int, sample: Sample) -> str | None:
    return None if num_tokens == sample.max_tokens else f"{num_tokens} of {sample.max_tokens} tokens came"


def terminated(model: str, *, num_clients: int, after_s: float, output_len: int, log: Path) -> dict[str, Any]:
    """Let a server under load get SIGTERM."""
    samples = text(256, input_len=24, output_len=output_len, range_ratio=0.8, seed=0)
    with running(model, SERVER, cores=None, log=log) as server:
        server.wait_for_status("/ready", START_LIMIT_S)
        crowd = Crowd(server.url, num_clients, samples)
        told_s: list[float] = []

        def stop() -> None:
            told_s.append(time.perf_counter())
            server.process.send_signal(signal.SIGTERM)

        found = uvloop.run(crowd.run(stop, asyncio.sleep(after_s)))
        status = server.process.wait(STOP_LIMIT_S)
        took_s = time.perf_counter() - told_s[0]
    return {
        "clients": num_clients,
        "answered before": crowd.num_answered,
        "in flight at SIGTERM": found.in_flight,
        "of these whole": found.whole,
        "of these still on their way and refused": found.crossed,
        "cut": len(found.cut),
        "why": sorted(set(found.cut)),
        "sent later and refused": found.refused,
        "sent later and answered": found.served_later,
        "seconds to the end": round(took_s, 2),
        "exit status": status,
    }


def killed(model: str, *, times: int, num_clients: int, after_s: float, log: Path) -> dict[str, Any]:
    """Let a server under load get SIGKILL, and start it again at once, several times."""
    samples = text(256, input_len=24, output_len=64, seed=0)
    port = free_port()
    rows = []
    with running(model, SERVER, cores=None, log=log, port=port) as server:
        server.wait_for_status("/ready", START_LIMIT_S)
        rows.append(_start_times(server))
        _kill_under_load(server, num_clients, samples, after_s)
    for turn in range(times):
        with running(model, SERVER, cores=None, log=log, port=port) as server:
            rows.append(_start_times(server))
            if turn + 1 < times:
                _kill_under_load(server, num_clients, samples, after_s)
    again = rows[1:]
    return {
        "restarts": times,
        **{
            name: {
                "median": round(statistics.median(row[name] for row in again), 2),
                "least": round(min(row[name] for row in again), 2),
                "most": round(max(row[name] for row in again), 2),
            }
            for name in again[0]
        },
    }


def _start_times(server: ServerProcess) -> dict[str, float]:
    """Return the seconds since a server was started until each of three things."""
    times = {
        "seconds to live": server.wait_for_status("/live", START_LIMIT_S),
        "seconds to ready": server.wait_for_status("/ready", START_LIMIT_S),
    }
    server.complete([20, 21, 22], 1)
    return times | {"seconds to a token": time.perf_counter() - server.started_s}


def _kill_under_load(
    server: ServerProcess, num_clients: int, samples: Sequence[Sample], after_s: float
) -> None:
    crowd = Crowd(server.url, num_clients, samples)
    uvloop.run(crowd.run(server.process.kill, asyncio.sleep(after_s)))
    server.process.wait()


def to_markdown(found: Mapping[str, Any]) -> str:
    """Return the tables."""
    lines = [f"# How a server ends, {found['date'][:10]}", "", "```", found["command"], "```", ""]
    lines += [
        f"asyncserve {found['version']}, {found['model']}",
        "",
        "| SIGTERM under load |  |",
        "|---|---|",
    ]
    lines += [f"| {name} | {value} |" for name, value in found["term"].items() if name != "why"]
    lines += [f"| cut since | {why} |" for why in found["term"]["why"]]
    if found["kill"]:
        lines += [
            "",
            "| SIGKILL under load, started again at once | median | least | most |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {value['median']} | {value['least']} | {value['most']} |"
            for name, value in found["kill"].items()
            if isinstance(value, dict)
        ]
        lines += [
            "",
            f"Of {found['kill']['restarts']} restarts, with the files of the model in the page cache.",
        ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and run."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.endings", description="End a server, and time it."
    )
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--clients", type=int, default=48, help="Clients at once. Default: 48.")
    parser.add_argument(
        "--after", type=float, default=5.0, help="Seconds of load before the end. Default: 5."
    )
    parser.add_argument("--output-len", type=int, default=64, help="Mean tokens of an answer. Default: 64.")
    parser.add_argument("--restarts", type=int, default=5, help="How often it is killed. Default: 5.")
    parser.add_argument("--results", type=Path, default=None, help="File to write, .json and .md.")
    arguments = parser.parse_args(argv)
    load = {"num_clients": arguments.clients, "after_s": arguments.after}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        try:
            term = terminated(arguments.model, output_len=arguments.output_len, log=log, **load)
            kill = (
                killed(arguments.model, times=arguments.restarts, log=log, **load)
                if arguments.restarts
                else {}
            )
        except (ServerFailed, ConnectionLost) as error:
            print(f"loadtest.endings: error: {error}", file=sys.stderr)
            return 2
    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "loadtest.endings", *argv]),
        "version": asyncserve.__version__,
        "model": Path(arguments.model).name,
        "term": term,
        "kill": kill,
    }
    print(to_markdown(found))
    if arguments.results is not None:
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.with_suffix(".json").write_text(
            json.dumps(found, indent=1) + "\n", encoding="utf-8"
        )
        arguments.results.with_suffix(".md").write_text(to_markdown(found), encoding="utf-8")
    return 1 if term["cut"] or term["exit status"] else 0


if __name__ == "__main__":
    sys.exit(main())
