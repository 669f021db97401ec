"""One call as a JSON object: a name and the arguments, in any order, as most models write calls.

A `CallObject` takes the object's text in pieces. It has begun once it is plausible: its name is known and
the arguments have begun, or the whole object is there. From then on its arguments come as they are written.
Before, an object that is no call can still be given as text. Knows no markers around the object.
"""

import enum
import json
from collections.abc import Collection

from asyncserve.http.parsers.json_scanner import SPACE, JsonScanner, Progress

NAME_KEYS = frozenset({"name", "function"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
OTHER_KEYS = frozenset({"type", "id"})
EMPTY_ARGUMENTS = "{}"


class _Expect(enum.Enum):
    OBJECT = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()
    COMMA_OR_END = enum.auto()


class CallObject:
    """One call, while it is written.

    `name` is None until it is known. `has_begun` says that the call may be told of; `take_arguments` then
    gives what is new of them. An object without arguments has empty ones; so has one whose arguments are
    null. Arguments written as a JSON string that holds an object are given as that object's text. If a
    member comes twice, the first one counts.

    Args:
        names: Functions that may be called; another name makes it no call. None allows every name.
        is_plain: The object stands in plain text: keys that no call has make it no call, and arguments must
            be there.
    """

    __slots__ = (
        "_arguments", "_expect", "_has_arguments", "_is_plain", "_key", "_names", "_string", "_value",
        "has_begun", "name", "progress",
    )  # fmt: skip

    def __init__(self, *, names: Collection[str] | None = None, is_plain: bool = False) -> None:
        self.progress = Progress.OPEN
        self.name: str | None = None
        self.has_begun = False
        self._names = names
        self._is_plain = is_plain
        self._expect = _Expect.OBJECT
        self._key = ""
        self._value: JsonScanner | None = None
        self._arguments: JsonScanner | None = None
        self._string = ""
        self._has_arguments = False

    @property
    def has_all_arguments(self) -> bool:
        """Whether the arguments have ended, so that nothing that follows can harm the call."""
        return self.has_begun and (self._arguments is None or self._arguments.progress is Progress.COMPLETE)

    def take_arguments(self) -> str:
        """Return the new text of the arguments of a call that has begun."""
        text = self._string
        self._string = ""
        return text + self._arguments.take() if self._arguments is not None else text

    def scan(self, text: str, position: int) -> int:
        """Take text from `position` on and return where the object ends, breaks, or the text ends."""
        num_characters = len(text)
        while position < num_characters and self.progress is Progress.OPEN:
            if self._value is not None:
                position = self._value.scan(text, position)
                if self._value.progress is Progress.COMPLETE:
                    self._end_value(self._value)
                elif self._value.progress is Progress.BROKEN:
                    self.progress = Progress.BROKEN
                continue
            space = SPACE.match(text, position)
            position = space.end() if space else position
            if position < num_characters and self._takes(text[position]):
                position += 1
        return position

    def _takes(self, character: str) -> bool:
        """Take one character between members; False leaves it to be looked at again."""
        expect = self._expect
        if expect is _Expect.OBJECT and character == "{":
            self._expect = _Expect.KEY_OR_END
            return True
        if character == '"' and (expect is _Expect.KEY or expect is _Expect.KEY_OR_END):
            self._expect = _Expect.IN_KEY
            self._value = JsonScanner(keeps=True)
            return False
        if expect is _Expect.COLON and character == ":":
            self._expect = _Expect.VALUE
            return True
        if expect is _Expect.VALUE:
            self._begin_value(character)
            return False
        if expect is _Expect.COMMA_OR_END and character == ",":
            self._expect = _Expect.KEY
            return True
        if character == "}" and (expect is _Expect.COMMA_OR_END or expect is _Expect.KEY_OR_END):
            return self._takes_end()
        self.progress = Progress.BROKEN
        return False

    def _begin_value(self, character: str) -> None:
        self._expect = _Expect.IN_VALUE
        is_name = self._key in NAME_KEYS and self.name is None
        is_arguments = self._key in ARGUMENT_KEYS and not self._has_arguments
        self._value = JsonScanner(keeps=is_name or is_arguments)
        if is_name and character != '"':
            self.progress = Progress.BROKEN
        elif is_arguments:
            if character == "{":
                self._has_arguments = True
                self._arguments = self._value
                self.has_begun = self.name is not None
            elif character not in '"n':
                self.progress = Progress.BROKEN

    def _end_value(self, value: JsonScanner) -> None:
        self._value = None
        if self._expect is _Expect.IN_KEY:
            self._expect = _Expect.COLON
            self._key = json.loads(value.take())
            if self._is_plain and self._key not in NAME_KEYS | ARGUMENT_KEYS | OTHER_KEYS:
                self.progress = Progress.BROKEN
            return
        self._expect = _Expect.COMMA_OR_END
        if value is self._arguments:
            return
        if self._key in NAME_KEYS and self.name is None:
            self._end_name(json.loads(value.take()))
        elif self._key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            self._end_other_arguments(value.take())

    def _end_name(self, name: str) -> None:
        # Lone surrogates, which no answer can hold, are not printable either.
        if not name.isprintable() or not name or (self._names is not None and name not in self._names):
            self.progress = Progress.BROKEN
            return
        self.name = name
        self.has_begun = self._has_arguments

    def _end_other_arguments(self, text: str) -> None:
        """Take arguments that are no object: null, or a string that holds one."""
        self._string = EMPTY_ARGUMENTS
        inner = "" if text == "null" else json.loads(text).strip()
        if inner:
            scanner = JsonScanner(keeps=True)
            end = scanner.scan(inner, 0)
            is_object = inner[0] == "{" and end == len(inner) and scanner.progress is Progress.COMPLETE
            if not is_object or not _is_encodable(inner):
                self.progress = Progress.BROKEN
                return
            self._string = scanner.take()
        self.has_begun = self.name is not None

    def _takes_end(self) -> bool:
        if self.name is None:
            self.progress = Progress.BROKEN
            return False
        if not self._has_arguments:
            if self._is_plain:
                self.progress = Progress.BROKEN
                return False
            self._string = EMPTY_ARGUMENTS
        self.has_begun = True
        self.progress = Progress.COMPLETE
        return True


def _is_encodable(text: str) -> bool:
    """Return whether the text has no lone surrogates, which JSON can spell but no answer can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
