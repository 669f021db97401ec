"""Publishes KV events over ZeroMQ: a PUB socket, and a ROUTER socket at which batches are asked for again.

Takes a batch of events a step, on the loop thread, gives it a number and leaves at once; a thread owns the
sockets. Messages are `topic`, number (8 bytes, big-endian), batch. What cannot be sent in time is left out,
which subscribers see by the numbers, and stays where it can be asked for again, for `buffer_steps` batches.

Who asks sends the first number wanted (8 bytes, big-endian; behind an empty frame, as a REQ socket does, or
not) and gets number and batch of each from there on, and at last the number -1 with nothing.
"""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from asyncserve.cache_events import CacheEvent
from asyncserve.errors import ConfigError
from asyncserve.kv_events.settings import KVEventsSettings
from asyncserve.kv_events.wire import END_OF_REPLAY, encode_batch

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

SENT_AT_ONCE = 64
"""Batches of one kind (new ones, or those of one replay) that are sent before the other has its turn."""
CLOSE_TIMEOUT_S = 1.0


class _Told(NamedTuple):
    """A batch that is not written yet."""

    events: Sequence[CacheEvent]
    now_s: float


class _Replay(NamedTuple):
    """What somebody asked for.

    Args:
        envelope: Frames that lead back to who asked.
        number: The next batch to send.
        end: Number of the first one that had not been told when it was asked.
    """

    envelope: tuple[bytes, ...]
    number: int
    end: int


