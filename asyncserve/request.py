"""What a client asks and what it gets: the values that cross every border of the package.

A `Request` goes in, `RequestOutput`s come out through an `OutputSink`. Values that are made once per
request are frozen. Values that are made once per token (`TokenDelta`, `RequestOutput`) are plain
slotted dataclasses, because a frozen one costs three times as much to build; treat them as frozen all
the same. Nothing here knows HTTP, asyncio, torch or a clock.
"""

import enum
import math
import operator
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, Protocol

from asyncserve.errors import AsyncserveError, InvalidRequest
from asyncserve.grammar import Grammar
from asyncserve.token_path import TextLane

MAX_STOP_STRINGS = 64
"""More stop strings than this are refused: each is compared with every token."""

MAX_STOP_CHARACTERS = 4096
"""More characters than this in all stop strings together are refused: a table is built of them."""

MAX_ALLOWED_TOKENS = 128 * 1024
"""More allowed tokens than this are refused: looking through them takes milliseconds."""

MAX_BAD_WORDS = 1024
"""More bad words than this are refused: each is looked for at every token."""

MAX_BAD_WORD_CHARACTERS = 4096
"""More characters than this in all bad words together are refused: the device keeps their tokens."""

MAX_BEAM_STOP_TOKENS = 64
"""More `stop_token_ids` than this are refused in a beam search: each stop token makes it look at more."""

MAX_LENGTH_PENALTY = 10.0
"""Length penalties further from 0 are refused: lengths are raised to them."""

MAX_STRUCTURE_CHARACTERS = 256 * 1024
"""A longer description of an output's shape is refused: it is compiled, and kept for the next request."""


class _DefaultLen(enum.IntEnum):
    """Lengths nobody asked for, so that they can be told from equal ones that somebody did."""

    MAX_TOKENS = 16


DEFAULT_MAX_TOKENS = _DefaultLen.MAX_TOKENS
"""`max_tokens` where it is left out, as OpenAI has it. Unlike a 16 that was asked for, it is cut to what the
context leaves instead of being refused."""

GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy, as in vLLM: hardly any chance is left there."""


EarlyStopping = bool | Literal["never"]
"""When a beam search is over; see `SamplingParams`."""


class FinishReason(enum.Enum):
    """Why a sequence ended; the value is what OpenAI's API calls it.

    MISSING: it is no choice, for its beam search has found fewer texts than it has rows; no client is told.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    MISSING = "missing"


