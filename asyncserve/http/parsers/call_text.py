"""The frame of all tool parsers: text in pieces, one state after the other, until the pieces are used up.

A format is a set of states. A state takes some of the text and says how far it came, or holds the rest back
until more is there; it never looks back, so each character is looked at a bounded number of times. What
becomes of broken calls is decided here, for all formats alike:

- Before a call has begun, what was taken of it is given as content, word for word, and reading goes on
  where it broke.
- Once a call has begun, its name is out. Everything up to the format's end of a call is given as its
  arguments, word for word: the client sees what the model wrote, and that it is no JSON.
"""

import re
from collections.abc import Callable

from asyncserve.http.parsers.call_object import CallObject
from asyncserve.http.parsers.interface import MessageDelta, ToolChoice
from asyncserve.http.parsers.json_scanner import Progress
from asyncserve.http.parsers.message_builder import MessageBuilder

State = Callable[[str, int], int]
"""Takes text from a position on; returns the position it came to."""


class CallTextParser:
    """What tool parsers have in common. A subclass defines `_read_text` and the states it leads to."""

    def __init__(self, choice: ToolChoice) -> None:
        is_single = not choice.parallel or choice.mode == "named"
        self._message = MessageBuilder(1 if is_single else None)
        self._names = frozenset(tool["name"] for tool in choice.tools)
        self._state: State = self._read_text
        self._is_all = False
        self._rest = ""
        self._taken: list[str] = []
        self._call = CallObject()
        self._is_told = False

    def feed(self, text: str) -> MessageDelta:
        """Take more text and return what is certain by now."""
        self._read(text)
        return self._message.take()

    def finish(self, text: str = "") -> MessageDelta:
        """Take the last text and return what was held back."""
        self._is_all = True
        self._read(text)
        self._give_back()
        return self._message.finish()

    def _read(self, text: str) -> None:
        if self._rest:
            text = self._rest + text
            self._rest = ""
        position = 0
        while position < len(text):
            position = self._state(text, position)

    def _read_text(self, text: str, position: int) -> int:
        raise NotImplementedError

    def _hold(self, text: str, position: int) -> int:
        """Keep the rest, which is short, until more text is there."""
        self._rest = text[position:]
        return len(text)

    def _skip(self, pattern: re.Pattern[str], text: str, position: int) -> int:
        """Take what the pattern matches, which may be nothing, and return where it ends."""
        match = pattern.match(text, position)
        end = match.end() if match else position
        if end > position:
            self._taken.append(text[position:end])
        return end

    def _give_back(self) -> None:
        """What was taken was no call after all: it is content."""
        if self._taken:
            self._message.text("".join(self._taken))
            self._taken.clear()
        self._state = self._read_text

    def _begin_object(self, call: CallObject) -> None:
        """Go on with a call that is a JSON object."""
        self._call = call
        self._is_told = False
        self._state = self._read_object

    def _read_object(self, text: str, position: int) -> int:
        call = self._call
        end = call.scan(text, position)
        if not self._is_told:
            if not call.has_begun or call.name is None:
                self._taken.append(text[position:end])
                if call.progress is Progress.BROKEN:
                    self._give_back()
                return end
            self._taken.clear()
            self._is_told = True
            self._message.begin_call(call.name)
        self._message.arguments(call.take_arguments())
        if call.progress is Progress.COMPLETE:
            self._state = self._after_call
        elif call.progress is Progress.BROKEN:
            self._state = self._after_call if call.has_all_arguments else self._read_broken
        return end

    def _after_call(self, text: str, position: int) -> int:
        """Take what ends a call; the call is complete."""
        raise NotImplementedError

    def _read_broken(self, text: str, position: int) -> int:
        """Take the rest of a call that broke after it had begun."""
        self._message.arguments(text[position:])
        return len(text)
