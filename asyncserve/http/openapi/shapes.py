"""What answers look like, as types: the response half of `/openapi.json`, beside the bodies of `schema`.

Nothing is built from these structs: answers are written where they are made, per token, without an object
in between. They are a second statement of the same shapes, strict (no field that is not named here), and the
tests hold every answer of a live server against them.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

NotNegative = Annotated[int, Meta(ge=0)]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all: no other fields."""


class ErrorDetail(Shape):
    """What went wrong."""

    message: Annotated[str, Meta(min_length=1)]
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: Annotated[str | None, Meta(description="The request field at fault.")]
    code: Annotated[str | None, Meta(description="A word that programs can compare.")]


class ErrorBody(Shape):
    """OpenAI's error envelope."""

    error: ErrorDetail


class PromptTokensDetails(Shape):
    """Of the prompt's tokens."""

    cached_tokens: Annotated[int, Meta(ge=0, description="Found in the prefix cache.")]


class CompletionTokensDetails(Shape):
    """Of the generated tokens."""

    reasoning_tokens: Annotated[int, Meta(ge=0, description="Spent on reasoning.")]


class UsageBody(Shape):
    """Token counts of a call."""

    prompt_tokens: NotNegative
    completion_tokens: NotNegative
    total_tokens: NotNegative
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionLogprobsBody(Shape):
    """Parallel lists, one entry per token; the first token of an echoed prompt has nulls."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[NotNegative]


class PromptLogprob(Shape):
    """Log-probability of a token at a place of the prompt."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For every prompt token: token id to its log-probability; null for the first."""


class CompletionChoice(Shape):
    """One choice."""

    index: NotNegative
    text: str
    logprobs: CompletionLogprobsBody | None
    finish_reason: FinishReason
    stop_reason: Annotated[str | int | None, Meta(description="The stop string or token id that ended it.")]
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[NotNegative] | UnsetType | None = UNSET
    token_ids: list[NotNegative] | UnsetType | None = UNSET


class CompletionAnswer(Shape):
    """Answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: Annotated[list[CompletionChoice], Meta(min_length=1)]
    usage: UsageBody


class CompletionChunkChoice(Shape):
    """News of one choice."""

    index: NotNegative
    text: str
    logprobs: CompletionLogprobsBody | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[NotNegative] | UnsetType | None = UNSET
    token_ids: list[NotNegative] | UnsetType | None = UNSET


class CompletionChunk(Shape):
    """One event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET


class TopLogprob(Shape):
    """A rival of a token."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]] | None


class TokenLogprob(Shape):
    """A token, its log-probability and its rivals'."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobsBody(Shape):
    """Log-probabilities of a message's tokens."""

    content: list[TokenLogprob] | None
    refusal: None


class CalledFunction(Shape):
    """Which function a model calls, and with what."""

    name: Annotated[str, Meta(min_length=1)]
    arguments: Annotated[str, Meta(description="A JSON object, as text.")]


class ToolCallBody(Shape):
    """A tool call."""

    id: Annotated[str, Meta(min_length=1)]
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Shape):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET


class ChatChoice(Shape):
    """One choice."""

    index: NotNegative
    message: AssistantMessage
    logprobs: ChatLogprobsBody | None
    finish_reason: FinishReason
    stop_reason: Annotated[str | int | None, Meta(description="The stop string or token id that ended it.")]
    token_ids: list[NotNegative] | UnsetType | None = UNSET


class ChatAnswer(Shape):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: Annotated[list[ChatChoice], Meta(min_length=1)]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[NotNegative] | UnsetType | None = UNSET


class CalledFunctionDelta(Shape):
    """News of a function call."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallChunk(Shape):
    """News of one tool call; the first has its id and name."""

    index: NotNegative
    function: CalledFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Shape):
    """News of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET


class ChatChunkChoice(Shape):
    """News of one choice."""

    index: NotNegative
    delta: ChatDelta
    logprobs: ChatLogprobsBody | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[NotNegative] | UnsetType | None = UNSET


class ChatChunk(Shape):
    """One event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: list[NotNegative] | UnsetType | None = UNSET


class TokenizeAnswer(Shape):
    """Answer of POST /tokenize."""

    count: NotNegative
    max_model_len: Annotated[int, Meta(ge=1)]
    tokens: list[NotNegative]
    token_strs: list[str] | None


class DetokenizeAnswer(Shape):
    """Answer of POST /detokenize."""

    prompt: str


class ModelBody(Shape):
    """A name under which the model is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: Annotated[int, Meta(ge=1)]


class ModelList(Shape):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelBody]


