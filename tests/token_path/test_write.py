"""Lanes into sockets: what goes out, what the socket does not take, and who must see to itself."""

import socket
from typing import Any

import pytest

from asyncserve.token_path import NEVER
from tests.token_path.implementations import Implementation, Pair, state_of

BEFORE, BETWEEN, AFTER = b"data: {", b"}\n\ndata: {", b"}\n\n"


def lane_to(
    path: Implementation, pair: Pair, *texts: bytes, is_chunked: bool = False, **attributes: Any
) -> Any:
    """Return a lane with texts, whose writes are events, in chunks or bare."""
    return path.lane(
        texts=list(texts),
        socket=path.SocketHandle(pair.near.fileno()),
        before=BEFORE,
        between=BETWEEN,
        after=AFTER + b"\r\n" if is_chunked else AFTER,
        is_chunked=is_chunked,
        **attributes,
    )


def framed(*texts: bytes, is_chunked: bool = False) -> bytes:
    events = b"".join(b"data: {%b}\n\n" % text for text in texts)
    return b"%x\r\n%b\r\n" % (len(events), events) if is_chunked else events


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("texts", [(b"a",), (b"a", b"bc"), tuple(b"%d" % i for i in range(100))], ids=len)
def test_the_texts_of_a_lane_go_out_in_one_write(
    path: Implementation, pair: Pair, texts: tuple[bytes, ...], is_chunked: bool
) -> None:
    lane = lane_to(path, pair, *texts, is_chunked=is_chunked, num_quiet_ticks=5)
    its_texts, before = lane.texts, state_of(lane)
    assert path.write([lane], 3) == (len(texts), [])
    assert pair.read() == framed(*texts, is_chunked=is_chunked)
    assert lane.texts is its_texts
    assert state_of(lane) == {**before, "texts": [], "flush_len": 3, "num_quiet_ticks": 0}


def test_it_is_one_write(path: Implementation) -> None:
    near, far = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with near, far:
        near.setblocking(False)
        lane = path.lane(
            socket=path.SocketHandle(near.fileno()), before=b"<", between=b"|", after=b">", texts=[b"a", b"b"]
        )
        path.write([lane, path.lane(socket=lane.socket, texts=[b"c"])], 1)
        assert (far.recv(100), far.recv(100)) == (b"<a|b>", b"c")


@pytest.mark.parametrize(
    "size", [*range(1, 18), 255, 256, 257, 4095, 4096, 4097, 65_535, 65_536, 65_537, 1_048_575, 1_048_576]
)
def test_the_length_of_a_chunk_is_that_of_what_stands_between_its_lines(
    path: Implementation, pair: Pair, size: int
) -> None:
    lane = path.lane(
        texts=[b"x" * size], socket=path.SocketHandle(pair.near.fileno()), after=b"\r\n", is_chunked=True
    )
    pair.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_000_000)
    num_texts, unwritten = path.write([lane], 1)
    assert num_texts == 1
    sent = pair.read() + (unwritten[0][1] if unwritten else b"")
    assert sent == b"%x\r\n" % size + b"x" * size + b"\r\n"


@pytest.mark.parametrize("is_chunked", [False, True])
def test_nothing_need_stand_around_a_text(path: Implementation, pair: Pair, is_chunked: bool) -> None:
    lane = path.lane(texts=[b"a", b"b"], socket=path.SocketHandle(pair.near.fileno()))
    if is_chunked:
        lane.is_chunked, lane.after = True, b"\r\n"
    assert path.write([lane], 1) == (2, [])
    assert pair.read() == (b"2\r\nab\r\n" if is_chunked else b"ab")


def test_many_lanes_are_written_each_to_its_socket(path: Implementation) -> None:
    pairs = [Pair() for _ in range(30)]
    lanes = [
        lane_to(path, pair, *(b"%d:%d" % (i, k) for k in range(1 + i % 3)), is_chunked=i % 2 == 0)
        for i, pair in enumerate(pairs)
    ]
    wanted = [framed(*lane.texts, is_chunked=lane.is_chunked) for lane in lanes]
    assert path.write(lanes, 1) == (sum(1 + i % 3 for i in range(30)), [])
    assert [pair.read() for pair in pairs] == wanted
    for pair in pairs:
        pair.close()


def test_writes_of_very_different_sizes_keep_apart(path: Implementation, pair: Pair) -> None:
    sizes = [1, 60_000, 1, 2, 30_000, 500, 1]
    lanes = [lane_to(path, pair, bytes([97 + i]) * size) for i, size in enumerate(sizes)]
    wanted = b"".join(framed(*lane.texts) for lane in lanes)
    assert path.write(lanes, 1) == (7, [])
    assert pair.read() == wanted


