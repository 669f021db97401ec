"""One Python literal, checked as it is written and given as JSON.

The grammar is JSON's, of which Python's differs in words, numbers, strings and trailing commas: `True`,
`None` and `'text'` are taken, and so are `true` and `null`, which models write as well. Strings come in
pieces, as they are written, the rest token by token, spaced as `json.dumps` does it. Sets, tuples, string
prefixes and expressions are no literals here. An escaped slash is a slash, as in JSON.
"""

import json
import math
import re

from asyncserve.http.parsers.json_scanner import SPACE, Expect, JsonScanner, Progress, escaped

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_WORD_RUN = re.compile(r"[A-Za-z0-9+\-._]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_STRING_RUN = re.compile(r"[^'\"\\\x00-\x1f]*")
_SAME_ESCAPES = '\\"/bfnrt'
_OTHER_ESCAPES = {"'": "'", "\n": "", "a": "\\u0007", "v": "\\u000b", "0": "\\u0000"}
_NUM_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class PythonScanner(JsonScanner):
    """One value; no white space is taken before it. `pieces` holds its JSON."""

    __slots__ = ("_has_comma", "_hex", "_is_triple", "_num_quotes", "_quote")
    _word_begins = "+-.0123456789tfnTFN"

    def __init__(self) -> None:
        super().__init__(keeps=True)
        self._has_comma = False
        self._quote = ""
        self._is_triple = False
        self._num_quotes = 0
        self._hex: list[str] = []

    def scan(self, text: str, position: int) -> int:
        """Take the text from `position` on and return where the value ends, breaks, or the text ends."""
        num_characters = len(text)
        while position < num_characters and self.progress is Progress.OPEN:
            expect = self._expect
            if expect is Expect.STRING:
                position = self._scan_string(text, position)
            elif expect is Expect.ESCAPED:
                position = self._scan_escape(text, position)
            elif expect is Expect.HEX_DIGIT:
                position = self._scan_hex(text, position)
            elif expect is Expect.WORD:
                run = _WORD_RUN.match(text, position)
                end = run.end() if run else position
                self._word.append(text[position:end])
                position = end
                if position < num_characters:
                    self._end_word()
            else:
                space = SPACE.match(text, position) if self._closers else None
                position = space.end() if space else position
                if position < num_characters and self._takes_token(text[position]):
                    position += 1
        return position

    def _takes_token(self, character: str) -> bool:
        """Take one character outside strings and words; False leaves it to be looked at again."""
        expects_comma = self._expect is Expect.COMMA_OR_END
        is_quote = character == "'" or character == '"'
        if not self._takes('"' if is_quote else character):
            return False
        if is_quote:
            self._quote = character
            self._num_quotes = 1
            self._is_triple = False
            self._keep('"')
        elif character == ",":
            self._has_comma = True
            # A comma may be the last thing before a bracket.
            self._expect = Expect.KEY_OR_END if self._closers[-1] == "}" else Expect.VALUE_OR_END
        elif character == ":":
            self.pieces.append(": ")
        elif expects_comma or character in "]}":
            self._has_comma = False
            self.pieces.append(character)
        else:
            self._keep(character)
        return True

    def _keep(self, token: str) -> None:
        """Keep a token that begins a value or key."""
        if self._has_comma:
            self._has_comma = False
            self.pieces.append(", ")
        self.pieces.append(token)

    def _scan_string(self, text: str, position: int) -> int:
        character = text[position]
        if self._num_quotes and not self._is_triple:
            # Behind the opening quote: the string is empty if another one follows, but not a third.
            if character == self._quote:
                self._num_quotes += 1
                self._is_triple = self._num_quotes == 3
                self._num_quotes %= 3
                return position + 1
            if self._num_quotes == 2:
                self._close_string()
                return position
            self._num_quotes = 0
        if character == self._quote:
            self._num_quotes += 1
            if not self._is_triple or self._num_quotes == 3:
                self._close_string()
            return position + 1
        self._flush_quotes()
        run = _STRING_RUN.match(text, position)
        end = run.end() if run else position
        if end > position:
            self.pieces.append(text[position:end])
            return end
        if character == "\\":
            self._expect = Expect.ESCAPED
        elif character in "'\"":
            self.pieces.append('\\"' if character == '"' else "'")
        else:
            self.pieces.append(escaped(character))
        return position + 1

    def _flush_quotes(self) -> None:
        """Keep quotes that did not end a string in triple quotes."""
        if self._num_quotes:
            self.pieces.append(('\\"' if self._quote == '"' else "'") * self._num_quotes)
            self._num_quotes = 0

    def _close_string(self) -> None:
        self._num_quotes = 0
        self.pieces.append('"')
        self._end_string()

    def _scan_escape(self, text: str, position: int) -> int:
        character = text[position]
        self._expect = Expect.STRING
        if character in _SAME_ESCAPES:
            self.pieces.append("\\" + character)
        elif character in _OTHER_ESCAPES:
            self.pieces.append(_OTHER_ESCAPES[character])
        elif character in _NUM_HEX_DIGITS:
            self._num_hex = _NUM_HEX_DIGITS[character]
            self._hex = ["\\" + character]
            self._expect = Expect.HEX_DIGIT
        else:
            # Python keeps the backslash of what is no escape.
            self.pieces.append("\\\\")
            return position
        return position + 1

    def _scan_hex(self, text: str, position: int) -> int:
        """Take one hexadecimal digit. An escape that is none is kept as it was written."""
        if text[position] not in "0123456789abcdefABCDEF":
            self.pieces += self._hex
            self.progress = Progress.BROKEN
            return position
        self._hex.append(text[position])
        if len(self._hex) > self._num_hex:
            code = int("".join(self._hex[1:]), 16)
            if code > 0x10FFFF:
                self.pieces += self._hex
                self.progress = Progress.BROKEN
            else:
                self.pieces.append(json.dumps(chr(code))[1:-1])
            self._expect = Expect.STRING
        return position + 1

    def _end_word(self) -> None:
        word = "".join(self._word)
        self._word.clear()
        token = _WORDS.get(word) or _number(word)
        if not token:
            self._keep(word)
            self.progress = Progress.BROKEN
            return
        self._keep(token)
        self._end_value()


def _number(word: str) -> str:
    """Return a number of Python's as JSON writes it; nothing if the word is no number, or none of JSON's."""
    if _NUMBER.fullmatch(word):
        return word
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return ""
    return repr(number) if math.isfinite(number) else ""
