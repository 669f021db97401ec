"""The event stream over a transport that the test holds in its hand."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from asyncserve.errors import EngineStopped
from asyncserve.http import sse
from asyncserve.http.sse import (
    EscapedTexts,
    EventStream,
    StreamEnd,
    StreamSink,
    data_event,
    named_event,
)
from asyncserve.http.write_pacing import WritePacer
from asyncserve.request import FinishReason, RequestOutput, Usage
from asyncserve.token_path import Outbox, add_text
from tests.http.live import until


class Renderer:
    """Shapes that are easy to read: `3:text`, `3:text!stop`."""

    def first_events(self) -> list[bytes]:
        return []

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        return b"data: %d:" % index, b"\n\n"

    def events(
        self, index: int, output: RequestOutput, *, is_first: bool, usage: Usage | None
    ) -> list[bytes]:
        end = f"!{output.finish_reason.value}" if output.finish_reason is not None else ""
        return [data_event(f"{index}:{'^' if is_first else ''}{output.text}{end}".encode())]

    def last_events(self, usages: Sequence[Usage]) -> list[bytes]:
        num_tokens = sum(usage.num_output_tokens for usage in usages)
        return [data_event(b"%d tokens" % num_tokens), data_event(b"[DONE]")]

    def error(self, error: BaseException) -> bytes:
        return data_event(f"error {error}".encode())


class Transport(asyncio.Transport):
    """Takes writes; `unsent` plays what the client has not read."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.unsent = 0
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: Any) -> None:
        if self.closed:
            raise RuntimeError("the handler is closed")
        self.writes.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.unsent


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def output(text: str, *, index: int = 0, end: FinishReason | None = None, **fields: Any) -> RequestOutput:
    usage = None if end is None else Usage(3, 5, 0)
    return RequestOutput(index=index, text=text, token_ids=[1], finish_reason=end, usage=usage, **fields)


def make(
    *num_choices: int,
    is_open: bool = True,
    is_chunked: bool = False,
    clock: Clock | None = None,
    renderer: Renderer | None = None,
    stream_interval: int | None = None,
) -> tuple[EventStream, Transport, list[StreamSink]]:
    clock = clock or Clock()
    stream = EventStream(
        renderer or Renderer(),
        clock=clock,
        stall_timeout_s=60.0,
        pacer=WritePacer(clock=clock, stream_interval=stream_interval),
    )
    sinks, base_index = [], 0
    for number in num_choices:
        sinks.append(
            stream.add_sink(
                base_index=base_index, num_choices=number, wants_usage=False, escaped=EscapedTexts()
            )
        )
        base_index += number
    transport = Transport()
    if is_open:
        stream.open(transport, is_chunked=is_chunked)
    return stream, transport, sinks


def events(transport: Transport) -> list[str]:
    parts = b"".join(transport.writes).decode().split("\n\n")
    assert parts.pop() == ""
    return [part.removeprefix("data: ") for part in parts]


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "BEHIND_POLL_S", 0.0)


async def test_one_write_per_output() -> None:
    stream, transport, [sink] = make(1)
    for text in ("a", "b", "", "c"):
        sink.put(output(text))
    sink.put(output("d", end=FinishReason.STOP))
    assert events(transport) == ["0:^a", "0:b", "0:c", "0:d!stop", "5 tokens", "[DONE]"]
    assert len(transport.writes) == 4
    assert stream.ended.result() is StreamEnd.COMPLETE


async def test_renderer_without_a_frame_is_given_all_output() -> None:
    class Frameless(Renderer):
        def frame(self, index: int) -> tuple[bytes, bytes] | None:
            return None

    _, transport, [sink] = make(1, renderer=Frameless(), is_chunked=True)
    sink.put(output("a"))
    sink.put(output("b"))
    sink.put(output(""))
    assert transport.writes[1:] == [b"b\r\ndata: 0:b\n\n\r\n", b"a\r\ndata: 0:\n\n\r\n"]


async def test_named_event_has_its_name_on_a_line_before_its_data() -> None:
    assert named_event(b"ping", b"{}") == b"event: ping\ndata: {}\n\n"


