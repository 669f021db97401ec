"""JSON to requests: every field of the API, once, with its type and what becomes of it.

Bodies are decoded by msgspec into typed structures: a wrong type is refused with the field's name. Values
are checked here against what only the server knows (vocabulary, limits); ranges are checked by
`SamplingParams`. Fields that would change the answer but are not implemented are refused unless they have
the value that means "off"; harmless ones are ignored; names nobody knows are ignored and logged once.
"""

import gc
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from asyncserve.errors import InvalidRequest
from asyncserve.http.message_schema import ChosenTool, Messages, Tools
from asyncserve.http.structure import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseFormat,
    StructuredOutputs,
)
from asyncserve.request import MAX_ALLOWED_TOKENS, MAX_BAD_WORDS, SamplingParams, StructuredOutput

logger = logging.getLogger(__name__)

MAX_CHOICES = 128
"""Most choices (`n`) of one prompt."""
MAX_SEQUENCES = 2048
"""Most sequences (prompts times `n`) of one HTTP request."""
MAX_TOKEN_IDS = 4096
"""Most entries of `stop_token_ids` and of `logit_bias` (OpenAI takes 300 of the latter)."""
MAX_FIELDS = 1024
"""Most fields of a body, unknown ones included."""
MAX_CACHE_SALT_LEN = 128
MAX_SHOWN_NAME_LEN = 64
"""A name that a client chose is shown in messages up to so many characters."""
REQUEST_ID_PATTERN = re.compile(r"[\x21-\x7e]{1,256}")
"""What is taken as a request id: printable, without spaces, short."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "custom_logit_processor": (),
    "documents": ([],),
    "ebnf": (),
    "ec_transfer_params": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "input_ids": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "logprob_token_ids": (),
    "lora_path": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prompt_embeds": (),
    "regex": (),
    "return_hidden_states": (False,),
    "repetition_detection": (),
    "return_token_offsets": (False,),
    "separate_reasoning": (True,),
    "stop_regex": (),
    "stream_interval": (1,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "thinking_token_budget": (-1,),
    "truncation_side": ("left",),
    "web_search_options": (),
}
"""Fields that change the answer and are not implemented; with each, the values that ask for nothing."""

REASONS: Mapping[str, str] = {
    "ebnf": "ebnf is not supported by this server; use structured_outputs.grammar",
    "function_call": "function_call, the older form of tool_choice, is not supported; use tool_choice",
    "functions": "functions, the older form of tools, is not supported; use tools",
    "json_schema": "json_schema is not supported as a field of its own; use response_format",
    "no_stop_trim": "no_stop_trim is not supported; use include_stop_str_in_output",
    "regex": "regex is not supported as a field of its own; use structured_outputs.regex",
    "suffix": "suffix is not supported: this server continues texts and fills no gaps",
    "truncation_side": "truncation_side can only be left: the end of a prompt is kept",
}
"""What is said of some of them."""

HARMLESS = frozenset(
    {
        "include_reasoning",
        "metadata",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
        "verbosity",
    }
)
"""Fields of OpenAI's API that do not change what a local model answers: taken and not used."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a streamed answer."""

    include_usage: Annotated[
        bool | None, msgspec.Meta(description="End the stream with an event that has the token counts")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, msgspec.Meta(description="Give the counts so far in every event, too")
    ] = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields that both generating endpoints have. None means that the client left it out."""

    model: Annotated[
        str | None, msgspec.Meta(description="The model's name; the served one's if left out")
    ] = None
    max_tokens: Annotated[
        int | None,
        msgspec.Meta(
            description="Most tokens to generate. Left out: 16 in completions, all there is room for in chat"
        ),
    ] = None
    min_tokens: Annotated[
        int | None, msgspec.Meta(description="Before so many tokens neither EOS nor a stop ends the answer")
    ] = None
    temperature: Annotated[
        float | None,
        msgspec.Meta(description="What logits are divided by; 0 always takes the likeliest token"),
    ] = None
    top_p: Annotated[
        float | None,
        msgspec.Meta(description="Choose among the fewest tokens whose probabilities add up to this"),
    ] = None
    top_k: Annotated[
        int | None, msgspec.Meta(description="Choose among so many likeliest tokens; 0 and -1 mean all")
    ] = None
    min_p: Annotated[
        float | None,
        msgspec.Meta(description="Leave out tokens less likely than this times the likeliest one"),
    ] = None
    n: Annotated[int | None, msgspec.Meta(description="Answers to each prompt")] = None
    best_of: Annotated[
        int | None,
        msgspec.Meta(
            description="Generate so many answers, and give the `n` likeliest by log-probability per token;"
            " all count in the usage. With use_beam_search, how wide it searches. Above `n` not with stream"
        ),
    ] = None
    use_beam_search: Annotated[
        bool | None,
        msgspec.Meta(
            description="Give the `n` likeliest answers that a beam search finds, as wide as `best_of` or"
            " `n`; not with stream, stop, log-probabilities, a shape of the answer, or what changes the odds"
        ),
    ] = None
    length_penalty: Annotated[
        float | None,
        msgspec.Meta(
            description="A beam search ranks answers by log-probability divided by length to this power"
        ),
    ] = None
    early_stopping: Annotated[
        bool | Literal["never"] | None,
        msgspec.Meta(
            description="A beam search ends with as many finished answers as it is wide (true), when better"
            ' ones are unlikely (false), or when there can be none ("never")'
        ),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        msgspec.Meta(description="Strings that end the answer, which does not contain them"),
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[int], msgspec.Meta(max_length=MAX_TOKEN_IDS)] | None,
        msgspec.Meta(description="Tokens that end the answer, besides EOS"),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, msgspec.Meta(description="Keep the stop string that ended the answer at its end")
    ] = None
    ignore_eos: Annotated[bool | None, msgspec.Meta(description="EOS does not end the answer")] = None
    seed: Annotated[
        int | None,
        msgspec.Meta(
            description="The same seed draws the same random numbers, whatever else the server does. What the"
            " model computes may differ in the last bit with the size of the batch, which in bfloat16 can"
            " change a token where two are nearly equal"
        ),
    ] = None
    presence_penalty: Annotated[
        float | None, msgspec.Meta(description="Taken off the logits of tokens the answer already has")
    ] = None
    frequency_penalty: Annotated[
        float | None, msgspec.Meta(description="Taken off the same as often as the answer has them")
    ] = None
    repetition_penalty: Annotated[
        float | None,
        msgspec.Meta(description="Makes tokens of prompt and answer less likely above 1, likelier below"),
    ] = None
    logit_bias: Annotated[
        Annotated[dict[int, float], msgspec.Meta(max_length=MAX_TOKEN_IDS)] | None,
        msgspec.Meta(description="Token ids with values that are added to their logits"),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[int], msgspec.Meta(max_length=MAX_ALLOWED_TOKENS)] | None,
        msgspec.Meta(description="Only these tokens are generated; name EOS, too, if it may end the answer"),
    ] = None
    bad_words: Annotated[
        Annotated[list[str], msgspec.Meta(max_length=MAX_BAD_WORDS)] | None,
        msgspec.Meta(
            description="Texts whose tokens are not generated one after the other, with or without a space"
            " before them"
        ),
    ] = None
    skip_special_tokens: Annotated[
        bool | None, msgspec.Meta(description="Leave special tokens out of the text; true if left out")
    ] = None
    spaces_between_special_tokens: Annotated[
        bool | None,
        msgspec.Meta(description="Taken and not used: text is what the tokens say, without spaces between"),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        msgspec.Meta(description="Put before a prompt what the tokenizer does by itself (BOS); not in chat"),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        msgspec.Meta(
            description="Keep only so many of the prompt's last tokens; -1 keeps what leaves room for"
            " max_tokens"
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        msgspec.Meta(
            description="Give the log-probability of each prompt token and so many likeliest ones; -1 gives"
            " as many as the server gives; not with stream"
        ),
    ] = None
    return_token_ids: Annotated[
        bool | None, msgspec.Meta(description="Give the token ids of prompt and answer")
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, msgspec.Meta(description="Name tokens in log-probabilities as `token_id:` and the id")
    ] = None
    response_format: Annotated[
        ResponseFormat | None, msgspec.Meta(description="The shape of the answer: any text, or JSON")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        msgspec.Meta(description="The shape of the answer: JSON, an expression, a choice or a grammar"),
    ] = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None
    stream: Annotated[
        bool | None, msgspec.Meta(description="Answer in server-sent events as tokens are generated")
    ] = None
    stream_options: Annotated[
        StreamOptions | None, msgspec.Meta(description="What a stream has besides; only with stream")
    ] = None
    priority: Annotated[
        int | None, msgspec.Meta(description="Lower goes first, with --scheduling-policy priority")
    ] = None
    cache_salt: Annotated[
        str | None,
        msgspec.Meta(description="Cached prompts are shared only among requests with the same salt"),
    ] = None
    request_id: Annotated[
        str | None,
        msgspec.Meta(description="The id to answer under, unless the header X-Request-Id gives one"),
    ] = None
    user: Annotated[str | None, msgspec.Meta(description="Taken and not used")] = None


class CompletionBody(GenerationBody, kw_only=True):
    """Body of POST /v1/completions; `decode_prompt` reads the prompt, which has four forms."""

    # A factory: the JSON schema of a struct cannot say what a `Raw` default is.
    prompt: Annotated[
        msgspec.Raw,
        msgspec.Meta(description="A text, several, a list of token ids, or several"),
    ] = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    echo: Annotated[
        bool | None,
        msgspec.Meta(description="Begin the answer with the prompt; then max_tokens may be 0"),
    ] = None
    logprobs: Annotated[
        int | None,
        msgspec.Meta(description="Give the log-probability of each token and of so many likeliest ones"),
    ] = None


MessagesField = Annotated[
    Messages | None, msgspec.Meta(description="The conversation so far, at least one message")
]
ToolsField = Annotated[Tools | None, msgspec.Meta(description="Functions that the model may call")]
DocumentsField = Annotated[
    list[dict[str, Any]] | None, msgspec.Meta(description="Documents, for chat templates that show them")
]
AddGenerationPromptField = Annotated[
    bool | None,
    msgspec.Meta(
        description="End the prompt with the opening of the assistant's turn; true unless the final message"
        " is continued"
    ),
]
ContinueFinalMessageField = Annotated[
    bool | None, msgspec.Meta(description="Let the model go on with the last message instead of answering it")
]
ChatTemplateField = Annotated[
    str | None,
    msgspec.Meta(
        description="A chat template instead of the model's; only with --trust-request-chat-template"
    ),
]
ChatTemplateKwargsField = Annotated[
    dict[str, Any] | None,
    msgspec.Meta(description="Further variables for the chat template, such as `enable_thinking`"),
]
ReasoningEffortField = Annotated[
    str | None, msgspec.Meta(description="A variable for chat templates that know it; others ignore it")
]


class ChatBody(GenerationBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: MessagesField = None
    tools: ToolsField = None
    tool_choice: Annotated[
        str | ChosenTool | None,
        msgspec.Meta(
            description="`none`, `auto`, `required`, a function to call, or the tools that are allowed;"
            " `auto` if there are tools"
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, msgspec.Meta(description="Whether one answer may hold several calls; true if left out")
    ] = None
    documents: DocumentsField = None
    add_generation_prompt: AddGenerationPromptField = None
    continue_final_message: ContinueFinalMessageField = None
    echo: Annotated[
        bool | None,
        msgspec.Meta(
            description="Begin the answer with the text of the last message, if it is the assistant's"
        ),
    ] = None
    chat_template: ChatTemplateField = None
    chat_template_kwargs: ChatTemplateKwargsField = None
    reasoning_effort: ReasoningEffortField = None
    include_reasoning: Annotated[
        bool | None, msgspec.Meta(description="Whether reasoning is part of the answer; true if left out")
    ] = None
    max_completion_tokens: Annotated[
        int | None,
        msgspec.Meta(
            description="Most tokens to generate, reasoning included; what the context leaves if left out"
        ),
    ] = None
    logprobs: Annotated[bool | None, msgspec.Meta(description="Give the log-probability of each token")] = (
        None
    )
    top_logprobs: Annotated[
        int | None, msgspec.Meta(description="And of so many of its likeliest rivals; needs `logprobs`")
    ] = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a prompt, or messages with the fields that chat has for them."""

    model: Annotated[str | None, msgspec.Meta(description="The model's name")] = None
    messages: MessagesField = None
    tools: ToolsField = None
    documents: DocumentsField = None
    add_generation_prompt: AddGenerationPromptField = None
    continue_final_message: ContinueFinalMessageField = None
    chat_template: ChatTemplateField = None
    chat_template_kwargs: ChatTemplateKwargsField = None
    reasoning_effort: ReasoningEffortField = None
    prompt: Annotated[str | None, msgspec.Meta(description="A text instead of messages")] = None
    add_special_tokens: Annotated[
        bool | None,
        msgspec.Meta(
            description="Add what the tokenizer adds by itself (BOS); true for a prompt, false for messages"
        ),
    ] = None
    return_token_strs: Annotated[bool | None, msgspec.Meta(description="Give the tokens' texts, too")] = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    model: Annotated[str | None, msgspec.Meta(description="The model's name")] = None
    tokens: Annotated[list[int], msgspec.Meta(description="Token ids")]


