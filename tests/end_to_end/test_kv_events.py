"""What a cache-aware router is told by a real server, and whether it could compute the hashes itself."""

import hashlib
import json
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cbor2
import httpx2 as httpx
import pytest

from tests.end_to_end.server_process import TINY, ServerProcess, running_server
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer
from tests.kv_events.subscriber import BlockStored, EventBatch, Subscriber

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

BLOCK_LEN = 16


def hashes(token_ids: list[int], seed: str) -> list[int]:
    """Return what a router that knows vLLM's sha256_cbor makes of a prompt's full blocks."""
    parent = hashlib.sha256(cbor2.dumps(seed, canonical=True)).digest()
    found = []
    for end in range(BLOCK_LEN, len(token_ids) + 1, BLOCK_LEN):
        block = (parent, tuple(token_ids[end - BLOCK_LEN : end]), None)
        parent = hashlib.sha256(cbor2.dumps(block, canonical=True)).digest()
        found.append(int.from_bytes(parent, "big") & (2**64 - 1))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("tiny"))
    write_tiny_tokenizer(folder, vocab_size=320)
    return folder


def test_a_router_is_told_which_prefixes_a_server_holds_by_hashes_it_can_compute(
    tmp_path: Path, model: Path
) -> None:
    endpoints = (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    config = {"enable_kv_cache_events": True, "endpoint": endpoints[0], "replay_endpoint": endpoints[1]}
    options = (*TINY, "--kv-events-config", json.dumps({**config, "topic": "kv"}), "--block-size", "16")
    with running_server(
        model, *options, "--kv-cache-memory-bytes", "32MiB", environ={"PYTHONHASHSEED": "7"}
    ) as server:
        assert f"KV events: published on {endpoints[0]}" in server.log
        router = Subscriber(endpoints, topic="kv")
        try:
            prompt = list(range(3, 43))
            for asked in (prompt, [*prompt[:32], *range(100, 120)]):
                body = {"model": str(model), "prompt": asked, "max_tokens": 1, "temperature": 0}
                assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
            events = [event for _, batch in router.ask(0) for event in batch.events]
        finally:
            router.close()
    first, second = [event for event in events if isinstance(event, BlockStored)]
    assert (first.token_ids, first.parent_block_hash) == (prompt[:32], None)
    assert first.block_hashes == hashes(prompt, "7")
    assert (second.token_ids, second.parent_block_hash) == (list(range(100, 116)), first.block_hashes[1])
    assert second.block_hashes == hashes([*prompt[:32], *range(100, 116)], "7")[2:]
    assert (first.block_size, first.medium, first.group_idx) == (16, "GPU", 0)


# Subscribers that do not do what they should


MOST_WAITING = 100
"""Batches that the server keeps for a subscriber that does not read."""
NUM_TOKENS = 64


class Busy:
    """A server that tells a batch for every token, asked for one answer after the other.

    No two prompts are the same, so nothing of an answer is cached before.
    """

    def __init__(self, server: ServerProcess, model: Path, endpoints: tuple[str, str]) -> None:
        self.server = server
        self.endpoints = endpoints
        self._model = str(model)
        self._num_asked = 0

    def ask(self, num_tokens: int = NUM_TOKENS) -> None:
        """Have so many tokens generated that nobody has asked for before."""
        high, low = divmod(self._num_asked, 250)
        self._num_asked += 1
        body = {
            "model": self._model,
            "prompt": [10 + high, 10 + low],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        answer = self.server.post("/v1/completions", body)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == num_tokens

    @property
    def num_sent(self) -> int:
        return int(self.server.metric("asyncserve:kv_event_batches_total", outcome="sent"))

    def let_hear(self, subscriber: Subscriber) -> None:
        """Publish until a subscriber hears something: nobody tells when a subscription has arrived."""
        self.ask(2)
        while not subscriber.has_heard(within_ms=50):
            self.ask(2)

    def follow(self, subscriber: Subscriber, heard: list[int]) -> None:
        """Receive all that was sent by now; the numbers are appended."""
        num_sent = self.num_sent
        while not heard or heard[-1] + 1 < num_sent:
            heard.append(subscriber.receive()[1])

    def still_works(self) -> None:
        self.server.wait_idle()
        assert self.server.get("/health").json()["status"] == "ok"
        assert self.server.metric("asyncserve:kv_event_batches_total", outcome="left_out") == 0


@pytest.fixture(scope="module")
def busy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    folder = tmp_path_factory.mktemp("sockets")
    endpoints = (f"ipc://{folder}/events", f"ipc://{folder}/replay")
    config = {"enable_kv_cache_events": True, "endpoint": endpoints[0], "replay_endpoint": endpoints[1]}
    options = (*TINY, "--kv-events-config", json.dumps({**config, "hwm": MOST_WAITING}), "--block-size", "1")
    with running_server(model, *options, "--kv-cache-memory-bytes", "8MiB") as server:
        yield Busy(server, model, endpoints)


@pytest.fixture
def good(busy: Busy) -> Iterator[Subscriber]:
    """A subscriber that hears everything from the first message on."""
    subscriber = Subscriber(busy.endpoints)
    busy.let_hear(subscriber)
    yield subscriber
    subscriber.close()


def contiguous(numbers: list[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[-1] + 1))


def _can_read(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], 0.05)[0])


