"""Calls as Python: `[get_weather(city="Oslo"), get_time()]`, as Llama 3.2 and 4 write them if asked to.

Nothing but the bracket marks a list of calls, so only a function that the request names makes a call; other
brackets are content, as soon as that is clear. Arguments are keyword arguments, given as one JSON object as
they are written.
"""

import json
import re

from asyncserve.http.parsers.call_text import CallTextParser
from asyncserve.http.parsers.interface import ToolChoice
from asyncserve.http.parsers.json_scanner import SPACE, Progress
from asyncserve.http.parsers.python_arguments import arguments_shape
from asyncserve.http.parsers.python_scanner import PythonScanner
from asyncserve.http.parsers.tool_format import CallShapes, ToolFormat

_NAME = re.compile(r"[\w.:/-]*")


class PythonicParser(CallTextParser):
    """Reads lists of Python calls."""

    def __init__(self, choice: ToolChoice) -> None:
        super().__init__(choice)
        self._max_name_len = max(map(len, self._names), default=0)
        self._function = ""
        self._key: list[str] = []
        self._num_arguments = 0
        self._value = PythonScanner()

    def _read_text(self, text: str, position: int) -> int:
        begin = text.find("[", position)
        if begin < 0:
            self._message.text(text[position:])
            return len(text)
        self._message.text(text[position:begin])
        self._begin_function("[")
        return begin + 1

    def _begin_function(self, before: str) -> None:
        self._taken.append(before)
        self._function = ""
        self._num_arguments = 0
        self._is_told = False
        self._state = self._read_function

    def _read_function(self, text: str, position: int) -> int:
        if not self._function:
            position = self._skip(SPACE, text, position)
        end = self._skip(_NAME, text, position)
        self._function += text[position:end]
        if len(self._function) > self._max_name_len:
            self._give_back()
        elif end < len(text):
            if text[end] == "(" and self._function in self._names:
                self._taken.append("(")
                self._state = self._read_key
                return end + 1
            if text[end] == "]" and not self._function and self._taken[0] != "[":
                # A comma was the last thing in the list.
                self._taken.clear()
                self._state = self._read_text
                return end + 1
            self._give_back()
        return end

    def _read_key(self, text: str, position: int) -> int:
        """Take the name of a keyword argument and the `=`, or the end of the call."""
        if not self._key:
            position = self._skip(SPACE, text, position)
        end = self._skip(_NAME, text, position)
        if end > position:
            self._key.append(text[position:end])
        if end == len(text):
            return end
        if text[end] == ")" and not self._key:
            self._tell("{}" if not self._num_arguments else "}")
            self._state = self._after_call
            return end + 1
        self._state = self._read_equals
        return end

    def _read_equals(self, text: str, position: int) -> int:
        position = self._skip(SPACE, text, position)
        if position == len(text):
            return position
        key = "".join(self._key)
        self._key.clear()
        if text[position] != "=" or not key:
            self._break()
            return position
        opening = ", " if self._num_arguments else "{"
        self._tell(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_arguments += 1
        self._value = PythonScanner()
        self._state = self._before_value
        return position + 1

    def _before_value(self, text: str, position: int) -> int:
        space = SPACE.match(text, position)
        position = space.end() if space else position
        if position < len(text):
            self._state = self._read_value
        return position

    def _read_value(self, text: str, position: int) -> int:
        end = self._value.scan(text, position)
        self._message.arguments(self._value.take())
        if self._value.progress is Progress.COMPLETE:
            self._state = self._after_value
        elif self._value.progress is Progress.BROKEN:
            self._state = self._read_broken
        return end

    def _after_value(self, text: str, position: int) -> int:
        space = SPACE.match(text, position)
        position = space.end() if space else position
        if position == len(text):
            return position
        if text[position] == ",":
            self._taken.append(",")
            self._state = self._read_key
            return position + 1
        if text[position] == ")":
            self._message.arguments("}")
            self._state = self._after_call
            return position + 1
        self._state = self._read_broken
        return position

    def _after_call(self, text: str, position: int) -> int:
        space = SPACE.match(text, position)
        position = space.end() if space else position
        if position == len(text):
            return position
        if text[position] == ",":
            self._begin_function(",")
            return position + 1
        self._state = self._read_text
        return position + 1 if text[position] == "]" else position

    def _tell(self, arguments: str) -> None:
        """Give new text of the arguments; the first makes the call begin."""
        if not self._is_told:
            self._is_told = True
            self._message.begin_call(self._function)
        self._taken.clear()
        self._message.arguments(arguments)

    def _break(self) -> None:
        """Leave a call that broke between arguments."""
        if self._is_told:
            self._message.arguments("".join(self._taken))
            self._taken.clear()
            self._state = self._read_broken
        else:
            self._give_back()

    def _give_back(self) -> None:
        self._key.clear()
        if self._is_told:
            # The text ends in the name of an argument, which is as good as not begun.
            self._taken.clear()
        super()._give_back()


PYTHONIC = ToolFormat(
    parser=PythonicParser,
    markers=(),
    shapes=CallShapes(
        opening="[",
        begin=lambda name: f"{name}(",
        arguments=arguments_shape,
        end=")",
        separator=", ",
        closing="]",
        trigger=None,
    ),
)
