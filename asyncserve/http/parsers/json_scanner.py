"""One JSON value, checked character by character as it is written.

A `JsonScanner` takes the value's text in pieces of any size and says when it is complete or cannot be JSON
any more, and where: a machine with a stack of open brackets, so that each character is looked at once. It
keeps the text as it was written, but for control characters inside strings, which models like to write and
JSON forbids: they are kept escaped. Builds no values.
"""

import enum
import re


class Progress(enum.Enum):
    """How far a value has come."""

    OPEN = enum.auto()
    COMPLETE = enum.auto()
    BROKEN = enum.auto()


class Expect(enum.Enum):
    """What may come next inside a value."""

    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()
    STRING = enum.auto()
    ESCAPED = enum.auto()
    HEX_DIGIT = enum.auto()
    WORD = enum.auto()


SPACE = re.compile(r"[ \t\n\r]*")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX_DIGIT = re.compile(r"[0-9a-fA-F]")
_WORD_RUN = re.compile(r"[A-Za-z0-9+\-.]*")
_WORD = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ESCAPES = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escaped(control: str) -> str:
    """Return a control character as JSON writes it inside a string."""
    return _ESCAPES.get(control) or f"\\u{ord(control):04x}"


class JsonScanner:
    """One value; no white space is taken before it.

    Args:
        keeps: Keep the text in `pieces`, to which the caller may help itself at any time.
    """

    __slots__ = ("_closers", "_expect", "_is_key", "_keeps", "_num_hex", "_word", "pieces", "progress")
    _word_begins = "-0123456789tfn"

    def __init__(self, *, keeps: bool) -> None:
        self.progress = Progress.OPEN
        self.pieces: list[str] = []
        self._keeps = keeps
        self._expect = Expect.VALUE
        self._closers: list[str] = []
        self._is_key = False
        self._num_hex = 0
        self._word: list[str] = []

    def scan(self, text: str, position: int) -> int:
        """Take the text from `position` on and return where the value ends, breaks, or the text ends."""
        start = position
        num_characters = len(text)
        while position < num_characters and self.progress is Progress.OPEN:
            if self._expect is Expect.STRING:
                run = _STRING_RUN.match(text, position)
                position = run.end() if run else position
                if position == num_characters:
                    break
                if (character := text[position]) == '"':
                    position += 1
                    self._end_string()
                elif character == "\\":
                    position += 1
                    self._expect = Expect.ESCAPED
                else:
                    if self._keeps:
                        self.pieces += (text[start:position], escaped(character))
                    position += 1
                    start = position
            elif self._expect is Expect.WORD:
                run = _WORD_RUN.match(text, position)
                end = run.end() if run else position
                self._word.append(text[position:end])
                position = end
                if position < num_characters:
                    self._end_word()
            elif self._expect is Expect.ESCAPED or self._expect is Expect.HEX_DIGIT:
                if self._takes_escape(text[position]):
                    position += 1
                else:
                    self.progress = Progress.BROKEN
            else:
                space = SPACE.match(text, position) if self._closers else None
                position = space.end() if space else position
                if position < num_characters and self._takes(text[position]):
                    position += 1
        if self._keeps and position > start:
            self.pieces.append(text[start:position])
        return position

    def take(self) -> str:
        """Return what was kept since the last call."""
        if not self.pieces:
            return ""
        text = self.pieces[0] if len(self.pieces) == 1 else "".join(self.pieces)
        self.pieces.clear()
        return text

    def _takes(self, character: str) -> bool:
        """Take one character outside strings and words; False leaves it to be looked at again."""
        expect = self._expect
        if expect is Expect.COMMA_OR_END:
            if character == ",":
                self._expect = Expect.KEY if self._closers[-1] == "}" else Expect.VALUE
                return True
            return self._takes_closer(character)
        if expect is Expect.COLON:
            if character == ":":
                self._expect = Expect.VALUE
                return True
        elif expect is Expect.KEY or expect is Expect.KEY_OR_END:
            if character == '"':
                self._is_key = True
                self._expect = Expect.STRING
                return True
            if expect is Expect.KEY_OR_END:
                return self._takes_closer(character)
        elif character == '"':
            self._is_key = False
            self._expect = Expect.STRING
            return True
        elif character == "{":
            self._closers.append("}")
            self._expect = Expect.KEY_OR_END
            return True
        elif character == "[":
            self._closers.append("]")
            self._expect = Expect.VALUE_OR_END
            return True
        elif expect is Expect.VALUE_OR_END and character == "]":
            return self._takes_closer(character)
        elif character in self._word_begins:
            self._expect = Expect.WORD
            return False
        self.progress = Progress.BROKEN
        return False

    def _takes_closer(self, character: str) -> bool:
        if character != self._closers[-1]:
            self.progress = Progress.BROKEN
            return False
        self._closers.pop()
        self._end_value()
        return True

    def _takes_escape(self, character: str) -> bool:
        if self._expect is Expect.HEX_DIGIT:
            if _HEX_DIGIT.match(character) is None:
                return False
            self._num_hex -= 1
            if not self._num_hex:
                self._expect = Expect.STRING
            return True
        if character == "u":
            self._num_hex = 4
            self._expect = Expect.HEX_DIGIT
            return True
        self._expect = Expect.STRING
        return character in '"\\/bfnrt'

    def _end_string(self) -> None:
        if self._is_key:
            self._expect = Expect.COLON
        else:
            self._end_value()

    def _end_word(self) -> None:
        word = "".join(self._word)
        self._word.clear()
        if _WORD.fullmatch(word) is None:
            self.progress = Progress.BROKEN
        else:
            self._end_value()

    def _end_value(self) -> None:
        if self._closers:
            self._expect = Expect.COMMA_OR_END
        else:
            self.progress = Progress.COMPLETE
