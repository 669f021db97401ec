import math

import pytest
import torch

from asyncserve.gpu.sampling.selection import BLOCK_LEN, argmax, block_max, largest

WIDTHS = [1, 5, BLOCK_LEN, 2 * BLOCK_LEN, 3 * BLOCK_LEN + 7, 40 * BLOCK_LEN, 40 * BLOCK_LEN + 1]


def coarse_rows(num_rows: int, width: int) -> torch.Tensor:
    """Rows with many equal values."""
    generator = torch.Generator().manual_seed(width)
    return torch.randint(-4, 5, (num_rows, width), generator=generator).to(torch.float32)


@pytest.mark.parametrize("width", WIDTHS)
def test_argmax_is_the_first_of_the_largest(width: int) -> None:
    rows = coarse_rows(9, width)
    values, indexes = argmax(rows)
    for row, value, index in zip(rows.tolist(), values.tolist(), indexes.tolist(), strict=True):
        assert (value, index) == (max(row), row.index(max(row)))


@pytest.mark.parametrize("width", WIDTHS)
def test_argmax_reports_nan_wherever_it_is(width: int) -> None:
    rows = coarse_rows(3, width)
    rows[1, width - 1] = math.nan
    values, _ = argmax(rows)
    assert values.isnan().tolist() == [False, True, False]


def test_argmax_of_rows_of_minus_infinity_is_minus_infinity() -> None:
    values, _ = argmax(torch.full((2, 5 * BLOCK_LEN + 3), -math.inf))
    assert values.tolist() == [-math.inf, -math.inf]


@pytest.mark.parametrize("width", [5, 300, 8 * BLOCK_LEN, 40 * BLOCK_LEN, 40 * BLOCK_LEN + 9])
@pytest.mark.parametrize("count", [1, 4, 5])
def test_largest_values_are_those_of_a_sort(width: int, count: int) -> None:
    for rows in (coarse_rows(7, width), torch.randn(7, width, generator=torch.Generator().manual_seed(1))):
        values, indexes = largest(rows, count)
        assert torch.equal(values, rows.sort(dim=1, descending=True).values[:, :count])
        assert torch.equal(rows.gather(1, indexes), values)
        assert all(len(set(row)) == count for row in indexes.tolist())


def test_largest_finds_elements_that_share_a_block_and_the_last_short_block() -> None:
    width = 30 * BLOCK_LEN + 3
    rows = torch.zeros(2, width)
    rows[0, 128:133] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    rows[1, width - 3 :] = torch.tensor([7.0, 9.0, 8.0])
    _, indexes = largest(rows, 3)
    assert indexes.tolist() == [[132, 131, 130], [width - 2, width - 1, width - 3]]


def test_block_max_covers_the_last_short_block() -> None:
    rows = torch.arange(2.0 * BLOCK_LEN + 5).unsqueeze(0)
    assert block_max(rows).tolist() == [[BLOCK_LEN - 1.0, 2 * BLOCK_LEN - 1.0, 2 * BLOCK_LEN + 4.0]]
