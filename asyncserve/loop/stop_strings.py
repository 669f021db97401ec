"""Finding stop strings in text that arrives in pieces, and how much text must be held back meanwhile.

An Aho-Corasick automaton over the request's stop strings: one step per character whatever their number, and
its state is exactly the longest end of the text that may be the beginning of a stop string. The result does
not depend on how the text is cut into pieces. Knows no tokens.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request. States are ints; 0 is the beginning. Not changed once built.

    Args:
        strings: At least one, none empty.
    """

    __slots__ = ("_fallback", "_next", "depth", "first_characters", "match")

    def __init__(self, strings: Sequence[str]) -> None:
        self.first_characters = frozenset(text[0] for text in strings)
        """Text without any of them, met in state 0, cannot begin a stop string."""
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]
        """By state: how many last characters of the text may begin a stop string."""
        self.match: list[str | None] = [None]
        """By state: the longest stop string that ends here."""
        self._fallback = [0]
        for text in strings:
            self._insert(text)
        self._link()

    def _insert(self, text: str) -> None:
        state = 0
        for character in text:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
                self._fallback.append(0)
            state = following
        self.match[state] = text

    def _link(self) -> None:
        # Breadth first, so that the shorter suffix a state falls back to is complete before it.
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if self.match[state] is None:
                self.match[state] = self.match[self._fallback[state]]
            for character, following in self._next[state].items():
                self._fallback[following] = self.step(self._fallback[state], character)
                queue.append(following)

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        following = self._next[state].get(character)
        while following is None and state:
            state = self._fallback[state]
            following = self._next[state].get(character)
        return following or 0

    def released(self, state: int) -> int:
        """Return the state after a match that does not count: nothing that cannot go on is held back."""
        while state and not self._next[state]:
            state = self._fallback[state]
        return state