class StructureKind(enum.Enum):
    """How the shape of an output is described."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The shape an output must have; hashable, since compiled grammars are kept by it.

    Args:
        source: By kind: nothing for JSON_OBJECT; a JSON schema as JSON text; a regular expression; a JSON
            list of strings for CHOICE; an EBNF grammar (GBNF notation); a structural tag as JSON text.
        param: The request field it came from, for error messages; no part of its identity.

    Raises:
        InvalidRequest: `kind` or `source` is of a wrong type, or `source` is too long or missing.
    """

    kind: StructureKind
    source: str = ""
    param: str = field(default="response_format", compare=False)

    def __post_init__(self) -> None:
        kind: object = self.kind
        source: object = self.source
        if not isinstance(kind, StructureKind) or not isinstance(source, str):
            raise InvalidRequest(
                f"a structure has a kind and a text, not {type(kind).__name__} and {type(source).__name__}",
                param=self.param,
            )
        if len(source) > MAX_STRUCTURE_CHARACTERS:
            raise InvalidRequest(
                f"{self.param} has {len(source)} characters; at most {MAX_STRUCTURE_CHARACTERS} are taken",
                param=self.param,
            )
        if not source and kind is not StructureKind.JSON_OBJECT:
            raise InvalidRequest(f"{self.param} is empty", param=self.param)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Bad values are refused when built.

    Numbers of other libraries (numpy's) are taken and become Python's; a bool is no number here.

    Args:
        n: Number of continuations of the prompt that are given, at least 1.
        best_of: Number that are generated, at least `n`; the `n` likeliest by mean log-probability of their
            tokens are given, likeliest first. In a beam search, its width. None means `n`.
        use_beam_search: The continuations are the likeliest that a beam search finds, best first, instead of
            drawn ones. What draws or changes probabilities is refused then, as are stop strings,
            log-probabilities and structures.
        length_penalty: Of a beam search, whose results are ranked by log-probability divided by length to
            this power, in [-10, 10].
        early_stopping: Of a beam search: whether it ends with as many finished continuations as it is wide
            (True), when no better ones are likely (False), or when there can be none ("never").
        temperature: Logits are divided by it, in [0, 100]; below 1e-5 the likeliest token is always taken.
        top_k: Keep the k most likely tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches it, in (0, 1].
        min_p: Drop tokens less likely than `min_p` times the likeliest, in [0, 1].
        max_tokens: Most tokens to generate, refused if the context cannot hold them; None means as many as
            it holds. Left out: 16, or what the context leaves if that is less.
        min_tokens: No EOS, stop token or stop string ends the sequence before this many tokens.
        stop: Strings that end the sequence; the text never contains them.
        stop_token_ids: Token ids that end the sequence besides the model's EOS.
        include_stop_str_in_output: Keep the stop string at the end of the text.
        ignore_eos: The model's EOS does not end the sequence.
        seed: Makes the random numbers the same whatever else is in the batch; None draws one.
        presence_penalty: Subtracted from the logit of every token already generated, in [-2, 2].
        frequency_penalty: Subtracted once per occurrence among the generated tokens, in [-2, 2].
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output, in
            [0.01, 100]; 1 is off.
        logit_bias: Token id to a value in [-100, 100] added to its logit.
        num_logprobs: Log-probabilities of this many likeliest tokens with each output token; 0 gives
            only the chosen token's, None gives none.
        num_prompt_logprobs: The same for every prompt token but the first.
        skip_special_tokens: Leave special tokens out of the text.
        allowed_token_ids: Only these tokens are chosen; None allows all. The EOS is not among them by itself.
        bad_words: Texts whose tokens never stand in the output, with a space before them or without; as text
            they can, spelled with other tokens.
        structured: The shape the output must have; None leaves it free.

    Raises:
        InvalidRequest: A value is of a wrong type or out of range; `param` names the field.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        for name, value in self._typed().items():
            object.__setattr__(self, name, value)
        _in_range("n", self.n, low=1)
        _in_range("temperature", self.temperature, low=0.0, high=100.0)
        _in_range("top_k", self.top_k, low=0)
        _in_range("top_p", self.top_p, low=0.0, high=1.0, low_is_open=True)
        _in_range("min_p", self.min_p, low=0.0, high=1.0)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, low=1)
        _in_range("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", param="min_tokens"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are taken", param="stop"
            )
        num_characters = sum(map(len, self.stop))
        if num_characters > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop has {num_characters} characters in all; at most {MAX_STOP_CHARACTERS} are taken",
                param="stop",
            )
        if any(not text for text in self.stop):
            raise InvalidRequest("stop may not hold an empty string", param="stop")
        if self.allowed_token_ids is not None:
            _check_allowed(self.allowed_token_ids)
        _check_bad_words(self.bad_words)
        for token_id in self.stop_token_ids:
            _in_range("stop_token_ids", token_id, low=0)
        _in_range("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _in_range("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        # Outside, finite logits could be scaled to infinite ones.
        _in_range("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        for token_id, bias in self.logit_bias.items():
            _in_range("logit_bias", token_id, low=0)
            _in_range("logit_bias", bias, low=-100.0, high=100.0)
        if self.seed is not None:
            _in_range("seed", self.seed, low=-(2**63), high=2**63 - 1)
        if self.num_logprobs is not None:
            _in_range("logprobs", self.num_logprobs, low=0)
        if self.num_prompt_logprobs is not None:
            _in_range("prompt_logprobs", self.num_prompt_logprobs, low=0)
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(f"best_of is {self.best_of}, below n {self.n}", param="best_of")
        _in_range("length_penalty", self.length_penalty, low=-MAX_LENGTH_PENALTY, high=MAX_LENGTH_PENALTY)
        self._check_beam_search()

    def _check_beam_search(self) -> None:
        """Refuse what a beam search cannot honour, and what is of beam searches only."""
        if not isinstance(self.use_beam_search, bool):
            raise InvalidRequest("use_beam_search must be true or false", param="use_beam_search")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequest('early_stopping must be true, false or "never"', param="early_stopping")
        if not self.use_beam_search:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != neutral:
                    raise InvalidRequest(f"{name} is of beam searches; set use_beam_search, too", param=name)
            return
        if not (self.is_greedy or self.temperature == 1.0):
            raise _not_with_beams("temperature", "leave it out, or give 0 or 1")
        for name, neutral in (
            ("top_p", 1.0),
            ("top_k", 0),
            ("min_p", 0.0),
            ("presence_penalty", 0.0),
            ("frequency_penalty", 0.0),
            ("repetition_penalty", 1.0),
        ):
            if getattr(self, name) != neutral:
                raise _not_with_beams(name, f"leave it out, or give {neutral:g}")
        if self.stop:
            raise _not_with_beams("stop", "stop_token_ids can")
        if len(self.stop_token_ids) > MAX_BEAM_STOP_TOKENS:
            raise InvalidRequest(
                f"stop_token_ids has {len(self.stop_token_ids)} tokens; a beam search takes at most"
                f" {MAX_BEAM_STOP_TOKENS}",
                param="stop_token_ids",
            )
        if self.num_logprobs is not None:
            raise _not_with_beams("logprobs", "leave it out")
        if self.num_prompt_logprobs is not None:
            raise _not_with_beams("prompt_logprobs", "leave it out")
        if self.structured is not None:
            raise _not_with_beams(self.structured.param, "leave it out")

    def _typed(self) -> dict[str, Any]:
        """Return every number, and every value that holds some, as the type it is used as."""
        values: dict[str, Any] = {name: _integer(name, getattr(self, name)) for name in _INTEGERS}
        if self.top_k == -1:
            values["top_k"] = 0
        for name, shown_as in _OPTIONAL_INTEGERS.items():
            value = getattr(self, name)
            if value is not None:
                values[name] = _integer(shown_as, value)
        for name in _NUMBERS:
            values[name] = _number(name, getattr(self, name))
        # People write stop="\n"; as a tuple that would be taken apart into letters.
        stop: object = self.stop
        values["stop"] = (stop,) if isinstance(stop, str) else _items("stop", stop)
        for text in values["stop"]:
            if not isinstance(text, str):
                raise InvalidRequest(f"stop holds a value of the type {type(text).__name__}", param="stop")
        values["stop_token_ids"] = _integers("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            values["allowed_token_ids"] = _integers("allowed_token_ids", self.allowed_token_ids)
        values["bad_words"] = _items("bad_words", self.bad_words)
        for word in values["bad_words"]:
            if not isinstance(word, str):
                raise InvalidRequest(
                    f"bad_words holds a value of the type {type(word).__name__}", param="bad_words"
                )
        structured: object = self.structured
        if structured is not None and not isinstance(structured, StructuredOutput):
            raise InvalidRequest(
                f"structured is of the type {type(structured).__name__}, not a StructuredOutput",
                param="structured",
            )
        biases: object = self.logit_bias
        if not isinstance(biases, Mapping):
            raise InvalidRequest(
                f"logit_bias is of the type {type(biases).__name__}, not a mapping", param="logit_bias"
            )
        values["logit_bias"] = {
            _integer("logit_bias", token_id): _number("logit_bias", bias) for token_id, bias in biases.items()
        }
        return values

    @property
    def num_sequences(self) -> int:
        """How many continuations are generated; in a beam search, how wide it is."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes the logits, so that token counts must be kept."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


_INTEGERS = ("n", "top_k", "min_tokens")
_OPTIONAL_INTEGERS = {
    "best_of": "best_of",
    "max_tokens": "max_tokens",
    "seed": "seed",
    "num_logprobs": "logprobs",
    "num_prompt_logprobs": "prompt_logprobs",
}
"""Fields that may be None, with what clients call them."""
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
)
_MAX_INTEGER = 2**63 - 1
"""What no integer exceeds, wherever it goes from here."""


def _not_with_beams(name: str, advice: str) -> InvalidRequest:
    return InvalidRequest(f"{name} cannot be used in a beam search; {advice}", param=name)


def _integer(name: str, value: object) -> int:
    if type(value) is int or value is DEFAULT_MAX_TOKENS:
        return value
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        try:
            return operator.index(value)
        except TypeError:
            pass  # an array of numbers
    raise InvalidRequest(f"{name} is of the type {type(value).__name__}; it must be an integer", param=name)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequest(f"{name} is of the type {type(value).__name__}; it must be a number", param=name)
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidRequest(f"{name} is far out of range", param=name) from error


def _items(name: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise InvalidRequest(f"{name} is of the type {type(values).__name__}, not a list", param=name)
    return tuple(values)


def _integers(name: str, values: object) -> tuple[int, ...]:
    items = _items(name, values)
    if set(map(type, items)) <= {int}:  # nearly always, and there may be many
        return items
    return tuple(_integer(name, item) for item in items)


def _check_allowed(token_ids: tuple[int, ...]) -> None:
    name = "allowed_token_ids"
    if not token_ids:
        raise InvalidRequest(f"{name} is empty: nothing could be generated", param=name)
    if len(token_ids) > MAX_ALLOWED_TOKENS:
        raise InvalidRequest(
            f"{name} has {len(token_ids)} token ids; at most {MAX_ALLOWED_TOKENS} are taken", param=name
        )
    for token_id in (min(token_ids), max(token_ids)):
        _in_range(name, token_id, low=0)


def _check_bad_words(words: tuple[str, ...]) -> None:
    name = "bad_words"
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"{name} has {len(words)} words; at most {MAX_BAD_WORDS} are taken", param=name)
    num_characters = sum(map(len, words))
    if num_characters > MAX_BAD_WORD_CHARACTERS:
        raise InvalidRequest(
            f"{name} has {num_characters} characters in all; at most {MAX_BAD_WORD_CHARACTERS} are taken",
            param=name,
        )
    if not all(words):
        raise InvalidRequest(f"{name} may not hold an empty string", param=name)


def _in_range(
    name: str, value: float, *, low: float, high: float = math.inf, low_is_open: bool = False
) -> None:
    if isinstance(value, int) and abs(value) > _MAX_INTEGER + 1:
        # Not shown: it may have thousands of digits.
        raise InvalidRequest(f"{name} is an integer of more than 64 bits", param=name)
    # NaN compares false with everything, so the test is written as "not inside".
    inside = (low < value if low_is_open else low <= value) and value <= high and not math.isinf(value)
    if not inside:
        opening = "(" if low_is_open else "["
        upper = "" if high == math.inf else f" and at most {high}"
        bound = f"above {low}" if low_is_open else f"at least {low}"
        raise InvalidRequest(
            f"{name} is {value}; it must be {bound}{upper}"
            if high == math.inf
            else f"{name} is {value}; it must lie in {opening}{low}, {high}]",
            param=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """A prompt as text; `add_special_tokens` lets the tokenizer add what it adds by itself (BOS)."""

    text: str
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        text: object = self.text
        if not isinstance(text, str):
            raise InvalidRequest(f"prompt is of the type {type(text).__name__}, not text", param="prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensPrompt:
    """A prompt as token ids, taken as they are."""

    token_ids: Sequence[int]

    def __post_init__(self) -> None:
        token_ids: object = self.token_ids
        if not isinstance(token_ids, Sized) or isinstance(token_ids, str | bytes | bytearray | Mapping):
            raise InvalidRequest(
                f"prompt is of the type {type(token_ids).__name__}, not a list of token ids", param="prompt"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation, rendered through the model's chat template.

    Args:
        messages: Each with `role` and `content`, as the template expects them.
        add_generation_prompt: End with the opening of the assistant's turn.
        continue_final_message: Leave the last message open, so that the model continues it.
        template_kwargs: Further names the template may use.
        chat_template: A template instead of the model's own.
        add_special_tokens: Let the tokenizer add what it adds by itself, though templates say that, too.
        rendered: The text, if somebody has put the conversation through the template already.
    """

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    add_special_tokens: bool = False
    rendered: str | None = None


Prompt = TextPrompt | TokensPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it enters the engine.

    Args:
        request_id: Unique among the requests in the engine.
        arrival_s: Monotonic time at which it was received.
        priority: Lower runs first under the `priority` policy; ignored under `fcfs`.
        cache_salt: Separates prefix caches: blocks are shared only among equal salts.
        truncate_prompt_tokens: Keep only so many of the prompt's last tokens, at least 1; -1 keeps as many as
            leave room for `max_tokens` (for one token where it is None); None keeps all.
        cuts_max_tokens: A `max_tokens` above what the context leaves is cut to that instead of refused.
        tenant: Whose share of the server it uses, under the `fair` policy; equal texts share one.
        trace_headers: `traceparent` and `tracestate`, if the client sent them: the trace it belongs to.
        deadline_s: Monotonic time at which it is ended if it has not ended by then; None for never.

    Raises:
        InvalidRequest: `prompt`, `priority`, `cache_salt`, `truncate_prompt_tokens`, `tenant` or `deadline_s`
            is of a wrong type, or `truncate_prompt_tokens` is out of range.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    arrival_s: float
    priority: int = 0
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    cuts_max_tokens: bool = False
    tenant: str = ""
    deadline_s: float | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Used deep in the engine, where a value of another type would harm everybody's requests.
        for name, kinds in (
            ("prompt", Prompt),
            ("priority", int),
            ("cache_salt", str | None),
            ("tenant", str),
            ("deadline_s", float | int | None),
        ):
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise InvalidRequest(f"{name} is of the type {type(value).__name__}", param=name)
        name = "truncate_prompt_tokens"
        if self.truncate_prompt_tokens is not None:
            num_kept = _integer(name, self.truncate_prompt_tokens)
            object.__setattr__(self, name, num_kept)
            _in_range(name, num_kept, low=-1)
            if num_kept == 0:
                raise InvalidRequest(f"{name} is 0; at least one token must be left, or -1", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedRequest:
    """One sequence of a request, ready for the scheduler; a request makes `sampling.num_sequences`.

    Args:
        sequence_id: Unique for the life of the engine; what scheduler and detokenizer know it by.
        index: Which of the request's sequences this is; of a beam search, which of its results it becomes.
        prompt_token_ids: `array('i')`, at least one token.
        max_output_len: Most tokens to generate: `max_tokens` if it was given, else what the context leaves.
        stop_token_ids: Every id that ends the sequence: the request's and, unless ignored, the EOS ids.
        seed: What the sampler uses, 64 bits, drawn if the request gave none.
        bad_words: The spellings of the request's bad words, each as its tokens.
        grammar: What the output must follow: the request's `structured`, compiled.
    """

    request: Request
    sequence_id: int
    index: int
    prompt_token_ids: "array[int]"
    max_output_len: int
    stop_token_ids: frozenset[int]
    seed: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probability of one token and of its likeliest rivals.

    Args:
        token_id: The token that was chosen (or that stands in the prompt).
        logprob: Its log-probability under the model's own distribution (before temperature, penalties
            and truncation).
        rank: How many tokens were at least as likely, itself included; 1 is the likeliest.
        top: (token id, logprob) of the likeliest tokens, likeliest first; as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class TokenDelta:
    """What one step gave one sequence: scheduler → detokenizer.

    Args:
        token_ids: New output tokens, oldest first; may be empty when only the end is reported. A stop
            token (EOS included) that ended the sequence is the last of them.
        logprobs: One per new token, if asked for.
        prompt_logprobs: One per prompt token from the second on, delivered once, with the first token.
        finish_reason: Set on the last delta of the sequence.
        stop_token_id: The stop token that ended it, if it was one of the request's `stop_token_ids` or
            the EOS: its text is left out.
        num_cached_tokens: Prompt tokens taken from the prefix cache.
        error: Why it ended, with FinishReason.ERROR.
    """

    sequence_id: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: AsyncserveError | None = None


@dataclass(slots=True)
class Usage:
    """Token counts of one sequence, given with its last output."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(slots=True)
class RequestOutput:
    """New output of one choice of a request: detokenizer → sink.

    Args:
        index: Which of the request's `n` choices.
        text: New text; empty while bytes of a character or the start of a stop string are held back.
        token_ids: New token ids.
        logprobs: One per new token, if asked for.
        prompt_logprobs: With the first output, if asked for.
        finish_reason: Set on the choice's last output; nothing follows it.
        stop_reason: The stop string or stop token id that ended it (None for EOS and length).
        usage: Counts up to this output; set with `finish_reason`, and on every output of a sink whose
            `wants_usage` is true.
        error: Set with FinishReason.ERROR.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    error: AsyncserveError | None = None


def merge_all(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Return outputs of one choice, at least one, oldest first, as one output."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    return RequestOutput(
        index=last.index,
        text="".join([output.text for output in outputs]),
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=_all_entries([output.logprobs for output in outputs]),
        prompt_logprobs=_all_entries([output.prompt_logprobs for output in outputs]),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        error=last.error,
    )


def _all_entries(lists: Sequence[Sequence[TokenLogprobs] | None]) -> list[TokenLogprobs] | None:
    present = [entries for entries in lists if entries is not None]
    return [entry for entries in present for entry in entries] if present else None


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Add up the choices of one prompt, at least one: its tokens count once.

    Cached tokens are those of the choice that found fewest: the others found what it had computed.
    """
    return Usage(
        num_prompt_tokens=usages[0].num_prompt_tokens,
        num_output_tokens=sum(usage.num_output_tokens for usage in usages),
        num_cached_tokens=min(usage.num_cached_tokens for usage in usages),
    )


class OutputSink(Protocol):
    """Where a request's output goes. Called on the loop thread, once per choice and step at most.

    `begin` is called once, when the prompt is tokenized. `put` then takes the outputs of all choices, in
    order per choice; after each of the `n` choices has had one with a `finish_reason`, nothing more
    comes. `fail` replaces all further calls when the request cannot be served (tokenizing failed,
    admission refused, engine stopped). None of them may block, await or raise: a sink that is behind
    merges or drops on its own account.
    """

    wants_usage: bool

    def begin(self, prompt_token_ids: "array[int]") -> None:
        """Take note of the tokenized prompt; the first call, made before any output."""

    def put(self, output: RequestOutput) -> None:
        """Take new output of one choice."""

    def fail(self, error: AsyncserveError) -> None:
        """Take the error that ends the whole request."""


class TextSink(ABC):
    """An `OutputSink` that may have a lane, a shorter way for tokens that mean nothing but their text.

    No `RequestOutput` is made of them: `token_path.deliver` puts their encoded texts into the lane. Anything
    else goes by `put`, and behind what the lane holds.
    """

    @staticmethod
    @abstractmethod
    def encode(text: str) -> bytes:
        """Return a text as its lanes take it; always the same function for sinks of one class."""

    @abstractmethod
    def lane(self, index: int) -> TextLane | None:
        """Return the lane of a choice, or None if its next output must come by `put`.

        Asked after every `put`; the answer holds until the next one.
        """
