"""Lanes, what puts texts into them and what writes them, in Python."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

NEVER = -1
"""A `flush_len` that no number of texts reaches."""


class SocketHandle:
    """A socket that belongs to somebody else: who closes it sets `fd` to -1 before.

    Args:
        fd: Its file descriptor; it does not block.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd


class Outbox(Protocol):
    """Lanes with enough texts for a write: a list, of which somebody knows how to write."""

    def append(self, lane: Any, /) -> None:
        """Take one more, whose outbox it is."""

    def __len__(self) -> int:
        """Return how many there are."""

    def write(self) -> None:
        """Write what they hold, and forget them."""


class TextLane:
    """What waits to be written of one stream, and how that is done.

    Attributes:
        texts: Encoded texts of tokens, none of them empty, in order.
        flush_len: At how many of them it goes into its outbox.
        outbox: A list, in C as well.
        socket: Where it is written; None while that is done in another way: then a write is given back whole.
        before: What stands before the first text of a write.
        between: What stands between two.
        after: What stands behind the last.
        is_chunked: Whether a write is a chunk of HTTP/1.1: the length of all but the last two bytes of
            `after`, which are the chunk's end, goes before it.
        held: Events that go before the texts. While there are any, it must be written in another way.
        is_resting: `flush_len` stays as it is when it has been written.
        num_quiet_ticks: Set to 0 by each write.
    """

    __slots__ = (
        "after",
        "before",
        "between",
        "flush_len",
        "held",
        "is_chunked",
        "is_resting",
        "num_quiet_ticks",
        "outbox",
        "socket",
        "texts",
    )

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.flush_len = NEVER
        self.outbox: Outbox
        self.socket: SocketHandle | None = None
        self.before = self.between = self.after = b""
        self.is_chunked = False
        self.held: tuple[bytes, ...] = ()
        self.is_resting = False
        self.num_quiet_ticks = 0


class TextRow:
    """One sequence whose tokens come in steps.

    Attributes:
        encoded: Token id to its text as the lane takes it, never empty, as far as known; None while its
            tokens mean more than that.
        lane: Set while `encoded` is.
        last_token_s: When its last token came; None before the first.
        num_passed: Texts that `deliver` has put into the lane, for whoever counts tokens.
    """

    __slots__ = ("encoded", "lane", "last_token_s", "num_passed")

    def __init__(self) -> None:
        self.encoded: Mapping[int, bytes | None] | None = None
        self.lane: TextLane | None = None
        self.last_token_s: float | None = None
        self.num_passed = 0


class Numbered(Protocol):
    """What a step's token is for."""

    @property
    def sequence_id(self) -> int:
        """Its key in the rows."""


Row = TypeVar("Row", bound=TextRow)
Lane = TypeVar("Lane", bound=TextLane)


def add_text(lane: TextLane, text: bytes, outboxes: list[Outbox]) -> None:
    """Put a text into its lane, and that into its outbox if it is due; `outboxes` are those of due lanes."""
    lane.texts.append(text)
    if len(lane.texts) == lane.flush_len:
        for outbox in outboxes:
            if outbox is lane.outbox:
                break
        else:
            outboxes.append(lane.outbox)
        lane.outbox.append(lane)


def deliver(
    rows: Mapping[int, Row],
    states: Sequence[Numbered],
    token_ids: Sequence[int],
    first: int,
    end: int,
    most: int,
    now_s: float,
    last_s: float,
) -> tuple[int, int, list[float], list[tuple[Row, int]], list[Outbox]]:
    """Put the texts of a slice of a step's tokens into their lanes.

    Args:
        rows: By sequence id; what has none is passed over.
        states: Which sequence each token is of.
        token_ids: One for each.
        first: Where the slice begins.
        end: Where it ends at the latest.
        most: It ends, too, when so many lanes are due.
        now_s: When the step ended; becomes `last_token_s`.
        last_s: What became `last_token_s` with the step before, the same object.

    Returns:
        Where the slice ended; of how many rows the last token came with the step before; the times since the
        last token of the others that had one; rows and tokens without a text, for the caller to see to; the
        outboxes of lanes that are due.

    Raises:
        IndexError: The slice exceeds the tokens; nothing was done.
    """
    if first < 0 or end > min(len(states), len(token_ids)):
        raise IndexError("the slice exceeds the tokens")
    num_alike = num_due = 0
    gaps_s: list[float] = []
    others: list[tuple[Row, int]] = []
    outboxes: list[Outbox] = []
    position = first
    while position < end and num_due < most:
        token_id = token_ids[position]
        row = rows.get(states[position].sequence_id)
        position += 1
        if row is None:
            continue
        if row.last_token_s is last_s:
            num_alike += 1
        elif row.last_token_s is not None:
            gaps_s.append(now_s - row.last_token_s)
        row.last_token_s = now_s
        lane = row.lane
        text = None if row.encoded is None else row.encoded.get(token_id)
        if text is None or lane is None:
            others.append((row, token_id))
        else:
            add_text(lane, text, outboxes)
            row.num_passed += 1
            num_due += len(lane.texts) == lane.flush_len
    return position, num_alike, gaps_s, others, outboxes


def write(lanes: list[Lane], flush_len: int) -> tuple[int, list[tuple[Lane, bytes | None]]]:
    """Write the texts of lanes, each in one write.

    Args:
        lanes: Each with texts.
        flush_len: What those that do not rest get.

    Returns:
        How many texts were written; and which lanes the caller must see to: with what was not sent of the
        write, which counts as written, or with None: no write could be made of what it holds.
    """
    num_texts = 0
    unwritten: list[tuple[Lane, bytes | None]] = []
    for lane in lanes:
        texts, handle = lane.texts, lane.socket
        if lane.held or not texts:
            unwritten.append((lane, None))
            continue
        data = b"".join((lane.before, lane.between.join(texts), lane.after))
        if lane.is_chunked:
            data = b"%x\r\n%b" % (len(data) - 2, data)
        num_sent = 0
        if handle is not None and handle.fd >= 0:
            with contextlib.suppress(OSError):  # full, or closed
                num_sent = os.write(handle.fd, data)
        num_texts += len(texts)
        lane.num_quiet_ticks = 0
        texts.clear()
        if not lane.is_resting:
            lane.flush_len = flush_len
        if num_sent != len(data):
            unwritten.append((lane, data[num_sent:]))
    return num_texts, unwritten
