"""Fixed texts found in text that arrives in pieces: tags, and special tokens shown as text.

A `MarkerSet` finds the first marker from a position on; of two that begin there, the longer one. What may
still become a marker at the end of the text is told apart, so that its caller can hold it back until more
text is there. A marker is a few dozen characters at most, so a search is linear in the text.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """A prefix of some markers; `ends` says that it is one."""

    following: dict[str, "_Node"] = field(default_factory=dict)
    ends: bool = False


class MarkerSet:
    """Markers to look for. Not changed once built.

    Args:
        markers: At least one, none empty.
    """

    __slots__ = ("_firsts", "_root")

    def __init__(self, markers: Iterable[str]) -> None:
        self._root = _Node()
        firsts = set()
        for marker in markers:
            firsts.add(marker[0])
            node = self._root
            for character in marker:
                node = node.following.setdefault(character, _Node())
            node.ends = True
        self._firsts = re.compile(f"[{''.join(map(re.escape, sorted(firsts)))}]")

    def find(self, text: str, position: int, *, is_all: bool) -> tuple[int, int]:
        """Return where the first marker from `position` on begins and ends.

        The end is -1 if the text stops inside what may become a marker, and `is_all` does not say that
        nothing follows. Begin and end are the text's end if there is none.
        """
        num_characters = len(text)
        for first in self._firsts.finditer(text, position):
            begin = index = first.start()
            following = self._root.following
            end = 0
            while index < num_characters and (node := following.get(text[index])) is not None:
                index += 1
                following = node.following
                if node.ends:
                    end = index
            if index == num_characters and following and not is_all:
                return begin, -1
            if end:
                return begin, end
        return num_characters, num_characters


class MarkerFilter:
    """Leaves markers out of a text.

    Args:
        markers: What to leave out.
    """

    __slots__ = ("_held", "_markers")

    def __init__(self, markers: MarkerSet) -> None:
        self._markers = markers
        self._held = ""

    def feed(self, text: str, *, is_all: bool = False) -> str:
        """Return what is certain by now of the text without markers; all of it if nothing follows."""
        text = self._held + text
        self._held = ""
        kept = []
        position = 0
        while position < len(text):
            begin, end = self._markers.find(text, position, is_all=is_all)
            kept.append(text[position:begin])
            if end < 0:
                self._held = text[begin:]
                break
            position = end
        return "".join(kept)
