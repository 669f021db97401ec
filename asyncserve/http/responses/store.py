"""Stored responses: kept in memory for a while, for those who made them, within bounds.

A response that is done is kept as bytes: the response object, the items it was made from, and its events if
it was streamed in the background. The longest unused go first when there are too many or they are too large
together. Responses that still run are kept beside them, as many at most, and never dropped; what they take
counts, too. What they are, `background` knows. Nothing survives the process. Pure: no asyncio, no clock.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncserve.errors import InvalidRequest, Overloaded, RequestError

MAX_SHOWN_ID_LEN = 64
RETRY_AFTER_S = 1.0


class ResponseNotFound(RequestError):
    """There is no such response, or not for this client."""

    status_hint = 404


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response that is done.

    Args:
        owner: The digest of its maker's key.
        body: The response object as JSON.
        items: The list of items it was made from, as JSON.
        can_continue: Another response can go on from it: it has an answer.
        was_background: It ran without its client.
        events: Its events, complete frames; None if they were not kept.
    """

    response_id: str
    owner: bytes
    body: bytes
    items: bytes
    can_continue: bool = True
    was_background: bool = False
    events: Sequence[bytes] | None = None

    @property
    def num_bytes(self) -> int:
        """What it takes, without small change."""
        return len(self.body) + len(self.items) + sum(map(len, self.events or ()))


class RunningResponse(Protocol):
    """A response that runs in the background."""

    response_id: str
    owner: bytes
    items: bytes
    events: list[bytes] | None
    num_bytes: int
    """What it takes, without small change; changed by `ResponseStore.resize_running`."""
    is_done: bool

    def body(self) -> bytes:
        """Return the response object as it is now, as JSON."""

    def cancel(self) -> None:
        """End it at once and keep what there is."""

    def discard(self) -> None:
        """End it at once and keep nothing."""

    async def wait_for_news(self) -> None:
        """Return when there are new events, or none will come."""


class ResponseStore:
    """All responses that can be asked for.

    Args:
        max_responses: Most that are kept; 0 keeps none.
        max_bytes: Most bytes of all that are kept, running ones included.
    """

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._done: OrderedDict[str, StoredResponse] = OrderedDict()
        self._running: dict[str, RunningResponse] = {}
        self.num_bytes = 0
        """Of all responses that are done."""
        self.num_running_bytes = 0

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self.max_responses > 0

    def __len__(self) -> int:
        return len(self._done) + len(self._running)

    def find(self, response_id: str, owner: bytes, *, param: str = "id") -> StoredResponse | RunningResponse:
        """Return a response, which thereby is the one used last.

        Raises:
            ResponseNotFound: It was never stored, is gone, or is another's.
        """
        found = self._running.get(response_id) or self._done.get(response_id)
        if found is None or found.owner != owner:
            raise ResponseNotFound(
                f"there is no stored response {response_id[:MAX_SHOWN_ID_LEN]!r} here; responses are kept in"
                " memory and for a while",
                param=param,
            )
        if response_id in self._done:
            self._done.move_to_end(response_id)
        return found

    def check_room(self, num_bytes: int = 0) -> None:
        """Refuse one more response that runs in the background.

        Args:
            num_bytes: What it takes at its beginning. Too large for all others it may only run alone.

        Raises:
            InvalidRequest: Nothing is kept here.
            Overloaded: As many as are kept, or as large, are running already.
        """
        if not self.is_on:
            raise InvalidRequest(
                "background responses are not available: this server stores no responses", param="background"
            )
        if len(self._running) >= self.max_responses or (
            self._running and self.num_running_bytes + num_bytes >= self.max_bytes
        ):
            raise Overloaded(
                f"{len(self._running)} responses are running in the background; try again later",
                retry_after_s=RETRY_AFTER_S,
            )

    def add_running(self, response: RunningResponse) -> None:
        """Keep a response until `add` or `remove`; `check_room` was asked."""
        self._running[response.response_id] = response
        self.num_running_bytes += response.num_bytes
        self._drop_oldest()

    def resize_running(self, response: RunningResponse, num_bytes: int, *, is_needed: bool = False) -> bool:
        """Take note of what a running response takes now; false, and nothing changes, if that is too much.

        Args:
            is_needed: It cannot do with less: then it is never too much, and only keeps others from starting.
        """
        num_running_bytes = self.num_running_bytes + num_bytes - response.num_bytes
        if num_running_bytes > max(self.max_bytes, self.num_running_bytes) and not is_needed:
            return False
        self.num_running_bytes = num_running_bytes
        response.num_bytes = num_bytes
        self._drop_oldest()
        return True

    def add(self, response: StoredResponse) -> None:
        """Keep a response that is done, unless it is too large by itself; others may have to go for it."""
        self._end_running(response.response_id)
        if not self.is_on or response.num_bytes > self.max_bytes:
            return
        self._done[response.response_id] = response
        self.num_bytes += response.num_bytes
        self._drop_oldest()

    def remove(self, response_id: str) -> None:
        """Forget a response."""
        self._end_running(response_id)
        found = self._done.pop(response_id, None)
        if found is not None:
            self.num_bytes -= found.num_bytes

    def _end_running(self, response_id: str) -> None:
        ended = self._running.pop(response_id, None)
        if ended is not None:
            self.num_running_bytes -= ended.num_bytes

    def _drop_oldest(self) -> None:
        while self._done and (
            len(self._done) > self.max_responses or self.num_bytes + self.num_running_bytes > self.max_bytes
        ):
            _, oldest = self._done.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
