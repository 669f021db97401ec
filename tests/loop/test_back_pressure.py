"""The engine when more is asked than it can do: bounds, deadlines, shares, clients that do not read."""

import asyncio
import dataclasses
from typing import Any

import pytest

from asyncserve.errors import DeadlineExceeded, InvalidRequest, Overloaded
from asyncserve.request import ChatPrompt, FinishReason, TextPrompt, TokensPrompt
from tests.fakes.engine import VOCAB_SIZE, Bench, bench, request
from tests.fakes.executor import fake_continuation, fake_info
from tests.fakes.sink import RecordingSink
from tests.fakes.tokenizer import BOS_ID


def send(b: Bench, prompt: Any, request_id: str, *, n: int = 1, **fields: Any) -> RecordingSink:
    """Submit a request with fields that `Bench.send` does not know."""
    asked = dataclasses.replace(request(prompt, request_id, n=n), **fields)
    sink = RecordingSink(n)
    b.engine.submit(asked, sink)
    return sink


def tokens(num_tokens: int) -> TokensPrompt:
    return TokensPrompt(token_ids=[5] * num_tokens)


# ---- tokens that wait ----------------------------------------------------------------------------------


async def test_tokens_that_wait_are_bounded_and_the_refusal_says_which_bound() -> None:
    async with bench(fake_info(num_slots=1), max_num_queued_tokens=60) as b:
        b.executor.hold()
        running = send(b, tokens(20), "running")
        await b.until(lambda: b.engine.statistics().num_running == 1)
        waiting = send(b, tokens(50), "waiting")
        with pytest.raises(
            Overloaded, match=r"50 tokens are waiting .* about 20 more .* at most 60"
        ) as caught:
            send(b, tokens(20), "too many")
        assert caught.value.reason == "queued_tokens"
        assert b.observer.rejected == [caught.value]
        fits = send(b, tokens(10), "fits")
        await b.turn()
        assert b.engine.statistics().num_waiting_tokens == 60
        b.executor.resume()
        for sink in (running, waiting, fits):
            assert (await sink.wait()).choice().finish_reason is FinishReason.LENGTH
        assert b.engine.statistics().num_waiting_tokens == 0


async def test_a_call_larger_than_the_bound_is_taken_when_nothing_waits() -> None:
    async with bench(max_num_queued_tokens=10) as b:
        sink = send(b, tokens(40), "large", n=2)
        assert (await sink.wait()).choice(1).finish_reason is FinishReason.LENGTH


async def test_all_requests_of_a_call_are_taken_or_none() -> None:
    async with bench(fake_info(num_slots=1), max_num_queued_tokens=10) as b:
        b.executor.hold()
        requests = [request(tokens(20), str(number)) for number in range(3)]
        sinks = [RecordingSink(1) for _ in requests]
        b.engine.submit_all(requests, sinks)
        with pytest.raises(Overloaded):
            b.engine.submit_all([request(tokens(1), "3")], [RecordingSink(1)])
        b.executor.resume()
        for sink in sinks:
            await sink.wait()


@pytest.mark.parametrize(
    ("prompt", "estimated", "known"),
    [
        (TokensPrompt(token_ids=[5] * 9), 9, 9),
        (TextPrompt(text="x" * 40), 11, 41),
        (TextPrompt(text="x" * 2000), 501, 2001),
        (ChatPrompt(messages=({"role": "user", "content": "x" * 40},)), 11, None),
        (
            ChatPrompt(messages=({"role": "user", "content": [{"type": "text", "text": "x" * 40}, {}]},)),
            11,
            None,
        ),
    ],
)
async def test_a_prompt_counts_as_estimated_until_it_is_encoded_and_then_as_it_is(
    prompt: Any, estimated: int, known: int | None
) -> None:
    info = fake_info(num_slots=1, max_model_len=4096, num_blocks=3000)
    async with bench(info) as b:
        b.executor.hold()
        first = send(b, tokens(4), "first")
        await b.until(lambda: b.engine.statistics().num_running == 1)
        second = send(b, prompt, "second", n=2)
        assert b.engine.statistics().num_waiting_tokens == 2 * estimated
        if known is not None:
            await b.until(lambda: b.engine.statistics().num_waiting_tokens == 2 * known)
        b.executor.resume()
        await first.wait()
        await second.wait()


async def test_refused_and_aborted_prompts_count_no_longer() -> None:
    async with bench() as b:
        bad = send(b, tokens(500), "bad")
        assert b.engine.statistics().num_waiting_tokens == 500
        await bad.wait()
        assert bad.error is not None
        send(b, "x" * 40, "aborted")
        b.engine.abort("aborted")
        await b.until(lambda: b.engine.statistics().num_waiting_tokens == 0)


# ---- shares --------------------------------------------------------------------------------------------