Body = TypeVar("Body", bound=msgspec.Struct)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector from looking at objects while they are made, again and again.

    Of a body of 2.7 MB with half a million objects that is two thirds of the time. A thread would be no help:
    the decoder never lets go of the interpreter, so that the loop would stand still all the same.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class BodyDecoder:
    """Decodes request bodies and remembers which unknown fields it has warned of."""

    MAX_WARNED = 256
    """Names remembered; after that many it warns no more, so that clients cannot flood log and memory."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def decode(self, body: bytes, kind: type[Body]) -> Body:
        """Decode `body` as a `kind`.

        Raises:
            InvalidRequest: It is no JSON object, a field has a wrong type, or a field asks for something
                that is not implemented; `param` names the field.
        """
        if not body.strip():
            raise InvalidRequest("the request has no body; send a JSON object")
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not valid UTF-8 at byte {error.start}") from error
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            self._check_names(fields, kind)
            with _collector_paused():
                return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            raise _wrong_type(str(error)) from error
        except msgspec.DecodeError as error:
            raise _malformed(body, str(error), kind.__struct_fields__) from error
        except RecursionError as error:
            raise InvalidRequest("the body's JSON is nested too deeply") from error

    def _check_names(self, fields: Mapping[str, msgspec.Raw], kind: type[msgspec.Struct]) -> None:
        if len(fields) > MAX_FIELDS:
            raise InvalidRequest(f"the body has {len(fields)} fields; at most {MAX_FIELDS} are taken")
        unknown = fields.keys() - set(kind.__struct_fields__) - HARMLESS
        for name in unknown:
            if name in UNSUPPORTED:
                try:
                    value = msgspec.json.decode(fields[name])
                except msgspec.ValidationError as error:
                    raise InvalidRequest(f"{name}: {error}", param=name) from error
                if value is not None and value not in UNSUPPORTED[name]:
                    raise InvalidRequest(
                        REASONS.get(name, f"{name} is not supported by this server"), param=name
                    )
            elif name not in self._warned and len(self._warned) < self.MAX_WARNED:
                self._warned.add(name)
                logger.warning("ignoring the unknown request field %r", name[:MAX_SHOWN_NAME_LEN])


_PATH = re.compile(r" - at (?:`key` in )?`\$(.*)`$")
_FIELD = re.compile(r"\.(\w+)")
_MISSING = re.compile(r"Object missing required field `(\w+)`$")
_BYTE = re.compile(r"\(byte (\d+)\)$")
_KEY = re.compile(rb'"(\w{1,%d})"\s*:\s*-?$' % MAX_SHOWN_NAME_LEN)
_LONE_SURROGATE = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F])*+"
    rb"(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""Matched from the beginning: an escaped half of a surrogate pair, behind anything else."""


