from asyncserve.loop.step_limit import SMALLEST_LIMIT, STEPS_KEPT_SMALL, StepLimit


def go_well(limit: StepLimit, num_steps: int) -> None:
    for _ in range(num_steps):
        limit.note_good()


def test_steps_may_double_each_time_that_enough_of_them_went_well_up_to_the_budget() -> None:
    limit = StepLimit(100)
    go_well(limit, 2 * STEPS_KEPT_SMALL)
    assert limit.num_tokens == 100
    limit.lower(30)
    go_well(limit, STEPS_KEPT_SMALL - 1)
    assert limit.num_tokens == 30
    go_well(limit, 1)
    assert limit.num_tokens == 60
    go_well(limit, STEPS_KEPT_SMALL)
    assert limit.num_tokens == 100


def test_another_step_that_lacks_memory_begins_the_count_again_and_never_raises_the_limit() -> None:
    limit = StepLimit(100)
    limit.lower(40)
    go_well(limit, STEPS_KEPT_SMALL - 1)
    limit.lower(50)
    go_well(limit, STEPS_KEPT_SMALL - 1)
    assert limit.num_tokens == 40


def test_steps_are_not_kept_smaller_than_the_least_nor_above_the_budget() -> None:
    limit = StepLimit(100)
    limit.lower(1)
    assert limit.num_tokens == SMALLEST_LIMIT
    small = StepLimit(SMALLEST_LIMIT // 2)
    small.lower(1)
    assert small.num_tokens == SMALLEST_LIMIT // 2
