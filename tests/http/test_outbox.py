"""Streams that are due: who writes them, who hears of it, and who sees to itself."""

import socket
from collections.abc import Iterator, Sequence

import pytest

from asyncserve.http.outbox import Outbox, PacedStream
from asyncserve.token_path import SocketHandle


class Stream(PacedStream):
    """Has texts, and a socket if it is given one; what it must write itself comes into a list."""

    __slots__ = ("fails", "rests")

    def __init__(self, *texts: bytes, near: socket.socket | None = None, fails: bool = False) -> None:
        super().__init__()
        self.texts += texts
        self.socket = SocketHandle(near.fileno()) if near is not None else None
        self.before, self.between, self.after = b"<", b"><", b">"
        self.rests: list[bytes | None] = []
        self.fails = fails

    def end_rest(self) -> bool:
        raise NotImplementedError

    def write_rest(self, rest: bytes | None) -> None:
        if self.fails:
            raise ZeroDivisionError
        self.rests.append(rest)

    def give_up(self) -> None:
        self.rests.append(b"given up")


Notes = list[tuple[list[PacedStream], int]]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        yield near, far


def outbox_with(*streams: Stream) -> tuple[Outbox, Notes]:
    notes: Notes = []

    def note(written: Sequence[PacedStream], num_tokens: int) -> None:
        notes.append((list(written), num_tokens))

    outbox = Outbox(3, note)
    outbox.extend(streams)
    return outbox, notes


def test_what_a_socket_takes_is_written_and_noted(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    first, second = Stream(b"a", b"b", near=near), Stream(b"c", near=near)
    outbox, notes = outbox_with(first, second)
    outbox.write()
    assert far.recv(100) == b"<a><b><c>"
    assert notes == [([first, second], 3)]
    assert not outbox
    assert (first.flush_len, first.texts, first.rests) == (3, [], [])


def test_who_has_no_socket_or_whose_does_not_take_all_sees_to_itself(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = ends
    sound, homeless, closed = Stream(b"a", near=near), Stream(b"b"), Stream(b"c", near=near)
    assert closed.socket is not None
    closed.socket.fd = -1
    outbox, notes = outbox_with(homeless, closed, sound)
    outbox.write()
    assert far.recv(100) == b"<a>"
    assert (homeless.rests, closed.rests, sound.rests) == ([b"<b>"], [b"<c>"], [])
    assert homeless.texts == []
    assert notes == [([sound], 3)], "what is on its way by another counts as well"


def test_one_that_cannot_be_written_is_given_up_and_the_others_are_not(
    ends: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    near, far = ends
    faulty, homeless, sound = Stream(b"a", fails=True), Stream(b"b"), Stream(b"c", near=near)
    outbox, notes = outbox_with(faulty, homeless, sound)
    outbox.write()
    assert (faulty.rests, homeless.rests) == ([b"given up"], [b"<b>"])
    assert far.recv(100) == b"<c>"
    assert notes == [([sound], 3)]
    assert "could not be written" in caplog.text


def test_a_stream_that_is_due_twice_is_written_once(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    stream = Stream(b"a", near=near)
    outbox, notes = outbox_with(stream, stream)
    outbox.write()
    assert far.recv(100) == b"<a>"
    assert stream.rests == [None], "with nothing to write"
    assert notes == [([], 1)], "it sees to itself"


def test_a_stream_that_is_due_again_while_others_are_written_waits_for_the_next_time() -> None:
    class Again(Stream):
        __slots__ = ()

        def write_rest(self, rest: bytes | None) -> None:
            super().write_rest(rest)
            outbox.append(self)

    stream = Again(b"a")
    outbox, notes = outbox_with(stream)
    outbox.write()
    assert list(outbox) == [stream]
    assert (stream.rests, notes) == ([b"<a>"], [([], 1)])


def test_an_empty_outbox_writes_nothing() -> None:
    outbox, notes = outbox_with()
    outbox.write()
    assert notes == [([], 0)]
