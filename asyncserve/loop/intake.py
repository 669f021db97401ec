"""The first stage: from requests to sequences that the scheduler can take.

    requests ─run─► (in place, or by a thread) ─► encoded ─► (grammar) ─► arrivals

Takes `ActiveRequest`s, gives `Arrival`s, or refuses. Small prompts are encoded in place, others in threads,
and a grammar is waited for; what a request must satisfy is `admission`'s. Counts what has not reached the
scheduler yet. Knows no step.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from asyncserve.errors import AsyncserveError, EngineError, InvalidRequest
from asyncserve.futures import ignore_outcome
from asyncserve.grammar import Grammar
from asyncserve.loop.active_request import ActiveRequest, ActiveSequence
from asyncserve.loop.admission import Admission, is_long, is_quick
from asyncserve.loop.channel import Channel, first_ready
from asyncserve.loop.detokenizer import Detokenizer
from asyncserve.loop.grammar_cache import GrammarCache, GrammarRefused, NobodyWaits
from asyncserve.loop.queue_bounds import Load, LoadByTenant
from asyncserve.request import TextPrompt, TokensPrompt

logger = logging.getLogger(__name__)

STARTED_PER_TURN = 16
"""Prompts given to the tokenizer's threads in one iteration of the loop: about 0.5 ms."""
ARRIVALS_CAPACITY = 32
"""Requests given to the scheduler in one iteration of the loop: about 0.2 ms."""


class Arrival(NamedTuple):
    """A tokenized request on its way to the scheduler."""

    active: ActiveRequest
    sequences: list[ActiveSequence]


class Encoded(NamedTuple):
    """A prompt's token ids, or why it has none, on the way back from a tokenizer's thread."""

    active: ActiveRequest
    outcome: "array[int] | Exception"