async def test_chunks_carry_their_length_in_hex() -> None:
    _, transport, [sink] = make(1, is_chunked=True)
    sink.put(output("x" * 30))
    sink.put(output('é"\n'))
    payload = b'data: 0:\xc3\xa9\\"\\n\n\n'
    assert transport.writes[0] == b"%x\r\n%b\r\n" % (41, b"data: 0:^" + b"x" * 30 + b"\n\n")
    assert transport.writes[1] == b"%x\r\n%b\r\n" % (len(payload), payload)


async def test_stream_ends_when_every_choice_of_every_prompt_has() -> None:
    stream, transport, [first, second] = make(2, 1)
    first.put(output("a", index=1, end=FinishReason.STOP))
    second.put(output("b", end=FinishReason.LENGTH))
    assert not stream.ended.done()
    first.put(output("c", index=0, end=FinishReason.STOP))
    assert events(transport) == ["1:^a!stop", "2:^b!length", "0:^c!stop", "15 tokens", "[DONE]"]
    assert stream.ended.result() is StreamEnd.COMPLETE


async def test_outputs_before_the_stream_opens_come_out_at_once_as_one() -> None:
    stream, transport, [sink] = make(1, is_open=False)
    for text in ("a", "b", "c"):
        sink.put(output(text))
    stream.open(transport, is_chunked=False)
    assert events(transport) == ["0:^abc"]


async def test_begun_when_all_prompts_are() -> None:
    stream, _, [first, second] = make(1, 1, is_open=False)
    first.begin([1])  # type: ignore[arg-type]
    assert not stream.begun.done()
    second.begin([1])  # type: ignore[arg-type]
    assert stream.begun.done()


async def test_failure_before_the_stream_opens_is_kept_for_the_handler() -> None:
    stream, transport, [first, second] = make(1, 1, is_open=False)
    first.begin([1])  # type: ignore[arg-type]
    second.fail(EngineStopped("gone"))
    assert stream.begun.done()
    assert isinstance(stream.failure, EngineStopped)
    assert not transport.writes


@pytest.mark.parametrize("by_output", [True, False])
async def test_failure_is_an_event_and_the_end(by_output: bool) -> None:
    stream, transport, [first, second] = make(1, 1)
    first.put(output("a"))
    error = EngineStopped("gone")
    if by_output:
        second.put(output("", end=FinishReason.ERROR, error=error))
    else:
        second.fail(error)
    first.put(output("too late", end=FinishReason.STOP))
    first.fail(error)
    assert events(transport) == ["0:^a", "error gone"]
    assert stream.ended.result() is StreamEnd.FAILED


@pytest.mark.parametrize("is_open", [True, False])
async def test_what_was_kept_before_a_failure_comes_before_it(is_open: bool) -> None:
    stream, transport, [sink] = make(2, is_open=is_open)
    sink.put(output("a"))
    transport.unsent = 70_000
    for text in ("b", "c"):
        sink.put(output(text))
        sink.put(output(text, index=1))
    sink.put(output("", end=FinishReason.ERROR, error=EngineStopped("gone")))
    transport.unsent = 0
    if not is_open:
        stream.open(transport, is_chunked=False)
    assert await stream.ended is StreamEnd.FAILED
    received = events(transport)
    assert received[-1] == "error gone"
    assert "".join(each[2:] for each in received if each.startswith("0:")).replace("^", "") == "abc"
    assert "".join(each[2:] for each in received if each.startswith("1:")) == "^bc"


async def test_aborted_choice_is_a_failure() -> None:
    stream, transport, [sink] = make(1)
    sink.put(output("", end=FinishReason.ABORT))
    assert events(transport) == ["error the request was aborted"]
    assert stream.ended.result() is StreamEnd.FAILED


async def test_closed_transport_is_never_written_to() -> None:
    stream, transport, [sink] = make(1)
    sink.put(output("a"))
    transport.closed = True
    for text in ("b", "c"):
        sink.put(output(text))
    sink.put(output("d", end=FinishReason.STOP))
    assert stream.ended.result() is StreamEnd.FAILED


