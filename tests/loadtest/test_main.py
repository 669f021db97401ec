import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from loadtest import __main__ as program
from loadtest import results
from loadtest.options import SCENARIOS
from tests.fakes.openai_server import ScriptedServer
from tests.loadtest.on_a_thread import on_a_thread
from tests.loadtest.records import paced


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A server that fails requests for 13 tokens."""
    with on_a_thread(ScriptedServer(failing=lambda body: 500 if body["max_tokens"] == 13 else 0)) as scripted:
        yield scripted


def main(argv: list[str]) -> int:
    """Run the program without the second that a ceiling takes."""
    return program.main([*argv, "--no-ceiling"])


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
        # Of a sweep one point is enough.
        if "[sweep]" in path.read_text():
            argv = ["sweep", "--points=1", "--requests-per-user=1", "--repeat=1"]
            argv += ["--url", server.url, "--scenario", str(path)]
            assert main([*argv, "--num-requests=1", "--input-len=2", "--output-len=2"]) == 0, path
            continue
        tiny = ["--num-requests=1", "--warmup=0", "--input-len=2", "--output-len=2", "--rate=1000"]
        tiny += ["--prefix-len=2", "--num-prefixes=1", "--requests-per-prefix=1"]
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


def test_rows_are_what_the_schema_says(server: ScriptedServer, tmp_path: Path) -> None:
    lines, document = tmp_path / "all.jsonl", tmp_path / "run.json"
    argv = ["--url", server.url, "--num-requests=2", "--output-len=3", "--goodput", "ttft:9000", "--label=x"]
    assert main([*argv, "--results", str(lines), "--json", str(document), "--api-key", "secret"]) == 0
    schema = json.loads(results.SCHEMA_FILE.read_text())
    for path in (lines, document):
        for row in results.read(path):
            jsonschema.validate(row, schema)
            assert (row["good_share"], row["label"], row["command"]) == (1.0, "x", "run")
            assert row["client"]["ceiling"] is None
        assert "secret" not in path.read_text()


@pytest.mark.slow
def test_the_ceiling_is_measured_and_printed(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "all.jsonl"
    argv = ["--url", server.url, "--num-requests=2", "--concurrency=1", "--output-len=3"]
    assert program.main([*argv, "--results", str(lines)]) == 0
    assert re.search(r"at most [\d,]+ tok/s at 1 streams", capsys.readouterr().out)
    (row,) = results.read(lines)
    most = row["client"]["ceiling"]
    assert most["tps"] == pytest.approx(most["replayed_tps"] / most["cpu_share"])
    jsonschema.validate(row, json.loads(results.SCHEMA_FILE.read_text()))


@pytest.mark.slow
def test_several_processes_send_one_load(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--url", server.url, "--num-requests=6", "--output-len=3", "--rate=500", "--client-processes=2"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "6 of 6 completed" in printed
    assert "2 processes" in printed


def test_a_sweep_goes_from_point_to_point_and_writes_a_page(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, page = tmp_path / "all.jsonl", tmp_path / "page.html"
    argv = ["sweep", "--url", server.url, "--points", "1", "2", "3", "--repeat=2", "--requests-per-user=2"]
    argv += ["--num-requests=2", "--input-len=2", "--output-len=3", "--gain=0%"]
    assert main([*argv, "--results", str(lines), "--html", str(page)]) == 0
    rows = results.read(lines)
    found = [(row["load"]["concurrency"], row["num_requests"], row["load"]["warmup"]) for row in rows]
    assert found[:4] == [(1, 2, 1), (1, 2, 1), (2, 4, 2), (2, 4, 2)]
    assert {row["command"] for row in rows} == {"sweep"}
    printed = capsys.readouterr().out
    assert "tok/s per user" in printed
    # Whether tokens of so short an answer come in one read, and it has a pace, is chance.
    table, _, said = printed.partition("Pareto\n")[2].partition("\n\n")
    assert said.startswith("most output tokens/s: ")
    assert {line.split()[0] for line in table.splitlines()} == {str(users) for users, _, _ in found}
    assert "Latency by load" in page.read_text()
    assert program.main(["report", str(lines), "-o", str(tmp_path / "again.html")]) == 0
    assert "Latency by load" in (tmp_path / "again.html").read_text()


def test_a_scenario_may_be_a_sweep_or_a_search(server: ScriptedServer, tmp_path: Path) -> None:
    tiny = "[defaults]\nnum_requests = 2\ninput_len = 2\noutput_len = 2\nrepeat = 1\n"
    lines = tmp_path / "all.jsonl"
    for table in (
        "[sweep]\nover = 'rate'\npoints = [500]\nseconds = 0.001\n",
        "[search]\nlast = 500\nfirst = 500\nseconds = 0.001\n",
    ):
        scenario = tmp_path / f"{table[1:4]}.toml"
        scenario.write_text(tiny + table)
        argv = ["--url", server.url, "--scenario", str(scenario), "--goodput", "ttft:9000"]
        assert main([*argv, "--results", str(lines)]) == 0
    rows = results.read(lines)
    assert [(row["command"], row["load"]["rate"]) for row in rows] == [("sweep", 500), ("search", 500)]
    scenario.write_text("[search]\nspeed = 1\n")
    assert main(["--url", server.url, "--scenario", str(scenario), "--goodput", "ttft:1"]) == 2


def test_a_search_ends_at_a_rate_and_says_what_it_tried(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["search", "--url", server.url, "--from=200", "--to=400", "--seconds=0.001", "--num-requests=3"]
    argv += ["--input-len=2", "--output-len=2", "--json", str(tmp_path / "s.json")]
    assert main([*argv, "--goodput", "e2el:60000"]) == 0
    assert "greatest rate that keeps the limits for 99.00%: 400.000/s" in capsys.readouterr().out
    found = json.loads((tmp_path / "s.json").read_text())["search"]
    assert [one["rate"] for one in found["tried"]] == [200, 400]
    assert (found["rate"], found["too_great"]) == (400, None)
    assert main([*argv, "--goodput", "e2el:0.0001", "--num-requests=1"]) == 1
    assert "no rate down to" in capsys.readouterr().out
    assert main(argv) == 2
    assert "--goodput" in capsys.readouterr().err


def test_a_comparison_has_an_exit_status_for_ci(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, page = tmp_path / "old.jsonl", tmp_path / "new.jsonl", tmp_path / "page.html"
    for path, tpots_ms in ((old, (20, 21)), (new, (30, 31))):
        for number, tpot_ms in enumerate(tpots_ms):
            results.append(path, paced(tpot_ms, repeat=number + 1))
    assert program.main(["compare", str(old), str(new)]) == 0
    assert "differ beyond noise" in capsys.readouterr().out
    assert program.main(["compare", str(old), str(new), "--fail-if-slower", "5%", "--html", str(page)]) == 1
    assert "slower: random 128+128, all at once: TPOT median, ms is worse by 48.8%" in capsys.readouterr().out
    assert "Compared" in page.read_text()
    assert program.main(["compare", str(new), str(old), "--fail-if-slower", "5%"]) == 0
    only = ["--fail-if-slower", "5%", "--metrics", "ttft_median"]
    assert program.main(["compare", str(old), str(new), *only]) == 0
    assert program.main(["compare", str(old), str(new), "--metrics", "speed"]) == 2
    assert program.main(["compare", str(old), str(tmp_path / "nowhere")]) == 2


def test_a_data_set_is_counted_by_the_server_and_sent(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "talks.json"
    said = [
        {"from": who, "value": f"{who} says five words {number}"}
        for number in range(2)
        for who in ("human", "gpt")
    ]
    path.write_text(json.dumps([{"conversations": said}]))
    argv = ["--url", server.url, "--dataset-path", str(path), "--num-prompts=2", "--endpoint=chat"]
    assert main([*argv, "--dataset-name=sharegpt", "--warmup=0"]) == 0
    assert "1 conversations" in capsys.readouterr().out
    assert {body["max_tokens"] for body in server.bodies} == {5}
    server.bodies.clear()
    assert main([*argv, "--workload=multi-turn", "--warmup=0"]) == 0
    assert [len(body["messages"]) for body in server.bodies] == [1, 1, 3, 3]
    assert "4 of 4 completed" in capsys.readouterr().out
