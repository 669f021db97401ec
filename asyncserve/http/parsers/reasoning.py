"""The reasoning in front of an answer: `<think>…</think>`, cut from the text that follows.

Reasoning begins with the opening tag, which only white space may precede, or with the first character if the
prompt has opened it (a repeated tag is dropped then). It lasts to the closing tag; if none comes, because a
limit cut the text off, all of it is reasoning. White space at both ends of the reasoning, and behind the
closing tag, is dropped. Text without an opening tag is an answer, and a closing tag in it is text.
"""

import enum

from asyncserve.http.parsers.markers import MarkerSet


class ReasoningTags:
    """What reasoning stands between."""

    __slots__ = ("begin", "begins", "end", "ends")

    def __init__(self, begin: str, end: str) -> None:
        self.begin = begin
        self.end = end
        self.begins = MarkerSet([begin])
        self.ends = MarkerSet([end])


class _At(enum.Enum):
    BEGIN = enum.auto()
    REASONING = enum.auto()
    ANSWER_BEGIN = enum.auto()
    ANSWER = enum.auto()


class ReasoningSplitter:
    """One text, cut into reasoning and answer.

    Args:
        tags: The tags the reasoning stands between.
        is_open: The prompt has opened the reasoning.
    """

    __slots__ = ("_at", "_has_begun", "_is_open", "_rest", "_space", "_tags")

    def __init__(self, tags: ReasoningTags, *, is_open: bool) -> None:
        self._tags = tags
        self._is_open = is_open
        self._at = _At.BEGIN
        self._has_begun = False
        self._rest = ""
        self._space: list[str] = []

    def feed(self, text: str, *, is_all: bool = False) -> tuple[str, str]:
        """Return what is new of the reasoning and of the answer; all of it if nothing follows."""
        if self._at is _At.ANSWER:
            return "", text
        if self._rest:
            text = self._rest + text
            self._rest = ""
        reasoning = ""
        if self._at is _At.BEGIN:
            text = self._find_begin(text, is_all=is_all)
        if self._at is _At.REASONING:
            reasoning, text = self._find_end(text, is_all=is_all)
        if self._at is _At.ANSWER_BEGIN:
            text = text.lstrip()
            if text:
                self._at = _At.ANSWER
        return reasoning, text

    def _find_begin(self, text: str, *, is_all: bool) -> str:
        """Return the text behind the opening tag, or the whole answer if there is none."""
        stripped = text.lstrip()
        if len(stripped) < len(text):
            self._space.append(text[: len(text) - len(stripped)])
        begin, end = self._tags.begins.find(stripped, 0, is_all=is_all)
        if begin == 0 and end < 0:
            self._rest = stripped
            return ""
        if stripped and begin == 0:
            self._at = _At.REASONING
            self._space.clear()
            return stripped[end:]
        if not stripped and not is_all:
            return ""
        self._at = _At.REASONING if self._is_open else _At.ANSWER
        space = "" if self._is_open else "".join(self._space)
        self._space.clear()
        return space + stripped

    def _find_end(self, text: str, *, is_all: bool) -> tuple[str, str]:
        """Return what is new of the reasoning, and what follows the closing tag."""
        begin, end = self._tags.ends.find(text, 0, is_all=is_all)
        reasoning = self._without_outer_space(text[:begin])
        if end < 0:
            self._rest = text[begin:]
            return reasoning, ""
        if begin < end:
            self._space.clear()
            self._at = _At.ANSWER_BEGIN
        return reasoning, text[end:]

    def _without_outer_space(self, text: str) -> str:
        """Return the new text; space at its end waits until more follows."""
        if not self._has_begun:
            text = text.lstrip()
        stripped = text.rstrip()
        if not stripped:
            if text:
                self._space.append(text)
            return ""
        self._has_begun = True
        if self._space:
            lead = "".join(self._space)
            self._space.clear()
        else:
            lead = ""
        if len(stripped) < len(text):
            self._space.append(text[len(stripped) :])
        return lead + stripped