async def test_slow_reader_gets_its_outputs_merged_when_it_has_drained() -> None:
    stream, transport, [sink] = make(2)
    transport.unsent = 70_000
    sink.put(output("a"))
    for text in ("b", "c"):
        sink.put(output(text))
        sink.put(output(text, index=1))
    assert events(transport) == ["0:^a"]
    transport.unsent = 20_000
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert events(transport) == ["0:^a"], "it must drain to the low mark first"
    transport.unsent = 16_000
    await until(lambda: len(transport.writes) == 2)
    assert events(transport) == ["0:^a", "0:bc", "1:^bc"]
    sink.put(output("d"))
    assert events(transport)[-1] == "0:d"
    stream.close()


async def test_slow_reader_ends_only_when_it_has_drained() -> None:
    stream, transport, [sink] = make(1)
    transport.unsent = 70_000
    sink.put(output("a"))
    sink.put(output("b", end=FinishReason.STOP))
    transport.unsent = 0
    assert await stream.ended is StreamEnd.COMPLETE
    assert events(transport) == ["0:^a", "0:b!stop", "5 tokens", "[DONE]"]


async def test_end_waits_for_the_last_bytes_of_a_slow_reader() -> None:
    stream, transport, [sink] = make(1)
    transport.unsent = 70_000
    sink.put(output("a", end=FinishReason.STOP))
    assert events(transport)[-1] == "[DONE]"
    await asyncio.sleep(0.002)
    assert not stream.ended.done()
    transport.unsent = 0
    assert await stream.ended is StreamEnd.COMPLETE


async def test_failure_reaches_a_slow_reader_after_what_was_kept() -> None:
    stream, transport, [sink] = make(1)
    transport.unsent = 70_000
    sink.put(output("a"))
    sink.put(output("b"))
    sink.fail(EngineStopped("gone"))
    transport.unsent = 0
    assert await stream.ended is StreamEnd.FAILED
    assert events(transport) == ["0:^a", "0:b", "error gone"]


async def test_reader_without_progress_is_given_up() -> None:
    clock = Clock()
    stream, transport, [sink] = make(1, clock=clock)
    transport.unsent = 70_000
    sink.put(output("a"))
    clock.now_s = 59.0
    transport.unsent = 69_999  # it read something: the time starts again
    await asyncio.sleep(0.002)
    clock.now_s = 118.0
    await asyncio.sleep(0.002)
    assert not stream.ended.done()
    clock.now_s = 119.0
    assert await stream.ended is StreamEnd.STALLED


async def test_reader_that_leaves_while_behind_ends_the_stream() -> None:
    stream, transport, [sink] = make(1)
    transport.unsent = 70_000
    sink.put(output("a"))
    transport.closed = True
    assert await stream.ended is StreamEnd.FAILED


def test_escaped_texts_remember_short_ones_only() -> None:
    texts = EscapedTexts()
    assert texts['a"\n\u2028é'] == b'a\\"\\n\xe2\x80\xa8\xc3\xa9'
    assert texts["x" * 1000] == b"x" * 1000
    assert len(texts) == 1


@pytest.mark.parametrize("seed", range(20))
async def test_no_text_is_lost_or_moved_however_the_client_reads(seed: int) -> None:
    draw = random.Random(seed)
    stream, transport, sinks = make(2, 1, is_open=False)
    expected = {0: "", 1: "", 2: ""}
    open_choices = [(sinks[0], 0, 0), (sinks[0], 1, 1), (sinks[1], 0, 2)]
    opens_at = draw.randrange(10)
    step = 0
    while open_choices:
        if step == opens_at:
            stream.open(transport, is_chunked=False)
        sink, index, choice = draw.choice(open_choices)
        text = draw.choice(["", "a", "b", "c "])
        ends = step > 30 and draw.random() < 0.1
        sink.put(output(text, index=index, end=FinishReason.STOP if ends else None))
        expected[choice] += text
        if ends:
            open_choices.remove((sink, index, choice))
        transport.unsent = draw.choice([0, 0, 0, 16_384, 30_000, 65_536, 70_000])
        if draw.random() < 0.3:
            await asyncio.sleep(0.0005)
        step += 1
    transport.unsent = 0
    assert await stream.ended is StreamEnd.COMPLETE
    *texts, usage, done = events(transport)
    got = {0: "", 1: "", 2: ""}
    for event in texts:
        number, _, rest = event.partition(":")
        got[int(number)] += rest.removeprefix("^").removesuffix("!stop")
    assert got == expected
    assert (usage, done) == ("15 tokens", "[DONE]")


