"""Responses that run without their client: an engine request whose output goes to memory.

A `BackgroundResponse` is the request's sink and has no task of its own: the engine calls it, it writes its
response down, and at the end it becomes a `StoredResponse`. Its events, where they are kept, are read by as
many clients as ask, each from where it likes. Knows no HTTP.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable

import orjson

from asyncserve.errors import AsyncserveError, EngineError
from asyncserve.http.responses.events import ResponseWriter
from asyncserve.http.responses.store import ResponseStore, StoredResponse
from asyncserve.request import FinishReason, RequestOutput

logger = logging.getLogger(__name__)


class BackgroundResponse:
    """An `OutputSink` that keeps a response up to date; stored under its id until it is done, and then too.

    Args:
        owner: The digest of its maker's key.
        items: What it is made from, as JSON.
        num_prompt_bytes: What the engine holds of it until it is admitted.
        writer: Of the response, not yet begun.
        store: Where it is kept.
        keeps_events: Whether clients may read its events.
        abort: Ends its request in the engine.
        shown_error: Puts an error in the client's terms.
    """

    wants_usage = False

    def __init__(
        self,
        response_id: str,
        *,
        owner: bytes,
        items: bytes,
        num_prompt_bytes: int,
        writer: ResponseWriter,
        store: ResponseStore,
        keeps_events: bool,
        abort: Callable[[], None],
        shown_error: Callable[[BaseException], BaseException],
    ) -> None:
        self.response_id = response_id
        self.owner = owner
        self.events: list[bytes] | None = [] if keeps_events else None
        self.items = items
        self.num_bytes = 0
        self.is_done = False
        self._writer = writer
        self._store = store
        self._abort = abort
        self._shown_error = shown_error
        self._num_prompt_bytes = num_prompt_bytes
        self._num_event_bytes = 0
        self._readers: list[asyncio.Future[None]] = []
        store.add_running(self)
        events = writer.begin(is_queued=True)
        self._num_fixed_bytes = len(items) + len(self.body())
        self._add(events)

    def body(self) -> bytes:
        """Return the response object as it is now."""
        return orjson.dumps(self._writer.response())

    def begin(self, prompt_token_ids: "array[int]") -> None:
        """Take note that the request has been admitted."""
        self._num_prompt_bytes = 0
        self._add(self._writer.progress())

    def put(self, output: RequestOutput) -> None:
        """Write down new output."""
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self.fail(output.error or EngineError("the request was aborted"))
            return
        self._add(self._writer.feed(output))
        if output.finish_reason is not None and output.usage is not None:
            self._add(self._writer.complete(output.usage))
            self._end(can_continue=True)

    def fail(self, error: AsyncserveError) -> None:
        """Write down that the request failed."""
        if not self.is_done:
            self._add(self._writer.fail(self._shown_error(error)))
            self._end(can_continue=False)

    def cancel(self) -> None:
        """End the request at once and keep what there is."""
        self._abort()
        if not self.is_done:
            self._add(self._writer.cancel())
            self._end(can_continue=False)

    def discard(self) -> None:
        """End the request at once and keep nothing."""
        self._abort()
        self.is_done = True
        self._store.remove(self.response_id)
        self._wake()

    async def wait_for_news(self) -> None:
        """Return when there are new events, or none will come."""
        news = asyncio.get_running_loop().create_future()
        self._readers.append(news)
        try:
            await news
        finally:
            # A reader that left is not in the list of the next news.
            if news in self._readers:
                self._readers.remove(news)

    def _add(self, events: list[bytes]) -> None:
        num_bytes = self._num_fixed_bytes + self._num_prompt_bytes + self._writer.num_bytes
        if self.events is not None:
            self.events += events
            self._num_event_bytes += sum(map(len, events))
            if self._store.resize_running(self, num_bytes + self._num_event_bytes):
                if events:
                    self._wake()
                return
            # Nobody else bounds how long answers get.
            logger.warning("the events of response %s are too large to be kept", self.response_id)
            self.events = None
            self._wake()
        self._store.resize_running(self, num_bytes, is_needed=True)

    def _end(self, *, can_continue: bool) -> None:
        self.is_done = True
        self._store.add(
            StoredResponse(
                response_id=self.response_id,
                owner=self.owner,
                body=self.body(),
                items=self.items,
                can_continue=can_continue,
                was_background=True,
                events=None if self.events is None else tuple(self.events),
            )
        )
        self._wake()

    def _wake(self) -> None:
        readers, self._readers = self._readers, []
        for news in readers:
            if not news.done():
                news.set_result(None)