def _wrong_type(message: str) -> InvalidRequest:
    # msgspec says: Expected `int | null`, got `str` - at `$.messages[0].role`
    found = _PATH.search(message)
    if (missing := _MISSING.match(message)) is not None:
        return InvalidRequest(f"{missing[1]} is missing", param=missing[1])
    if found is None:
        return InvalidRequest(f"the body must be a JSON object: {message}")
    path = found[1].lstrip(".")
    field = _FIELD.match(found[1])
    return InvalidRequest(f"{path}: {message[: found.start()]}", param=field[1] if field else None)


def _malformed(body: bytes, message: str, fields: Sequence[str] = ()) -> InvalidRequest:
    """Say why a body is not valid JSON.

    Args:
        message: What the decoder says.
        fields: Names at the top of the body, one of which may be at fault.
    """
    found = _BYTE.search(message)
    offset = int(found[1]) if found else 0
    if found and body[offset : offset + 3] in (b"NaN", b"Inf"):
        # Python's json module writes these; JSON has no such numbers.
        key = _KEY.search(body[max(0, offset - MAX_SHOWN_NAME_LEN - 16) : offset])
        name = key[1].decode() if key else None
        return InvalidRequest(f"{name or 'a value'} is not a finite number", param=name)
    surrogate = _LONE_SURROGATE.match(body)
    if surrogate is not None:
        # msgspec calls the body truncated.
        ends = {name: _value_offset(body, name, surrogate.start(1)) for name in fields}
        at_fault = max(ends, key=ends.__getitem__, default=None)
        name = at_fault if at_fault is not None and ends[at_fault] >= 0 else None
        return InvalidRequest(
            f"{name or 'the body'} holds {surrogate[1].decode()}, half of a surrogate pair, which is no"
            " character",
            param=name,
        )
    return InvalidRequest(f"the body is not valid JSON: {message}")


