import dataclasses
from array import array
from typing import Any

import pytest

from asyncserve.kv_spec import FullAttention, RecurrentState, SlidingWindow
from asyncserve.request import SamplingParams
from asyncserve.step import BlockAppend, ScheduledSequence, SlotAssignment, StepPlan
from tests.contracts.plan_rules import PlanRuleBroken, PlanRules
from tests.fakes.executor import fake_info

INFO = fake_info(num_slots=4, num_blocks=10, block_len=4, max_model_len=12, max_num_batched_tokens=8)


def assignment(slot: int, num_tokens: int = 5, **changes: Any) -> SlotAssignment:
    fields: dict[str, Any] = {
        "slot": slot,
        "token_ids": array("i", range(num_tokens)),
        "prompt_len": num_tokens,
        "sampling": SamplingParams(logit_bias={3: 1.0}),
        "seed": 1,
    }
    return SlotAssignment(**(fields | changes))


def first_plan() -> StepPlan:
    """Slot 0 computes its prompt of 5 tokens whole."""
    return StepPlan(
        step_id=0,
        sequences=(ScheduledSequence(0, 0, 5, True),),
        admitted=(assignment(0),),
        block_appends=(BlockAppend(0, 0, (1, 2)),),
    )


def second_plan(**changes: Any) -> StepPlan:
    """Slot 0 decodes; slot 1 enters with 3 tokens."""
    plan = StepPlan(
        step_id=1,
        sequences=(ScheduledSequence(0, 5, 1, True), ScheduledSequence(1, 0, 3, True)),
        admitted=(assignment(1, 3),),
        block_appends=(BlockAppend(0, 1, (3,)),),
    )
    return dataclasses.replace(plan, **changes)


def test_a_sound_stream_of_plans_passes() -> None:
    rules = PlanRules(INFO)
    rules.check(first_plan())
    rules.check(second_plan())
    rules.check(
        StepPlan(
            step_id=2,
            released_slots=(0,),
            admitted=(assignment(0, 6),),
            block_appends=(BlockAppend(0, 0, (1, 4)),),
            sequences=(ScheduledSequence(1, 3, 1, True), ScheduledSequence(0, 4, 1, False)),
        )
    )
    assert rules.held_slots == {0, 1}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"step_id": 2}, "step_id should be 1"),
        ({"sequences": ()}, "at least one sequence"),
        ({"sequences": (ScheduledSequence(0, 5, 1, True),) * 2}, "distinct"),
        ({"released_slots": (2,)}, "released slot 2 was admitted"),
        ({"released_slots": (0,)}, "slot 0 is used while not admitted"),
        ({"admitted": (assignment(0),)}, "admitted slot 0 was free"),
        ({"admitted": (assignment(4),)}, "slot 4 is below 4"),
        ({"admitted": (assignment(1, token_ids=[1, 2, 3]),)}, "array"),
        ({"admitted": (assignment(1, token_ids=array("i", [1, 512, 3])),)}, "vocabulary"),
        ({"admitted": (assignment(1, 3, prompt_len=4),)}, "prompt_len"),
        ({"sequences": (ScheduledSequence(0, 4, 1, True),)}, "continues at 5, not 4"),
        ({"sequences": (ScheduledSequence(0, 5, 0, True),)}, "at least one token"),
        ({"sequences": (ScheduledSequence(0, 5, 2, True),)}, "decodes one token"),
        ({"sequences": (ScheduledSequence(1, 3, 1, True),)}, "starts in its tokens"),
        ({"sequences": (ScheduledSequence(1, 0, 4, True),)}, "4 of 3 known tokens"),
        ({"sequences": (ScheduledSequence(1, 0, 2, True),)}, "samples exactly when"),
        ({"sequences": (ScheduledSequence(1, 0, 3, False),)}, "samples exactly when"),
        (
            {"sequences": (ScheduledSequence(1, 0, 3, True), ScheduledSequence(0, 5, 1, True))},
            "decode steps stand before prefill chunks",
        ),
        ({"block_appends": ()}, "covers 3 positions with 0 blocks"),
        ({"block_appends": (BlockAppend(0, 1, (0,)),)}, r"block ids are in 1 … 9"),
        ({"block_appends": (BlockAppend(0, 1, (10,)),)}, r"block ids are in 1 … 9"),
        ({"block_appends": (BlockAppend(0, 1, ()),)}, "at least one block"),
        ({"block_appends": (BlockAppend(0, 2, (3,)),)}, "admitted slot, not 2"),
        ({"block_appends": (BlockAppend(1, 1, (3,)),)}, "group 1 exists"),
        ({"block_appends": (BlockAppend(0, 1, (3,)), BlockAppend(0, 0, (2,)))}, "no block twice"),
        (
            {
                "admitted": (assignment(1, 9),),
                "sequences": (ScheduledSequence(1, 0, 9, True),),
                "block_appends": (BlockAppend(0, 1, (3, 4, 5)),),
            },
            "num_tokens 9 is within the budget 8",
        ),
        (
            {
                "admitted": (assignment(1, 13),),
                "sequences": (ScheduledSequence(1, 8, 5, True),),
                "block_appends": (BlockAppend(0, 1, (3, 4, 5, 6)),),
            },
            "stays within the context",
        ),
    ],
)
def test_a_plan_that_breaks_a_rule_is_named_with_the_rule(changes: dict[str, Any], rule: str) -> None:
    rules = PlanRules(INFO)
    rules.check(first_plan())
    with pytest.raises(PlanRuleBroken, match=rule):
        rules.check(second_plan(**changes))


