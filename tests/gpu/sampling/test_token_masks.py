import gc
import math
import weakref
from array import array
from collections.abc import Sequence

import pytest
import torch

from asyncserve.gpu.device import CpuEvent
from asyncserve.gpu.sampling.sampler import Sampler
from asyncserve.gpu.sampling.token_masks import SLOW_STEP_S, TokenMasks
from asyncserve.grammar import SLOW_S, USUAL_S, Grammar
from asyncserve.request import SamplingParams
from asyncserve.step import NO_TOKEN, SlotAssignment
from tests.fakes.grammar import FakeGrammar, FakeMatcher
from tests.fakes.tokenizer import EOS_ID, FakeTokenizer
from tests.gpu.sampling.rows import CPU, new_sampler

VOCAB = 301  # neither a multiple of 32 nor of 8
PROMPT_LEN = 3
GREEDY = SamplingParams(temperature=0.0)


def grammar(*texts: str) -> FakeGrammar:
    return FakeGrammar(texts, FakeTokenizer(), VOCAB)


def assignment(
    slot: int,
    follows: Grammar | None,
    sampling: SamplingParams = GREEDY,
    *,
    outputs: bytes = b"",
    seed: int = 0,
    stop_token_ids: Sequence[int] = (EOS_ID,),
) -> SlotAssignment:
    return SlotAssignment(
        slot=slot,
        token_ids=array("i", [0] * PROMPT_LEN + list(outputs)),
        prompt_len=PROMPT_LEN,
        sampling=sampling,
        seed=seed,
        stop_token_ids=frozenset(stop_token_ids),
        grammar=follows,
    )


def some_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.5


class Rows:
    """A sampler driven as the runner drives it."""

    def __init__(self, *assignments: SlotAssignment) -> None:
        self.sampler = new_sampler(VOCAB)
        self.num_steps = 0
        self.positions: dict[int, int] = {}
        for each in assignments:
            self.admit(each)

    def admit(self, each: SlotAssignment) -> None:
        self.sampler.admit(each)
        self.positions[each.slot] = len(each.token_ids)

    def step(self, *slots: int, logits: torch.Tensor | None = None) -> list[int]:
        self.num_steps += 1
        if logits is None:
            logits = torch.stack([some_logits(1, seed=100 * self.positions[slot])[0] for slot in slots])
        sampled = self.sampler.sample(logits, slots, [self.positions[slot] for slot in slots])
        self.sampler.record(slots, sampled.token_ids)
        self.sampler.expect(slots, sampled.token_ids, CpuEvent())
        for slot in slots:
            self.positions[slot] += 1
        token_ids: list[int] = sampled.token_ids.tolist()
        return token_ids

    def write(self, slot: int, max_tokens: int = 30) -> list[int]:
        token_ids: list[int] = []
        while len(token_ids) < max_tokens and token_ids[-1:] not in ([EOS_ID], [NO_TOKEN]):
            token_ids += self.step(slot)
        return token_ids


# ---- which tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.3, top_p=0.9, top_k=20),
        SamplingParams(temperature=2.0, min_p=0.1, repetition_penalty=1.5, presence_penalty=1.0),
        SamplingParams(temperature=0.0, logit_bias={ord("z"): 100.0}, num_logprobs=2),
    ],
)
def test_a_row_writes_a_text_of_its_grammar_and_ends(sampling: SamplingParams) -> None:
    texts = ["a text", "another one", "zz"]
    written = Rows(assignment(0, grammar(*texts), sampling)).write(0)
    assert bytes(written[:-1]).decode() in texts
    assert written[-1] == EOS_ID


def test_the_likeliest_of_the_allowed_tokens_is_taken() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, ord("x")], logits[0, ord("b")], logits[0, ord("a")] = 9.0, 2.0, 1.0
    assert Rows(assignment(0, grammar("a1", "b2"))).step(0, logits=logits) == [ord("b")]


