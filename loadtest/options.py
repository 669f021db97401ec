"""The command line of `python -m loadtest`, and scenario files.

Gives `Load`s, a `SweepPlan` or a `SearchPlan`, and the rest as parsed; runs nothing. A scenario is a TOML
file of `[defaults]` and either runs (`[[run]]`), a sweep (`[sweep]`) or a search (`[search]`); what stands on
the command line goes before what stands in it. Names that `vllm bench serve` has for an option are
understood, too.
"""

import argparse
import dataclasses
import math
import random
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.load import ENDPOINTS, WORKLOADS, Load, made
from loadtest.search import SearchPlan
from loadtest.sweep import SweepPlan

SCENARIOS = Path(__file__).parent / "scenarios"
COMMANDS: Mapping[str, str] = {
    "run": "Run one load, or the runs of a scenario. What is done when no command is given.",
    "sweep": "Run one load at 1, 2, 4 … requests at once (or per second) until nothing is gained.",
    "search": "Find the greatest request rate at which a share of requests keeps the limits.",
    "compare": "Hold one results file against another: what differs beyond noise.",
    "report": "Make an HTML page of results files.",
    "ceiling": "Measure what the client itself reaches at most.",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run: loads, or one load and what is varied.

    Args:
        scenario: Name of the scenario, "" for none.
        loads: In their order; exactly one for a sweep or search.
        sweep: Given for a sweep.
        search: Given for a search.
    """

    scenario: str
    loads: Sequence[Load]
    sweep: SweepPlan | None = None
    search: SearchPlan | None = None


def parsed(argv: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """Return the command and its options; a command line without a command is one of `run`."""
    command = argv[0] if argv and argv[0] in COMMANDS else "run"
    arguments = argv[1:] if argv and argv[0] in COMMANDS else argv
    return command, parser(command).parse_args(arguments)


def parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    others = "commands:\n" + "\n".join(f"  {name:9} {text}" for name, text in COMMANDS.items())
    found = argparse.ArgumentParser(
        prog="python -m loadtest" + ("" if command == "run" else f" {command}"),
        description=f"Load an OpenAI-compatible server and report what it does. {COMMANDS[command]}",
        epilog=f"{others}\n\nHow to, and definitions: docs/load-testing.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,  # the key is kept out of files by the name of its option
    )
    _ARGUMENTS[command](found)
    return found


def _add_sending(to: argparse.ArgumentParser) -> None:
    to.add_argument("--url", "--base-url", default="http://127.0.0.1:8000", help="Base URL of the server.")
    to.add_argument("--model", default=None, help="Model to ask for. Default: the server's first.")
    to.add_argument("--api-key", default=None, help="Key to send.")
    to.add_argument(
        "--scenario", default=None, help="TOML file, or the name of one in scenarios/: runs, sweep or search."
    )
    to.add_argument("--label", default="", help="Said of every run in files: commit, machine.")
    to.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="Limits (SLOs) in ms, such as ttft:500 tpot:50 e2el:9000.",
    )
    files = to.add_argument_group("files")
    files.add_argument("--json", type=Path, default=None, help="Write everything measured to this file.")
    files.add_argument(
        "--results", type=Path, default=None, help="Append one JSON line per run to this file, as they end."
    )
    files.add_argument(
        "--html", type=Path, default=None, help="Write a page with plots and tables to this file."
    )
    files.add_argument("--png", type=Path, default=None, help="Draw the latency distributions to this file.")
    _add_client(to)
    _add_load(to)


def _add_client(to: argparse.ArgumentParser) -> None:
    client = to.add_argument_group("client")
    client.add_argument(
        "--client-processes",
        type=_processes,
        default=0,
        metavar="N",
        help="Processes that send. Default: auto, one, and more where one is not enough and cores are free.",
    )
    client.add_argument(
        "--ceiling",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Measure what the client reaches at most, for every number of requests at once. Default: yes.",
    )


def _add_load(to: argparse.ArgumentParser) -> None:
    load = to.add_argument_group("load")
    load.add_argument(
        "--workload",
        "--dataset-name",
        type=lambda name: name.replace("_", "-"),
        choices=WORKLOADS,
        help="random: token ids; text: English; prefix-repetition: beginnings shared by groups; sharegpt: a "
        "file's first exchanges; multi-turn: conversations that grow. Default: random.",
    )
    load.add_argument("--endpoint", choices=ENDPOINTS, help="Default: completions.")
    load.add_argument(
        "--num-requests", "--num-prompts", type=int, help="Requests to send (multi-turn: conversations)."
    )
    load.add_argument(
        "--input-len",
        "--random-input-len",
        "--suffix-len",
        "--prefix-repetition-suffix-len",
        type=int,
        dest="input_len",
        help="Mean prompt length: tokens (ids) or words (text). After a shared beginning, what follows it.",
    )
    load.add_argument(
        "--output-len",
        "--random-output-len",
        "--prefix-repetition-output-len",
        type=int,
        dest="output_len",
        help="Mean tokens to generate.",
    )
    load.add_argument(
        "--range-ratio",
        "--random-range-ratio",
        type=float,
        dest="range_ratio",
        help="Spread of lengths around their mean, in [0, 1).",
    )
    load.add_argument(
        "--prefix-len",
        "--random-prefix-len",
        "--prefix-repetition-prefix-len",
        type=int,
        dest="prefix_len",
        help="Beginning that prompts share, added to input-len.",
    )
    load.add_argument(
        "--num-prefixes",
        "--prefix-repetition-num-prefixes",
        type=int,
        dest="num_prefixes",
        help="How many such beginnings there are. Default: 1, in prefix-repetition 10.",
    )
    load.add_argument(
        "--requests-per-prefix", type=int, help="Instead of num-requests: requests with each beginning."
    )
    load.add_argument("--num-turns", type=int, help="Mean turns of a conversation. Default: 4.")
    load.add_argument(
        "--think-time", type=float, help="Mean seconds between an answer and the next turn. Default: 0."
    )
    load.add_argument("--dataset-path", help="File of conversations in ShareGPT's format.")
    load.add_argument(
        "--sharegpt-output-len", type=int, help="Output length. Default: that of the answer in the file."
    )
    load.add_argument(
        "--tokenizer",
        type=Path,
        default=None,
        help="tokenizer.json that counts a data set's tokens. Default: the server's /tokenize, or a guess.",
    )
    load.add_argument("--vocab-size", type=int, help="Random token ids are below it. Default: 32000.")
    load.add_argument(
        "--concurrency", "--max-concurrency", type=int, help="Most requests at once. Default: no limit."
    )
    load.add_argument(
        "--rate", "--request-rate", type=float, help="Poisson arrivals per second. Default: all at once."
    )
    load.add_argument("--burst-size", type=int, help="Requests that arrive together.")
    load.add_argument(
        "--seed",
        type=int,
        help="Of prompts and arrivals; the same seed asks the same again, which a server may have cached. "
        "Default: another one every time.",
    )
    load.add_argument("--temperature", type=float, help="Default: 0.")
    load.add_argument(
        "--warmup", type=int, help="Requests to send before, which do not count. Default: 1; sweep: one each."
    )
    load.add_argument(
        "--repeat",
        type=int,
        help="Times to run it, with other prompts each time; the spread is shown. Default: 1; sweep: 3.",
    )
    load.add_argument("--timeout", type=float, help="Most seconds for one request.")


def _add_sweep(to: argparse.ArgumentParser) -> None:
    _add_sending(to)
    sweep = to.add_argument_group("sweep")
    sweep.add_argument(
        "--over", choices=("concurrency", "rate"), help="What is varied. Default: concurrency."
    )
    sweep.add_argument("--points", type=float, nargs="+", help="Its values. Default: doubling.")
    sweep.add_argument("--from", type=float, dest="first", help="First value. Default: 1.")
    sweep.add_argument("--to", type=float, dest="last", help="Last value. Default: 1024.")
    sweep.add_argument(
        "--gain",
        type=share,
        help="Saturated once two points in a row bring less than this over the best so far. Default: 5%%.",
    )
    sweep.add_argument(
        "--requests-per-user",
        type=int,
        help="Requests at a concurrency of n: n times this; num-requests (16) at least. Default: 10.",
    )
    sweep.add_argument("--seconds", type=float, help="Shortest run at a rate. Default: 30.")
    sweep.add_argument(
        "--pareto", type=Path, default=None, help="Draw tokens/s against tokens/s per user (.png, .svg)."
    )


def _add_search(to: argparse.ArgumentParser) -> None:
    _add_sending(to)
    search = to.add_argument_group("search")
    search.add_argument("--share", type=share, help="Of requests that must keep the limits. Default: 99%%.")
    search.add_argument("--from", type=float, dest="first", help="First rate to try, per second. Default: 1.")
    search.add_argument("--to", type=float, dest="last", help="Greatest rate to try. Default: 4096.")
    search.add_argument(
        "--precision", type=share, help="How near to the limit the rate must come. Default: 5%%."
    )
    search.add_argument("--seconds", type=float, help="Shortest run of each rate. Default: 30.")


def _add_compare(to: argparse.ArgumentParser) -> None:
    to.add_argument("before", type=Path, help="Results file to hold against.")
    to.add_argument("after", type=Path, help="Results file in question.")
    to.add_argument(
        "--fail-if-slower",
        type=share,
        default=None,
        metavar="SHARE",
        help="Exit status 1 if a metric is worse by more than this and beyond noise: 5%%.",
    )
    to.add_argument(
        "--metrics", nargs="+", default=None, help="Only these count for --fail-if-slower. Default: all."
    )
    to.add_argument("--json", type=Path, default=None, help="Write the comparison to this file.")
    to.add_argument("--html", type=Path, default=None, help="Write a page with both to this file.")


def _add_report(to: argparse.ArgumentParser) -> None:
    to.add_argument("files", type=Path, nargs="+", help="Results files.")
    to.add_argument("-o", "--output", type=Path, required=True, help="The page to write.")
    to.add_argument("--title", default=None, help="Its title.")


def _add_ceiling(to: argparse.ArgumentParser) -> None:
    to.add_argument("--client-processes", type=_processes, default=1, metavar="N", help="Default: 1.")
    to.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 256], help="Default: 1 16 256.")
    to.add_argument("--endpoint", choices=ENDPOINTS, default="completions", help="Default: completions.")


_ARGUMENTS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "run": _add_sending,
    "sweep": _add_sweep,
    "search": _add_search,
    "compare": _add_compare,
    "report": _add_report,
    "ceiling": _add_ceiling,
}


def share(text: str) -> float:
    """Read `5%` or `0.05`."""
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0% and 100%")
    return value


def _processes(text: str) -> int:
    count = 0 if text == "auto" else int(text)
    if count < 0:
        raise argparse.ArgumentTypeError("a number of processes, or auto")
    return count


def limits(texts: Sequence[str]) -> dict[str, float]:
    """Read `ttft:500 tpot:50`.

    Raises:
        ValueError: It is something else.
    """
    found = {}
    for limit in texts:
        name, _, value = limit.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ValueError(f"goodput takes ttft, tpot and e2el, not {name!r}")
        found[name] = float(value)
    return found


def plan(command: str, arguments: argparse.Namespace) -> Plan:
    """Return what is to be run.

    Raises:
        ValueError: An option or the scenario is wrong.
        OSError: The scenario cannot be read.
    """
    given = vars(arguments)
    name, content = ("", {}) if arguments.scenario is None else _scenario(arguments.scenario)
    if command == "run":
        command = next((other for other in ("sweep", "search") if other in content), "run")
    defaults = content.get("defaults", {})
    # One seed for the whole invocation, told in the output and the files; the runs' indices make it theirs.
    seed = random.SystemRandom().randrange(2**32)
    options = _of(Load, given)
    if command == "run":
        runs = content.get("run", [{}])
        return Plan(name, [_made(defaults | run | options, seed, name) for run in runs])
    table = content.get(command, {})
    if command == "sweep":
        _refuse_unknown(SweepPlan, table, name)
        sweep = SweepPlan(**(table | _of(SweepPlan, given)))
        load = _made({"repeat": 3, "num_requests": 16} | defaults | options, seed, name)
        return Plan(name, [load], sweep=dataclasses.replace(sweep, has_warmup="warmup" in defaults | options))
    _refuse_unknown(SearchPlan, table, name)
    search = SearchPlan(**(table | _of(SearchPlan, given)))
    return Plan(name, [_made(defaults | options, seed, name)], search=search)


def _scenario(text: str) -> tuple[str, dict[str, Any]]:
    path = Path(text)
    if not path.suffix:
        path = SCENARIOS / f"{path}.toml"
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in SCENARIOS.glob("*.toml")))
            raise ValueError(f"no scenario {text!r}; there are {known}")
    content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    unknown = content.keys() - {"defaults", "run", "sweep", "search"}
    if unknown:
        raise ValueError(f"{path}: unknown table {min(unknown)}")
    return path.stem, content


def _of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in given.items() if name in names}


def _refuse_unknown(kind: type, table: Mapping[str, Any], name: str) -> None:
    unknown = table.keys() - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        raise ValueError(f"scenario {name}: unknown option {min(unknown)}")


def _made(values: Mapping[str, Any], seed: int, scenario: str) -> Load:
    unknown = values.keys() - {field.name for field in dataclasses.fields(Load)}
    if unknown:
        raise ValueError(f"scenario {scenario}: unknown option {min(unknown)}")
    if values.get("rate") is None:
        values = dict(values) | {"rate": math.inf}
    return made(values, seed)
