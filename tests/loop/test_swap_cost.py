"""What is chosen by the two measured times."""

from asyncserve.loop.swap_cost import SwapCost


def test_before_a_prompt_was_computed_the_host_is_chosen() -> None:
    assert SwapCost(1e9).prefers_swap(1000, 1)


def test_the_cheaper_way_is_chosen() -> None:
    cost = SwapCost(block_s=1e-3)
    cost.note_step(num_tokens=1000, num_decodes=0, device_s=0.1)  # 10 000 tokens a second
    assert cost.prefers_swap(num_blocks=9, num_tokens=100)
    assert not cost.prefers_swap(num_blocks=11, num_tokens=100)
    # Half as fast: twice as many blocks may come.
    slower = SwapCost(block_s=1e-3)
    slower.note_step(num_tokens=1000, num_decodes=0, device_s=0.2)
    assert slower.prefers_swap(num_blocks=19, num_tokens=100)
    assert not slower.prefers_swap(num_blocks=21, num_tokens=100)


def test_what_is_there_is_loaded_for_half_of_what_the_way_there_and_back_takes() -> None:
    cost = SwapCost(block_s=1e-3)
    assert cost.prefers_load(num_blocks=10**9, num_tokens=1)
    cost.note_step(num_tokens=1000, num_decodes=0, device_s=0.1)
    assert cost.prefers_load(num_blocks=19, num_tokens=100)
    assert not cost.prefers_load(num_blocks=21, num_tokens=100)
    assert not cost.prefers_load(num_blocks=1, num_tokens=0)


def test_steps_that_say_nothing_of_prompts_do_not_count() -> None:
    cost = SwapCost(block_s=1e-3)
    cost.note_step(num_tokens=10, num_decodes=6, device_s=1.0)
    cost.note_step(num_tokens=1000, num_decodes=0, device_s=0.0)
    assert cost.prefers_swap(num_blocks=10**9, num_tokens=1)
    cost.note_step(num_tokens=10, num_decodes=5, device_s=1e-6)
    assert not cost.prefers_swap(num_blocks=1, num_tokens=1)


def test_large_steps_count_for_more_and_old_ones_for_less() -> None:
    cost = SwapCost(block_s=1e-3)
    cost.note_step(num_tokens=10, num_decodes=0, device_s=0.05)  # a small step reads all weights, too
    cost.note_step(num_tokens=10_000, num_decodes=0, device_s=1.0)
    assert not cost.prefers_swap(num_blocks=11, num_tokens=100)
    for _ in range(500):
        cost.note_step(num_tokens=10_000, num_decodes=0, device_s=2.0)
    assert cost.prefers_swap(num_blocks=19, num_tokens=100)