@pytest.mark.parametrize("others", [0, 1, 3])
def test_rows_without_a_grammar_get_what_they_get_without_neighbours(others: int) -> None:
    free = [assignment(slot, None, SamplingParams(temperature=1.0), seed=slot) for slot in range(4)]
    expected = Rows(*free).step(0, 1, 2, 3)
    held = [
        assignment(4 + slot, grammar("ab", "cd"), SamplingParams(temperature=1.0)) for slot in range(others)
    ]
    rows = Rows(*free, *held)
    order = [0, *(4 + slot for slot in range(others)), 1, 2, 3]
    together = dict(zip(order, rows.step(*order), strict=True))
    assert [together[slot] for slot in range(4)] == expected
    assert all(together[4 + slot] in (ord("a"), ord("c")) for slot in range(others))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    sampling = SamplingParams(temperature=1.0)
    texts = ["abc", "abd", "bcd", "bce", "dea"]
    alone = [Rows(assignment(0, grammar(*texts), sampling, seed=seed)).write(0) for seed in range(6)]
    rows = Rows(*(assignment(slot, grammar(*texts), sampling, seed=slot) for slot in range(6)))
    steps = [rows.step(*range(6)) for _ in range(4)]
    assert [list(row) for row in zip(*steps, strict=True)] == alone
    assert len({tuple(row) for row in alone}) > 1


def test_a_preempted_row_goes_on_where_it_was() -> None:
    sampling = SamplingParams(temperature=1.0, min_tokens=2)
    texts = ["a long text", "a longer text", "b", "be"]
    for seed in range(5):
        whole = Rows(assignment(0, grammar(*texts), sampling, seed=seed)).write(0)
        for cut in range(len(whole) - 1):
            again = assignment(3, grammar(*texts), sampling, seed=seed, outputs=bytes(whole[:cut]))
            assert whole[:cut] + Rows(again).write(3) == whole


def test_a_slot_is_given_to_the_next_sequence_before_anybody_looked_at_its_last_token() -> None:
    rows = Rows(assignment(0, grammar("ab")))
    assert rows.step(0) == [ord("a")]
    rows.sampler.release(0)
    rows.admit(assignment(0, grammar("xy")))
    assert rows.write(0) == [*b"xy", EOS_ID]


def test_a_row_that_skips_a_step_loses_no_token() -> None:
    rows = Rows(assignment(0, grammar("abc")), assignment(1, grammar("xyz")))
    assert rows.step(0) == [ord("a")]
    assert rows.step(1) == [ord("x")]
    assert rows.step(1) == [ord("y")]
    assert rows.step(0, 1) == [ord("b"), ord("z")]


def test_a_step_behind_the_end_is_harmless() -> None:
    rows = Rows(assignment(0, grammar("a")), assignment(1, None))
    assert rows.step(0) == [ord("a")]
    assert rows.step(0) == [EOS_ID]
    free = rows.step(1, logits=some_logits(1))
    assert rows.step(0, 1, logits=some_logits(1).expand(2, -1).clone())[1:] == free


# ---- with other restrictions ---------------------------------------------------------------------------


def test_no_end_comes_before_min_tokens_unless_nothing_else_is_left() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS_ID] = 9.0
    sampling = SamplingParams(temperature=0.0, min_tokens=4)
    rows = Rows(assignment(0, grammar("a", "ab"), sampling))
    steps = [rows.step(0, logits=logits.clone())[0] for _ in range(3)]
    assert steps == [ord("a"), ord("b"), EOS_ID]
    rows = Rows(assignment(0, grammar("aaaa", "aaaab"), sampling))
    assert [rows.step(0, logits=logits.clone())[0] for _ in range(5)] == [*b"aaaa", EOS_ID]


def test_other_stop_tokens_are_held_back_before_min_tokens_too() -> None:
    sampling = SamplingParams(temperature=0.0, min_tokens=2)
    logits = torch.zeros(1, VOCAB)
    logits[0, ord("b")] = 9.0
    rows = Rows(assignment(0, grammar("ax", "bx"), sampling, stop_token_ids=(EOS_ID, ord("b"))))
    assert rows.step(0, logits=logits) == [ord("a")]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, allowed_token_ids=tuple(b"ab")),
        SamplingParams(temperature=1.0, top_p=0.5, allowed_token_ids=tuple(b"ab")),
    ],
)
def test_a_complete_text_ends_even_if_the_end_is_not_among_the_allowed_tokens(
    sampling: SamplingParams,
) -> None:
    assert Rows(assignment(0, grammar("ab", "cd"), sampling)).write(0) == [*b"ab", EOS_ID]


