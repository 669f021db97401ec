"""Calls after `[TOOL_CALLS]`, as Mistral models write them, in either of two forms.

Older models write a JSON list, `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, newer ones each call by
itself, `[TOOL_CALLS]name[ARGS]{…}`; `[CALL_ID]` with an id may precede the arguments, and `[ARGS]` may be
missing. Both are read whatever the model; a grammar asks for the one that its template shows. Any function's
name makes a call: the marker says that one is meant.
"""

import re

from asyncserve.http.parsers.call_object import CallObject
from asyncserve.http.parsers.call_text import CallTextParser
from asyncserve.http.parsers.interface import ToolChoice
from asyncserve.http.parsers.json_scanner import SPACE, JsonScanner, Progress
from asyncserve.http.parsers.markers import MarkerSet
from asyncserve.http.parsers.tool_format import CallShapes, ToolFormat, quoted

TOOL_CALLS = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
CALL_ID_LEN = 9
MAX_NAME_LEN = 256

_BEGINS = MarkerSet([TOOL_CALLS])
_BEFORE_ARGUMENTS = MarkerSet([ARGS, CALL_ID])
_NAME = re.compile(r"[\w.:/-]*")
_SEPARATOR = re.compile(r"[ \t\n\r,]*")


class MistralParser(CallTextParser):
    """Reads calls after `[TOOL_CALLS]`."""

    def __init__(self, choice: ToolChoice) -> None:
        super().__init__(choice)
        self._is_list = False
        self._name = ""
        self._arguments = JsonScanner(keeps=True)

    def _read_text(self, text: str, position: int) -> int:
        begin, end = _BEGINS.find(text, position, is_all=self._is_all)
        self._message.text(text[position:begin])
        if end < 0:
            return self._hold(text, begin)
        if begin < end:
            self._taken.append(TOOL_CALLS)
            self._state = self._read_opening
        return end

    def _read_opening(self, text: str, position: int) -> int:
        """Tell the forms apart by what follows the marker."""
        position = self._skip(SPACE, text, position)
        if position == len(text):
            return position
        character = text[position]
        self._is_list = False
        if character == "{":
            self._begin_object(CallObject())
        elif character == "[":
            if position + 1 == len(text):
                if not self._is_all:
                    return self._hold(text, position)
            elif text[position + 1] in "{] \t\n\r":
                self._is_list = True
                self._taken.append("[")
                self._state = self._read_list
                return position + 1
            self._give_back()
        else:
            self._name = ""
            self._state = self._read_name
        return position

    def _read_list(self, text: str, position: int) -> int:
        position = self._skip(_SEPARATOR, text, position)
        if position == len(text):
            return position
        if text[position] == "{":
            self._begin_object(CallObject())
        elif text[position] == "]":
            self._taken.append("]")
            # Taken is only what follows the last call, unless there was none.
            if TOOL_CALLS not in self._taken:
                self._taken.clear()
            self._give_back()
            return position + 1
        else:
            self._give_back()
        return position

    def _after_call(self, text: str, position: int) -> int:
        self._state = self._read_list if self._is_list else self._read_text
        return position

    def _read_name(self, text: str, position: int) -> int:
        end = self._skip(_NAME, text, position)
        self._name += text[position:end]
        if len(self._name) > MAX_NAME_LEN or (end < len(text) and not self._name):
            self._give_back()
        elif end < len(text):
            self._state = self._read_before_arguments
        return end

    def _read_before_arguments(self, text: str, position: int) -> int:
        position = self._skip(SPACE, text, position)
        if position == len(text):
            return position
        if text[position] == "{":
            self._taken.clear()
            self._message.begin_call(self._name)
            self._arguments = JsonScanner(keeps=True)
            self._state = self._read_arguments
            return position
        begin, end = _BEFORE_ARGUMENTS.find(text, position, is_all=self._is_all)
        if begin == position and end < 0:
            return self._hold(text, position)
        if begin > position:
            self._give_back()
            return position
        self._taken.append(text[begin:end])
        if end - begin == len(CALL_ID):
            self._state = self._read_call_id
        return end

    def _read_call_id(self, text: str, position: int) -> int:
        end = self._skip(_NAME, text, position)
        if end < len(text):
            self._state = self._read_before_arguments
        return end

    def _read_arguments(self, text: str, position: int) -> int:
        end = self._arguments.scan(text, position)
        self._message.arguments(self._arguments.take())
        if self._arguments.progress is Progress.COMPLETE:
            self._state = self._read_text
        elif self._arguments.progress is Progress.BROKEN:
            self._state = self._read_broken
        return end

    def _read_broken(self, text: str, position: int) -> int:
        begin, end = _BEGINS.find(text, position, is_all=self._is_all)
        self._message.arguments(text[position:begin])
        if end < 0:
            return self._hold(text, begin)
        if begin < end:
            self._state = self._read_text
        return begin


MISTRAL = ToolFormat(
    parser=MistralParser,
    markers=(TOOL_CALLS, ARGS, CALL_ID),
    shapes=CallShapes(
        opening=f"{TOOL_CALLS} [",
        begin=lambda name: f'{{"name": {quoted(name)}, "arguments": ',
        end="}",
        separator=", ",
        closing="]",
        trigger=TOOL_CALLS,
    ),
    call_id_len=CALL_ID_LEN,
)

MISTRAL_ARGS = ToolFormat(
    parser=MistralParser,
    markers=(TOOL_CALLS, ARGS, CALL_ID),
    shapes=CallShapes(begin=lambda name: f"{TOOL_CALLS}{name}{ARGS}", end="", trigger=TOOL_CALLS),
    call_id_len=CALL_ID_LEN,
)