def _value_offset(body: bytes, name: str, end: int) -> int:
    """Return where the last field of that name before `end` begins, or -1."""
    quoted = b'"%b"' % name.encode()
    at = body.rfind(quoted, 0, end)
    is_key = at >= 0 and body[at + len(quoted) : at + len(quoted) + 16].lstrip()[:1] == b":"
    return at if is_key else -1


def decode_prompt(prompt: msgspec.Raw) -> list[str] | list[list[int]]:
    """Return the prompts of a completion body: one string, several, one list of token ids, or several.

    Each form has a type of its own, so that a long one is read and checked without a loop in Python.

    Raises:
        InvalidRequest: It is missing, empty, of no such form, or holds too many prompts.
    """
    text = bytes(prompt).lstrip()
    if text == b"null":
        raise InvalidRequest("prompt is missing", param="prompt")
    first = text[1:].lstrip()[:1] if text[:1] == b"[" else b""
    try:
        if text[:1] == b'"':
            return [msgspec.json.decode(text, type=str)]
        if first == b"[":
            # Counted before they are made: a million lists take a third of a second.
            _check_num_prompts(text.count(b"[") - 1)
            return msgspec.json.decode(text, type=list[list[int]])
        if first == b'"':
            texts = msgspec.json.decode(text, type=list[str])
            _check_num_prompts(len(texts))
            return texts
        token_ids = msgspec.json.decode(text, type=list[int])
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, not a"
            f" mixture: {error}",
            param="prompt",
        ) from error
    except msgspec.DecodeError as error:
        malformed = _malformed(text, str(error))
        malformed.param = "prompt"
        raise malformed from error
    if not token_ids:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    return [token_ids]


