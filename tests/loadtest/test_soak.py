"""The soak itself: a sound server gets through a short one, and what is wrong with another is found."""

from collections import Counter
from pathlib import Path
from typing import Any, get_args, get_type_hints

import psutil
import pytest

from asyncserve.config import ServerConfig
from asyncserve.faults import parse_faults
from loadtest.soak import report, residue
from loadtest.soak.__main__ import TINY, is_sound, main, soak
from loadtest.soak.guests import Guests, Texts, Transcript
from loadtest.soak.ledger import End, Ledger, Visit, read_counts
from loadtest.soak.questions import CULPRIT_TOKEN, NAN_TOKEN, POISON, Question, Questions, draw
from loadtest.soak.scenario import SCENARIOS, read_scenario
from tests.http.live import MODEL, live_server, spell

ENDS = ("answered", "failed by design", "left by the client")
STRIKES = ("steps failed", "steps retried by halves", "sequences replayed", "device restarts")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sound_server_loses_nothing_and_says_nothing_wrong_whatever_strikes(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    seconds = 3
    while not all(seen[each] for each in (*ENDS, *STRIKES)):
        # What comes to pass within some seconds depends on the machine.
        folder = tmp_path / f"soak of {seconds} s"
        found = soak(
            read_scenario("short"), model=TINY, seconds=seconds, idle_seconds=0, seed=0, folder=folder
        )
        assert [part["policy"] for part in found["parts"]] == ["fair", "priority"]
        for part in found["parts"]:
            assert part["complaints"] == {}
            assert (part["requests"]["ends"]["lost"], part["requests"]["wrong"]) == (0, 0)
            assert is_sound(part)
            seen.update(part["requests"]["ends"])
            seen.update(part["server"])
        seconds *= 3
    written = {"date": report.today(), "command": report.command_line([]), **found}
    report.write(written, tmp_path / "results")
    text = (tmp_path / "results.md").read_text()
    assert text.count("| lost | 0 |") == text.count("## Scheduling policy ") == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"complaints": {"left behind: 1 tasks": 1}},
        {"requests": {"ends": {"lost": 1}, "wrong": 0}},
        {"requests": {"ends": {"lost": 0}, "wrong": 1}},
    ],
)
def test_whatever_is_wrong_makes_a_soak_unsound(wrong: dict[str, Any]) -> None:
    right = {"complaints": {}, "requests": {"ends": {"lost": 0}, "wrong": 0}}
    assert is_sound(right)
    assert not is_sound({**right, **wrong})


# ---- guests ----------------------------------------------------------------------------------------------

SOUND = Question("/v1/completions", {"prompt": "ab", "max_tokens": 4, "temperature": 0, "ignore_eos": True})
FAILING = Question(SOUND.path, SOUND.fields, fails="nothing")


def guests_of(url: str, expected: Texts, ledger: Ledger) -> Guests:
    return Guests(
        url,
        model=MODEL,
        keys=(),
        questions=Questions(sound=[SOUND], failing={"nothing": FAILING}),
        expected=[expected],
        ledger=ledger,
        weights={},
        seed=0,
    )


PATIENT = ("plain", "stream", "slow_reader", "hurried")
LEAVING = ("leaver", "half_open", "half_closed")


@pytest.mark.slow
async def test_guests_enter_what_they_get() -> None:
    ledger = Ledger()
    async with live_server(next_token=spell("four")) as live:
        guests = guests_of(live.url, ("four",), ledger)
        for kind in (*PATIENT, *LEAVING, "cancelled", "malformed"):
            await guests.visit(getattr(guests, f"visit_{kind}"))
        guests.close()
    assert not ledger.complaints
    assert ledger.num_sent == len(PATIENT) + len(LEAVING) + 2
    assert len(set(ledger.request_ids) - {""}) == len(ledger.request_ids) >= len(PATIENT) + 2
    kinds = ledger.kinds()
    assert kinds["plain"] == kinds["stream"] == kinds["slow reader"] == {"answered": 1}
    assert kinds["half-open"] == {"left by the client": 1}
    assert kinds["malformed"] == {"refused": 1}
    assert not ledger.num_wrong


@pytest.mark.parametrize("kind", ["plain", "stream"])
async def test_an_answer_that_is_another_is_found(kind: str) -> None:
    ledger = Ledger()
    async with live_server(next_token=spell("fool")) as live:
        guests = guests_of(live.url, ("four",), ledger)
        await guests.visit(getattr(guests, f"visit_{kind}"))
        guests.close()
    assert ledger.num_wrong == 1
    assert list(ledger.complaints) == ["question 0 is answered with 'fool', not 'four'"]


