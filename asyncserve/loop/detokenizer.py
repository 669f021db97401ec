"""Token ids to text, one delta at a time: bytes of a character held back, stop strings held back.

Takes `TokenDelta`s of one sequence in order, gives `RequestOutput`s whose texts joined are exactly the
tokenizer's `decode` of all its tokens (up to a stop string), however the tokens were cut into deltas. The
common token (a piece of valid text, nothing held back) is one table look-up. Knows no asyncio and no HTTP;
that a stop string ended the sequence is told to the scheduler by the caller.
"""

import codecs
from collections.abc import Callable, Sequence

from asyncserve.errors import InvariantError
from asyncserve.loop.stop_strings import StopStrings
from asyncserve.loop.tokenizer import Tokenizer
from asyncserve.request import FinishReason, RequestOutput, TokenDelta, TokenizedRequest, Usage

_MAX_STOP_SETS = 64
"""Sets of stop strings whose tables are kept: applications send the same ones with every request."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def strips_first_space(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> bool:
    """Return whether the output after this prompt loses one space at its beginning.

    The space that SentencePiece puts before a text goes only where nothing stands before it: after a prompt
    of BOS alone. Behind other text it separates words.
    """
    return tokenizer.strips_leading_space and all(map(tokenizer.is_special, prompt_token_ids))


class EncodedTexts(dict[int, bytes | None]):
    """Token id → its text as a sink's lane takes it; None where it must go the long way, through `feed`."""

    __slots__ = ("_encode", "_texts")

    def __init__(self, texts: "_Texts", encode: Callable[[str], bytes]) -> None:
        super().__init__()
        self._texts = texts
        self._encode = encode

    def __missing__(self, token_id: int) -> bytes | None:
        text = self._texts[token_id]
        encoded = self[token_id] = self._encode(text) if text else None
        return encoded


class _Texts(dict[int, str | None]):
    """Token id → text, or None; filled on first use."""

    __slots__ = ("_encoded",)

    def __init__(self) -> None:
        super().__init__()
        self._encoded: dict[Callable[[str], bytes], EncodedTexts] = {}

    def encoded_by(self, encode: Callable[[str], bytes]) -> EncodedTexts:
        """Return the same texts as a sink's lanes take them."""
        encoded = self._encoded.get(encode)
        if encoded is None:
            encoded = self._encoded[encode] = EncodedTexts(self, encode)
        return encoded


class _Continuations(dict[tuple[bytes, int], tuple[str, bytes]]):
    """(waiting bytes of a character, token id) → characters that the token completes, bytes that wait then.

    Scripts and emoji whose characters are several tokens have few of them, which come again and again.
    """

    MAX_ENTRIES = 100_000

    __slots__ = ("_texts",)

    def __init__(self, texts: "_TextTable") -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, key: tuple[bytes, int]) -> tuple[str, bytes]:
        waiting, token_id = key
        decoder = _Utf8Decoder("replace")
        decoder.setstate((waiting, 0))
        text = decoder.decode(self._texts.bytes_of(token_id))
        found = (text, decoder.getstate()[0])
        if len(self) < self.MAX_ENTRIES:
            self[key] = found
        return found


class _TextTable(_Texts):
    """Token id → text, filled on first use; None where the bytes are no whole characters by themselves."""

    __slots__ = ("_skip_special_tokens", "_tokenizer", "continued")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self.continued = _Continuations(self)

    def __missing__(self, token_id: int) -> str | None:
        text: str | None
        try:
            text = self.bytes_of(token_id).decode("utf-8")
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that count: none for a special token that is skipped."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)


class _SafeTextTable(_Texts):
    """The same for one set of stop strings: None also where a stop string may begin in the token."""

    __slots__ = ("_first_characters", "_texts")

    def __init__(self, texts: _TextTable, stops: StopStrings) -> None:
        super().__init__()
        self._texts = texts
        self._first_characters = stops.first_characters

    def __missing__(self, token_id: int) -> str | None:
        text = self._texts[token_id]
        if text is not None and not self._first_characters.isdisjoint(text):
            text = None
        self[token_id] = text
        return text