def _check_num_prompts(num_prompts: int) -> None:
    if num_prompts > MAX_SEQUENCES:
        raise InvalidRequest(
            f"prompt holds {num_prompts} prompts; at most {MAX_SEQUENCES} are taken", param="prompt"
        )


def sampling_params(
    body: GenerationBody,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
    structured: StructuredOutput | None = None,
) -> SamplingParams:
    """Build the sampling parameters of a request; `defaults` stand in for what it leaves out.

    Args:
        num_logprobs: With output tokens.
        num_prompt_logprobs: With prompt tokens.
        structured: As `structured_output` gave it.

    Raises:
        InvalidRequest: A value is out of range.
    """
    if body.n is not None and body.n > MAX_CHOICES:
        raise InvalidRequest(f"n is {_shown(body.n)}; at most {MAX_CHOICES} choices are given", param="n")
    if body.best_of is not None and body.best_of > MAX_CHOICES:
        raise InvalidRequest(
            f"best_of is {_shown(body.best_of)}; at most {MAX_CHOICES} answers are generated", param="best_of"
        )
    given = {
        "n": body.n,
        "best_of": body.best_of,
        "use_beam_search": body.use_beam_search,
        "length_penalty": body.length_penalty,
        "early_stopping": body.early_stopping,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "min_tokens": body.min_tokens,
        "stop": body.stop,
        "stop_token_ids": body.stop_token_ids,
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "ignore_eos": body.ignore_eos,
        "seed": body.seed,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": body.logit_bias,
        "skip_special_tokens": body.skip_special_tokens,
        "allowed_token_ids": body.allowed_token_ids,
        "bad_words": body.bad_words,
        "structured": structured,
    }
    # A beam search draws nothing: values recommended for drawing are not meant for it.
    values: dict[str, Any] = {} if body.use_beam_search else dict(defaults)
    values.update((name, value) for name, value in given.items() if value is not None)
    return SamplingParams(
        max_tokens=max_tokens, num_logprobs=num_logprobs, num_prompt_logprobs=num_prompt_logprobs, **values
    )


