"""JSON to requests: every field of the API, once, with its type and what becomes of it.

Bodies are decoded by msgspec into typed structures: a wrong type is refused with the field's name. Values
are checked here against what only the server knows (vocabulary, limits); ranges are checked by
`SamplingParams`. Fields that would change the answer but are not implemented are refused unless they have
the value that means "off"; harmless ones are ignored; names nobody knows are ignored and logged once.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from asyncserve.errors import InvalidRequest
from asyncserve.request import SamplingParams

logger = logging.getLogger(__name__)

MAX_CHOICES = 128
"""Most choices (`n`) of one prompt."""
MAX_SEQUENCES = 2048
"""Most sequences (prompts times `n`) of one HTTP request."""
MAX_TOKEN_IDS = 4096
"""Most entries of `stop_token_ids` and of `logit_bias` (OpenAI takes 300 of the latter)."""
MAX_MESSAGES = 4096
"""Most messages of a conversation."""
MAX_FIELDS = 1024
"""Most fields of a body, unknown ones included."""
MAX_CACHE_SALT_LEN = 128
MAX_SHOWN_NAME_LEN = 64
"""A name that a client chose is shown in messages up to so many characters."""
REQUEST_ID_PATTERN = re.compile(r"[\x21-\x7e]{1,256}")
"""What is taken as a request id: printable, without spaces, short."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": (),
    "echo": (False,),
    "ec_transfer_params": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that change the answer and are not implemented; with each, the values that ask for nothing."""

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

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields that both generating endpoints have. None means that the client left it out."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], msgspec.Meta(max_length=MAX_TOKEN_IDS)] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """Body of POST /v1/completions; `decode_prompt` reads the prompt, which has four forms."""

    prompt: msgspec.Raw = msgspec.Raw(b"null")
    echo: bool | None = None
    logprobs: int | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[Message], msgspec.Meta(max_length=MAX_MESSAGES)]


class ChatBody(GenerationBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a prompt, or messages with the fields that chat has for them."""

    model: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=msgspec.Struct)


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
                    raise InvalidRequest(f"{name} is not supported by this server", param=name)
            elif name not in self._warned and len(self._warned) < self.MAX_WARNED:
                self._warned.add(name)
                logger.warning("ignoring the unknown request field %r", name[:MAX_SHOWN_NAME_LEN])


_PATH = re.compile(r" - at (?:`key` in )?`\$(.*)`$")
_FIELD = re.compile(r"\.(\w+)")
_BYTE = re.compile(r"\(byte (\d+)\)$")
_KEY = re.compile(rb'"(\w{1,%d})"\s*:\s*-?$' % MAX_SHOWN_NAME_LEN)
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2}))"
)
"""An escaped half of a surrogate pair whose other half is not beside it; not behind an escaped backslash."""


def _wrong_type(message: str) -> InvalidRequest:
    # msgspec says: Expected `int | null`, got `str` - at `$.messages[0].role`
    found = _PATH.search(message)
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
    surrogate = _LONE_SURROGATE.search(body)
    if surrogate is not None:
        # msgspec calls the body truncated.
        ends = {name: _value_offset(body, name, surrogate.start()) for name in fields}
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
) -> SamplingParams:
    """Build the sampling parameters of a request; `defaults` stand in for what it leaves out.

    Raises:
        InvalidRequest: A value is out of range.
    """
    if body.n is not None and body.n > MAX_CHOICES:
        raise InvalidRequest(f"n is {_shown(body.n)}; at most {MAX_CHOICES} choices are given", param="n")
    given = {
        "n": body.n,
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
    }
    values: dict[str, Any] = dict(defaults)
    values.update((name, value) for name, value in given.items() if value is not None)
    return SamplingParams(
        max_tokens=max_tokens, num_logprobs=num_logprobs, num_prompt_logprobs=num_prompt_logprobs, **values
    )


def check_common(body: GenerationBody) -> None:
    """Refuse what both endpoints refuse and `SamplingParams` does not see.

    Raises:
        InvalidRequest: Stream options without a stream, a salt or a request id that cannot be meant.
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options are for streams; set stream to true", param="stream_options")
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


def _shown(number: int) -> str:
    return str(number) if number.bit_length() <= 64 else "an integer of more than 64 bits"