async def test_fault_while_catching_up_ends_the_stream_instead_of_leaving_its_handler_waiting() -> None:
    class Faulty(Renderer):
        def events(self, index: int, output: RequestOutput, **_: Any) -> list[bytes]:
            if output.text == "bc":
                raise ZeroDivisionError
            return [output.text.encode()]

    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    stream, transport, [sink] = make(1, renderer=Faulty())
    transport.unsent = 70_000
    for text in ("a", "b", "c"):
        sink.put(output(text))
    transport.unsent = 0
    assert await stream.ended is StreamEnd.FAILED
    assert isinstance(seen[0]["exception"], ZeroDivisionError)


# ---- many tokens in one write --------------------------------------------------------------------------


def lane_of(sink: StreamSink) -> EventStream:
    lane = sink.lane(0)
    assert lane is not None
    return lane


def pass_texts(lane: EventStream, *texts: str) -> None:
    """Do with texts what the pipeline does."""
    for text in texts:
        outboxes: list[Outbox] = []
        add_text(lane, StreamSink.encode(text), outboxes)
        for outbox in outboxes:
            outbox.write()


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_bare_texts_make_the_events_that_outputs_make(is_chunked: bool) -> None:
    texts = ["a", 'é"\n', " ", "x" * 5000]
    _, by_output, [sink] = make(1, is_chunked=is_chunked)
    for text in ("first", *texts):
        sink.put(output(text))
    _, by_lane, [sink] = make(1, is_chunked=is_chunked)
    sink.put(output("first"))
    pass_texts(lane_of(sink), *texts)
    assert by_lane.writes == by_output.writes


async def test_stream_that_cannot_be_written_breaks_its_connection_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Transport):
        is_aborted = False

        def write(self, data: Any) -> None:
            raise ZeroDivisionError

        def abort(self) -> None:
            self.is_aborted = True

    stream, _, [sink] = make(1, stream_interval=1)
    sink.put(output("a"))
    broken = Broken()
    stream.attach(broken, is_chunked=False)  # type: ignore[arg-type]
    pass_texts(lane_of(sink), "b")
    assert broken.is_aborted, "what was sent may be half a chunk"
    assert await stream.ended is StreamEnd.FAILED
    assert "could not be written" in caplog.text


async def test_given_number_of_tokens_goes_into_a_write_and_the_first_and_the_last_at_once() -> None:
    stream, transport, [sink] = make(1, is_chunked=True, stream_interval=3)
    sink.put(output("a"))
    assert len(transport.writes) == 1
    pass_texts(lane_of(sink), *"bcdefgh")
    sink.put(output("i", end=FinishReason.STOP))
    assert [write.count(b"data: ") for write in transport.writes] == [1, 3, 3, 4]
    bodies = [write.partition(b"\r\n")[2].removesuffix(b"\r\n") for write in transport.writes]
    for write, body in zip(transport.writes, bodies, strict=True):
        assert write.startswith(b"%x\r\n" % len(body)), "the events of a write are one chunk"
    transport.writes = bodies
    letters = ["0:^a", *(f"0:{letter}" for letter in "bcdefgh"), "0:i!stop", "5 tokens", "[DONE]"]
    assert events(transport) == letters
    assert stream.ended.done()


async def test_outputs_are_joined_as_bare_texts_are() -> None:
    _, transport, [sink] = make(2, stream_interval=2)
    for letter in "abcde":
        sink.put(output(letter))
    sink.put(output("x", index=1))
    assert [write.count(b"data: ") for write in transport.writes] == [1, 2, 2, 1]
    assert events(transport) == ["0:^a", "0:b", "0:c", "0:d", "0:e", "1:^x"]


