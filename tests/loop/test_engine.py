import asyncio
import logging
import random
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from asyncserve.errors import (
    EngineError,
    EngineStopped,
    InvalidRequest,
    NotReady,
    Overloaded,
    PromptTooLong,
    StartupError,
)
from asyncserve.loop.engine import Engine
from asyncserve.request import (
    ChatPrompt,
    FinishReason,
    Prompt,
    Request,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from asyncserve.step import ExecutorInfo
from tests.fakes.engine import VOCAB_SIZE, bench, request
from tests.fakes.executor import FakeExecutor, NextToken, fake_continuation, fake_info
from tests.fakes.sink import RecordingSink
from tests.fakes.tokenizer import BOS_ID, EOS_ID, FakeTokenizer

LONG_TEXT = "x" * 2000
ROOM_FOR_LONG_TEXT = {"max_model_len": 4096, "num_blocks": 2000}


def expected_tokens(text: str, num_tokens: int) -> list[int]:
    return fake_continuation([BOS_ID, *text.encode()], num_tokens, VOCAB_SIZE)


def writes(text: str, *, then: int = EOS_ID) -> NextToken:
    """A model that answers every prompt with a text, byte by byte, then with one token for ever."""
    answer = text.encode()

    def next_token(token_ids: Any, prompt_len: int) -> int:
        position = len(token_ids) - prompt_len
        return answer[position] if position < len(answer) else then

    return next_token


# ---- answers -------------------------------------------------------------------------------------------


async def test_a_request_gets_its_prompt_then_its_tokens_then_its_end() -> None:
    async with bench() as b:
        sink = await b.send("hello").wait()
        answer = sink.choice()
        assert sink.prompt_token_ids is not None
        assert list(sink.prompt_token_ids) == [BOS_ID, *b"hello"]
        assert answer.token_ids == expected_tokens("hello", 6)
        assert answer.text == b.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert answer.finish_reason is FinishReason.LENGTH
        assert [output.finish_reason for output in sink.outputs[:-1]] == [None] * 5
        assert answer.usage is not None
        assert (answer.usage.num_prompt_tokens, answer.usage.num_output_tokens) == (6, 6)
        assert sink.outputs[0].usage is None


async def test_answers_do_not_depend_on_what_else_runs() -> None:
    texts = [f"prompt {i} " + "y" * (i * 3 % 17) for i in range(24)]
    async with bench() as b:
        sinks = [b.send(text, text, max_tokens=3 + i % 9) for i, text in enumerate(texts)]
        for i, (text, sink) in enumerate(zip(texts, sinks, strict=True)):
            await sink.wait()
            assert sink.choice().token_ids == expected_tokens(text, 3 + i % 9)


async def test_answers_are_the_same_with_preemption_in_a_tiny_pool() -> None:
    info = fake_info(vocab_size=VOCAB_SIZE, num_blocks=14, block_len=4, max_model_len=48)
    async with bench(info) as b:
        texts = [f"preempt {i}" for i in range(6)]
        sinks = [b.send(text, text, max_tokens=20) for text in texts]
        for text, sink in zip(texts, sinks, strict=True):
            assert (await sink.wait()).choice().token_ids == expected_tokens(text, 20)
        assert b.engine.statistics().num_preemptions > 0


@pytest.mark.parametrize(("async_scheduling", "most_ahead"), [(True, 2), (False, 1)])
async def test_planning_ahead_changes_the_pace_and_not_the_answers(
    async_scheduling: bool, most_ahead: int
) -> None:
    async with bench(async_scheduling=async_scheduling) as b:
        b.executor.hold()
        sinks = {text: b.send(text, text) for text in ("one", "two", "three")}
        depths = set()
        while not all(sink.has_ended for sink in sinks.values()):
            await b.turn()
            depths.add(len(b.executor.pending_step_ids))
            if b.executor.pending_step_ids:
                b.executor.complete()
        for text, sink in sinks.items():
            await sink.wait()
            assert sink.choice().token_ids == expected_tokens(text, 6)
        assert max(depths) == most_ahead


async def test_n_choices_are_independent_sequences_of_one_request() -> None:
    async with bench() as b:
        sink = await b.send("three", n=3, seed=70, temperature=1.0).wait()
        for index in range(3):
            assert sink.choice(index).token_ids == expected_tokens("three", 6)
        seeds = [assignment.seed for plan in b.executor.plans for assignment in plan.admitted]
        assert len(set(seeds)) == 3
        assert 70 in seeds
        assert b.observer.reasons == {FinishReason.LENGTH: 3}


async def test_a_request_with_choices_still_running_has_not_ended() -> None:
    def ends_at_once_for_choice_one(token_ids: Any, prompt_len: int) -> int:
        calls.append(len(token_ids))
        return EOS_ID if len(calls) == 2 else 97

    calls: list[int] = []
    async with bench(next_token=ends_at_once_for_choice_one) as b:
        b.executor.hold()
        sink = b.send("x", n=2, ignore_eos=False)
        while len(sink.outputs) < 2:
            await b.turn()
            b.executor.complete()
            await b.turn()
        assert sorted(str(output.finish_reason) for output in sink.outputs) == ["FinishReason.STOP", "None"]
        assert not sink.has_ended
        with pytest.raises(InvalidRequest, match="'r' is being served"):
            b.send("again")
        b.executor.resume()
        await sink.wait()
        assert b.observer.reasons == {FinishReason.STOP: 1, FinishReason.LENGTH: 1}


async def test_requests_without_a_seed_draw_their_own_from_the_engines() -> None:
    async def seeds(engine_seed: int) -> list[int]:
        async with bench(seed=engine_seed) as b:
            for i in range(3):
                await b.send("x", str(i)).wait()
            return [assignment.seed for plan in b.executor.plans for assignment in plan.admitted]

    first, again, other = await seeds(1), await seeds(1), await seeds(2)
    assert len(set(first)) == 3
    assert first == again
    assert set(first).isdisjoint(other)


async def test_eos_ends_the_answer_and_is_no_part_of_its_text() -> None:
    async with bench(next_token=writes("hi")) as b:
        answer = (await b.send("x", ignore_eos=False, max_tokens=20).wait()).choice()
        assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hi", FinishReason.STOP, None)
        ignoring = (await b.send("x", max_tokens=4, skip_special_tokens=False).wait()).choice()
        assert (ignoring.text, ignoring.finish_reason) == ("hi<eos><eos>", FinishReason.LENGTH)


async def test_a_stop_token_of_the_request_ends_the_answer_and_is_named() -> None:
    async with bench(next_token=writes("hi!more")) as b:
        answer = (await b.send("x", stop_token_ids=(33,), max_tokens=20).wait()).choice()
        assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hi", FinishReason.STOP, 33)


async def test_a_stop_string_ends_the_answer_and_frees_what_it_held() -> None:
    async with bench(next_token=writes("one. two. three", then=97)) as b:
        sink = await b.send("x", stop=(". t",), max_tokens=None).wait()
        answer = sink.choice()
        assert (answer.text, answer.finish_reason, answer.stop_reason) == ("one", FinishReason.STOP, ". t")
        await b.settle()
        assert b.observer.reasons == {FinishReason.STOP: 1}
        # Steps ahead of the detokenizer may have been wasted, but few.
        assert len(b.executor.plans) < len("one. t") + 12


async def test_without_max_tokens_the_context_is_the_limit() -> None:
    async with bench(fake_info(vocab_size=VOCAB_SIZE, max_model_len=40)) as b:
        answer = (await b.send("hello", max_tokens=None).wait()).choice()
        assert len(answer.token_ids) == 40 - 6
        assert answer.finish_reason is FinishReason.LENGTH


async def test_a_sink_that_wants_usage_gets_it_with_every_output() -> None:
    async with bench() as b:
        sink = RecordingSink(wants_usage=True)
        b.send("hello", sink=sink)
        await sink.wait()
        usages = [output.usage for output in sink.outputs]
        assert [usage and usage.num_output_tokens for usage in usages] == [1, 2, 3, 4, 5, 6]
        assert {usage and usage.num_prompt_tokens for usage in usages} == {6}


# ---- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "sampling", "kind", "param"),
    [
        (TokensPrompt(token_ids=()), {}, InvalidRequest, "prompt"),
        (TokensPrompt(token_ids=(VOCAB_SIZE,)), {}, InvalidRequest, "prompt"),
        (TextPrompt(text="x" * 128), {}, PromptTooLong, "prompt"),
        (TextPrompt(text="x" * 128), {"max_tokens": None}, PromptTooLong, "prompt"),
        (ChatPrompt(messages=({"role": "user", "content": "x" * 128},)), {}, PromptTooLong, "messages"),
        (TextPrompt(text="x" * 4000), {}, PromptTooLong, "prompt"),
        (TextPrompt(text="x"), {"max_tokens": 127}, PromptTooLong, "max_tokens"),
        (TextPrompt(text="x"), {"logit_bias": {VOCAB_SIZE: 1.0}}, InvalidRequest, "logit_bias"),
        (TextPrompt(text="x"), {"stop_token_ids": (VOCAB_SIZE,)}, InvalidRequest, "stop_token_ids"),
        (ChatPrompt(messages=({"role": "wizard", "content": "x"},)), {}, InvalidRequest, "messages"),
    ],
)
async def test_a_request_that_cannot_be_served_hears_why_and_nobody_else_does(
    prompt: Prompt, sampling: Mapping[str, Any], kind: type[Exception], param: str
) -> None:
    async with bench() as b:
        before, bad, after = b.send("before", "a"), b.send(prompt, "b", **sampling), b.send("after", "c")
        await bad.wait()
        assert type(bad.error) is kind
        assert bad.error is not None
        assert getattr(bad.error, "param", None) == param
        assert bad.prompt_token_ids is None
        assert b.observer.rejected == [bad.error]
        for sink, text in ((before, "before"), (after, "after")):
            assert (await sink.wait()).choice().token_ids == expected_tokens(text, 6)
        assert b.observer.reasons == {FinishReason.LENGTH: 2}


