"""`python -m loadtest.soak`: learn the right answers, soak a server with faults in it, hold it to account.

Starts the servers itself: one undisturbed, for the answers, and, for the soak, one with `ASYNCSERVE_FAULTS`
for each of the scenario's scheduling policies. Exit status 1 if a request was lost or answered wrongly, if
metrics and clients disagree, if something is left behind, if memory grows by more than 2 % after warm-up, or
if the server is busy when idle. Run in the repository's root; needs what tests need.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

import asyncserve
from asyncserve.config import FAULTS_VARIABLE
from loadtest.chaos import GAUGES_AT_REST, SETTLE_S, measured_idle_share
from loadtest.client import Client, ConnectionLost
from loadtest.server_process import ServerFailed, ServerProcess, running
from loadtest.soak import report, residue
from loadtest.soak.guests import Guests, Texts, told_at_once
from loadtest.soak.ledger import Counts, Ledger, read_counts
from loadtest.soak.questions import Questions, draw
from loadtest.soak.scenario import Scenario, read_scenario
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

DEMO_MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
TINY = "tiny"
TINY_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TINY_VOCAB = 320
MAX_GROWTH_PERCENT = 2.0
MAX_IDLE_PERCENT = 2.0
LIVE_INTERVAL_S = 0.05
LIVE_LIMIT_S = 60.0
START_LIMIT_S = 120.0
MIN_MEMORY_S = 60.0
"""A shorter soak says nothing of the growth of memory."""
WARM_UP_S = 10.0
"""So long, at most, everything is done once before what is alive counts as there from the beginning."""
KEY_FILE_INTERVAL_S = 5.0


class Soak:
    """The soak of one server.

    Args:
        scenario: What is done.
        server: The server, a `watched_server` that is ready.
        watch_file: What it writes to.
        questions: What is asked.
        expected: What sound questions are answered with.
        seed: Of everything drawn.
    """

    def __init__(
        self,
        scenario: Scenario,
        server: ServerProcess,
        watch_file: Path,
        *,
        questions: Questions,
        expected: Sequence[Texts],
        seed: int,
    ) -> None:
        self._scenario = scenario
        self._url = server.url
        self._process = psutil.Process(server.process.pid)
        self._watch_file = watch_file
        self._questions = questions
        self._expected = expected
        self._seed = seed
        self._client = Client(server.url, api_key=next(iter(scenario.keys), None))
        self.ledger = Ledger()
        self.live_ms: list[float] = []

    async def run(self, seconds: float, *, warm_up_s: float, idle_seconds: float) -> dict[str, Any]:
        """Soak it, and return all that was found."""
        self._client.model = (await self._client.served_model())[0]
        # Threads and pools that start when they are first needed are no leaks.
        await self._ask_everything()
        warm_up = Ledger()
        await self._load(warm_up_s, warm_up, seed=self._seed + 1)
        for message, count in warm_up.complaints.items():
            self.ledger.complaints[f"while warming up: {message}"] += count
        await self._rest()
        alive_before = await residue.alive(self._process, self._watch_file)
        before = await self._counts()
        ended = asyncio.Event()
        memory = residue.Memory(self._process)
        watching = [
            asyncio.create_task(memory.watch(ended)),
            asyncio.create_task(self._watch_live(ended)),
        ]
        cpu_before, began_s = self._cpu_s(), time.perf_counter()
        await self._load(seconds, self.ledger, seed=self._seed)
        took_s = time.perf_counter() - began_s
        busy_percent = 100 * (self._cpu_s() - cpu_before) / took_s
        ended.set()
        await asyncio.gather(*watching)
        at_rest = await self._rest()
        after = await self._counts()
        alive_after = await residue.alive(self._process, self._watch_file)
        idle_percent = None
        if idle_seconds:
            idle_percent = await measured_idle_share(self._process.pid, idle_seconds)
        self._client.close()
        growth = memory.growth(began_s + self._scenario.warm_share * seconds)
        equations = list(self.ledger.equations(before, after))
        leaks = residue.leaks(alive_before, alive_after)
        self._complain(equations, leaks, at_rest)
        if took_s >= MIN_MEMORY_S and growth["growth_percent"] > MAX_GROWTH_PERCENT:
            self.ledger.complain(f"memory grew by {growth['growth_percent']} %")
        if idle_percent is not None and idle_percent > MAX_IDLE_PERCENT:
            self.ledger.complain(f"idle, the server takes {idle_percent:.1f} % of a core")
        median, p99, most = np.percentile(self.live_ms, [50, 99, 100])
        return {
            "seconds": round(took_s, 1),
            "requests": {
                "sent": self.ledger.num_sent,
                "ends": self.ledger.ends(),
                "wrong": self.ledger.num_wrong,
            },
            "server": {
                name: int(after.values.get(metric, 0) - before.values.get(metric, 0))
                for name, metric in report.EVENTS.items()
            },
            "equations": [report.plain(equation) for equation in equations],
            "leaks": leaks,
            "alive": {"before": alive_before, "after": alive_after},
            "at_rest": at_rest,
            "memory": growth,
            "memory_mib": memory.thinned(),
            "idle_percent": None if idle_percent is None else round(idle_percent, 2),
            "busy_percent": round(busy_percent, 1),
            "live_ms": {"median": median, "p99": p99, "most": most, "num_asked": len(self.live_ms)},
            "kinds": self.ledger.kinds(),
            "complaints": dict(self.ledger.complaints),
        }

    async def _ask_everything(self) -> None:
        """Ask all sound questions at once, whatever comes of it."""
        model = self._client.model
        asked = [
            self._client.ask("POST", question.path, question.body(stream=False, model=model))
            for question in self._questions.sound
        ]
        await asyncio.gather(*asked, return_exceptions=True)
        self._client.close()

    async def _load(self, seconds: float, ledger: Ledger, *, seed: int) -> None:
        """Let guests come for so long, and wait until the last has gone."""
        scenario = self._scenario
        guests = Guests(
            self._url,
            model=self._client.model,
            keys=scenario.keys,
            questions=self._questions,
            expected=self._expected,
            ledger=ledger,
            weights=scenario.visits,
            seed=seed,
        )
        stop_s = time.perf_counter() + seconds
        idle = [await self._client.open() for _ in range(scenario.idle_connections)]
        for connection in idle:
            await connection.exchange(self._client.head("GET", "/live"))
        async with asyncio.TaskGroup() as group:
            for _ in range(scenario.guests):
                group.create_task(guests.live(stop_s))
            if scenario.burst_len:
                group.create_task(self._bursts(guests, stop_s))
        guests.close()
        for connection in idle:
            connection.close()

    async def _bursts(self, guests: Guests, stop_s: float) -> None:
        while (left_s := stop_s - time.perf_counter()) > 0:
            await asyncio.sleep(min(left_s, self._scenario.burst_interval_s / 2))
            if time.perf_counter() < stop_s:
                await guests.burst(self._scenario.burst_len)
            await asyncio.sleep(self._scenario.burst_interval_s / 2 if time.perf_counter() < stop_s else 0)

    async def _watch_live(self, ended: asyncio.Event) -> None:
        """Ask /live all the time: it must be answered whatever happens."""
        request = self._client.head("GET", "/live")
        connection = None
        while not ended.is_set():
            try:
                if connection is None or not connection.is_open:
                    connection = await self._client.open()
                began_s = time.perf_counter()
                async with asyncio.timeout(LIVE_LIMIT_S):
                    answer = await connection.exchange(request)
            except (ConnectionLost, TimeoutError) as error:
                self.ledger.complain(f"/live: {str(error) or 'no answer'}")
                if connection is not None:
                    connection.close()
            else:
                self.live_ms.append(1e3 * (time.perf_counter() - began_s))
                if answer.status != 200:
                    self.ledger.complain(f"/live: HTTP {answer.status}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), LIVE_INTERVAL_S)
        if connection is not None:
            connection.close()

    async def _rest(self) -> dict[str, float]:
        """Wait until nobody is served, and return the gauges that say so."""
        deadline_s = time.perf_counter() + SETTLE_S
        while True:
            values = (await self._counts()).values
            at_rest = {name: values[gauge] for name, gauge in GAUGES_AT_REST.items()}
            at_rest["requests paused"] = values.get("num_requests_paused", 0.0)
            # This request is one of those in progress.
            at_rest["requests in progress"] = values["http_requests_in_progress"] - 1
            if not any(at_rest.values()) or time.perf_counter() > deadline_s:
                return at_rest
            await asyncio.sleep(0.1)

    async def _counts(self) -> Counts:
        return read_counts((await self._client.ask("GET", "/metrics")).body.decode())

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def _complain(
        self, equations: Sequence[Any], leaks: Mapping[str, int], rest: Mapping[str, float]
    ) -> None:
        ledger = self.ledger
        for equation in equations:
            if not equation.holds:
                ledger.complain(
                    f"{equation.name}: the server counted {equation.counted}, its clients say"
                    f" {equation.least} to {equation.most}"
                )
        for name, count in leaks.items():
            ledger.complain(f"left behind: {count} {name}")
        for name, value in rest.items():
            if value:
                ledger.complain(f"at rest, {name} is {value:g}")


async def right_answers(server: ServerProcess, scenario: Scenario, questions: Questions) -> list[Texts]:
    """Ask an undisturbed server everything once, one after the other."""
    client = Client(server.url, api_key=next(iter(scenario.keys), None))
    client.model = (await client.served_model())[0]
    texts = []
    for question in questions.sound:
        body = question.body(stream=False, model=client.model)
        answer = await client.ask("POST", question.path, body)
        told = told_at_once(answer, question.num_choices)
        if not told.is_whole:
            raise ServerFailed(f"a sound question gets HTTP {answer.status}: {told.error}")
        texts.append(told.texts)
    client.close()
    return texts


@contextmanager
def watched(
    model: str, options: Mapping[str, Any], *, folder: Path, name: str, faults: str = ""
) -> Iterator[tuple[ServerProcess, Path]]:
    """Run a watched server for the duration of the block; gives it, ready, and the file it writes to.

    Its log is called by its name.
    """
    watch_file = folder / f"{name}-alive.jsonl"
    environment = {**os.environ, FAULTS_VARIABLE: faults}
    command = ["loadtest.soak.watched_server", str(watch_file)]
    log = folder / f"{name}.log"
    with running(model, options, cores=None, log=log, module=command, environment=environment) as server:
        server.wait_for_status("/ready", START_LIMIT_S)
        yield server, watch_file


def soak(
    scenario: Scenario, *, model: str, seconds: float, idle_seconds: float, seed: int, folder: Path
) -> dict[str, Any]:
    """Do it all; `folder` gets the model, if it is a tiny one, and logs.

    The scenario's scheduling policies share the seconds; what was found of each is one of `parts`.

    Raises:
        ServerFailed: A server does not start, or gives no right answers.
    """
    options = dict(scenario.server)
    vocab_size = 32_000
    name = Path(model).name
    if model == TINY:
        vocab_size = TINY_VOCAB - 32
        model = str(tiny_llama_folder(folder / TINY, vocab_size=TINY_VOCAB, max_position_embeddings=4096))
        write_tiny_tokenizer(Path(model), vocab_size=TINY_VOCAB)
        options["chat_template"] = TINY_TEMPLATE
        name = "a tiny random Llama"
    key_file = folder / "keys"
    if scenario.keys:
        # From a file, so that it is read again while serving, from a disk that may be slow.
        key_file.write_text("\n".join(scenario.keys) + "\n")
        options["api_key_file"] = str(key_file)
    questions = draw(**scenario.questions, vocab_size=vocab_size, seed=seed)
    with watched(model, options, folder=folder, name="undisturbed") as (server, _):
        expected = uvloop.run(right_answers(server, scenario, questions))
    parts = []
    for policy in scenario.policies:
        of_policy = {**options, "scheduling_policy": policy}
        with watched(model, of_policy, folder=folder, name=policy, faults=scenario.faults_text) as (
            server,
            watch_file,
        ):
            whole = Soak(scenario, server, watch_file, questions=questions, expected=expected, seed=seed)
            running_soak = whole.run(
                seconds / len(scenario.policies),
                warm_up_s=min(WARM_UP_S, seconds / 4),
                idle_seconds=idle_seconds,
            )
            found = uvloop.run(_touching(key_file if scenario.keys else None, running_soak))
            if server.process.poll() is not None:
                raise ServerFailed(f"the server ended by itself:\n{server.last_lines(30)}")
        if (status := server.process.returncode) != 0:
            found["complaints"][f"the server ended with status {status}"] = 1
        for request_id in whole.ledger.unlogged(server.log.read_text(errors="replace")):
            found["complaints"][f"request {request_id} is not in the server's log exactly once"] = 1
        parts.append({"policy": policy, **found})
    return {
        "version": asyncserve.__version__,
        "model": name,
        "guests": scenario.guests,
        "faults": scenario.faults_text,
        "parts": parts,
    }


def is_sound(part: Mapping[str, Any]) -> bool:
    """Return whether nothing is wrong with what was found of one server."""
    requests = part["requests"]
    return not (part["complaints"] or requests["ends"]["lost"] or requests["wrong"])


async def _touching(key_file: Path | None, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    touching = None if key_file is None else asyncio.create_task(_touch(key_file))
    try:
        return await work
    finally:
        if touching is not None:
            touching.cancel()


async def _touch(key_file: Path) -> None:
    """Touch the file of keys now and then: the server reads it again."""
    while True:
        await asyncio.sleep(KEY_FILE_INTERVAL_S)
        os.utime(key_file)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and run."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.soak", description="Soak a server with faults in it, and hold it to account."
    )
    parser.add_argument("--scenario", default="soak", help="Name in loadtest/scenarios/soak, or a TOML file.")
    parser.add_argument("--model", default=DEMO_MODEL, help=f"A model, or {TINY!r} for a tiny random Llama.")
    parser.add_argument(
        "--seconds", type=float, default=1200.0, help="How long, all policies together. Default: 1200."
    )
    parser.add_argument(
        "--idle-seconds", type=float, default=10.0, help="How long idleness is measured; 0: not."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=None, help="File to write, .json and .md.")
    parser.add_argument("--log-dir", type=Path, default=None, help="Where the servers' logs stay.")
    arguments = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        folder = arguments.log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found = soak(
                read_scenario(arguments.scenario),
                model=arguments.model,
                seconds=arguments.seconds,
                idle_seconds=arguments.idle_seconds,
                seed=arguments.seed,
                folder=folder,
            )
        except (ServerFailed, ConnectionLost, ValueError, psutil.Error) as error:
            print(f"loadtest.soak: error: {error}", file=sys.stderr)
            return 2
    found = {"date": report.today(), "command": report.command_line(argv), **found}
    if arguments.results is not None:
        report.write(found, arguments.results)
    print(report.to_markdown(found))
    return 0 if all(map(is_sound, found["parts"])) else 1


if __name__ == "__main__":
    sys.exit(main())
