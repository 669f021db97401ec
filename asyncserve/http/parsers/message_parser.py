"""The parser of one choice: special tokens left out, reasoning split off, calls found, as far as asked for.

The steps are strung together here: each takes the text the one before it lets through. What is not asked for
costs nothing.
"""

from asyncserve.http.parsers.call_text import CallTextParser
from asyncserve.http.parsers.interface import MessageDelta
from asyncserve.http.parsers.markers import MarkerFilter, MarkerSet
from asyncserve.http.parsers.reasoning import ReasoningSplitter


class ChoiceParser:
    """Reads the text of one choice.

    Args:
        dropped: Texts that are no part of the message.
        reasoning: Splits off the reasoning; None if there is none.
        calls: Finds the calls; None if there are none.
        includes_reasoning: Give the reasoning; else it is left out.
    """

    __slots__ = ("_calls", "_filter", "_includes_reasoning", "_reasoning")

    def __init__(
        self,
        *,
        dropped: MarkerSet | None,
        reasoning: ReasoningSplitter | None,
        calls: CallTextParser | None,
        includes_reasoning: bool,
    ) -> None:
        self._filter = None if dropped is None else MarkerFilter(dropped)
        self._reasoning = reasoning
        self._calls = calls
        self._includes_reasoning = includes_reasoning

    def feed(self, text: str) -> MessageDelta:
        """Take more text and return what is certain by now."""
        if self._filter is not None:
            text = self._filter.feed(text)
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text)
        delta = MessageDelta(content=text) if self._calls is None else self._calls.feed(text)
        if self._includes_reasoning:
            delta.reasoning = reasoning
        return delta

    def finish(self) -> MessageDelta:
        """Return what was held back: the text has ended."""
        text = "" if self._filter is None else self._filter.feed("", is_all=True)
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text, is_all=True)
        delta = MessageDelta(content=text) if self._calls is None else self._calls.finish(text)
        if self._includes_reasoning:
            delta.reasoning = reasoning
        return delta