SIZE: dict[str, Any] = {"block_len": 4, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32"}
WINDOW_INFO = fake_info(
    num_slots=4,
    num_blocks=20,
    max_model_len=40,
    max_num_batched_tokens=16,
    specs=[
        FullAttention(**SIZE),
        SlidingWindow(window_len=5, **SIZE),
        RecurrentState(state_bytes=60, page_bytes=32),
    ],
)


def window_plan(start: int, *tables: tuple[int, ...]) -> StepPlan:
    """Return a plan that admits a sequence of 14 tokens, a table a group, and computes it from `start` on."""
    return StepPlan(
        step_id=0,
        admitted=(assignment(1, 14),),
        sequences=(ScheduledSequence(1, start, 14 - start, True),),
        block_appends=tuple(BlockAppend(group_id, 1, table) for group_id, table in enumerate(tables)),
    )


def test_null_blocks_stand_where_a_window_has_passed_before_a_sequence_came() -> None:
    PlanRules(WINDOW_INFO).check(window_plan(12, (1, 2, 3, 4), (0, 0, 5, 6), (7, 8)))


@pytest.mark.parametrize(
    ("start", "tables", "rule"),
    [
        (11, ((1, 2, 3, 4), (0, 0, 5, 6), (7, 8)), "sees no null block from 11 on"),
        (12, ((0, 2, 3, 4), (0, 0, 5, 6), (7, 8)), "block ids are in"),
        (12, ((1, 2, 3, 4), (0, 0, 5, 6), (0, 8)), "block ids are in"),
        (12, ((1, 2, 3, 4), (0, 0, 5, 6), (7,)), "covers 14 positions with 1 blocks"),
        (12, ((1, 2, 3, 4), (0, 0, 5), (7, 8)), "covers 14 positions with 3 blocks"),
        (12, ((1, 2, 3, 4), (9, 0, 5, 6), (7, 8)), "block ids are in"),
        (12, ((1, 2, 3, 4), (0, 0, 5, 4), (7, 8)), "no block twice"),
    ],
)
def test_a_table_that_lacks_what_is_seen_breaks_a_rule(
    start: int, tables: tuple[tuple[int, ...], ...], rule: str
) -> None:
    with pytest.raises(PlanRuleBroken, match=rule):
        PlanRules(WINDOW_INFO).check(window_plan(start, *tables))


def test_what_a_window_has_passed_may_stand_in_a_table_again() -> None:
    rules = PlanRules(WINDOW_INFO)
    rules.check(window_plan(0, (1, 2, 3, 4), (5, 6, 9, 10), (7, 8)))
    for position in (14, 15):
        rules.check(StepPlan(step_id=position - 13, sequences=(ScheduledSequence(1, position, 1, True),)))
    appends = (BlockAppend(0, 1, (11,)), BlockAppend(1, 1, (5,)))
    rules.check(StepPlan(step_id=3, sequences=(ScheduledSequence(1, 16, 1, True),), block_appends=appends))


def test_a_plan_that_does_not_survive_pickling_breaks_a_rule() -> None:
    class Opaque(frozenset[int]):
        """Equal to nothing, itself unpickled included."""

        def __eq__(self, other: object) -> bool:
            return False

        def __hash__(self) -> int:
            return 0

        def __reduce__(self) -> tuple[type[frozenset[int]], tuple[()]]:
            return (frozenset, ())

    rules = PlanRules(INFO)
    plan = dataclasses.replace(first_plan(), admitted=(assignment(0, stop_token_ids=Opaque()),))
    with pytest.raises(PlanRuleBroken, match="pickle round trip"):
        rules.check(plan)