class Detokenizer:
    """What all sequences share: the text of every token met so far.

    Args:
        tokenizer: Gives the bytes of tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._texts = {skip: _TextTable(tokenizer, skip_special_tokens=skip) for skip in (False, True)}
        self._stop_sets: dict[tuple[bool, tuple[str, ...]], tuple[StopStrings, _SafeTextTable]] = {}

    def begin(self, request: TokenizedRequest) -> "DetokenizerState":
        """Return the state of a new sequence, which takes its deltas."""
        sampling = request.request.sampling
        texts = self._texts[sampling.skip_special_tokens]
        if not sampling.stop:
            return DetokenizerState(self.tokenizer, request, texts, texts, None)
        key = (sampling.skip_special_tokens, sampling.stop)
        shared = self._stop_sets.get(key)
        if shared is None:
            if len(self._stop_sets) >= _MAX_STOP_SETS:
                del self._stop_sets[next(iter(self._stop_sets))]
            stops = StopStrings(sampling.stop)
            shared = self._stop_sets[key] = (stops, _SafeTextTable(texts, stops))
        stops, safe_texts = shared
        return DetokenizerState(self.tokenizer, request, texts, safe_texts, stops)


class DetokenizerState:
    """One sequence's text so far, as far as it is still needed. Made by `Detokenizer.begin`.

    `_is_clear` says that nothing is held back: no bytes of a character, no text that may begin a stop
    string, no leading space to strip. Then a token's text can go out as the table has it.
    """

    __slots__ = (
        "_held",
        "_includes_stop",
        "_index",
        "_is_clear",
        "_min_tokens",
        "_num_cached_tokens",
        "_num_prompt_tokens",
        "_reported_stop_ids",
        "_safe_texts",
        "_stop_state",
        "_stops",
        "_strips",
        "_texts",
        "_waiting",
        "is_finished",
        "num_output_tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: TokenizedRequest,
        texts: _TextTable,
        safe_texts: _Texts,
        stops: StopStrings | None,
    ) -> None:
        sampling = request.request.sampling
        self._index = request.index
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_cached_tokens = 0
        self._texts = texts
        self._safe_texts = safe_texts
        self._waiting = b""  # bytes of a character
        self._stops = stops
        self._stop_state = 0
        self._held = ""
        self._includes_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        # EOS is reported as None even if it was listed, unless it is only a stop token because it was.
        eos_ids = frozenset() if sampling.ignore_eos else tokenizer.eos_token_ids
        self._reported_stop_ids = frozenset(sampling.stop_token_ids) - eos_ids
        self._strips = strips_first_space(tokenizer, request.prompt_token_ids)
        self._is_clear = not self._strips
        self.num_output_tokens = 0
        self.is_finished = False
        """No further delta is taken."""

    def encoded_texts(self, encode: Callable[[str], bytes]) -> EncodedTexts:
        """Return the table of texts for tokens that go past `feed`; see `TextSink`."""
        return self._safe_texts.encoded_by(encode)

    @property
    def is_clear(self) -> bool:
        """Whether nothing is held back: the next token may go out as the table has it, past `feed`."""
        return self._is_clear

    @property
    def has_stop_strings(self) -> bool:
        """Whether text may have to be held back, so that what is not clear must go by `feed`."""
        return self._stops is not None

    def take_bare(self, token_id: int) -> str:
        """Return the characters that a token completes, where nothing else is to be told of it.

        Without stop strings, and once `is_clear` has been true: only bytes of a character are held back. A
        token with characters is not counted here; see `note_passed`.
        """
        text = self._text_of(token_id)
        self._is_clear = not self._waiting
        if not text:
            self.num_output_tokens += 1
        return text

    def note_passed(self, num_tokens: int) -> None:
        """Count tokens that went past `feed`."""
        self.num_output_tokens += num_tokens

    def usage(self) -> Usage:
        """Return the token counts up to now."""
        return Usage(self._num_prompt_tokens, self.num_output_tokens, self._num_cached_tokens)

    def feed(self, delta: TokenDelta) -> RequestOutput:
        """Take the next tokens and return what can be told of them.

        Token ids and log-probabilities come with the delta that brings them; their text may come later.
        If a stop string is complete, the output ends the sequence (`FinishReason.STOP`, `stop_reason` the
        string): tokens of the delta behind it are dropped, and the caller must abort it in the scheduler.
        """
        token_ids = delta.token_ids
        if self._is_clear and len(token_ids) == 1 and delta.finish_reason is None:
            text = self._safe_texts[token_ids[0]]
            if text is not None:
                self.num_output_tokens += 1
                if delta.num_cached_tokens:
                    self._num_cached_tokens = delta.num_cached_tokens
                return RequestOutput(self._index, text, token_ids, delta.logprobs, delta.prompt_logprobs)
        return self._feed_any(delta)

    def _feed_any(self, delta: TokenDelta) -> RequestOutput:
        if self.is_finished:
            raise InvariantError("a delta came for a sequence whose text has ended")
        if delta.num_cached_tokens:
            self._num_cached_tokens = delta.num_cached_tokens
        token_ids = delta.token_ids
        # The last token is a stop token: it counts, but its text is no part of the answer.
        num_texts = len(token_ids) - (delta.stop_token_id is not None and bool(token_ids))
        pieces: list[str] = []
        for position in range(num_texts):
            self.num_output_tokens += 1
            stop = self._take(self._text_of(token_ids[position]), pieces)
            if stop is not None:
                return self._stopped_by_string(delta, pieces, position + 1, stop)
        finish_reason = delta.finish_reason
        if finish_reason is not None:
            stop = self._take(self._rest_of_character(), pieces)
            if stop is not None:
                return self._stopped_by_string(delta, pieces, num_texts, stop)
            pieces.append(self._held)
            self._held = ""
            self.is_finished = True
        if num_texts < len(token_ids):
            self.num_output_tokens += 1
            if self._includes_stop:
                pieces.append(self._texts.bytes_of(token_ids[-1]).decode("utf-8", "replace"))
        self._is_clear = not (self._held or self._strips or self._waiting or self.is_finished)
        return RequestOutput(
            self._index,
            "".join(pieces),
            token_ids,
            delta.logprobs,
            delta.prompt_logprobs,
            finish_reason,
            delta.stop_token_id if delta.stop_token_id in self._reported_stop_ids else None,
            None if finish_reason is None else self.usage(),
            delta.error,
        )

    def _text_of(self, token_id: int) -> str:
        """Return the characters that the token completes."""
        if not self._waiting:
            text = self._texts[token_id]
            if text is not None:
                return text
        text, self._waiting = self._texts.continued[self._waiting, token_id]
        return text

    def _rest_of_character(self) -> str:
        """Return U+FFFD if the sequence ends within a character."""
        waiting, self._waiting = self._waiting, b""
        return waiting.decode("utf-8", "replace")

    def _take(self, text: str, pieces: list[str]) -> str | None:
        """Move new text through the stop strings; what can go out is appended to `pieces`.

        Returns:
            The stop string that ends the sequence, already cut off.
        """
        if self._strips and text:
            self._strips = False
            if text[0] == " ":
                text = text[1:]
        stops = self._stops
        if stops is None:
            pieces.append(text)
            return None
        state = self._stop_state
        for position, character in enumerate(text):
            state = stops.step(state, character)
            match = stops.match[state]
            if match is not None:
                if self.num_output_tokens >= self._min_tokens:
                    whole = self._held + text[: position + 1]
                    pieces.append(whole if self._includes_stop else whole[: len(whole) - len(match)])
                    self._held = ""
                    return match
                state = stops.released(state)
        self._stop_state = state
        whole = self._held + text
        num_released = len(whole) - stops.depth[state]
        pieces.append(whole[:num_released])
        self._held = whole[num_released:]
        return None

    def _stopped_by_string(
        self, delta: TokenDelta, pieces: Sequence[str], num_tokens: int, stop: str
    ) -> RequestOutput:
        self.is_finished = True
        self._is_clear = False
        logprobs = delta.logprobs
        return RequestOutput(
            self._index,
            "".join(pieces),
            delta.token_ids[:num_tokens],
            None if logprobs is None else logprobs[:num_tokens],
            delta.prompt_logprobs,
            FinishReason.STOP,
            stop,
            self.usage(),
        )
