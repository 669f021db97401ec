"""`asyncserve run-batch` as a process: from file to file, broken off and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.server_process import TINY
from tests.fakes.demo_model import demo_model_path
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MEMORY = ("--kv-cache-memory-bytes", "32MiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)
    write_tiny_tokenizer(folder, vocab_size=320)
    return folder


def run_batch(model: Path, *options: str, **popen: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "asyncserve", "run-batch", str(model), "--device", "cpu", *MEMORY, *options],
        stderr=subprocess.PIPE,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        **popen,
    )


def request(name: str, *, num_tokens: int = 4) -> dict[str, Any]:
    body = {"prompt": "hello", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def write_lines(path: Path, lines: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def answers(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_name = {each["custom_id"]: each for each in found}
    assert len(by_name) == len(found), "an answer was given twice"
    return by_name


def test_the_demo_model_answers_a_file(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    lines = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": body},
        request("completion"),
        {"custom_id": "wrong", "method": "POST", "url": "/v1/completions", "body": {"prompt": 5}},
    ]
    write_lines(tmp_path / "in", lines)
    process = run_batch(
        demo_model_path(), "--dtype", "float32", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")
    )
    _, log = process.communicate(timeout=150)
    assert process.returncode == 3, log.decode()
    found = answers(tmp_path / "out")
    assert sorted(found) == ["chat", "completion", "wrong"]
    assert "Paris" in found["chat"]["response"]["body"]["choices"][0]["message"]["content"]
    assert found["completion"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert found["wrong"]["response"]["status_code"] == 400
    assert b"answers written: 2 good, 1 errors; had one already: 0" in log


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_interrupted_leaves_whole_lines_and_is_gone_on_with(
    model: Path, tmp_path: Path, number: int, status: int
) -> None:
    path = tmp_path / "out"
    names = [str(each) for each in range(300)]
    write_lines(tmp_path / "in", [request(name, num_tokens=200) for name in names])
    options = (*TINY, "-i", str(tmp_path / "in"), "-o", str(path), "--max-concurrency", "4")
    process = run_batch(model, *options)
    deadline = time.monotonic() + 100
    while not path.exists() or path.stat().st_size == 0:
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, log = process.communicate(timeout=120)
    assert process.returncode == status, log.decode()
    assert b"goes on with what is left" in log
    assert b"Traceback" not in log, log.decode()
    first = answers(path)
    assert 0 < len(first) < len(names)

    # Torn as by a crash: the last answer counts as not given.
    path.write_bytes(path.read_bytes()[:-20])
    write_lines(tmp_path / "in", [request(name, num_tokens=2) for name in names])
    process = run_batch(model, *options)
    _, log = process.communicate(timeout=150)
    assert process.returncode == 0, log.decode()
    found = answers(path)
    assert sorted(found) == sorted(names)
    lengths = [each["response"]["body"]["usage"]["completion_tokens"] for each in found.values()]
    assert lengths.count(200) == len(first) - 1
    assert lengths.count(2) == len(names) - len(first) + 1


def test_lines_may_come_from_a_pipe_and_answers_go_into_one(model: Path) -> None:
    """An answer is written while the input is still open."""
    process = run_batch(model, *TINY, "-i", "-", "-o", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    for name in ("one", "two"):
        process.stdin.write(json.dumps(request(name)).encode() + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["custom_id"] == name
    rest, log = process.communicate(b"no json", timeout=120)
    assert json.loads(rest)["error"]["line"] == 3
    assert process.returncode == 3, log.decode()


def test_an_interrupted_run_that_waits_for_input_ends(model: Path) -> None:
    process = run_batch(model, *TINY, "-i", "-", "-o", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request("one")).encode() + b"\n")
    process.stdin.flush()
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    process.communicate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-i", "/nowhere.jsonl", "-o", "-"), b"cannot read the input file /nowhere.jsonl"),
        (("-i", "/", "-o", "-"), b"cannot read the input file /"),
        (("-i", "-", "-o", "/nowhere/out"), b"cannot write the output file /nowhere/out"),
    ],
)
def test_files_that_cannot_be_used_are_named_before_anything_is_loaded(
    options: tuple[str, ...], message: bytes
) -> None:
    process = run_batch(Path("/no/such/model"), *options)
    _, log = process.communicate(timeout=120)
    assert process.returncode == 2
    assert message in log
    assert b"Traceback" not in log
