import pytest

from asyncserve.http.reasoning_tokens import ReasoningCount

BEGIN, END, SPACE = 900, 901, 10


def count(token_ids: list[int], *, is_open: bool = False) -> int:
    counted = ReasoningCount((BEGIN, END), is_open=is_open, is_space=lambda token_id: token_id == SPACE)
    for token_id in token_ids:
        counted.take([token_id])
    at_once = ReasoningCount((BEGIN, END), is_open=is_open, is_space=lambda token_id: token_id == SPACE)
    at_once.take(token_ids)
    assert at_once.num_tokens == counted.num_tokens, "the count depends on how tokens come"
    return counted.num_tokens


@pytest.mark.parametrize(
    ("token_ids", "is_open", "num_tokens"),
    [
        ([1, 2, 3], False, 0),
        ([BEGIN, 1, 2, END, 3, 4], False, 4),
        ([SPACE, BEGIN, 1, END, 3], False, 4),
        ([1, 2, END, 3, 4], True, 3),
        ([1, 2, 3], True, 3),
        ([BEGIN, 1], False, 2),
        ([1, BEGIN, 2, END], False, 0),
        ([1, END, 2], False, 0),
        ([BEGIN, 1, END, BEGIN, 2, END], False, 3),
        ([], True, 0),
    ],
)
def test_tokens_up_to_the_closing_marker_are_reasoning(
    token_ids: list[int], is_open: bool, num_tokens: int
) -> None:
    assert count(token_ids, is_open=is_open) == num_tokens