@pytest.mark.parametrize("flush_len", [1, 7, NEVER])
def test_a_lane_that_rests_keeps_its_flush_len_and_the_others_get_the_one_given(
    path: Implementation, pair: Pair, flush_len: int
) -> None:
    resting = lane_to(path, pair, b"a", is_resting=True, flush_len=NEVER, num_quiet_ticks=1)
    other = lane_to(path, pair, b"a", flush_len=40, num_quiet_ticks=1)
    path.write([resting, other], flush_len)
    assert (resting.flush_len, other.flush_len) == (NEVER, flush_len)
    assert (resting.num_quiet_ticks, other.num_quiet_ticks) == (0, 0)
    assert resting.is_resting


def test_a_full_socket_takes_nothing_and_the_whole_write_is_left(path: Implementation, pair: Pair) -> None:
    lane = lane_to(path, pair, b"a", b"b", is_chunked=True, num_quiet_ticks=2)
    num_bytes = pair.fill()
    num_texts, unwritten = path.write([lane], 3)
    assert (num_texts, unwritten) == (2, [(lane, framed(b"a", b"b", is_chunked=True))])
    assert unwritten[0][0] is lane
    assert type(unwritten[0]) is tuple
    assert (lane.texts, lane.flush_len, lane.num_quiet_ticks) == ([], 3, 0), "it counts as written"
    assert len(pair.read()) == num_bytes


@pytest.mark.parametrize("is_chunked", [False, True])
def test_of_what_a_socket_takes_in_part_the_rest_is_left(
    path: Implementation, pair: Pair, is_chunked: bool
) -> None:
    pair.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    texts = [bytes([65 + i % 26]) * 997 for i in range(200)]
    lane = lane_to(path, pair, *texts, is_chunked=is_chunked)
    num_texts, [(whose, rest)] = path.write([lane], 1)
    sent = pair.read()
    assert (num_texts, whose) == (200, lane)
    assert sent
    assert rest
    assert sent + rest == framed(*texts, is_chunked=is_chunked)


@pytest.mark.parametrize("how", ["let go of", "closed", "shut down", "the other end closed", "negative"])
def test_to_a_socket_that_is_closed_nothing_is_sent(path: Implementation, pair: Pair, how: str) -> None:
    sound = Pair()  # before another is closed: it would get the same number
    lane = lane_to(path, pair, b"a")
    if how == "let go of":
        lane.socket.fd = -1
    elif how == "negative":
        lane.socket.fd = -5
    elif how == "closed":
        pair.near.close()
    elif how == "shut down":
        pair.near.shutdown(socket.SHUT_WR)
    else:
        pair.far.close()
    other = lane_to(path, sound, b"b")
    assert path.write([lane, other], 3) == (2, [(lane, framed(b"a"))])
    assert (lane.texts, lane.flush_len) == ([], 3)
    assert sound.read() == framed(b"b")
    sound.close()


@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_write_of_a_lane_without_a_socket_is_given_back_whole(
    path: Implementation, pair: Pair, is_chunked: bool
) -> None:
    lane = lane_to(path, pair, b"a", b"b", num_quiet_ticks=2, flush_len=9)
    lane.socket, lane.is_chunked, lane.after = None, is_chunked, lane.after + b"\r\n" * is_chunked
    whole = lane.before + lane.between.join(lane.texts) + lane.after
    if is_chunked:
        whole = b"%x\r\n%b" % (len(whole) - 2, whole)
    assert path.write([lane], 3) == (2, [(lane, whole)])
    assert (lane.texts, lane.flush_len, lane.num_quiet_ticks) == ([], 3, 0)
    assert pair.read() == b""


@pytest.mark.parametrize("case", ["held", "no texts"])
def test_a_lane_that_cannot_be_written_here_is_left_as_it_is(
    path: Implementation, pair: Pair, case: str
) -> None:
    lane = lane_to(path, pair, b"a", num_quiet_ticks=2, flush_len=9)
    if case == "held":
        lane.held = (b"event",)
    else:
        lane.texts.clear()
    before = {**state_of(lane), "texts": lane.texts[:]}
    num_texts, unwritten = path.write([lane], 3)
    assert (num_texts, unwritten) == (0, [(lane, None)])
    assert state_of(lane) == before
    assert pair.read() == b""


