"""A whole server with every bound drawn tight, as its options say."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import httpx2 as httpx
import pytest

from loadtest.metrics_page import samples
from tests.end_to_end.server_process import TINY, ServerProcess, running_server
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.slow
HELLO = {"prompt": [5] * 8, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("tiny"), vocab_size=320)
    write_tiny_tokenizer(folder, vocab_size=320)
    options = (
        *("--scheduling-policy", "fair", "--max-num-queued-tokens", "100", "--max-connections", "4"),
        *("--request-timeout", "30", "--timeout-keep-alive", "1", "--sse-keep-alive-interval", "5"),
        *("--api-key", "one", "two"),
    )
    with running_server(folder, *TINY, *options) as running:
        yield running


def ask(server: ServerProcess, *, timeout: str | None = None, **fields: object) -> httpx.Response:
    headers = {"Authorization": "Bearer one"} | ({} if timeout is None else {"X-Request-Timeout": timeout})
    return httpx.post(f"{server.url}/v1/completions", json=HELLO | fields, headers=headers, timeout=60)


def test_a_server_with_tight_bounds_serves(server: ServerProcess) -> None:
    assert ask(server).status_code == 200
    assert ask(server, stream=True).text.endswith("data: [DONE]\n\n")


def test_an_answer_that_takes_too_long_is_a_504(server: ServerProcess) -> None:
    answer = ask(server, timeout="0.001", max_tokens=100)
    assert answer.status_code == 504
    metrics = httpx.get(f"{server.url}/metrics", headers={"X-Api-Key": "two"}).text
    # The time may be over before the engine hears of it, or later.
    assert (
        sum(
            sample.value
            for sample in samples(metrics)
            if sample.name == "asyncserve:deadlines_missed_total" or sample.labels.get("reason") == "deadline"
        )
        == 1
    )


def test_one_connection_too_many_is_told_so_and_silent_ones_are_closed(server: ServerProcess) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    are_refused = [True] * 5
    while are_refused != [False] * 4 + [True]:
        # Before they are five, the server may not have seen others end, or the time of the first is over.
        with ExitStack() as clients:
            silent = [
                clients.enter_context(socket.create_connection((host, int(port)), timeout=60))
                for _ in range(5)
            ]
            are_refused = [b" 503 " in each.recv(1000) for each in silent]
    assert ask(server).status_code == 200