async def test_output_between_bare_texts_keeps_its_place() -> None:
    stream, transport, [sink] = make(1, stream_interval=4)
    sink.put(output("a"))
    lane = lane_of(sink)
    pass_texts(lane, "b", "c")
    assert stream.num_waiting == 2
    sink.put(output("d"))
    assert stream.num_waiting == 3
    pass_texts(lane, "e")
    assert stream.num_waiting == 0
    assert [write.count(b"data: ") for write in transport.writes] == [1, 4]
    assert events(transport) == [f"0:{text}" for text in ("^a", "b", "c", "d", "e")]


async def test_failure_comes_behind_what_waits() -> None:
    _, transport, [sink] = make(1, stream_interval=4)
    sink.put(output("a"))
    pass_texts(lane_of(sink), "b", "c")
    sink.fail(EngineStopped("gone"))
    assert events(transport) == ["0:^a", "0:b", "0:c", "error gone"]


async def test_stream_under_load_joins_what_comes_within_the_interval() -> None:
    clock = Clock()
    pacer = WritePacer(clock=clock)
    stream = EventStream(Renderer(), clock=clock, stall_timeout_s=60.0, pacer=pacer)
    sink = stream.add_sink(base_index=0, num_choices=1, wants_usage=False, escaped=EscapedTexts())
    transport = Transport()
    stream.open(transport, is_chunked=False)
    pacer.note_writes((stream,), 1000)  # in no time
    sink.put(output("a"))
    assert len(transport.writes) == 1, "the first token does not wait"
    pass_texts(lane_of(sink), "b", "c")
    sink.put(output("d"))
    assert len(transport.writes) == 1
    clock.now_s += 0.004
    await until(lambda: len(transport.writes) == 2)
    pass_texts(lane_of(sink), "e")
    sink.put(output("f", end=FinishReason.STOP))
    assert [write.count(b"data: ") for write in transport.writes] == [1, 3, 4], "nor does the last"
    assert events(transport)[:6] == ["0:^a", "0:b", "0:c", "0:d", "0:e", "0:f!stop"]


async def test_slow_reader_gets_bare_texts_merged_when_it_has_drained() -> None:
    stream, transport, [sink] = make(1)
    sink.put(output("a"))
    lane = lane_of(sink)
    transport.unsent = 70_000
    pass_texts(lane, "b", "c", "d")
    assert sink.lane(0) is None, "what comes by outputs must come behind them"
    assert stream.num_waiting == 2
    sink.put(output("e"))
    sink.put(output("f"))
    transport.unsent = 0
    await until(lambda: len(transport.writes) == 3)
    assert events(transport) == ["0:^a", "0:b", "0:cd", "0:ef"]
    pass_texts(lane_of(sink), "g")
    assert events(transport)[-1] == "0:g"
    stream.close()


async def test_reader_that_leaves_is_not_written_bare_texts() -> None:
    stream, transport, [sink] = make(1)
    sink.put(output("a"))
    lane = lane_of(sink)
    transport.closed = True
    pass_texts(lane, "b", "c")
    assert await stream.ended is StreamEnd.FAILED
    stream.close()
    pass_texts(lane, "d")
    assert events(transport) == ["0:^a"]


async def test_only_a_stream_of_plain_text_takes_bare_texts() -> None:
    class Frameless(Renderer):
        def frame(self, index: int) -> tuple[bytes, bytes] | None:
            return None

    _, _, [sink] = make(1)
    assert sink.lane(0) is None, "its first output brings more than text"
    _, _, [sink] = make(2)
    sink.put(output("a"))
    assert sink.lane(0) is None, "several choices"
    _, _, sinks = make(1, 1)
    sinks[0].put(output("a"))
    assert sinks[0].lane(0) is None, "several prompts"
    _, _, [sink] = make(1, renderer=Frameless())
    sink.put(output("a"))
    assert sink.lane(0) is None, "events with more than text"
    _, _, [sink] = make(1, is_open=False)
    sink.put(output("a"))
    assert sink.lane(0) is None, "not open yet"
