import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.__main__ import SCENARIOS, main
from tests.fakes.openai_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A scripted server on a thread of its own; every third request fails."""
    loop = asyncio.new_event_loop()
    listening, stop = threading.Event(), asyncio.Event()
    scripted = ScriptedServer(failing=lambda body: 500 if body["max_tokens"] == 13 else 0)

    async def serve() -> None:
        async with scripted.running():
            listening.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert listening.wait(5)
    yield scripted
    loop.call_soon_threadsafe(stop.set)
    thread.join(5)
    loop.close()


def test_a_run_prints_a_table_and_writes_its_files(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = (
        f"--url {server.url} --num-requests 5 --input-len 7 --output-len 4 --concurrency 2 --warmup 1".split()
    )
    argv += [
        "--json",
        str(tmp_path / "run.json"),
        "--results",
        str(tmp_path / "all.jsonl"),
        "--goodput",
        "ttft:9000",
    ]
    assert main(argv) == 0
    assert main(argv) == 0
    table = capsys.readouterr().out
    assert "5 of 5 completed" in table
    assert "35 prompt, 20 output" in table
    assert "TPOT" in table
    (run,) = json.loads((tmp_path / "run.json").read_text())["runs"]
    assert run["num_output_tokens"] == 20
    assert len(run["values_ms"]["itl"]) == 15
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["model"] for line in lines] == ["scripted", "scripted"]
    assert len(server.bodies) == 12


def test_failed_requests_fail_the_run_and_are_counted(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--url", server.url, "--num-requests", "3", "--input-len", "2", "--output-len", "13"]) == 1
    table = capsys.readouterr().out
    assert "0 of 3 completed" in table
    assert "3 x HTTP 500: scripted 500" in table


def test_every_scenario_of_the_package_can_be_read_and_small_ones_run(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--url", server.url, "--scenario", "smoke"]) == 0
    assert capsys.readouterr().out.count("4 of 4 completed") == 3
    for path in SCENARIOS.glob("*.toml"):
        tiny = ["--num-requests=1", "--warmup=0", "--input-len=2", "--output-len=2", "--rate=1000"]
        assert main(["--url", server.url, "--scenario", str(path), *tiny]) == 0, path


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--endpoint", "chat", "--workload", "random"], "text"),
        (["--goodput", "speed:3"], "goodput"),
        (["--range-ratio", "1.5"], "range-ratio"),
        (["--rate", "0"], "rate"),
        (["--input-len", "250", "--output-len", "7"], "257"),
        (["--scenario", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], argv: list[str], word: str
) -> None:
    assert main(["--url", server.url, *argv]) == 2
    message = capsys.readouterr().err
    assert message.startswith("loadtest: error: ")
    assert word in message
    assert message.count("\n") == 1


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:1"]) == 2
    assert "cannot connect" in capsys.readouterr().err
