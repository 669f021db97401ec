"""What is done once for each token of each stream, or nearly: written twice, in C and in Python.

A step gives hundreds of sequences a token each, thousands of times a second. For those to which it means
nothing but its text, nearly all, `rows` plans and applies a step; `lanes` looks up texts, puts frames around
them and sends them. One token in sixteen fills a block, whose digest is `prefix_hash`'s.

In C because of what a token costs beside its `send()`: mostly caches that system calls leave cold. Code that
does one thing for a slice of sequences and then the next, with little to bring back into the caches, takes
half of the user time. Here is only what needs no decision: whatever is not plain goes back to the caller.

The C is compiled into `native` when the package is installed. Where there is no compiler the Python is used,
which says what the C means, and to which tests hold it. `IS_NATIVE` tells which it is.
"""

from typing import TYPE_CHECKING

from asyncserve.token_path.lanes import (
    NEVER,
    Outbox,
    SocketHandle,
    TextLane,
    TextRow,
    add_text,
    deliver,
    write,
)
from asyncserve.token_path.prefix_hash import block_digest, extend_digests, root_digest
from asyncserve.token_path.rows import SequenceRow, apply_rows, plan_rows

IS_NATIVE = False

if not TYPE_CHECKING:
    try:
        from asyncserve.token_path.native import *  # noqa: F403

        IS_NATIVE = True
    except ModuleNotFoundError:
        pass  # one that is there and cannot be loaded is a fault of the installation

__all__ = [
    "IS_NATIVE",
    "NEVER",
    "Outbox",
    "SequenceRow",
    "SocketHandle",
    "TextLane",
    "TextRow",
    "add_text",
    "apply_rows",
    "block_digest",
    "deliver",
    "extend_digests",
    "plan_rows",
    "root_digest",
    "write",
]
