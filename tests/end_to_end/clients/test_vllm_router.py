"""vllm-router in front of two servers: it spreads requests, keeps to caches, gets over a server that ends."""

import asyncio
import contextlib
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from loadtest.client import Client, Record
from loadtest.server_process import free_port
from loadtest.workload import Sample, random_tokens
from tests.end_to_end.clients.environments import client_python
from tests.end_to_end.server_process import TINY, ServerProcess
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        (platform.system(), platform.machine()) != ("Linux", "x86_64"),
        reason="vllm-router is published for Linux on x86-64 alone",
    ),
]

LIMIT_S = 90.0
NUM_CLIENTS = 6
BLOCK_LEN = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    write_tiny_tokenizer(folder, vocab_size=320)
    return folder


class Instances:
    """Two servers, of which one may be ended and started again at its address."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self.servers = [self._start(free_port()), self._start(free_port())]
        for server in self.servers:
            server.wait_ready()
        self.urls = [server.url for server in self.servers]

    def start_again(self, index: int) -> None:
        self.servers[index] = self._start(int(self.urls[index].rsplit(":", 1)[1])).wait_ready()

    def _start(self, port: int) -> ServerProcess:
        options = ("--served-model-name", "tiny", "--kv-cache-memory-bytes", "32MiB", "--port", str(port))
        return ServerProcess(self._model, *TINY, *options)


@pytest.fixture(scope="module")
def instances(model: Path) -> Iterator[Instances]:
    both = Instances(model)
    try:
        yield both
    finally:
        for server in both.servers:
            server.stop()


@contextlib.contextmanager
def router(instances: Instances, policy: str, log: Path) -> Iterator[str]:
    """Run the router; gives its URL when it has found both servers ready."""
    port, metrics_port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    options = {
        "port": port,
        "policy": policy,
        "prometheus-port": metrics_port,
        "health-check-endpoint": "/ready",
        "health-check-interval-secs": 1,
        "worker-startup-check-interval": 1,
        "cb-timeout-duration-secs": 1,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(str(client_python("vllm-router")), "-m", "vllm_router.launch_router"),
                *("--worker-urls", *instances.urls),
                *(f"--{name}={value}" for name, value in options.items()),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: answers(f"{url}/health"), log)
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=LIMIT_S).status_code == 200
    return False


def until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)


def num_answered(server: ServerProcess) -> float:
    return server.metric("asyncserve:request_success_total", finished_reason="length")


def load(url: str, samples: list[Sample], end: Callable[[], None] = lambda: None) -> list[Record]:
    """Send samples from several clients at once, and call `end` in a thread when a third of them is done."""

    async def run() -> list[Record]:
        client = Client(url, model="tiny", timeout_s=LIMIT_S)
        left, records = list(samples), []
        ending: asyncio.Future[None] | None = None

        async def one() -> None:
            nonlocal ending
            while left:
                records.append(await client.complete(left.pop()))
                if ending is None and len(records) > len(samples) / 3:
                    ending = asyncio.ensure_future(asyncio.to_thread(end))

        await asyncio.gather(*(one() for _ in range(NUM_CLIENTS)))
        assert ending is not None
        await ending
        client.close()
        return records

    return asyncio.run(run())


def prompts(count: int, seed: str) -> list[Sample]:
    return random_tokens(count, input_len=8, output_len=24, vocab_size=256, seed=seed)


def test_requests_of_one_beginning_go_to_the_server_that_has_it_cached(
    instances: Instances, tmp_path: Path
) -> None:
    num_groups, num_each, num_blocks = NUM_CLIENTS, 4, 8

    def hits() -> list[float]:
        return [server.metric("asyncserve:prefix_cache_hits_total") for server in instances.servers]

    # The router compares texts: of token ids it sees none.
    beginnings = [
        (f"{group} sheep went over the hill. " * 10)[: num_blocks * BLOCK_LEN] for group in range(num_groups)
    ]
    begun = hits()
    with router(instances, "cache_aware", tmp_path / "router.log") as url:
        for turn in range(num_each):
            # At once, for a router with nothing to do sends everything the same way.
            records = load(url, [Sample(f"{beginning}{turn}", 8) for beginning in beginnings])
            assert [record.error for record in records if record.error] == []
    found = [after - before for after, before in zip(hits(), begun, strict=True)]
    # All but the first of each group; sent in turns to both, every second one would find nothing.
    assert sum(found) == num_groups * (num_each - 1) * num_blocks * BLOCK_LEN
    assert all(found), "one server got everything"


def test_no_request_is_lost_when_a_server_stops_and_only_those_on_it_when_it_is_killed(
    instances: Instances, tmp_path: Path
) -> None:
    first, second = instances.servers
    begun = [num_answered(server) for server in instances.servers]
    with router(instances, "round_robin", tmp_path / "router.log") as url:
        killed_s: list[float] = []

        def kill() -> None:
            assert num_answered(second) > begun[1]
            second.signal(signal.SIGKILL)
            second.wait()
            killed_s.append(time.perf_counter())
            second.stop()

        records = load(url, prompts(48, "killed"), kill)
        for record in records:
            assert record.error is None or record.started_s < killed_s[0], record.error
        assert sum(record.error is not None for record in records) <= NUM_CLIENTS
        assert num_answered(first) > begun[0]

        # Its health checks find it again once it is back.
        instances.start_again(1)
        second = instances.servers[1]
        until(
            lambda: not load_errors(url, prompts(2, "back")) and num_answered(second) > 0,
            tmp_path / "router.log",
        )

        begun_again = num_answered(second)
        records = load(url, prompts(48, "stopped"), lambda: first.signal(signal.SIGTERM))
        assert [record.error for record in records if record.error] == []
        assert num_answered(second) > begun_again
        assert first.wait() == 0


def load_errors(url: str, samples: list[Sample]) -> list[str]:
    return [record.error for record in load(url, samples) if record.error]
