import pytest
import torch

from asyncserve.errors import ConfigError
from asyncserve.gpu.batch import SampleRows
from asyncserve.gpu.graphs import GraphPool, StepGraph, decode_sizes, mixed_sizes
from asyncserve.gpu.step_inputs import StepSize


def size(num_rows: int, num_tokens: int | None = None, num_long_rows: int = 0) -> StepSize:
    return StepSize(num_rows=num_rows, num_tokens=num_tokens or num_rows, num_long_rows=num_long_rows)


def graph_of(captured: StepSize) -> StepGraph:
    nothing = torch.empty(0)
    rows = SampleRows(slots=nothing, positions=nothing, write_back=nothing, result_row=None)
    return StepGraph(
        size=captured,
        forward=lambda: None,
        choose=lambda: None,
        choose_truncated=lambda: None,
        logits=nothing,
        rows=rows,
    )


def pool_of(*sizes: StepSize) -> GraphPool:
    pool = GraphPool(sizes)
    while pool.num_pending:
        pool.capture_next(graph_of)
    return pool


def found(pool: GraphPool, wanted: StepSize, *, is_decode: bool = True) -> StepSize | None:
    graph = pool.find(wanted, is_decode=is_decode)
    return None if graph is None else graph.size


def test_the_largest_is_captured_first() -> None:
    order: list[int] = []

    def capture(captured: StepSize) -> StepGraph:
        order.append(captured.num_tokens)
        return graph_of(captured)

    pool = GraphPool([size(4), size(64, 512, 8), size(16)])
    assert pool.num_pending == 3
    assert found(pool, size(1)) is None
    pool.capture_next(capture)
    assert found(pool, size(1)) == size(64, 512, 8)
    pool.capture_next(capture)
    pool.capture_next(capture)
    assert order == [512, 16, 4]
    assert pool.num_pending == 0


def test_a_step_gets_the_smallest_graph_with_room_for_it() -> None:
    pool = pool_of(size(1), size(4), size(8), size(8, 64, 4), size(32, 64, 4))
    assert found(pool, size(1)) == size(1)
    assert found(pool, size(2)) == size(4)
    assert found(pool, size(8)) == size(8)
    assert found(pool, size(9)) == size(32, 64, 4)
    assert found(pool, size(33)) is None
    assert found(pool, size(3, 40, 1), is_decode=False) == size(8, 64, 4)
    assert found(pool, size(9, 40, 1), is_decode=False) == size(32, 64, 4)
    assert found(pool, size(3, 65, 1), is_decode=False) is None
    assert found(pool, size(8, 64, 5), is_decode=False) is None


def test_rows_of_one_token_that_do_not_all_sample_are_no_decode_step() -> None:
    pool = pool_of(size(4), size(8, 64, 4))
    assert found(pool, size(3), is_decode=False) == size(8, 64, 4)


def test_after_a_failed_capture_the_rest_is_left_and_what_is_there_is_used() -> None:
    def capture(captured: StepSize) -> StepGraph:
        if captured.num_rows < 8:
            raise RuntimeError("CUDA out of memory")
        return graph_of(captured)

    pool = GraphPool([size(2), size(4), size(8)])
    pool.capture_next(capture)
    pool.capture_next(capture)
    assert pool.num_pending == 0
    assert found(pool, size(2)) == size(8)


def test_a_size_that_lacks_memory_is_left_out_and_the_smaller_ones_are_captured() -> None:
    def capture(captured: StepSize) -> StepGraph:
        if captured.num_rows == 8:
            raise torch.OutOfMemoryError
        return graph_of(captured)

    pool = GraphPool([size(2), size(4), size(8)])
    pool.capture_next(capture)
    assert (pool.num_pending, pool.num_ready) == (2, 0)
    pool.capture_next(capture)
    assert found(pool, size(2)) == size(4)
    assert found(pool, size(5)) is None


def test_usual_sizes_are_dense_where_padding_would_cost_most() -> None:
    assert [entry.num_rows for entry in decode_sizes(1)] == [1]
    assert [entry.num_rows for entry in decode_sizes(20)] == [1, 2, 4, 8, 16, 20]
    nums = [entry.num_rows for entry in decode_sizes(300)]
    assert nums[:6] == [1, 2, 4, 8, 16, 24]
    assert nums[-5:] == [248, 256, 272, 288, 300]
    assert all(entry.num_tokens == entry.num_rows and not entry.num_long_rows for entry in decode_sizes(300))


def test_asked_sizes_replace_the_usual_ones() -> None:
    assert [entry.num_rows for entry in decode_sizes(64, [128, 3, 3, 64])] == [3, 64]
    with pytest.raises(ConfigError, match="cudagraph_capture_sizes"):
        decode_sizes(64, [0])


def test_mixed_sizes_stay_within_the_step_and_hold_prompts() -> None:
    sizes = mixed_sizes(num_slots=300, token_budget=600)
    assert sizes
    assert max(entry.num_tokens for entry in sizes) == 512
    assert {entry.num_rows for entry in sizes} == {16, 256}
    assert all(0 < entry.num_long_rows <= entry.num_rows <= entry.num_tokens for entry in sizes)
    assert {entry.num_rows for entry in mixed_sizes(num_slots=3, token_budget=600)} == {3}