async def test_what_must_fail_and_is_answered_is_complained_of() -> None:
    ledger = Ledger()
    async with live_server(next_token=spell("four")) as live:
        guests = guests_of(live.url, ("four",), ledger)
        await guests.visit(guests.visit_failing)
        guests.close()
    assert list(ledger.complaints) == ["what must fail (nothing) was answered"]


async def test_a_server_that_is_gone_has_lost_the_request() -> None:
    ledger = Ledger()
    guests = guests_of("http://127.0.0.1:1", ("four",), ledger)
    await guests.visit(guests.visit_stream)
    assert ledger.ends()["lost"] == 1
    assert ledger.complaints.total() == 1


def test_a_stream_is_read_as_far_as_it_has_come() -> None:
    transcript = Transcript()
    for piece in (
        b': keep-alive\n\ndata: {"choices":[{"index":1,"te',
        b'xt":"b"}]}\n\ndata: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\ndata: {"choi',
    ):
        transcript.take(piece, 0.0)
    told = transcript.read(2)
    assert (told.texts, told.error, told.is_whole) == (("a", "b"), "", False)
    transcript.take(b'ces":[]}\n\ndata: {"error":{"message":"no"}}\n\ndata: [DONE]\n\n', 0.0)
    assert (transcript.read(2).error, transcript.read(2).is_whole) == ("no", False)


# ---- the ledger ------------------------------------------------------------------------------------------

PAGE = """
asyncserve:http_requests_total{{engine="0",handler="/v1/completions",status="2xx"}} {ok}.0
asyncserve:http_requests_total{{engine="0",handler="/v1/completions",status="4xx"}} {bad}.0
asyncserve:http_requests_total{{engine="0",handler="/v1/completions",status="5xx"}} 0.0
asyncserve:http_requests_total{{engine="0",handler="/v1/completions",status="client_left"}} {left}.0
asyncserve:http_requests_total{{engine="0",handler="/metrics",status="2xx"}} 7.0
asyncserve:request_success_total{{model_name="m",engine="0",finished_reason="length"}} {length}.0
asyncserve:request_success_total{{model_name="m",engine="0",finished_reason="abort"}} {abort}.0
asyncserve:request_success_total{{model_name="m",engine="0",finished_reason="error"}} {error}.0
asyncserve:requests_rejected_total{{model_name="m",engine="0",reason="invalid"}} {rejected}.0
"""
NOTHING = {"ok": 0, "bad": 0, "left": 0, "length": 0, "abort": 0, "error": 0, "rejected": 0}
VISITS = (
    *[Visit(kind="stream", end=End.ANSWERED, status=200)] * 3,
    Visit(kind="two", end=End.ANSWERED, status=200, num_sequences=2),
    Visit(kind="nan", end=End.FAILED_BY_DESIGN, status=200),
    Visit(kind="malformed", end=End.REFUSED, status=400),
    Visit(kind="wrong key", end=End.REFUSED, status=401),
    *[Visit(kind="leaver", end=End.LEFT, status=200)] * 2,
    Visit(kind="leaver", end=End.LEFT),
)
RIGHT = {"ok": 6, "bad": 2, "left": 1, "length": 5, "abort": 3, "error": 1, "rejected": 1}


def broken(**counted: int) -> set[str]:
    ledger = Ledger()
    for visit in VISITS:
        ledger.take(visit)
    before = read_counts(PAGE.format(**NOTHING))
    after = read_counts(PAGE.format(**{**RIGHT, **counted}))
    return {equation.name for equation in ledger.equations(before, after) if not equation.holds}


def test_a_ledger_agrees_with_a_server_that_counted_everything_once() -> None:
    assert broken() == set()
    # Nothing was read of the one that left at once, and the others that left were done.
    assert broken(left=0, ok=7, abort=0, length=7) == set()


@pytest.mark.parametrize(
    ("counted", "name"),
    [
        ({"ok": 4}, "answers 2xx"),
        ({"ok": 9}, "answers 2xx"),
        ({"bad": 1}, "answers 4xx"),
        ({"left": 4}, "requests whose client left"),
        ({"ok": 5, "left": 0}, "all HTTP requests"),
        ({"length": 4}, "sequences answered"),
        ({"length": 9}, "sequences answered"),
        ({"error": 0}, "sequences failed"),
        ({"abort": 4}, "sequences aborted"),
        ({"length": 7, "abort": 2, "error": 2}, "all sequences"),
        ({"rejected": 0}, "requests refused"),
        ({"rejected": 5}, "requests refused"),
    ],
)
def test_a_request_that_is_counted_twice_or_never_is_found(counted: dict[str, int], name: str) -> None:
    assert name in broken(**counted)