async def test_what_the_pool_could_never_hold_is_refused_with_the_numbers() -> None:
    async with bench(fake_info(vocab_size=VOCAB_SIZE, num_blocks=6, block_len=4)) as b:
        sink = await b.send("hello", max_tokens=30).wait()
        assert isinstance(sink.error, PromptTooLong)
        assert sink.error.param == "max_tokens"
        assert "36" in sink.error.message
        assert "holds 20" in sink.error.message


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        # Values whose types change behind the back of what checks them when built.
        (lambda: spoilt(TextPrompt(text="x"), text=None), EngineError),
        (lambda: spoilt(TokensPrompt(token_ids=[1]), token_ids=None), EngineError),
        (lambda: TokensPrompt(token_ids=["a"]), InvalidRequest),  # type: ignore[list-item]
        (lambda: TokensPrompt(token_ids=[1.5]), InvalidRequest),  # type: ignore[list-item]
        (lambda: TokensPrompt(token_ids=array("b", [1, -2])), InvalidRequest),
        (lambda: TokensPrompt(token_ids={1: 2}.keys()), type(None)),  # type: ignore[arg-type]
    ],
)
async def test_an_odd_prompt_ends_its_own_request_alone(
    spoil: Callable[[], Prompt], kind: type[Exception]
) -> None:
    async with bench() as b:
        odd = await b.send(spoil(), "odd").wait()
        assert type(odd.error) is kind
        assert (await b.send("good", "good").wait()).choice().token_ids == expected_tokens("good", 6)


