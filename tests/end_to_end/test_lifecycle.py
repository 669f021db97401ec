"""What a server does when it is told to stop, when clients leave, and when it cannot start."""

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.end_to_end.server_process import COMMAND, TINY, ServerProcess, running_server, sse_events
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=65536)
    write_tiny_tokenizer(folder, vocab_size=320)
    return folder


FILE_OPTIONS = (
    "--api-key-file",
    "--chat-template",
    "--model",
    "--ssl-certfile",
    "--trace-steps",
    "--uds",
)
OPTIONS = (*TINY, "--served-model-name", "tiny", "--kv-cache-memory-bytes", "32MiB")


@pytest.fixture
def server(model: Path) -> Iterator[ServerProcess]:
    """A server that the test ends."""
    with running_server(model, *OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def lasting_server(model: Path) -> Iterator[ServerProcess]:
    """One for all tests that leave it as it was."""
    with running_server(model, *OPTIONS) as server:
        yield server


def ask(num_tokens: int) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": "hello",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }


def test_sigterm_lets_running_streams_finish_and_refuses_new_ones(server: ServerProcess) -> None:
    lines: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ask(3000), timeout=60) as answer:
        stream = answer.iter_lines()
        lines.append(next(stream))
        server.signal(signal.SIGTERM)
        while server.get("/ready").status_code == 200:
            pass
        assert server.get("/live").status_code == 200
        refused = server.post("/v1/completions", ask(1))
        assert refused.status_code == 503
        assert refused.json()["error"]["message"]
        lines.extend(stream)
    events = sse_events(lines)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.wait() == 0


def test_second_signal_stops_at_once(server: ServerProcess) -> None:
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ask(30000), timeout=60) as answer:
        stream = answer.iter_lines()
        next(stream)
        server.signal(signal.SIGTERM)
        while server.get("/ready").status_code == 200:
            pass
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        rest = sse_events(list(stream))
    assert "error" in json.loads(rest[-1] if rest[-1] != "[DONE]" else rest[-2])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_everything(lasting_server: ServerProcess, stream: bool) -> None:
    server = lasting_server
    num_aborted = server.metric("asyncserve:request_success_total", finished_reason="abort")
    num_tokens = server.metric("asyncserve:generation_tokens_total")
    body = json.dumps({**ask(30000), "stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        while server.metric("asyncserve:num_requests_running") == 0:
            pass
    server.wait_idle()
    assert server.metric("asyncserve:request_success_total", finished_reason="abort") == num_aborted + 1
    assert server.metric("asyncserve:generation_tokens_total") < num_tokens + 30000


def test_the_live_page_is_there_and_its_feed_tells_of_the_engine(lasting_server: ServerProcess) -> None:
    assert lasting_server.get("/").headers["Content-Type"] == "text/html; charset=utf-8"
    assert lasting_server.post("/v1/completions", ask(5)).status_code == 200
    lasting_server.wait_idle()
    with httpx.stream("GET", lasting_server.url + "/pipeline/events", timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: snapshot"
        snapshot = json.loads(next(lines).removeprefix("data: "))
    totals = dict(zip(snapshot["total_fields"], snapshot["state"]["totals"], strict=True))
    assert totals["output_tokens"] >= 5
    assert [step[1] for step in snapshot["steps"] if step[1]], "a prompt was computed"


def test_many_clients_at_once_all_get_their_tokens(lasting_server: ServerProcess) -> None:
    server = lasting_server
    num_tokens = server.metric("asyncserve:generation_tokens_total")
    counts: list[int] = []

    def run() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=ask(50), timeout=60) as answer:
            events = sse_events(list(answer.iter_lines()))
            counts.append(len(events))
            assert events[-1] == "[DONE]"

    threads = [threading.Thread(target=run) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 24
    server.wait_idle()
    assert server.metric("asyncserve:generation_tokens_total") == num_tokens + 24 * 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such-folder/at-all"], "no/such-folder/at-all"),
        (["--model", "{model}", "--max-model-len", "0"], "max_model_len"),
        (["--model", "{model}", "--port", "notanumber"], "port"),
        (["--model", "{model}", "--no-such-flag"], "no-such-flag"),
        (["--model", "{model}", "--attention-backend", "magic"], "magic"),
    ],
)
def test_a_bad_start_ends_with_one_clear_message(model: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [*COMMAND, *(a.format(model=model) for a in arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_option_that_names_no_file_is_a_wrong_option(model: Path, tmp_path: Path) -> None:
    nowhere, folder = str(tmp_path / "nowhere" / "x"), str(tmp_path)
    cases = [
        *((option, nowhere) for option in FILE_OPTIONS),
        ("--uds", folder),
    ]
    command = [*COMMAND, "--port", "0"]
    started = [
        subprocess.Popen(
            [*command, *([] if option == "--model" else ["--model", str(model)]), option, path],
            stderr=subprocess.PIPE,
            text=True,
        )
        for option, path in cases
    ]
    for (option, path), process in zip(cases, started, strict=True):
        _, said = process.communicate(timeout=120)
        assert process.returncode == 2, (option, said)
        assert said.splitlines()[-1].startswith("asyncserve: error: ")
        assert path in said.splitlines()[-1]
        assert "Traceback" not in said


def test_an_unknown_architecture_names_the_known_ones(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(model / name)
    done = subprocess.run(
        [*COMMAND, "--model", str(tmp_path), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "FooForCausalLM" in done.stderr
    assert "LlamaForCausalLM" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_named(lasting_server: ServerProcess, model: Path) -> None:
    port = lasting_server.url.rsplit(":", 1)[1]
    done = subprocess.run(
        [*COMMAND, "--model", str(model), "--host", "127.0.0.1", "--port", port],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert port in done.stderr