def test_an_answer_that_is_in_the_log_twice_or_not_at_all_is_found() -> None:
    ledger = Ledger(request_ids=["one", "two"])
    line = "2026-01-01 00:00:00,000 INFO    asyncserve.http.access: POST /v1/completions 200 1.0 ms {}\n"
    log = "".join(line.format(request_id) for request_id in ("one", "two", "left", "-", "-"))
    assert ledger.unlogged(log) == []
    assert ledger.unlogged(log + line.format("two")) == ["two"]
    assert ledger.unlogged(line.format("one")) == ["two"]


# ---- the rest --------------------------------------------------------------------------------------------


def test_questions_are_the_same_for_the_same_seed_and_keep_out_of_the_faults_way() -> None:
    asked = draw(40, input_len=50, output_len=20, vocab_size=300, seed=3)
    assert asked == draw(40, input_len=50, output_len=20, vocab_size=300, seed=3)
    assert asked != draw(40, input_len=50, output_len=20, vocab_size=300, seed=4)
    kinds = Counter(type(question.fields.get("prompt")).__name__ for question in asked.sound)
    assert set(kinds) == {"str", "tuple", "NoneType"}
    for question in asked.sound:
        prompt = question.fields.get("prompt", ())
        if not isinstance(prompt, str):
            assert not {NAN_TOKEN, CULPRIT_TOKEN} & set(prompt)
        assert POISON not in str(question.fields)


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_scenario_has_all_faults_and_only_visits_that_there_are(path: Path) -> None:
    scenario = read_scenario(str(path))
    faults = parse_faults(scenario.faults_text)
    assert set(faults.steps) == {"lose-device", "hang-step", "oom-step", "fail-step", "nan-row"}
    assert (faults.steps["nan-row"].token_id, faults.steps["fail-step"].token_id) == (
        NAN_TOKEN,
        CULPRIT_TOKEN,
    )
    assert (faults.poisoned_text, faults.disk_delay_s > 0) == (POISON, True)
    assert {"fair", "priority"} <= set(scenario.policies)
    assert set(scenario.policies) <= set(get_args(get_type_hints(ServerConfig)["scheduling_policy"]))
    draw(**scenario.questions, vocab_size=300, seed=0)
    Guests(
        "http://127.0.0.1:1",
        model="",
        keys=scenario.keys,
        questions=Questions(sound=[]),
        expected=[],
        ledger=Ledger(),
        weights=scenario.visits,
        seed=0,
    )


def test_a_scenario_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scenario", "none"]) == 2
    assert "there are restarts, short, soak" in capsys.readouterr().err
    (tmp_path / "odd.toml").write_text("guests = 1\nodd = 2\n")
    assert main(["--scenario", str(tmp_path / "odd.toml")]) == 2
    assert "unknown field odd" in capsys.readouterr().err


def test_more_of_anything_is_a_leak_but_the_last_work_of_each_coroutine() -> None:
    before = {"Request": 1, "tasks": 9, "threads": 4, "OS threads": 8, "file descriptors": 20}
    assert residue.leaks(before, {**before, "Request": 1 + residue.MAX_LAST, "tasks": 8}) == {}
    assert residue.leaks(before, {**before, "Request": 2 + residue.MAX_LAST, "file descriptors": 21}) == {
        "Request": 1 + residue.MAX_LAST,
        "file descriptors": 1,
    }


@pytest.mark.parametrize("num_lost_at_end", [0, 3, 6])
def test_growth_is_told_apart_from_a_cache_that_is_not_resident_yet(num_lost_at_end: int) -> None:
    """Where a soak ended in the minute after the device was opened anew, growth used to look like a loss."""

    def growth(sizes_mib: list[float]) -> float:
        memory = residue.Memory(psutil.Process())
        memory.sizes_mib = [*sizes_mib[: 40 - num_lost_at_end], *num_lost_at_end * [900.0]]
        memory.times_s = [float(at_s) for at_s in range(40)]
        return float(memory.growth(warm_s=4.0)["growth_percent"])

    opened_often = 8 * [900.0, 950.0, 999.0, 1000.0, 1000.0]
    assert growth(opened_often) == 0.0
    assert growth([size + idx for idx, size in enumerate(opened_often)]) > 2.0
