import pytest

from asyncserve.http.parsers.markers import MarkerFilter, MarkerSet


@pytest.mark.parametrize(
    ("text", "is_all", "found"),
    [
        ("ab<x>c", False, (2, 5)),
        ("ab<x>>c", False, (2, 6)),
        ("ab<x>", False, (2, -1)),
        ("ab<x>", True, (2, 5)),
        ("ab<", False, (2, -1)),
        ("ab<", True, (3, 3)),
        ("a<<y", False, (2, 4)),
        ("<<<", False, (2, -1)),
        ("plain", False, (5, 5)),
        ("", False, (0, 0)),
    ],
)
def test_the_first_marker_is_found_and_the_longer_of_two(
    text: str, is_all: bool, found: tuple[int, int]
) -> None:
    assert MarkerSet(["<x>", "<x>>", "<y"]).find(text, 0, is_all=is_all) == found


def test_a_search_begins_at_its_position() -> None:
    assert MarkerSet(["ab"]).find("abab", 1, is_all=True) == (2, 4)


def test_a_filter_leaves_markers_out_wherever_the_text_is_cut() -> None:
    text = "a<|end|>b<|en<|end|><|end"
    for pieces in ([text], list(text), [text[:4], text[4:]]):
        markers = MarkerFilter(MarkerSet(["<|end|>", "<|begin|>"]))
        kept = "".join(map(markers.feed, pieces)) + markers.feed("", is_all=True)
        assert kept == "ab<|en<|end"
