"""Options of the engine as programs take them beside their own: `--option NAME=VALUE …`.

Values are Python's literals where they are some, else text.
"""

import ast
from typing import Any


def read_option(text: str) -> tuple[str, Any]:
    """Return name and value.

    Raises:
        ValueError: It is no NAME=VALUE.
    """
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"{text!r} is no NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
