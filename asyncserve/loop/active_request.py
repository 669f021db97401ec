"""A request in the engine and its sequences, as everybody but the scheduler knows them.

An `ActiveRequest` lives from submission until the last of its sequences has ended, and says where it stands;
an `ActiveSequence` is one of these on the way back: it takes what steps gave and gives the sink outputs, or,
where a token means nothing but its text, says how that goes to the sink's lane. Changed by the pipeline
alone; knows no step and no channel.
"""

from asyncserve.grammar import Grammar
from asyncserve.loop.admission import estimated_len
from asyncserve.loop.detokenizer import DetokenizerState
from asyncserve.loop.queue_bounds import Load
from asyncserve.observer import RequestTimeline
from asyncserve.request import (
    OutputSink,
    Request,
    RequestOutput,
    TextSink,
    TokenDelta,
    TokenizedRequest,
)
from asyncserve.token_path import Outbox, TextRow, add_text


class ActiveRequest:
    """A request in the engine, from submission until the last of its sequences has ended."""

    __slots__ = (
        "bad_words",
        "grammar",
        "has_ended",
        "is_paused",
        "load",
        "num_open",
        "request",
        "seed",
        "sequence_ids",
        "sink",
        "timelines",
    )

    def __init__(self, request: Request, sink: OutputSink, *, seed: int) -> None:
        self.request = request
        self.sink = sink
        self.seed = seed
        self.timelines = [
            RequestTimeline(arrived_s=request.arrival_s, request=request)
            for _ in range(request.sampling.num_sequences)
        ]
        self.num_open = request.sampling.num_sequences
        # As long as it is in nobody's queue; estimated until the prompt is encoded.
        self.load = Load(self.num_open, self.num_open * estimated_len(request))
        self.is_paused = False
        self.bad_words: tuple[tuple[int, ...], ...] = ()  # set with the prompt's encoding
        self.grammar: Grammar | None = None  # set before admission, if a structure is asked for
        self.sequence_ids: list[int] = []
        self.has_ended = False


class ActiveSequence(TextRow):
    """One of a request's sequences on the way back: where its deltas go.

    It has a lane while plain tokens may take the short way; `encoded`, while no bytes of a character are held
    back.
    """

    __slots__ = ("_texts", "is_bare", "owner", "state", "text_sink", "timeline", "tokenized", "wants_usage")

    def __init__(self, tokenized: TokenizedRequest, owner: ActiveRequest, state: DetokenizerState) -> None:
        super().__init__()
        self.tokenized = tokenized
        self.owner = owner
        self.state = state
        self.timeline = owner.timelines[tokenized.index]
        self.wants_usage = owner.sink.wants_usage
        self.text_sink = owner.sink if isinstance(owner.sink, TextSink) else None
        self.is_bare = False  # what `encoded` lacks may take the short way as well

    def feed(self, delta: TokenDelta) -> RequestOutput:
        """Give the sink what it is to hear of a delta, and return that."""
        state = self.state
        state.note_passed(self.num_passed)
        self.num_passed = 0
        output = state.feed(delta)
        if self.wants_usage and output.usage is None:
            output.usage = state.usage()
        self.owner.sink.put(output)
        if self.text_sink is not None and output.finish_reason is None:
            self._choose_way(self.text_sink)
        return output

    def _choose_way(self, sink: TextSink) -> None:
        """Let plain tokens take the short way from now on, or no longer."""
        lane = sink.lane(self.tokenized.index) if self.state.is_clear else None
        if lane is None:
            self.lane = self.encoded = None
            self.is_bare = False
        elif self.encoded is None:
            self.lane = lane
            self.encoded = self._texts = self.state.encoded_texts(sink.encode)
            self.is_bare = not self.state.has_stop_strings

    def take(self, token_id: int, outboxes: list[Outbox]) -> RequestOutput | None:
        """Take a token whose text `deliver` did not know; return what the sink was given, if not a text.

        Args:
            token_id: The token.
            outboxes: As for `add_text`.
        """
        text = None if self.encoded is None else self.encoded[token_id]
        if text is None and self.is_bare:
            text = self._bare_text(token_id)
        if text is None:
            return self.feed(TokenDelta(self.tokenized.sequence_id, (token_id,)))
        if text:
            assert self.lane is not None
            add_text(self.lane, text, outboxes)
            self.num_passed += 1
        return None

    def _bare_text(self, token_id: int) -> bytes:
        """Return what a token adds to the lane: nothing, if it is part of a character or a special token."""
        text = self.state.take_bare(token_id)
        sink = self.text_sink
        assert sink is not None
        self.encoded = self._texts if self.state.is_clear else None
        return sink.encode(text) if text else b""