class KVEventPublisher:
    """Publishes what it is told, until it is closed.

    Args:
        settings: Where, and how much is kept.
        clock: Seconds since 1970.

    Raises:
        ConfigError: pyzmq is not installed, or an address cannot be used.
    """

    def __init__(self, settings: KVEventsSettings, *, clock: Callable[[], float] = time.time) -> None:
        try:
            import zmq
        except ModuleNotFoundError as error:
            raise ConfigError(
                "kv_events_config needs pyzmq, which is not installed: pip install 'asyncserve[kv-events]'"
            ) from error
        self._settings = settings
        self._clock = clock
        # By number: as told, or as written once it was sent. The loop adds and drops, the thread replaces.
        self._batches: dict[int, _Told | bytes] = {}
        self._num_kept = settings.buffer_steps + settings.max_queue_size
        self._num_told = 0
        self._num_handled = 0
        self._num_sent = 0
        self._num_left_out = 0
        self._replays: deque[_Replay] = deque()
        self._is_closing = False
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(settings.hwm)
            is_bound = "*" in settings.endpoint or "::" in settings.endpoint
            if is_bound or settings.endpoint.startswith("ipc://"):
                _use(self._pub.bind, settings.endpoint)
            else:
                _use(self._pub.connect, settings.endpoint)
            self._router: zmq.Socket[bytes] | None = None
            if settings.replay_endpoint is not None:
                self._router = self._context.socket(zmq.ROUTER)
                # A ROUTER drops what does not fit, and a replay must not have holes.
                self._router.set_hwm(settings.buffer_steps + 2)
                _use(self._router.bind, settings.replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_asleep = False
        self._thread = threading.Thread(target=self._run, name="asyncserve-kv-events", daemon=True)
        self._thread.start()

    @property
    def num_told(self) -> int:
        """Batches so far; the number of the next one."""
        return self._num_told

    @property
    def num_sent(self) -> int:
        """Of these, how many were sent to whoever subscribed; one who reads too slowly may miss some."""
        return self._num_sent

    @property
    def num_left_out(self) -> int:
        """Of these, how many were not sent because too many waited; they could be asked for."""
        return self._num_left_out

    @property
    def endpoints(self) -> tuple[str, str | None]:
        """Addresses of the PUB and the ROUTER socket; ports that were left to the system are known here."""
        import zmq

        last = zmq.LAST_ENDPOINT
        router = None if self._router is None else self._router.getsockopt_string(last)
        return self._pub.getsockopt_string(last), router

    def tell(self, events: Sequence[CacheEvent]) -> None:
        """Publish a batch. Never waits; after `close` it does nothing."""
        if self._is_closing:
            return
        number = self._num_told
        self._batches[number] = _Told(events, self._clock())
        self._batches.pop(number - self._num_kept, None)
        self._num_told = number + 1
        if self._is_asleep:
            os.eventfd_write(self._wakes, 1)

    def close(self) -> None:
        """Send what waits and end the thread; if that takes too long it is left behind. Blocks."""
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._wakes, 1)
        self._thread.join(2 * CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self._wakes)

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._wakes, select.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        ends_s: float | None = None
        try:
            while True:
                self._is_asleep = True
                is_idle = self._num_handled == self._num_told and not self._replays
                if self._is_closing:
                    ends_s = ends_s or time.monotonic() + CLOSE_TIMEOUT_S
                    if is_idle or time.monotonic() > ends_s:
                        break
                ready = dict(poller.poll(None if is_idle else 0))
                self._is_asleep = False
                if self._wakes in ready:
                    os.eventfd_read(self._wakes)
                if self._router is not None and self._router in ready:
                    self._take_request(self._router)
                self._send_new()
                if self._router is not None and self._replays:
                    self._go_on(self._router, self._replays.popleft())
        except Exception:  # the top of a thread
            logger.exception("KV events are not published any more")
        finally:
            self._context.destroy(linger=100)

    def _send_new(self) -> None:
        """Send some of the batches that are new."""
        num_late = self._num_told - self._num_handled - self._settings.max_queue_size
        if num_late > 0:
            if not self._num_left_out:
                logger.warning("KV events come faster than they are sent; some are left to be asked for")
            self._num_left_out += num_late
            self._num_handled += num_late
        topic = self._settings.topic.encode()
        for number in range(self._num_handled, min(self._num_told, self._num_handled + SENT_AT_ONCE)):
            payload = self._payload(number)
            if payload is not None:
                # A PUB socket never waits: a subscriber that is too far behind misses it.
                self._pub.send_multipart((topic, number.to_bytes(8, "big"), payload))
                self._num_sent += 1
            self._num_handled = number + 1

    def _payload(self, number: int) -> bytes | None:
        """Return a batch as it is written; None if it is not kept any more."""
        batch = self._batches.get(number)
        if not isinstance(batch, _Told):
            return batch
        try:
            payload = encode_batch(batch.events, batch.now_s)
        except Exception:  # the others are to be published
            logger.exception("a batch of KV events cannot be written; an empty one takes its place")
            payload = encode_batch((), batch.now_s)
        if number in self._batches:
            self._batches[number] = payload
            if number < self._num_told - self._num_kept:
                self._batches.pop(number, None)  # the loop dropped it in between
        return payload

    def _take_request(self, router: "zmq.Socket[bytes]") -> None:
        frames = router.recv_multipart()
        *envelope, start = frames
        if len(start) != 8 or len(envelope) not in (1, 2) or any(envelope[1:]):
            logger.warning("a request for KV events is not understood: %d frames", len(frames))
            return
        oldest = max(0, self._num_told - self._settings.buffer_steps)
        number = max(oldest, int.from_bytes(start, "big"))
        self._replays.append(_Replay(tuple(envelope), number, self._num_told))

    def _go_on(self, router: "zmq.Socket[bytes]", replay: _Replay) -> None:
        """Send some of what was asked for; the rest has its turn later."""
        end = min(replay.end, replay.number + SENT_AT_ONCE)
        for number in range(replay.number, end):
            payload = self._payload(number)
            if payload is not None:
                router.send_multipart((*replay.envelope, number.to_bytes(8, "big"), payload))
        if end >= replay.end:
            router.send_multipart((*replay.envelope, END_OF_REPLAY, b""))
        else:
            self._replays.append(replay._replace(number=end))


def _use(connect: Callable[[str], object], address: str) -> None:
    import zmq

    try:
        connect(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"kv_events_config: {address!r} cannot be used: {error}") from error