async def test_a_tenant_that_floods_the_server_leaves_room_and_turns_for_the_others() -> None:
    async with bench(fake_info(num_slots=1), max_num_queued_requests=20, policy="fair") as b:
        b.executor.hold()
        flood = []
        for number in range(17):
            flood.append(send(b, tokens(9), f"flood {number}", tenant="greedy"))
            await b.turn()
        with pytest.raises(Overloaded, match="of this API key") as caught:
            send(b, tokens(9), "too many", tenant="greedy")
        assert caught.value.reason == "tenant_share"
        late = send(b, tokens(9), "late", tenant="modest")
        await b.turn()
        b.executor.resume()
        await late.wait()
        num_done = sum(sink.has_ended for sink in flood)
        assert num_done <= 2, "whoever was given least is next"
        for sink in flood:
            await sink.wait()


# ---- deadlines -----------------------------------------------------------------------------------------


async def test_a_request_whose_time_is_over_ends_wherever_it_is_and_is_told_so() -> None:
    now_s = 0.0
    async with bench(fake_info(num_slots=1), clock=lambda: now_s) as b:
        b.executor.hold()
        running = send(b, tokens(4), "running", n=1, deadline_s=0.01)
        await b.until(lambda: b.engine.statistics().num_running == 1)
        waiting = send(b, tokens(4), "waiting", n=2, deadline_s=0.02)
        other = send(b, tokens(4), "other", deadline_s=3600.0)
        now_s = 1.0
        await b.until(lambda: waiting.has_ended)
        assert isinstance(running.error, DeadlineExceeded)
        assert isinstance(waiting.error, DeadlineExceeded)
        assert "1.0 s after the request" in str(running.error)
        assert b.observer.reasons[FinishReason.ABORT] == 3
        assert b.engine.statistics().num_deadlines_missed == 2
        b.executor.resume()
        assert (await other.wait()).choice().finish_reason is FinishReason.LENGTH
        assert [timeline.missed_deadline for timeline, _ in b.observer.finished] == [True, True, True, False]


async def test_a_request_that_comes_after_its_time_is_refused() -> None:
    async with bench(clock=lambda: 5.0) as b:
        with pytest.raises(DeadlineExceeded):
            send(b, "x", "late", deadline_s=5.0)
        assert [type(error) for error in b.observer.rejected] == [DeadlineExceeded]
        with pytest.raises(InvalidRequest, match="deadline_s"):
            send(b, "x", "odd", deadline_s="soon")


async def test_a_request_that_ends_in_time_hears_nothing_of_its_deadline() -> None:
    async with bench() as b:
        sink = await send(b, "x", "quick", deadline_s=asyncio.get_running_loop().time() + 3600.0).wait()
        assert sink.error is None
        assert b.engine.statistics().num_deadlines_missed == 0


# ---- clients that do not read --------------------------------------------------------------------------


async def test_a_paused_request_holds_no_slot_and_goes_on_as_if_nothing_had_been() -> None:
    async with bench(fake_info(num_slots=2, vocab_size=VOCAB_SIZE)) as b:
        b.executor.hold()
        paused = b.send("hello", "paused", n=2, max_tokens=12)
        await b.until(lambda: b.engine.statistics().num_running == 2)
        b.executor.complete()
        await b.turn()
        b.engine.pause("paused")
        b.engine.pause("paused")
        b.executor.resume()
        assert (await b.send("other", "other").wait()).choice().finish_reason is FinishReason.LENGTH
        await b.turn()
        statistics = b.engine.statistics()
        assert (statistics.num_running, statistics.num_paused, statistics.num_blocks_used) == (0, 2, 0)
        assert not paused.has_ended
        b.engine.check()
        b.engine.resume("paused")
        b.engine.resume("paused")
        await paused.wait()
        for index in range(2):
            assert paused.choice(index).token_ids == fake_continuation([BOS_ID, *b"hello"], 12, VOCAB_SIZE)


async def test_a_request_paused_before_it_is_admitted_waits_outside_the_queue() -> None:
    async with bench() as b:
        sink = b.send("hello", "r")
        b.engine.pause("r")
        await b.until(lambda: b.engine.statistics().num_paused == 1)
        await b.turn()
        assert (b.engine.statistics().num_waiting, sink.outputs) == (0, [])
        b.engine.resume("r")
        await sink.wait()


async def test_a_paused_request_can_be_aborted_and_unknown_ones_are_nothing() -> None:
    async with bench() as b:
        sink = b.send("hello", "r", n=3)
        await b.until(lambda: len(sink.outputs) > 0)
        b.engine.pause("r")
        b.engine.abort("r")
        b.engine.resume("r")
        b.engine.pause("nobody")
        b.engine.resume("nobody")


async def test_nothing_but_paused_requests_is_no_lack_of_progress() -> None:
    now_s = 0.0
    async with bench(clock=lambda: now_s) as b:
        sink = b.send("hello", "r", max_tokens=20)
        await b.until(lambda: len(sink.outputs) > 0)
        b.engine.pause("r")
        await b.until(lambda: b.engine.statistics().num_unapplied_steps == 0)
        now_s = 1000.0
        assert b.engine.statistics().last_progress_s == 1000.0
        b.executor.hold()
        b.engine.resume("r")
        now_s = 1030.0
        assert b.engine.statistics().last_progress_s == 1000.0, "now it is held up"
        b.executor.resume()
        await sink.wait()
