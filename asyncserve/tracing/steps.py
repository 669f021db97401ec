"""A timeline of every step: loop, device thread, device and waiter, as Chrome and Perfetto show it.

Takes the engine's calls as an `Observer` and writes one file in the trace event format, a row for each of
the four, so that what overlaps is seen to overlap. Written by a thread as it comes, and ended at a size
limit, or when a write fails. A file that a killed process or a full disk leaves is cut between two events,
which Perfetto takes, and is JSON as soon as a `]` is put behind it. Open it at ui.perfetto.dev. Decides
nothing.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from asyncserve.observer import NullObserver
from asyncserve.step import StepOutput, StepPlan, StepTimes
from asyncserve.tracing.background import BackgroundWriter

logger = logging.getLogger(__name__)

MAX_BYTES = 256 * 2**20
"""Some 300,000 steps; more makes a browser slow."""
CAPACITY = 16_384
"""Events that wait to be written: a disk may be slow for some seconds."""
BATCH_LEN = 1024
LINGER_S = 0.1
CLOSE_TIMEOUT_S = 5.0
LOOP, DEVICE_THREAD, DEVICE, WAITER = range(1, 5)
ROWS = {LOOP: "event loop", DEVICE_THREAD: "device thread", DEVICE: "device", WAITER: "waiter"}
SHORTEST_S = 1e-9


class StageEvent(NamedTuple):
    """A stage of the loop worked on a step."""

    stage: str
    step_id: int
    began_s: float
    ended_s: float


class StepEvent(NamedTuple):
    """A step was applied."""

    step_id: int
    num_sequences: int
    num_tokens: int
    num_prefills: int
    times: StepTimes
    device_s: float
    idle_s: float


class StepTrace(NullObserver):
    """An `Observer` that writes a timeline, until the first write that fails.

    Args:
        path: File to write; one that is there is overwritten.
        max_bytes: Its largest size.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: str | Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 - open as long as the server runs
        self._timeline = Timeline()
        self._path = path
        self._num_bytes = 0
        self._max_bytes = max_bytes
        self._has_ended = False
        self._has_failed = False
        try:
            self._append(b"[\n" + b",\n".join(map(_metadata, ROWS)))
        except OSError:
            self._file.close()
            raise
        self._writer = BackgroundWriter[StageEvent | StepEvent](
            self._write, name="asyncserve-trace", capacity=CAPACITY, batch_len=BATCH_LEN, linger_s=LINGER_S
        )

    def stage_ran(self, stage: str, step_id: int, began_s: float, ended_s: float) -> None:
        """Note what the loop did for a step."""
        if not self._has_ended:
            self._writer.put(StageEvent(stage, step_id, began_s, ended_s))

    def step_applied(
        self, plan: StepPlan, output: StepOutput, inter_token_s: Sequence[float], now_s: float
    ) -> None:
        """Note what the device did for a step."""
        if self._has_ended or output.times is None:
            return
        num_tokens, num_sequences = plan.num_tokens, len(plan.sequences)
        num_prefills = sum(num > 1 for num in plan.rows.lens)
        self._writer.put(
            StepEvent(
                plan.step_id,
                num_sequences,
                num_tokens,
                num_prefills,
                output.times,
                output.device_s,
                output.idle_s,
            )
        )

    def close(self) -> None:
        """Write what waits and end the file. Blocks; a full disk is only told of: the server ends here.

        A file that could not be written stays as it was then.
        """
        self._writer.close(CLOSE_TIMEOUT_S)
        with self._file:
            if not self._has_failed:
                self._try_to_append(b"\n]\n")
        if self._writer.num_dropped:
            logger.warning(
                "%s lacks %d events: it could not be written fast enough",
                self._path,
                self._writer.num_dropped,
            )

    def _write(self, events: Sequence[StageEvent | StepEvent]) -> None:
        if self._has_ended:
            return
        lines = [line for event in events for line in self._timeline.lines(event)]
        self._try_to_append(b"".join(b",\n" + line for line in lines))
        if self._num_bytes >= self._max_bytes:
            self._has_ended = True
            logger.warning("%s has reached %d bytes: no more steps are written", self._path, self._num_bytes)

    def _try_to_append(self, data: bytes) -> None:
        """Write; if that fails, leave the file with whole events, and write no more."""
        try:
            self._append(data)
        except OSError as error:
            self._has_ended = self._has_failed = True
            logger.warning("%s could not be written: %s; no more steps are", self._path, error.strerror)
            with suppress(OSError):  # what is no file has no end to cut off
                self._file.truncate(self._num_bytes)

    def _append(self, data: bytes) -> None:
        # In one call, so that a process that is killed leaves whole events; a disk takes a part as it fills.
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._num_bytes += len(data)


class Timeline:
    """Makes the file's events; remembers where the device's row ends, since its spans may not overlap."""

    def __init__(self) -> None:
        self._device_end_s = 0.0

    def lines(self, event: StageEvent | StepEvent) -> Iterator[bytes]:
        """Yield the events, as JSON, that one thing that happened makes."""
        if isinstance(event, StageEvent):
            yield _span(LOOP, event.stage, event.began_s, event.ended_s, event.step_id)
            return
        times, step_id = event.times, event.step_id
        yield _span(DEVICE_THREAD, "launch", times.launch_begin_s, times.launch_end_s, step_id)
        yield _span(WAITER, "wait", times.wait_begin_s, times.done_s, step_id)
        if not event.num_sequences:
            return
        # The device tells durations; that the step is over is seen by the waiter, a little later.
        began_s = max(times.done_s - event.device_s, self._device_end_s, times.launch_begin_s)
        ended_s = max(times.done_s, began_s)
        idle_from_s = max(began_s - event.idle_s, self._device_end_s)
        if event.idle_s > 0 and idle_from_s < began_s:
            yield _span(DEVICE, "idle", idle_from_s, began_s, step_id)
        arguments = (
            f'"step":{step_id},"sequences":{event.num_sequences},"tokens":{event.num_tokens}'
            f',"prefills":{event.num_prefills},"device_us":{event.device_s * 1e6:.1f}'
        )
        yield _span(DEVICE, "step", began_s, ended_s, step_id, arguments)
        self._device_end_s = ended_s


def _span(
    row: int, name: str, began_s: float, ended_s: float, step_id: int, arguments: str | None = None
) -> bytes:
    duration_us = max(ended_s - began_s, SHORTEST_S) * 1e6
    if arguments is None:
        arguments = f'"step":{step_id}'
    return (
        f'{{"ph":"X","pid":1,"tid":{row},"name":"{name}","ts":{began_s * 1e6:.3f}'
        f',"dur":{duration_us:.3f},"args":{{{arguments}}}}}'
    ).encode()


def _metadata(row: int) -> bytes:
    return (
        f'{{"ph":"M","pid":1,"tid":{row},"name":"thread_name","args":{{"name":"{ROWS[row]}"}}}},\n'
        f'{{"ph":"M","pid":1,"tid":{row},"name":"thread_sort_index","args":{{"sort_index":{row}}}}}'
    ).encode()
