"""Random lives of a scheduler on tiny pools: whatever happens, tokens are right and nothing leaks."""

import pytest

from tests.loop.random_life import live_many, simulate


@pytest.mark.parametrize("seed", range(40))
def test_random_life_gives_every_sequence_its_tokens_and_leaks_nothing(seed: int) -> None:
    simulate(seed)


@pytest.mark.slow
def test_many_random_lives_meet_everything_that_can_happen() -> None:
    total = live_many(range(1000, 1060))
    assert all(number > 20 for number in total.values()), total


@pytest.mark.slow
def test_larger_random_lives_go_as_well() -> None:
    live_many(range(3), size=2)


def test_who_can_compute_gets_its_turn_in_steps_that_never_hold_all() -> None:
    total = live_many([*range(4), 3001], are_steps_tiny=True)
    assert total["beams"]
    assert total["preemptions"]
