import random

import pytest

from asyncserve.gpu.attention.row_groups import similar_rows


@pytest.mark.parametrize(("free_padding", "most_pages"), [(32, 10**9), (32, 500), (0, 1000), (1000, 1)])
def test_grouped_rows_are_each_row_once_with_bounded_padding_and_size(
    free_padding: int, most_pages: int
) -> None:
    rng = random.Random(3)
    for _ in range(200):
        num_pages = [int(1.5 ** rng.randrange(1, 18)) for _ in range(rng.randrange(0, 40))]
        groups = similar_rows(num_pages, free_padding=free_padding, most_pages=most_pages)
        assert sorted(row for group in groups for row in group) == list(range(len(num_pages)))
        for group in groups:
            pages = [num_pages[row] for row in group]
            padded = max(pages) * len(pages)
            assert padded - sum(pages) <= max(free_padding, sum(pages) // 3)
            assert padded <= most_pages or len(group) == 1


def test_rows_that_fit_one_group_stay_in_order() -> None:
    assert similar_rows([3, 5, 4], free_padding=3, most_pages=15) == [[0, 1, 2]]
    assert len(similar_rows([3, 5, 4], free_padding=3, most_pages=14)) == 2
    assert len(similar_rows([1, 50, 1], free_padding=3, most_pages=10**6)) == 2


def test_equal_rows_above_the_size_are_split_and_no_finer_than_needed() -> None:
    assert [len(group) for group in similar_rows([10] * 25, free_padding=0, most_pages=100)] == [10, 10, 5]
