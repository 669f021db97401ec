import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtest.__main__ import SCENARIOS, main
from tests.fakes.openai_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A server that fails requests for 13 tokens."""
    with on_a_thread(ScriptedServer(failing=lambda body: 500 if body["max_tokens"] == 13 else 0)) as scripted:
        yield scripted


@contextmanager
def on_a_thread(scripted: ScriptedServer) -> Iterator[ScriptedServer]:
    loop = asyncio.new_event_loop()
    listening, stop = threading.Event(), asyncio.Event()

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


def test_no_prompt_is_sent_twice_in_a_scenario_nor_by_the_same_command_again(
    server: ScriptedServer, tmp_path: Path
) -> None:
    scenario = tmp_path / "twice.toml"
    scenario.write_text(
        "[defaults]\nworkload = 'text'\ninput_len = 6\noutput_len = 1\nwarmup = 2\nrepeat = 2\n"
        "[[run]]\nnum_requests = 3\n[[run]]\nnum_requests = 5\n[[run]]\nnum_requests = 5\n"
        "[[run]]\nworkload = 'random'\nnum_requests = 3\n[[run]]\nworkload = 'random'\nnum_requests = 5\n"
    )
    argv = ["--url", server.url, "--scenario", str(scenario)]
    assert main(argv) == 0
    assert main(argv) == 0
    prompts = [str(body["prompt"]) for body in server.bodies]
    assert len(prompts) == 2 * 2 * (3 + 5 + 5 + 3 + 5 + 5 * 2)
    assert len(set(prompts)) == len(prompts)
    beginnings = {prompt.split()[0] for prompt in prompts}
    assert len(beginnings) == len(prompts)


def test_a_seed_that_is_given_asks_the_same_again_and_one_that_is_not_is_told(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--url", server.url, "--num-requests=2", "--warmup=0", "--input-len=6", "--output-len=1"]
    assert main(argv) == 0
    found = re.search(r"\(seed (\d+)\)", capsys.readouterr().out)
    assert found is not None
    assert main([*argv, "--seed", found[1]]) == 0
    prompts = [body["prompt"] for body in server.bodies]
    assert sorted(prompts[:2]) == sorted(prompts[2:])


def test_answers_that_are_too_short_fail_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with on_a_thread(ScriptedServer(num_missing=1)) as server:
        argv = ["--url", server.url, "--num-requests=3", "--input-len=2", "--output-len=4"]
        assert main(argv) == 1
    table = capsys.readouterr().out
    assert "3 of 3 completed" in table
    assert "wrong length  3 answers" in table


def test_the_share_of_cached_tokens_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "all.jsonl"
    with on_a_thread(ScriptedServer(num_cached=2)) as server:
        argv = ["--url", server.url, "--num-requests=3", "--input-len=8", "--output-len=4", "--repeat=2"]
        assert main([*argv, "--results", str(results)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("6 prompt tokens were in it (25.0%)") == 2
    assert printed.count(" 25.0% ") == 2  # and in the row of each run
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["prefix_cache_hit_rate"] for row in rows] == [0.25, 0.25]
    assert [row["num_cached_tokens"] for row in rows] == [6, 6]


def test_repeats_show_their_median_and_their_spread(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    argv = ["--url", server.url, "--num-requests=2", "--input-len=2", "--output-len=3", "--repeat=3"]
    assert main([*argv, "--json", str(path)]) == 0
    assert "repeats: median (lowest - highest)" in capsys.readouterr().out
    content = json.loads(path.read_text())
    throughputs = sorted(run["output_throughput"] for run in content["runs"])
    (spread,) = content["repeats"]
    assert spread["num_repeats"] == 3
    assert spread["output_throughput"] == dict(zip(("min", "median", "max"), throughputs, strict=True))
    medians = sorted(run["latencies"]["ttft"]["median"] for run in content["runs"])
    assert spread["ttft_median"] == dict(zip(("min", "median", "max"), medians, strict=True))


def test_the_scenarios_that_measure_repeat_their_runs(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["--num-requests=1", "--warmup=0", "--input-len=2", "--output-len=2", "--rate=1000"]
    for name in ("cpu", "gpu"):
        assert main(["--url", server.url, "--scenario", name, *tiny]) == 0
        assert capsys.readouterr().out.count("1 of 1 completed") == 9


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


def test_an_unknown_scenario_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scenario", "nope"]) != 0
    assert "smoke" in capsys.readouterr().err