def test_a_row_to_which_nothing_is_left_says_so_and_its_neighbours_go_on() -> None:
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=tuple(b"x"))
    rows = Rows(assignment(0, grammar("ab"), sampling), assignment(1, grammar("cd")), assignment(2, None))
    step = rows.step(0, 1, 2)
    assert step[:2] == [NO_TOKEN, ord("c")]
    assert step[2] >= 0
    assert rows.step(0, 1)[1] == ord("d")


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    sampling = SamplingParams(temperature=0.0, num_logprobs=3)
    logits = some_logits(2)
    rows = Rows(assignment(0, grammar("ab"), sampling), assignment(1, None, sampling))
    sampled = rows.sampler.sample(logits.clone(), [0, 1], [PROMPT_LEN, PROMPT_LEN])
    assert sampled.logprobs is not None
    raw = torch.log_softmax(logits, 1)
    assert sampled.logprobs[0].logprob == pytest.approx(raw[0, ord("a")].item(), abs=1e-5)
    assert sampled.logprobs[0].top[0][0] == logits[0].argmax()
    assert sampled.logprobs[1].logprob == pytest.approx(raw[1].max().item(), abs=1e-5)


def test_logits_that_are_not_finite_are_still_reported_as_such() -> None:
    logits = torch.full((1, VOCAB), math.nan)
    assert Rows(assignment(0, grammar("ab"))).step(0, logits=logits)[0] == -1


# ---- waiting and failing -------------------------------------------------------------------------------


class NotedEvent(CpuEvent):
    """Notes that it was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


def test_the_copy_of_a_token_is_waited_for_when_the_next_mask_needs_it_and_not_before() -> None:
    sampler = new_sampler(VOCAB)
    sampler.admit(assignment(0, grammar("abc")))
    sampler.admit(assignment(1, None))
    event, other = NotedEvent(), NotedEvent()
    sampler.sample(some_logits(1), [0], [PROMPT_LEN])
    sampler.expect([0], torch.tensor([ord("a")]), event)
    sampler.sample(some_logits(1), [1], [PROMPT_LEN])
    sampler.expect([1], torch.tensor([5]), other)
    assert event.num_waits == 0
    assert sampler.sample(some_logits(1), [0], [PROMPT_LEN + 1]).token_ids.tolist() == [ord("b")]
    assert (event.num_waits, other.num_waits) == (1, 0)


def test_nothing_is_kept_of_steps_without_a_grammar() -> None:
    masks = TokenMasks(VOCAB, CPU)
    event = NotedEvent()
    masks.expect([0, 1], torch.tensor([3, 4]), event)
    masks.admit(assignment(0, grammar("ab")))
    masks.apply(some_logits(1), [0], [0], [PROMPT_LEN])
    assert event.num_waits == 0


class BrokenMatcher(FakeMatcher):
    """Raises where it is told to."""

    def __init__(self, of: FakeGrammar, breaks: str) -> None:
        super().__init__(of)
        self.breaks = breaks

    def accept(self, token_id: int) -> bool:
        if self.breaks == "accept":
            raise RuntimeError("no")
        return self.breaks != "refuses" and super().accept(token_id)

    def fill_mask(self, words: memoryview) -> None:
        super().fill_mask(words)
        if self.breaks == "mask" and self._written:
            raise RuntimeError("no")


@pytest.mark.parametrize("breaks", ["accept", "mask", "refuses"])
def test_a_matcher_that_fails_ends_its_row_alone(breaks: str) -> None:
    class BrokenGrammar(FakeGrammar):
        def matcher(self) -> FakeMatcher:
            return BrokenMatcher(self, breaks)

    broken = BrokenGrammar(["abc"], FakeTokenizer(), VOCAB)
    rows = Rows(assignment(0, broken), assignment(1, grammar("xyz")))
    assert rows.step(0, 1) == [ord("a"), ord("x")]
    assert rows.step(0, 1) == [NO_TOKEN, ord("y")]
    assert rows.step(0, 1) == [NO_TOKEN, ord("z")]


def test_a_matcher_that_cannot_even_begin_ends_its_row_alone() -> None:
    class NoGrammar(FakeGrammar):
        def matcher(self) -> FakeMatcher:
            raise MemoryError

    resumed = assignment(0, NoGrammar(["abc"], FakeTokenizer(), VOCAB), outputs=b"a")
    rows = Rows(resumed, assignment(1, grammar("xyz")))
    assert rows.step(0, 1) == [NO_TOKEN, ord("x")]


class SlowGrammar(FakeGrammar):
    """Each of its masks takes some processor time."""

    def __init__(self, text: str, takes_s: float, clock: "Clock") -> None:
        super().__init__([text], FakeTokenizer(), VOCAB)
        self.takes_s = takes_s
        self.clock = clock
        self.num_masks = 0

    def matcher(self) -> FakeMatcher:
        slow = self

        class SlowMatcher(FakeMatcher):
            def fill_mask(self, words: memoryview) -> None:
                super().fill_mask(words)
                slow.num_masks += 1
                slow.clock.now_s += slow.takes_s

        return SlowMatcher(self)


class Clock:
    """Instead of the processor's."""

    now_s = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.thread_time", lambda: clock.now_s)
    return clock