def test_a_lane_without_an_outbox_is_written_as_any(path: Implementation, pair: Pair) -> None:
    lane = path.TextLane()
    lane.socket = path.SocketHandle(pair.near.fileno())
    lane.texts.append(b"a")
    assert path.write([lane], 1) == (1, [])
    assert pair.read() == b"a"
    assert not hasattr(lane, "outbox")


def test_a_lane_that_comes_twice_is_written_once(path: Implementation, pair: Pair) -> None:
    lane, other = lane_to(path, pair, b"a", b"b"), lane_to(path, pair, b"c")
    assert path.write([lane, other, lane], 1) == (3, [(lane, None)])
    assert pair.read() == framed(b"a", b"b", b"c")
    pair.fill()
    lane.texts += [b"d"]
    assert path.write([lane, lane], 1) == (1, [(lane, framed(b"d")), (lane, None)])


def test_no_lanes_are_written_at_once(path: Implementation) -> None:
    assert path.write([], 1) == (0, [])


def test_who_must_see_to_itself_comes_in_the_order_of_the_lanes(path: Implementation, pair: Pair) -> None:
    lanes = [lane_to(path, pair, b"%d" % i) for i in range(8)]
    for i in (1, 6):
        lanes[i].held = (b"event",)
    for i in (2, 5):
        lanes[i].socket.fd = -1
    num_texts, unwritten = path.write(lanes, 1)
    assert num_texts == 6
    assert unwritten == [
        (lanes[1], None),
        (lanes[2], framed(b"2")),
        (lanes[5], framed(b"5")),
        (lanes[6], None),
    ]
    assert pair.read() == framed(b"0", b"3", b"4", b"7")


def test_lanes_are_written_in_their_order(path: Implementation, pair: Pair) -> None:
    lanes = [lane_to(path, pair, b"%d" % i) for i in range(50)]
    path.write(lanes[::-1], 1)
    assert pair.read() == framed(*(b"%d" % i for i in range(49, -1, -1)))


def test_the_list_of_lanes_is_left_as_it_is(path: Implementation, pair: Pair) -> None:
    lanes = [lane_to(path, pair, b"a"), path.lane()]
    kept = lanes[:]
    path.write(lanes, 1)
    assert lanes == kept


def test_a_lane_may_be_of_a_subclass(path: Implementation, pair: Pair) -> None:
    class Larger(path.TextLane):  # type: ignore[misc, name-defined]
        __slots__ = ("other",)

    lane = Larger()
    lane.socket, lane.other = path.SocketHandle(pair.near.fileno()), 3
    lane.texts.append(b"a")
    assert path.write([lane], 1) == (1, [])
    assert (pair.read(), lane.other) == (b"a", 3)


def test_a_lane_is_written_again_and_again(path: Implementation, pair: Pair) -> None:
    lane = lane_to(path, pair, is_chunked=True)
    for i in range(200):
        lane.texts.append(b"%d" % i)
        assert path.write([lane], 1) == (1, [])
        assert pair.read() == framed(b"%d" % i, is_chunked=True)


def test_in_c_an_item_that_is_no_lane_is_refused_before_anything_is_done(
    native: Implementation, pair: Pair
) -> None:
    lane = lane_to(native, pair, b"a", flush_len=9)
    with pytest.raises(TypeError):
        native.write([lane, object()], 1)
    assert (lane.texts, lane.flush_len) == ([b"a"], 9)
    assert pair.read() == b""


@pytest.mark.parametrize("attribute", ["texts", "before", "between", "after", "held", "socket"])
def test_in_c_what_is_of_another_type_is_left_to_the_caller(
    native: Implementation, pair: Pair, attribute: str
) -> None:
    lane = lane_to(native, pair, b"a")
    setattr(lane, attribute, "no")
    assert native.write([lane], 1) == (0, [(lane, None)])
    if attribute != "held":
        delattr(lane, attribute)
        assert native.write([lane], 1) == (0, [(lane, None)])
    assert pair.read() == b""


def test_in_c_a_text_that_is_not_bytes_is_left_to_the_caller_with_those_beside_it(
    native: Implementation, pair: Pair
) -> None:
    lane = lane_to(native, pair, b"a", "b")  # type: ignore[arg-type]
    assert native.write([lane, lane_to(native, pair, b"c")], 1) == (1, [(lane, None)])
    assert lane.texts == [b"a", "b"]
    assert pair.read() == framed(b"c")


@pytest.mark.parametrize("arguments", [(), ([],), ((), 1), ([], "1"), ([], 1, 2), ([], 2**64)])
def test_in_c_wrong_arguments_are_an_error(native: Implementation, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        native.write(*arguments)