class Intake:
    """The stage that makes sequences of requests.

    Args:
        admission: What requests must satisfy.
        detokenizer: Makes the state that each sequence's text begins with.
        grammars: Makes and keeps the grammars of structured outputs.
        clock: Monotonic seconds.
        refuse: Called for a request that has not ended and becomes no sequences, with the reason.
        sink_raised: Called, from an except clause, for a request whose sink raised.
        requests_capacity: Requests that may wait for the tokenizer.
        num_threads: Threads that encode prompts; one more encodes long ones (`is_long`), which would hold up
            the others for seconds.

    Attributes:
        arrivals: What it gives; each one taken is to be told by `note_taken`.
        load: What is on its way: put, and not taken from `arrivals` yet.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        detokenizer: Detokenizer,
        grammars: GrammarCache,
        clock: Callable[[], float],
        refuse: Callable[[ActiveRequest, AsyncserveError], None],
        sink_raised: Callable[[ActiveRequest], None],
        requests_capacity: int,
        num_threads: int,
    ) -> None:
        self._admission = admission
        self._detokenizer = detokenizer
        self._grammars = grammars
        self._clock = clock
        self._refuse = refuse
        self._sink_raised = sink_raised
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._sequence_ids: Iterator[int] = count()
        self._requests = Channel[ActiveRequest]("requests", requests_capacity)
        self._encoded = Channel[Encoded]("encoded", requests_capacity)
        self.arrivals = Channel[Arrival]("arrivals", ARRIVALS_CAPACITY)
        self.load = LoadByTenant()

    @property
    def channels(self) -> tuple[Channel[Any], ...]:
        """All of its channels, in the order in which requests pass them."""
        return self._requests, self._encoded, self.arrivals

    def put(self, active: ActiveRequest) -> None:
        """Take a request in.

        Raises:
            ChannelClosed: The pipeline has ended.
        """
        self._requests.put_nowait(active)
        self.load.add(active.request.tenant, active.load)

    def note_taken(self, arrival: Arrival) -> None:
        """Note that somebody else counts what has arrived."""
        self.load.remove(arrival.active.request.tenant, arrival.active.load)

    async def close(self) -> None:
        """Free the worker threads; after `run` has ended."""
        # A prompt may be in a thread still: it is waited for, though not by the loop.
        ends: list[Callable[[], None]] = [self._grammars.close]
        ends += [partial(each.shutdown, cancel_futures=True) for each in (self._threads, self._long_thread)]
        for end in ends:
            try:
                await asyncio.to_thread(end)
            except RuntimeError:  # the interpreter is ending: it starts no thread, and has waited for these
                end()

    async def run(self) -> None:
        """Be the stage: each prompt is admitted when it is encoded, so no slow one holds up others.

        Prompts encoded in place, and prompts of one thread, stay in order of arrival.
        """
        requests, encoded = self._requests, self._encoded
        while True:
            await first_ready(requests, encoded)
            for finished in encoded.take_all():
                await self._admit(finished.active, finished.outcome)
            for _ in range(STARTED_PER_TURN):
                active = requests.get_nowait()
                if active is None:
                    break
                outcome = self._encode(active)
                if outcome is not None:
                    await self._admit(active, outcome)
                    break  # that was this iteration's share of the loop's time
            await asyncio.sleep(0)

    def _encode(self, active: ActiveRequest) -> "array[int] | Exception | None":
        """Encode a small prompt in place; any other is given to a thread, and None is returned."""
        try:
            if active.has_ended:
                return array("i")
            if is_quick(active.request):
                return self._admission.encode_prompt(active.request)
            self._start_encoding(active, None)
        except Exception as error:
            return error
        return None

    def _start_encoding(self, active: ActiveRequest, rendered: TextPrompt | TokensPrompt | None) -> None:
        """Give a prompt to a thread; `_note_encoded` is called with what becomes of it."""
        lane = self._long_thread if is_long(rendered or active.request.prompt) else self._threads
        future = asyncio.get_running_loop().run_in_executor(lane, self._encode_in_thread, active, rendered)
        future.add_done_callback(partial(self._note_encoded, active))

    def _encode_in_thread(
        self, active: ActiveRequest, rendered: TextPrompt | TokensPrompt | None
    ) -> "array[int] | TextPrompt | TokensPrompt":
        """Return a prompt's ids; of a conversation that turns out to be long, its text for the other lane."""
        if active.has_ended:
            return array("i")  # aborted while it waited for the thread
        prompt = active.request.prompt
        if rendered is None:
            rendered = self._admission.rendered(prompt)
            if is_long(rendered) and not is_long(prompt):
                return rendered
        active.bad_words = self._admission.encode_bad_words(active.request)
        return self._admission.encode_prompt(active.request, rendered)

    def _note_encoded(
        self, active: ActiveRequest, future: "asyncio.Future[array[int] | TextPrompt | TokensPrompt]"
    ) -> None:
        ignore_outcome(future)  # if the pipeline has ended, nobody looks at it
        if self._encoded.is_closed:
            return
        error = future.exception()
        if error is not None:
            outcome = error if isinstance(error, Exception) else EngineError(repr(error))
            self._encoded.put_nowait(Encoded(active, outcome))
        elif isinstance(result := future.result(), array):
            self._encoded.put_nowait(Encoded(active, result))
        else:
            self._start_encoding(active, result)

    async def _admit(self, active: ActiveRequest, prompt_token_ids: "array[int] | Exception") -> None:
        try:
            if active.has_ended:
                self.load.remove(active.request.tenant, active.load)
                return
            if isinstance(prompt_token_ids, Exception):
                raise prompt_token_ids
            if not self._has_grammar(active):
                self._start_compiling(active, prompt_token_ids)
                return  # it comes here again
            now_s = self._clock()
            tokenized = self._admission.admit(
                active.request,
                prompt_token_ids,
                seed=active.seed,
                sequence_ids=self._sequence_ids,
                bad_words=active.bad_words,
                grammar=active.grammar,
            )
            active.request = tokenized[0].request
            known = Load(active.load.num_sequences, active.load.num_sequences * len(prompt_token_ids))
            self.load.remove(active.request.tenant, active.load)
            self.load.add(active.request.tenant, known)
            active.load = known
            sequences = [ActiveSequence(each, active, self._detokenizer.begin(each)) for each in tokenized]
            for each in sequences:
                each.timeline.request = each.tokenized.request  # without what was asked, which may be large
                each.timeline.tokenized_s = now_s
                each.timeline.num_prompt_tokens = len(prompt_token_ids)
                each.timeline.max_output_len = each.tokenized.max_output_len
        except AsyncserveError as error:
            self._refuse_one(active, error)
            return
        except Exception as error:
            logger.exception(
                "a request could not be admitted", extra={"request_id": active.request.request_id}
            )
            rejection = EngineError(f"the request could not be admitted: {error!r}")
            rejection.__cause__ = error
            self._refuse_one(active, rejection)
            return
        try:
            active.sink.begin(prompt_token_ids)
        except Exception:
            self._sink_raised(active)
        await self.arrivals.put(Arrival(active, sequences))

    def _has_grammar(self, active: ActiveRequest) -> bool:
        """Return whether a request has the grammar it asks for, if any; one that is kept is given to it."""
        structured = active.request.sampling.structured
        if structured is not None and active.grammar is None:
            active.grammar = self._grammars.find(structured)
        return structured is None or active.grammar is not None

    def _start_compiling(self, active: ActiveRequest, prompt_token_ids: "array[int]") -> None:
        """Have a request's grammar made; `_note_compiled` is called with what becomes of it."""
        structured = active.request.sampling.structured
        assert structured is not None
        future = self._grammars.compile(structured, lambda: not active.has_ended)
        future.add_done_callback(partial(self._note_compiled, active, prompt_token_ids))

    def _note_compiled(
        self, active: ActiveRequest, prompt_token_ids: "array[int]", future: "asyncio.Future[Grammar]"
    ) -> None:
        ignore_outcome(future)  # if the pipeline has ended, nobody looks at it
        if self._encoded.is_closed:
            return
        outcome: array[int] | Exception = prompt_token_ids
        error = future.exception()
        if error is None:
            active.grammar = future.result()
        elif isinstance(error, NobodyWaits):
            pass  # if it has not ended itself, it came as the others had left, and asks again
        elif isinstance(error, GrammarRefused):
            structured = active.request.sampling.structured
            param = None if structured is None else structured.param
            outcome = InvalidRequest(f"{param} cannot be used: {error}", param=param)
        else:
            outcome = error if isinstance(error, Exception) else EngineError(repr(error))
        self._encoded.put_nowait(Encoded(active, outcome))

    def _refuse_one(self, active: ActiveRequest, error: AsyncserveError) -> None:
        self.load.remove(active.request.tenant, active.load)
        if not active.has_ended:
            self._refuse(active, error)