def test_a_grammar_whose_calls_take_far_too_long_in_all_ends_all_its_rows(clock: Clock) -> None:
    slow = SlowGrammar("a" * 50, USUAL_S + 0.4 * SLOW_STEP_S, clock)
    rows = Rows(*(assignment(slot, slow) for slot in range(2)), assignment(2, grammar("xyz")))
    assert rows.step(0, 1, 2) == [ord("a"), ord("a"), ord("x")]
    while rows.step(0) == [ord("a")]:
        assert not slow.time_budget.is_spent
    assert slow.time_budget.is_spent
    before_s = clock.now_s
    assert rows.step(0, 1, 2) == [NO_TOKEN, NO_TOKEN, ord("y")]
    assert clock.now_s == before_s, "it was asked again"


def test_many_rows_of_a_grammar_have_together_the_time_of_one(clock: Clock) -> None:
    """Rows of one request and of the next: each for itself would have it all."""
    slow = SlowGrammar("a" * 100, USUAL_S + 0.2 * SLOW_STEP_S, clock)
    for _ in range(20):
        rows = Rows(*(assignment(slot, slow) for slot in range(3)))
        while NO_TOKEN not in rows.step(0, 1, 2):
            pass
    late_s = slow.num_masks * (slow.takes_s - USUAL_S)
    assert SLOW_S < late_s < 1.5 * SLOW_S


def test_calls_that_take_a_usual_time_add_up_to_nothing(clock: Clock) -> None:
    text = "a" * (int(SLOW_S / USUAL_S) + 10)
    slow = SlowGrammar(text, 0.99 * USUAL_S, clock)
    assert Rows(assignment(0, slow)).write(0, len(text) + 1) == [*text.encode(), EOS_ID]


def test_slow_calls_among_quick_ones_are_made_up_for(clock: Clock) -> None:
    text = "a" * 400
    slow = SlowGrammar(text, 0.0, clock)
    rows = Rows(assignment(0, slow))
    for step in range(len(text)):
        slow.takes_s = 10 * USUAL_S if step % 10 == 0 else 0.1 * USUAL_S
        assert rows.step(0) == [ord("a")]


def test_the_costliest_rows_of_a_step_end_when_its_masks_take_too_long_together(clock: Clock) -> None:
    shares = [0.3, 0.45, 0.2, 0.4]
    slow = [SlowGrammar("ab", USUAL_S + share * SLOW_STEP_S, clock) for share in shares]
    rows = Rows(*(assignment(slot, each) for slot, each in enumerate(slow)))
    assert rows.step(0, 1, 2, 3) == [ord("a"), NO_TOKEN, ord("a"), ord("a")]
    for each in slow:
        each.takes_s = 0.0
    assert rows.step(0, 1, 2, 3) == [ord("b"), NO_TOKEN, ord("b"), ord("b")]


def test_nothing_is_kept_of_a_grammar_whose_slot_was_released() -> None:
    follows = FakeGrammar(["abc"], FakeTokenizer(), VOCAB)
    kept = weakref.ref(follows)
    rows = Rows(assignment(0, follows))
    rows.step(0)
    del follows
    rows.sampler.release(0)
    gc.collect()
    assert kept() is None


def test_a_sampler_without_grammars_waits_for_nothing() -> None:
    sampler = Sampler(4, VOCAB, 64, CPU)
    sampler.admit(assignment(0, None))
    event = NotedEvent()
    sampler.expect([0], torch.tensor([1]), event)
    sampler.sample(some_logits(1), [0], [PROMPT_LEN])
    assert event.num_waits == 0
