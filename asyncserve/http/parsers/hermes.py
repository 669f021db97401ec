"""Calls in tags: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen write them.

Text before, between and after the tags is content. The call's name may be one the request does not know:
the tags say that a call is meant, and the client can tell the model so. A missing end tag, or a bracket too
many before it, does no harm.
"""

import re

from asyncserve.http.parsers.call_object import CallObject
from asyncserve.http.parsers.call_text import CallTextParser
from asyncserve.http.parsers.markers import MarkerSet
from asyncserve.http.parsers.tool_format import CallShapes, ToolFormat, quoted

BEGIN = "<tool_call>"
END = "</tool_call>"

_BEGINS = MarkerSet([BEGIN])
_ENDS = MarkerSet([END])
_TAIL = re.compile(r"[ \t\n\r}\]]*")


class HermesParser(CallTextParser):
    """Reads calls in `<tool_call>` tags."""

    def _read_text(self, text: str, position: int) -> int:
        begin, end = _BEGINS.find(text, position, is_all=self._is_all)
        self._message.text(text[position:begin])
        if end < 0:
            return self._hold(text, begin)
        if begin < end:
            self._taken.append(BEGIN)
            self._begin_object(CallObject())
        return end

    def _after_call(self, text: str, position: int) -> int:
        tail = _TAIL.match(text, position)
        position = tail.end() if tail else position
        if position == len(text):
            return position
        begin, end = _ENDS.find(text, position, is_all=False)
        if begin == position and end < 0:
            # If the text ends here, the tag is as good as whole.
            return self._hold(text, position)
        self._state = self._read_text
        return end if begin == position else position

    def _read_broken(self, text: str, position: int) -> int:
        begin, end = _ENDS.find(text, position, is_all=self._is_all)
        self._message.arguments(text[position:begin])
        if end < 0:
            return self._hold(text, begin)
        if begin < end:
            self._state = self._read_text
        return end


HERMES = ToolFormat(
    parser=HermesParser,
    markers=(BEGIN, END),
    shapes=CallShapes(
        begin=lambda name: f'{BEGIN}\n{{"name": {quoted(name)}, "arguments": ',
        end=f"}}\n{END}",
        separator="\n",
        trigger=BEGIN,
    ),
)