def check_common(body: GenerationBody) -> None:
    """Refuse what both endpoints refuse and `SamplingParams` does not see.

    Raises:
        InvalidRequest: Stream options without a stream, a stream of what is known at its end, a salt or a
            request id that cannot be meant.
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options are for streams; set stream to true", param="stream_options")
    if body.stream and body.use_beam_search:
        raise InvalidRequest(
            "a beam search knows its answers at its end only; leave out stream", param="stream"
        )
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        raise InvalidRequest(
            f"best_of is {_shown(body.best_of)}, above n {_shown(body.n or 1)}: which answers are best is"
            " known at their end only; leave out stream",
            param="best_of",
        )
    salt = body.cache_salt
    if salt is not None and not 0 < len(salt) <= MAX_CACHE_SALT_LEN:
        raise InvalidRequest(
            f"cache_salt has {len(salt)} characters; it must have 1 to {MAX_CACHE_SALT_LEN}",
            param="cache_salt",
        )
    if body.request_id is not None and not REQUEST_ID_PATTERN.fullmatch(body.request_id):
        raise InvalidRequest(
            "request_id must have 1 to 256 printable ASCII characters and no spaces", param="request_id"
        )


def check_num_logprobs(num_logprobs: int, limit: int, *, param: str) -> None:
    """Refuse more log-probabilities per token than the server gives.

    Raises:
        InvalidRequest: There are too many, or fewer than none.
    """
    if not 0 <= num_logprobs <= limit:
        raise InvalidRequest(f"{param} is {_shown(num_logprobs)}; it must lie in [0, {limit}]", param=param)


def num_prompt_logprobs(body: GenerationBody, limit: int) -> int | None:
    """Return how many log-probabilities a request wants with each prompt token.

    Raises:
        InvalidRequest: Too many, or any in a stream.
    """
    asked = body.prompt_logprobs
    if asked is None:
        return None
    if body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed; leave out stream", param="prompt_logprobs")
    if asked == -1:
        return limit
    check_num_logprobs(asked, limit, param="prompt_logprobs")
    return asked


def _shown(number: int) -> str:
    return str(number) if number.bit_length() <= 64 else "an integer of more than 64 bits"
