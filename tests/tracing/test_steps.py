import asyncio
import json
import os
import resource
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from asyncserve.step import ScheduledSequence, StepOutput, StepPlan, StepTimes
from asyncserve.tracing.steps import DEVICE, DEVICE_THREAD, LOOP, ROWS, WAITER, StepTrace
from tests.http.live import live_server

Event = dict[str, Any]


def plan(step_id: int, num_tokens: tuple[int, ...] = (1, 1, 30)) -> StepPlan:
    sequences = tuple(ScheduledSequence(slot, 0, num, True) for slot, num in enumerate(num_tokens))
    return StepPlan(step_id=step_id, sequences=sequences)


def apply(trace: StepTrace, step_id: int, times: StepTimes, *, device_s: float, idle_s: float = 0.0) -> None:
    output = StepOutput(step_id=step_id, token_ids=(), device_s=device_s, idle_s=idle_s, times=times)
    trace.step_applied(plan(step_id), output, (), times.done_s)


def spans(path: Path, row: int) -> list[Event]:
    """Return a row's spans in order of time."""
    events = [each for each in json.loads(path.read_bytes()) if each["ph"] == "X" and each["tid"] == row]
    return sorted(events, key=lambda event: float(event["ts"]))


def bounds(event: Event) -> tuple[float, float]:
    """Return when a span begins and ends, in whole microseconds."""
    return round(event["ts"]), round(event["ts"] + event["dur"])


def test_every_row_shows_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = StepTrace(path)
    trace.stage_ran("plan", 7, 0.5, 0.75)
    apply(trace, 7, StepTimes(1.0, 1.25, 1.5, 4.0), device_s=2.5, idle_s=0.25)
    trace.close()
    named = {each["tid"]: each["args"].get("name") for each in json.loads(path.read_bytes())[0::2][:4]}
    assert named == ROWS
    (stage,), (launch,), (wait,) = (spans(path, row) for row in (LOOP, DEVICE_THREAD, WAITER))
    idle, step = spans(path, DEVICE)
    assert (stage["name"], *bounds(stage), stage["args"]) == ("plan", 500_000, 750_000, {"step": 7})
    assert (launch["name"], *bounds(launch)) == ("launch", 1_000_000, 1_250_000)
    assert (wait["name"], *bounds(wait)) == ("wait", 1_500_000, 4_000_000)
    assert (step["name"], *bounds(step)) == ("step", 1_500_000, 4_000_000)
    assert (idle["name"], *bounds(idle)) == ("idle", 1_250_000, 1_500_000)
    expected = {"step": 7, "sequences": 3, "tokens": 32, "prefills": 1, "device_us": 2_500_000}
    assert step["args"] == expected


def test_one_step_ahead_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = StepTrace(path)
    # Each step is launched while the one before it runs on the device.
    for number in range(5):
        at_s = float(number)
        times = StepTimes(at_s + 0.25, at_s + 0.375, max(at_s + 0.375, at_s + 1), at_s + 2.0)
        apply(trace, number, times, device_s=1.0)
    trace.close()
    launches, steps = spans(path, DEVICE_THREAD), spans(path, DEVICE)
    for launch, running in zip(launches[1:], steps, strict=False):
        assert running["args"]["step"] == launch["args"]["step"] - 1
        assert bounds(running)[0] < bounds(launch)[0] < bounds(launch)[1] < bounds(running)[1]


def test_spans_of_the_device_never_overlap(tmp_path: Path) -> None:
    """A waiter that is woken late says the step ended later than it did."""
    path = tmp_path / "trace.json"
    trace = StepTrace(path)
    for number, done_s in enumerate((1.0, 2.5, 3.0, 3.75)):
        times = StepTimes(number / 4, number / 4 + 0.1, done_s - 0.5, done_s)
        apply(trace, number, times, device_s=1.0, idle_s=0.5)
    trace.close()
    found = [bounds(each) for each in spans(path, DEVICE)]
    assert all(begin < end for begin, end in found)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(found))


def test_a_killed_process_leaves_whole_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = StepTrace(path)
    for number in range(100):
        apply(trace, number, StepTimes(number, number + 0.5, number + 0.5, number + 1), device_s=0.5)
    trace._writer.close(60.0)  # what the thread has written, without the end of the file
    events = json.loads(path.read_bytes() + b"]")
    assert [each["args"]["step"] for each in events if each["name"] == "step"] == list(range(100))
    trace.close()


def test_the_file_stops_growing_at_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    trace = StepTrace(path, max_bytes=2000)
    for number in range(3000):
        trace.stage_ran("plan", number, number, number + 0.5)
    trace.close()
    json.loads(path.read_bytes())
    # What was written at once when the limit was reached is written to its end.
    assert path.stat().st_size < 2000 + 1024 * 120
    assert "no more steps" in caplog.text


def test_a_step_whose_times_are_not_known_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = StepTrace(path)
    trace.step_applied(plan(0), StepOutput(step_id=0, token_ids=()), (), 1.0)
    trace.close()
    assert not [each for each in json.loads(path.read_bytes()) if each["ph"] == "X"]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        StepTrace(tmp_path / "nowhere" / "trace.json")


def test_a_file_that_can_be_written_no_more_does_not_keep_the_server_from_ending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    os.mkfifo(path)  # as a disk that is full from some moment on: this one, when nobody reads any more
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    trace = StepTrace(path)
    os.close(reader)
    trace.stage_ran("plan", 1, 0.0, 0.5)
    trace.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} could not be written: Broken pipe; no more steps are"
    ]


def test_a_disk_that_fills_in_the_middle_of_a_write_leaves_whole_events_and_gets_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    trace = StepTrace(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Of the write that reaches it a part is taken, and the next one fails: as on a disk that is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        for number in range(5000):
            trace.stage_ran("plan", number, number, number + 0.5)
        while not caplog.records:
            os.sched_yield()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for number in range(2000):
        trace.stage_ran("plan", number, number, number + 0.5)
    trace.close()
    (record,) = caplog.records
    assert record.getMessage() == f"{path} could not be written: File too large; no more steps are"
    events = json.loads(path.read_bytes() + b"]")
    steps = [each["args"]["step"] for each in events if each["name"] == "plan"]
    assert steps == list(range(len(steps)))
    assert 0 < len(steps) < 5000


async def test_the_loop_works_on_one_thing_at_a_time_and_on_every_step(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = await asyncio.to_thread(StepTrace, path)
    async with live_server(engine_options={"observer": trace}) as live:
        for _ in range(3):
            answer = await live.complete(max_tokens=5, ignore_eos=True)
            assert answer.status == 200
    await asyncio.to_thread(trace.close)
    found = await asyncio.to_thread(spans, path, LOOP)
    edges = [(each["ts"], each["ts"] + each["dur"]) for each in found]
    # The clock ticks in nanoseconds; what is written is cut to those.
    assert all(end <= begin + 0.01 for (_, end), (begin, _) in pairwise(edges))
    stages: dict[int, list[str]] = {}
    for each in found:
        stages.setdefault(each["args"]["step"], []).append(each["name"])
    assert len(stages) >= 15
    assert all(names == ["plan", "submit", "apply", "detokenize"] for names in stages.values())
