from hypothesis import given
from hypothesis import strategies as st

from asyncserve.loop.stop_strings import StopStrings

_STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def _longest_beginning(text: str, stops: list[str]) -> int:
    """Return how many last characters of the text begin some stop string (or are one)."""
    return max(
        length
        for length in range(len(text) + 1)
        for stop in stops
        if stop.startswith(text[len(text) - length :])
    )


@given(_STOPS, st.text("abc", max_size=30))
def test_the_state_is_the_longest_end_that_may_begin_a_stop_string(stops: list[str], text: str) -> None:
    automaton = StopStrings(stops)
    state = 0
    for end in range(1, len(text) + 1):
        state = automaton.step(state, text[end - 1])
        assert automaton.depth[state] == _longest_beginning(text[:end], stops)
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        assert automaton.match[state] == (max(ended, key=len) if ended else None)


@given(_STOPS, st.text("ab", max_size=30))
def test_after_a_match_that_does_not_count_only_proper_beginnings_are_held(
    stops: list[str], text: str
) -> None:
    automaton = StopStrings(stops)
    state = 0
    for end in range(1, len(text) + 1):
        state = automaton.released(automaton.step(state, text[end - 1]))
        held = text[end - automaton.depth[state] : end]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
        longer = [
            length
            for length in range(automaton.depth[state] + 1, end + 1)
            if any(stop.startswith(text[end - length : end]) and len(stop) > length for stop in stops)
        ]
        assert longer == []


def test_first_characters_are_all_that_can_begin_a_stop_string() -> None:
    assert StopStrings(["\n\n", "User:", "Use"]).first_characters == {"\n", "U"}
