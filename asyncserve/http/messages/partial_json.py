"""Whether a text is a JSON object; the beginning of one in, what of it is complete out.

An answer that ends at its token limit may end within the arguments of a tool call. Clients that stream show
what was complete until then, as jiter's partial mode reads it: unfinished strings, words and members are left
out, a number that ends the text counts. Here the same is done for answers in one piece.
"""

import json
import re
from typing import Any

_TOKEN = re.compile(
    r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.+-]))'
    r"|(?P<word>true|false|null)|(?P<mark>[{}\[\],:]))",
    re.DOTALL,
)
_CLOSER = {"{": "}", "[": "]"}
MAX_DEPTH = 500
"""Nesting that `partial_object` follows: about half of what Python reads and writes in the worst case."""


def is_object(text: str) -> bool:
    """Return whether the text is one JSON object, and nothing in it that an answer cannot hold."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        text.encode()
        json.dumps(value, ensure_ascii=False).encode()  # a half of a surrogate pair may be escaped
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def partial_object(text: str) -> dict[str, Any] | None:
    """Return the members of a JSON object that are complete in `text`.

    None if it does not begin one, or one that is nested more deeply than `MAX_DEPTH`. The work is linear in
    the length of the text.

    Args:
        text: A JSON object or the beginning of one.
    """
    closers: list[str] = []  # as of `complete`: what follows it opens and closes nothing
    complete = 0
    at = 0
    is_value = True
    while (found := _TOKEN.match(text, at)) is not None:
        at = found.end()
        mark = found["mark"]
        if mark in _CLOSER:
            if len(closers) == MAX_DEPTH:
                return None
            closers.append(_CLOSER[mark])
            is_value = mark == "["
        elif mark in ("}", "]"):
            if not closers or closers.pop() != mark:
                return None
        elif mark == ":":
            is_value = True
            continue
        elif mark == ",":
            is_value = closers[-1:] == ["]"]
            continue
        elif not is_value:
            continue  # a key
        complete = at
        if not closers:
            break
    try:
        value = json.loads(text[:complete] + "".join(reversed(closers)))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