def spoilt(prompt: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        object.__setattr__(prompt, name, value)
    return prompt


@pytest.mark.parametrize(
    ("build", "param"),
    [
        (lambda: TextPrompt(text=None), "prompt"),  # type: ignore[arg-type]
        (lambda: TokensPrompt(token_ids=None), "prompt"),  # type: ignore[arg-type]
        (lambda: TokensPrompt(token_ids="hi"), "prompt"),  # type: ignore[arg-type]
        (lambda: TokensPrompt(token_ids=b"\0\0\0\0"), "prompt"),
        (lambda: request(None), "prompt"),  # type: ignore[arg-type]
        (lambda: request("x", priority="high"), "priority"),  # type: ignore[arg-type]
        (lambda: replace(request("x"), cache_salt=5), "cache_salt"),  # type: ignore[arg-type]
    ],
)
def test_values_of_a_wrong_type_are_refused_when_a_request_is_built(
    build: Callable[[], object], param: str
) -> None:
    with pytest.raises(InvalidRequest, match="is of the type") as caught:
        build()
    assert caught.value.param == param


async def test_a_long_token_prompt_is_refused_by_its_length_before_its_ids_are_looked_at() -> None:
    async with bench() as b:
        sink = await b.send(TokensPrompt(token_ids=[-1] * 20_000)).wait()
        assert type(sink.error) is PromptTooLong
        assert "20000" in sink.error.message
        assert "128" in sink.error.message


async def test_a_default_output_length_is_cut_to_the_context_and_one_asked_for_is_not() -> None:
    async with bench(fake_info(vocab_size=VOCAB_SIZE, max_model_len=20)) as b:
        asked = Request(
            request_id="r",
            prompt=TextPrompt(text="x" * 10),
            sampling=SamplingParams(ignore_eos=True),
            arrival_s=0,
        )
        cut = RecordingSink()
        b.engine.submit(asked, cut)
        assert len((await cut.wait()).choice().token_ids) == 20 - 11
        refused = await b.send("x" * 10, max_tokens=16).wait()
        assert isinstance(refused.error, PromptTooLong)
        assert refused.error.param == "max_tokens"


async def test_a_tokenizer_that_breaks_fails_one_request(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenTokenizer(FakeTokenizer):
        def render_chat(self, prompt: ChatPrompt) -> str:
            raise ZeroDivisionError("a bug")

    async with bench(tokenizer=BrokenTokenizer()) as b:
        bad = b.send(ChatPrompt(messages=({"role": "user", "content": "x"},)), "bad")
        good = b.send("good", "good")
        await bad.wait()
        assert type(bad.error) is EngineError
        assert isinstance(bad.error.__cause__, ZeroDivisionError)
        assert (await good.wait()).error is None
    assert [record.message for record in caplog.records] == ["a request could not be admitted"]


async def test_the_queue_has_an_end_and_says_when_to_come_back() -> None:
    async with bench(fake_info(num_slots=1), max_num_queued_requests=3) as b:
        b.executor.hold()
        running = b.send("x", "running")
        await b.until(lambda: b.engine.statistics().num_running == 1)
        queued = [b.send("x", f"queued {i}") for i in range(2)]
        await b.turn()
        queued.append(b.send("x", "queued 2"))
        with pytest.raises(Overloaded, match="3 sequences are waiting, 1 more") as caught:
            b.send("x", "too many")
        assert caught.value.retry_after_s >= 1.0
        assert b.observer.rejected == [caught.value]
        b.engine.abort("queued 0")
        await b.turn()
        queued.append(b.send("x", "now there is room"))
        b.executor.resume()
        for sink in (running, *queued[1:]):
            assert (await sink.wait()).choice().finish_reason is FinishReason.LENGTH


async def test_a_burst_that_is_not_even_tokenized_yet_fills_the_queue() -> None:
    async with bench(max_num_queued_requests=5) as b:
        sinks = [b.send("x", str(i)) for i in range(5)]
        with pytest.raises(Overloaded):
            b.send("x", "5")
        for sink in sinks:
            await sink.wait()
        await b.send("x", "5").wait()


async def test_choices_count_one_by_one_against_the_bound_of_the_queue() -> None:
    async with bench(fake_info(num_slots=1), max_num_queued_requests=5) as b:
        first = b.send("x", "first", n=3)  # not even tokenized
        with pytest.raises(Overloaded, match="3 sequences are waiting, 3 more are asked for"):
            b.send("x", "second", n=3)
        second = b.send("x", "second", n=2)
        assert b.engine.statistics().num_waiting == 5
        b.engine.abort("second")
        await b.until(lambda: b.engine.statistics().num_waiting == 2)
        assert second.outputs == []
        await first.wait()
        bad = await b.send("x", "bad", n=5, logit_bias={VOCAB_SIZE: 1.0}).wait()
        assert bad.error is not None
        assert b.engine.statistics().num_waiting == 0


async def test_a_call_of_more_sequences_than_may_ever_wait_is_refused_for_good_with_the_numbers() -> None:
    async with bench(max_num_queued_requests=5) as b:
        with pytest.raises(InvalidRequest, match=r"6 sequences are asked for at once; .* at most 5 wait"):
            b.send("x", n=6)
        with pytest.raises(InvalidRequest, match="9 sequences"):
            b.engine.check_room([request("x", str(number)) for number in range(9)])
        assert [type(error) for error in b.observer.rejected] == [InvalidRequest] * 2
        b.engine.check_room([request("x", str(number)) for number in range(5)])


# ---- aborts --------------------------------------------------------------------------------------------


async def test_abort_before_the_prompt_is_looked_at() -> None:
    async with bench() as b:
        sink = b.send("x", n=2)
        b.engine.abort("r")
        b.engine.abort("r")
        await b.turn()
        assert sink.prompt_token_ids is None
        assert b.executor.plans == []
        assert b.observer.reasons == {FinishReason.ABORT: 2}
        assert b.tokenizer.encoding_threads == []


async def test_abort_while_the_prompt_is_in_a_tokenizer_thread() -> None:
    gate = threading.Event()
    info = fake_info(vocab_size=VOCAB_SIZE, **ROOM_FOR_LONG_TEXT)
    async with bench(info, tokenizer=FakeTokenizer(gate=gate)) as b:
        sink = b.send(LONG_TEXT)
        await b.until(lambda: len(b.tokenizer.encoding_threads) == 1)
        b.engine.abort("r")
        gate.set()
        await b.until(lambda: b.engine.statistics().num_waiting == 0)
        assert (sink.prompt_token_ids, sink.error, sink.outputs) == (None, None, [])
        assert b.observer.reasons == {FinishReason.ABORT: 1}
        assert b.observer.rejected == []


async def test_abort_while_waiting_for_a_slot() -> None:
    async with bench(fake_info(num_slots=1)) as b:
        b.executor.hold()
        running, waiting = b.send("x", "running"), b.send("x", "waiting")
        await b.turn()
        b.engine.abort("waiting")
        b.executor.resume()
        await running.wait()
        assert waiting.outputs == []
        assert b.observer.reasons == {FinishReason.ABORT: 1, FinishReason.LENGTH: 1}


async def test_abort_between_two_chunks_of_the_prompt() -> None:
    async with bench(fake_info(max_num_batched_tokens=8)) as b:
        b.executor.hold()
        sink = b.send("x" * 40)
        await b.turn()
        b.executor.complete()
        await b.turn()
        assert not any(each.samples for plan in b.executor.plans for each in plan.sequences)
        b.engine.abort("r")
        await b.settle()
        assert sink.outputs == []
        assert b.observer.reasons == {FinishReason.ABORT: 1}
        assert b.observer.first_tokens == []


async def test_abort_while_a_decode_step_is_on_the_device() -> None:
    async with bench() as b:
        b.executor.hold()
        sink = b.send("x")
        await b.turn()
        b.executor.complete()
        await b.turn()
        assert len(sink.outputs) == 1
        assert b.executor.pending_step_ids != []
        b.engine.abort("r")
        await b.settle()
        assert len(sink.outputs) == 1
        assert b.observer.reasons == {FinishReason.ABORT: 1}


async def test_abort_while_the_output_is_on_its_way_to_the_sink() -> None:
    async with bench() as b:
        num_outputs_seen = set()
        for num_turns in range(10):
            # One turn further each time, so that the delta is caught at every place on its way.
            b.executor.hold()
            victim = b.send("x", f"victim {num_turns}")
            await b.turn()
            b.executor.complete()
            await b.turn(num_turns)
            b.engine.abort(f"victim {num_turns}")
            num_outputs = len(victim.outputs)
            num_outputs_seen.add(num_outputs)
            await b.settle()
            assert len(victim.outputs) == num_outputs
            assert b.observer.reasons == {FinishReason.ABORT: num_turns + 1}
        assert num_outputs_seen == {0, 1}


async def test_abort_ends_every_choice_and_keeps_what_was_given() -> None:
    async with bench() as b:
        b.executor.hold()
        sink = b.send("x", n=3)
        other = b.send("other", "other")
        await b.turn()
        b.executor.complete()
        await b.turn()
        num_outputs = len(sink.outputs)
        b.engine.abort("r")
        b.executor.resume()
        assert (await other.wait()).choice().token_ids == expected_tokens("other", 6)
        assert len(sink.outputs) == num_outputs
        assert b.observer.reasons == {FinishReason.ABORT: 3, FinishReason.LENGTH: 1}


async def test_abort_of_an_unknown_or_ended_request_does_nothing() -> None:
    async with bench() as b:
        b.engine.abort("never seen")
        await b.send("x").wait()
        b.engine.abort("r")
        assert b.observer.reasons == {FinishReason.LENGTH: 1}
        assert (await b.send("x").wait()).choice().finish_reason is FinishReason.LENGTH


async def test_a_sink_may_abort_its_own_request_while_it_is_given_output() -> None:
    async with bench() as b:

        def abort_own(output: RequestOutput) -> None:
            b.engine.abort("r")

        sink = RecordingSink(on_put=abort_own)
        b.send("x", sink=sink, max_tokens=1)
        other = b.send("other", "other")
        assert (await other.wait()).choice().finish_reason is FinishReason.LENGTH
        assert len(sink.outputs) == 1
        assert b.observer.reasons == {FinishReason.ABORT: 1, FinishReason.LENGTH: 1}


async def test_a_sink_may_submit_the_next_request_from_its_last_output() -> None:
    async with bench() as b:
        second = RecordingSink()

        def submit_next(output: RequestOutput) -> None:
            if output.finish_reason is not None:
                b.send("second", "second", sink=second)

        b.send("first", "first", sink=RecordingSink(on_put=submit_next))
        assert (await second.wait()).choice().token_ids == expected_tokens("second", 6)


# ---- failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["begin", "put"])
async def test_a_sink_that_raises_ends_its_own_request_alone(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenSink(RecordingSink):
        def begin(self, prompt_token_ids: Any) -> None:
            super().begin(prompt_token_ids)
            if where == "begin":
                raise ZeroDivisionError("a bug in the sink")

        def put(self, output: RequestOutput) -> None:
            super().put(output)
            raise ZeroDivisionError("a bug in the sink")

        def fail(self, error: Any) -> None:
            super().fail(error)
            raise ZeroDivisionError("another")

    async with bench() as b:
        broken = BrokenSink(2)
        b.send("x", "broken", sink=broken, n=2)
        good = b.send("good", "good")
        assert (await good.wait()).choice().token_ids == expected_tokens("good", 6)
        await broken.wait()
        assert type(broken.error) is EngineError
        assert len(broken.outputs) == (1 if where == "put" else 0)
        assert b.observer.reasons == {FinishReason.ERROR: 2, FinishReason.LENGTH: 1}
    assert [record.message for record in caplog.records] == ["output could not be delivered"]


async def test_a_stage_that_dies_ends_the_engine_and_tells_everyone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(token_ids: Any, prompt_len: int) -> int:
        raise ZeroDivisionError("a bug in the device side")

    gate = threading.Event()
    info = fake_info(vocab_size=VOCAB_SIZE, **ROOM_FOR_LONG_TEXT)
    async with bench(info, next_token=broken, settles=False, tokenizer=FakeTokenizer(gate=gate)) as b:
        running = b.send("x", "running")
        in_tokenizer = b.send(LONG_TEXT, "in the tokenizer")
        waiting = asyncio.create_task(b.engine.wait_stopped())
        await asyncio.gather(running.wait(), in_tokenizer.wait())
        gate.set()
        await waiting
        assert isinstance(b.engine.failure, ZeroDivisionError)
        for sink in (running, in_tokenizer):
            assert isinstance(sink.error, EngineStopped)
            assert "a bug in the device side" in str(sink.error)
        assert b.executor.is_stopped
        assert not b.engine.is_accepting
        assert b.observer.reasons == {FinishReason.ERROR: 2}
        with pytest.raises(NotReady):
            b.send("x", "late")
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL]


async def test_a_request_that_comes_just_as_a_stage_dies_hears_that_the_engine_stopped() -> None:
    def broken(token_ids: Any, prompt_len: int) -> int:
        raise ZeroDivisionError("a bug in the device side")

    async with bench(next_token=broken, settles=False) as b:
        b.send("x", "first")
        refusals: list[Exception] = []
        for turn in range(1000):
            await asyncio.sleep(0)
            try:
                b.send("x", str(turn))
            except EngineError as error:
                refusals.append(error)
                if isinstance(error, NotReady):
                    break
        assert {type(error) for error in refusals} == {EngineStopped, NotReady}
        assert b.observer.rejected == refusals


# ---- life ----------------------------------------------------------------------------------------------


def unstarted(executor: FakeExecutor | None = None) -> Engine:
    return Engine(executor=executor or FakeExecutor(), tokenizer=FakeTokenizer())


async def test_nothing_is_taken_before_the_engine_has_started() -> None:
    engine = unstarted()
    assert not engine.is_accepting
    with pytest.raises(NotReady, match="starting"):
        engine.submit(request("x"), RecordingSink())
    with pytest.raises(NotReady):
        _ = engine.info
    engine.abort("r")
    engine.check()
    assert engine.statistics().num_running == 0
    await engine.drain(0.0)
    await engine.stop()
    await engine.wait_stopped()
    with pytest.raises(NotReady, match="stopping"):
        engine.submit(request("x"), RecordingSink())


async def test_an_engine_tells_what_it_runs_on_once_started() -> None:
    async with bench(fake_info(num_blocks=6, block_len=4)) as b:
        assert b.engine.info is b.executor.info
        assert b.engine.tokenizer is b.tokenizer
        assert b.engine.is_accepting
        with pytest.raises(RuntimeError, match="started once"):
            await b.engine.start()


async def test_a_device_that_cannot_start_says_why_and_is_stopped() -> None:
    executor = FakeExecutor(start_error=StartupError("no weights"))
    engine = unstarted(executor)
    with pytest.raises(StartupError, match="no weights"):
        await engine.start()
    assert executor.is_stopped
    await engine.wait_stopped()
    await engine.stop()


async def test_stop_during_start_wins() -> None:
    class SlowExecutor(FakeExecutor):
        async def start(self) -> ExecutorInfo:
            started.set()
            await go_on.wait()
            return await super().start()

    started, go_on = asyncio.Event(), asyncio.Event()
    engine = unstarted(SlowExecutor())
    starting = asyncio.create_task(engine.start())
    await started.wait()
    await engine.stop()
    go_on.set()
    with pytest.raises(EngineStopped):
        await starting
    assert not engine.is_accepting


async def test_stop_ends_everything_at_once_and_tells_everyone() -> None:
    gate = threading.Event()
    info = fake_info(num_slots=1, **ROOM_FOR_LONG_TEXT)
    async with bench(info, settles=False, tokenizer=FakeTokenizer(gate=gate)) as b:
        b.executor.hold()
        running = b.send("x", "running")
        waiting = b.send("x", "waiting")
        await b.turn()
        b.executor.complete()
        await b.turn()
        in_tokenizer = b.send(LONG_TEXT, "in the tokenizer")
        await b.until(lambda: len(b.tokenizer.encoding_threads) == 3)
        stopping = [asyncio.create_task(b.engine.stop()) for _ in range(2)]
        for sink in (running, waiting, in_tokenizer):
            assert isinstance((await sink.wait()).error, EngineStopped)
        gate.set()
        await asyncio.gather(*stopping, b.engine.wait_stopped())
        assert len(running.outputs) == 1
        assert b.engine.failure is None
        assert b.observer.reasons == {FinishReason.ABORT: 3}
        with pytest.raises(NotReady, match="stopping"):
            b.send("x", "late")


async def test_drain_refuses_new_requests_and_lets_the_others_finish() -> None:
    async with bench() as b:
        b.executor.hold()
        sink, queued = b.send("x"), b.send("queued", "queued")
        await b.turn()
        draining = asyncio.create_task(b.engine.drain(30.0))
        await b.turn()
        assert not b.engine.is_accepting
        with pytest.raises(NotReady, match="stopping"):
            b.send("x", "late")
        assert not draining.done()
        b.executor.resume()
        await draining
        assert sink.choice().token_ids == expected_tokens("x", 6)
        assert queued.choice().token_ids == expected_tokens("queued", 6)


async def test_drain_ends_what_does_not_finish_in_time() -> None:
    async with bench() as b:
        b.executor.hold()
        sink = b.send("x", n=2)
        await b.turn()
        await b.engine.drain(0.0)
        assert isinstance(sink.error, EngineStopped)
        assert b.observer.reasons == {FinishReason.ABORT: 2}


async def test_drain_of_an_idle_engine_returns_at_once() -> None:
    async with bench() as b:
        await b.send("x").wait()
        await b.engine.drain(30.0)


async def test_stop_ends_a_drain() -> None:
    async with bench(settles=False) as b:
        b.executor.hold()
        sink = b.send("x")
        draining = asyncio.create_task(b.engine.drain(1000.0))
        await b.turn()
        await b.engine.stop()
        await draining
        assert isinstance(sink.error, EngineStopped)


# ---- generate ------------------------------------------------------------------------------------------


async def test_generate_yields_all_outputs_of_all_choices() -> None:
    async with bench() as b:
        outputs = [output async for output in b.engine.generate(request("hello", n=2))]
        for index in range(2):
            tokens = [token for output in outputs if output.index == index for token in output.token_ids]
            assert tokens == expected_tokens("hello", 6)
        assert sum(output.finish_reason is not None for output in outputs) == 2


async def test_leaving_generate_early_aborts_the_request() -> None:
    async with bench() as b:
        async with aclosing(b.engine.generate(request("hello", max_tokens=100))) as outputs:
            async for output in outputs:
                assert output.finish_reason is None
                break
        assert b.observer.reasons == {FinishReason.ABORT: 1}


async def test_generate_raises_what_the_request_failed_with() -> None:
    async with bench() as b:
        with pytest.raises(InvalidRequest, match="empty"):
            await anext(b.engine.generate(request(TokensPrompt(token_ids=()))))
        await b.engine.drain(0.0)
        with pytest.raises(NotReady):
            await anext(b.engine.generate(request("x")))


async def test_generate_gives_what_had_come_before_the_engine_stopped() -> None:
    async with bench(settles=False) as b:
        b.executor.hold()
        outputs = b.engine.generate(request("x"))
        first = asyncio.create_task(anext(outputs))
        await b.turn()
        b.executor.complete()
        assert (await first).token_ids != []
        await b.engine.stop()
        with pytest.raises(EngineStopped):
            await anext(outputs)


async def test_generate_ends_when_its_request_is_aborted_from_elsewhere() -> None:
    async with bench() as b:
        b.executor.hold()
        following = asyncio.create_task(anext(b.engine.generate(request("x"))))
        await b.turn()
        b.engine.abort("r")
        with pytest.raises(StopAsyncIteration):
            await following


# ---- all together --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_no_mixture_of_ends_leaks_or_disturbs_the_survivors(seed: int) -> None:
    chance = random.Random(seed)
    info = fake_info(vocab_size=VOCAB_SIZE, num_slots=6, num_blocks=40, block_len=4)
    async with bench(info, num_tokenizer_threads=1) as b:
        sinks: dict[str, tuple[str, int, RecordingSink]] = {}
        aborted: set[str] = set()
        num_failures = 0
        for i in range(80):
            kind = chance.random()
            text = "p" * chance.randrange(1, 60) + str(i)
            if kind < 0.08:
                text = chance.choice(["x" * 200, LONG_TEXT])
            num_choices = chance.choice([1, 1, 1, 2, 3])
            num_tokens = chance.randrange(1, 30)
            sink = b.send(text, str(i), n=num_choices, max_tokens=num_tokens)
            sinks[str(i)] = (text, num_tokens, sink)
            if chance.random() < 0.3:
                victim = str(chance.randrange(i + 1))
                if not sinks[victim][2].has_ended:
                    aborted.add(victim)
                b.engine.abort(victim)
            if chance.random() < 0.05:
                b.executor.fail(len(b.executor.plans) + chance.randrange(3))
                num_failures += 1
            await b.turn(chance.randrange(12))
            b.engine.check()
        for request_id, (text, num_tokens, sink) in sinks.items():
            if request_id in aborted:
                continue
            await sink.wait()
            if len(text) >= 128:
                assert isinstance(sink.error, PromptTooLong)
                continue
            for index in {output.index for output in sink.outputs}:
                answer = sink.choice(index)
                if answer.finish_reason is FinishReason.ERROR:
                    assert num_failures > 0
                else:
                    assert answer.token_ids == expected_tokens(text, num_tokens)
        num_sequences = Counter(
            "rejected" if sink.error is not None else "taken" for _, _, sink in sinks.values()
        )
        assert len(b.observer.rejected) == num_sequences["rejected"]