class HealthAnswer(Shape):
    """The engine makes progress, or has nothing to do, and what that was judged by."""

    status: Literal["ok"]
    num_device_restarts: Annotated[int, Meta(ge=0, description="Times a lost device was opened anew.")]
    num_explained_losses: Annotated[
        int, Meta(ge=0, description="Losses of the device by the fault of one request, which has ended.")
    ]
    num_unapplied_steps: Annotated[int, Meta(ge=0, description="Steps the device has not finished.")]
    num_running: NotNegative
    num_waiting: NotNegative
    seconds_without_progress: Annotated[
        float, Meta(ge=0, description="Since a step ended, or since there is work.")
    ]


class LiveAnswer(Shape):
    """The engine has not died."""

    status: Literal["live"]


class ReadyAnswer(Shape):
    """New requests are taken."""

    status: Literal["ready"]


class VersionAnswer(Shape):
    """Answer of GET /version."""

    version: str


class Rendered(Shape):
    """What a call would be generated from."""

    request_id: str
    model: str
    token_ids: Annotated[list[NotNegative], Meta(min_length=1)]
    sampling_params: dict[str, Any]
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    features: None
    kv_transfer_params: None


class LoadAnswer(Shape):
    """Answer of GET /load."""

    server_load: NotNegative
    num_running: NotNegative
    num_waiting: NotNegative
    max_num_seqs: Annotated[int, Meta(ge=1)]
    kv_cache_usage: Annotated[float, Meta(ge=0, le=1)]


class KVLedgerGroup(Shape):
    """What one KV group has of the pool: layers that keep everything, a window, or a state.

    `block_size` is in tokens, null for a state. `unused_slots` are those of `slots` behind the last token of
    a sequence; `padding_bytes` those of used blocks for which the group has no layer.
    """

    group: NotNegative
    kind: Literal["full", "window", "state"]
    num_layers: NotNegative
    block_size: Annotated[int, Meta(ge=1)] | None
    window: Annotated[int, Meta(ge=1)] | None
    used_blocks: NotNegative
    cached_blocks: NotNegative
    slots: NotNegative
    unused_slots: NotNegative
    used_bytes: NotNegative
    unused_bytes: NotNegative
    padding_bytes: NotNegative


class KVLedgerHost(Shape):
    """KV blocks in the host's memory: used by preempted sequences that will come back, cached, or free.

    `num_bytes` counts one block more, which is never given out; `stored_bytes` and `loaded_bytes` are those
    moved so far.
    """

    num_bytes: NotNegative
    num_blocks: NotNegative
    used_blocks: NotNegative
    cached_blocks: NotNegative
    free_blocks: NotNegative
    swapped_sequences: NotNegative
    stored_bytes: NotNegative
    loaded_bytes: NotNegative


class KVLedger(Shape):
    """Answer of GET /kv_cache: of the pool that all KV groups share, what holds tokens and what does not.

    A block is used (held by a sequence), cached (free, its content findable) or free. `filled_share` of the
    token slots of used blocks hold a token. `num_bytes` counts one block more, which is never given out.
    """

    block_bytes: NotNegative
    num_bytes: NotNegative
    num_blocks: NotNegative
    used_blocks: NotNegative
    cached_blocks: NotNegative
    free_blocks: NotNegative
    used_bytes: NotNegative
    unused_bytes: NotNegative
    padding_bytes: NotNegative
    slots: NotNegative
    unused_slots: NotNegative
    filled_share: Annotated[float, Meta(ge=0, le=1)]
    window_blocks_freed: NotNegative
    groups: list[KVLedgerGroup]
    host: KVLedgerHost | None


class CacheGroup(Shape):
    """Layers that share one kind of KV cache. Blocks and bytes are of the pool that all groups share."""

    num_layers: NotNegative
    dtype: str
    block_size: Annotated[int, Meta(ge=1)]
    num_blocks: NotNegative
    num_bytes: NotNegative


class ServerInfo(msgspec.Struct):
    """Answer of GET /server_info; besides these, versions, options, and which form the token path has."""

    version: str
    model_names: Annotated[list[str], Meta(min_length=1)]
    device: str
    max_model_len: Annotated[int, Meta(ge=1)]
    max_num_seqs: Annotated[int, Meta(ge=1)]
    max_num_batched_tokens: Annotated[int, Meta(ge=1)]
    vocab_size: Annotated[int, Meta(ge=1)]
    kv_cache: list[CacheGroup]
    default_sampling: dict[str, Any]


class TokenizerInfo(Shape):
    """Answer of GET /tokenizer_info."""

    tokenizer_class: str
    vocab_size: Annotated[int, Meta(ge=1)]
    model_max_length: Annotated[int, Meta(ge=1)]
    eos_token_ids: list[NotNegative]
    special_tokens: list[str]
    chat_template: str | None


JsonObject = dict[str, Any]