DYING = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.set_hwm(1)
socket.setsockopt(zmq.SUBSCRIBE, b"")
socket.connect(sys.argv[1])
socket.recv_multipart()
print("heard", flush=True)
sys.stdin.read()
"""


def test_a_subscriber_that_stops_and_dies_takes_nothing_from_others(busy: Busy, good: Subscriber) -> None:
    heard: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", DYING, busy.endpoints[0]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as dying:
        try:
            assert dying.stdout is not None
            while not _can_read(dying):
                busy.ask(2)
                busy.follow(good, heard)
            assert dying.stdout.readline() == b"heard\n"
            for end in (signal.SIGSTOP, signal.SIGKILL):
                dying.send_signal(end)
                for _ in range(8):
                    busy.ask()
                    busy.follow(good, heard)
        finally:
            dying.kill()
    assert contiguous(heard)
    assert len(heard) > 8 * NUM_TOKENS
    busy.still_works()


def test_a_subscriber_that_never_reads_misses_batches_and_nobody_else_does(
    busy: Busy, good: Subscriber
) -> None:
    heard: list[int] = []
    slow = Subscriber(busy.endpoints, most_waiting=1)
    try:
        busy.let_hear(slow)
        for _ in range(40):
            busy.ask()
            busy.follow(good, heard)
        assert contiguous(heard)
        assert len(heard) > 30 * NUM_TOKENS
        late: list[int] = []
        while slow.has_heard(within_ms=200):
            late.append(slow.receive()[1])
        assert len(late) < 20 * NUM_TOKENS, "it was too far behind, or this shows nothing"
        # By the numbers it knows what it has missed, and may ask.
        busy.let_hear(slow)
        now = slow.receive()[1]
        assert now > late[-1] + 1
        again = [number for number, _ in slow.ask(late[-1] + 1)]
        assert again[: now - late[-1]] == list(range(late[-1] + 1, now + 1))
    finally:
        slow.close()
    busy.still_works()


def test_a_subscriber_that_comes_late_gets_what_was_before_and_what_comes(busy: Busy) -> None:
    for _ in range(4):
        busy.ask()
    late = Subscriber(busy.endpoints)
    try:
        busy.let_hear(late)
        again = late.ask(0)
        assert [number for number, _ in again] == list(range(len(again)))
        heard: list[tuple[int, EventBatch]] = []
        busy.ask()
        num_sent = busy.num_sent
        while not heard or heard[-1][0] + 1 < num_sent:
            heard.append(late.receive()[1:])
        assert heard[0][0] <= len(again), "there is no hole between them"
        assert contiguous([number for number, _ in heard])
        # What comes twice is the same.
        told = dict(again)
        assert all(told[number].events == batch.events for number, batch in heard if number in told)
        assert set(told).union(number for number, _ in heard) == set(range(num_sent))
    finally:
        late.close()
    busy.still_works()


@pytest.mark.parametrize("which", ["endpoint", "replay_endpoint"])
def test_an_address_in_use_stops_the_second_server_and_not_the_first(
    model: Path, tmp_path: Path, which: str
) -> None:
    first = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://127.0.0.1:*",
        "replay_endpoint": "tcp://127.0.0.1:*",
    }
    options = (*TINY, "--kv-events-config", json.dumps(first), "--block-size", "1")
    with running_server(model, *options, "--kv-cache-memory-bytes", "8MiB") as server:
        line = next(line for line in server.log.splitlines() if "KV events: published" in line)
        addresses = [word.rstrip(",").strip('"') for word in line.split() if word.startswith("tcp://")]
        free = f"ipc://{tmp_path}/"
        taken = {"endpoint": addresses[0], "replay_endpoint": addresses[1]}[which]
        # One with a wildcard is bound; so is any for replays.
        taken = taken.replace("127.0.0.1", "*")
        config = {
            "enable_kv_cache_events": True,
            "endpoint": free + "e",
            "replay_endpoint": free + "r",
            which: taken,
        }
        second = ServerProcess(model, *TINY, "--kv-events-config", json.dumps(config))
        try:
            assert second.wait() == 2
            assert f"kv_events_config: '{taken}' cannot be used: Address already in use" in second.log
        finally:
            second.stop()
        subscriber = Subscriber((addresses[0], addresses[1]))
        try:
            Busy(server, model, (addresses[0], addresses[1])).let_hear(subscriber)
        finally:
            subscriber.close()
