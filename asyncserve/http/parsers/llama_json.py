"""Calls as bare JSON: `{"name": …, "parameters": {…}}`, as Llama 3.x writes them.

Nothing marks these calls, so only an object that names one of the request's functions is one; every other
object is content, as soon as that is clear. After `<|python_tag|>`, which Llama puts before some calls, the
name may be any. Several calls stand one after the other, `;` between them.
"""

import re

from asyncserve.http.parsers.call_object import CallObject
from asyncserve.http.parsers.call_text import CallTextParser
from asyncserve.http.parsers.interface import ToolChoice
from asyncserve.http.parsers.json_scanner import SPACE
from asyncserve.http.parsers.markers import MarkerSet
from asyncserve.http.parsers.tool_format import CallShapes, ToolFormat, quoted

PYTHON_TAG = "<|python_tag|>"

_BEGINS = MarkerSet(["{", PYTHON_TAG])
_SEPARATOR = re.compile(r"[ \t\n\r;,]*")


class LlamaJsonParser(CallTextParser):
    """Reads calls that are JSON objects in plain text."""

    def __init__(self, choice: ToolChoice) -> None:
        super().__init__(choice)
        self._separators: list[str] = []

    def _read_text(self, text: str, position: int) -> int:
        begin, end = _BEGINS.find(text, position, is_all=self._is_all)
        self._message.text(text[position:begin])
        if end < 0:
            return self._hold(text, begin)
        if end - begin == 1:
            self._begin_object(CallObject(names=self._names, is_plain=True))
            return begin
        if begin < end:
            self._taken.append(PYTHON_TAG)
            self._state = self._read_tagged
        return end

    def _read_tagged(self, text: str, position: int) -> int:
        end = self._skip(SPACE, text, position)
        if end < len(text):
            if text[end] == "{":
                self._begin_object(CallObject())
            else:
                self._give_back()
        return end

    def _after_call(self, text: str, position: int) -> int:
        """Take separators: they are none if no call follows."""
        separator = _SEPARATOR.match(text, position)
        end = separator.end() if separator else position
        self._separators.append(text[position:end])
        if end < len(text):
            if text[end] not in "{<":
                self._message.text("".join(self._separators))
            self._separators.clear()
            self._state = self._read_text
        return end


LLAMA3_JSON = ToolFormat(
    parser=LlamaJsonParser,
    markers=(),
    shapes=CallShapes(
        begin=lambda name: f'{{"name": {quoted(name)}, "parameters": ',
        end="}",
        separator="; ",
        trigger='{"name": ',
    ),
)
