"""Futures of asyncio whose outcome may be of no interest to anybody.

Used on both sides of the device's border, which know nothing of each other.
"""

import asyncio
from typing import Any


def ignore_outcome(future: "asyncio.Future[Any]") -> None:
    """Keep asyncio from reporting an error that nobody may come to look at; to be a done callback."""
    if not future.cancelled():
        future.exception()
