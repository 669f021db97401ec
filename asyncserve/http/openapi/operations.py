"""Every operation of the API: path, method, meaning, body, answers.

One row per route of `app`; the tests compare the two. What the fields of a body are stands in the bodies'
structs and in `fields`; `document` makes the document of all three.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncserve.http.messages.schema import CountTokensBody, MessagesBody
from asyncserve.http.openapi import messages_shapes, responses_shapes, shapes
from asyncserve.http.responses.schema import ResponsesBody
from asyncserve.http.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

JSON = "application/json"
EVENTS = "text/event-stream"

ERRORS: Mapping[int, str] = {
    400: "The request cannot be served as it is; `param` names the field at fault.",
    401: "No key was sent, or none of this server's.",
    404: "There is no such thing here, such as a model of that name.",
    408: "The body did not come.",
    413: "The body is too large.",
    415: "The body's encoding is not taken.",
    431: "There are too many headers, or they are too long.",
    429: "The queue is full: try again after `Retry-After` seconds.",
    500: "A bug here, or a step that failed on the device.",
    503: "The server is loading, draining or has failed.",
    504: "The answer was not complete in the time allowed for it.",
}
"""Every status of an error, with its meaning."""

OF_ALL = (400, 431, 500)
"""Errors any operation may have: bad HTTP, too many headers, a bug. With keys, 401 is one, too."""
OF_BODIES = (408, 413, 415)
"""Errors of operations with a body."""
OF_ENGINE = (404, 429, 503, 504)
"""Errors of operations that generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    Args:
        path: With its parameters in braces.
        name: Unique; OpenAPI's `operationId`.
        body: The struct of its JSON body.
        required: Fields of the body that may not be missing, though their struct has a default for them.
        answers: The structs its JSON answer may have.
        error: The struct of its errors.
        events: The type of the JSON of its events, for answers that may be streamed.
        example: A body to start from.
        end_mark: The data of a last event that is no JSON.
        media: Content type and schema of an answer that is no JSON.
        errors: Statuses besides those of all operations and of bodies.
        path_parameters: Name and meaning.
        query: Name, meaning and JSON schema of optional parameters of the query.
        needs_key: A key is asked for, if the server has keys.
    """

    method: str
    path: str
    name: str
    summary: str
    tag: str
    description: str = ""
    body: type | None = None
    required: Sequence[str] = ()
    example: Mapping[str, Any] = field(default_factory=dict)
    answers: Sequence[Any] = ()
    error: Any = shapes.ErrorBody
    events: Any = None
    end_mark: str | None = None
    media: str | None = None
    errors: Sequence[int] = ()
    path_parameters: Mapping[str, str] = field(default_factory=dict)
    query: Sequence[tuple[str, str, Mapping[str, Any]]] = ()
    needs_key: bool = True

    @property
    def statuses(self) -> list[int]:
        """Statuses of its errors, in order, without 401."""
        of_body = OF_BODIES if self.body is not None else ()
        return sorted({*OF_ALL, *of_body, *self.errors})


RESPONSE_ID = {"response_id": "The id of a stored response."}

OPERATIONS: Sequence[Operation] = (
    Operation(
        method="POST",
        path="/v1/completions",
        name="createCompletion",
        summary="Continue a prompt",
        tag="Generation",
        body=CompletionBody,
        required=("prompt",),
        example={"prompt": "San Francisco is a", "max_tokens": 32, "temperature": 0, "stream": True},
        answers=(shapes.CompletionAnswer,),
        events=shapes.CompletionChunk,
        end_mark="[DONE]",
        errors=OF_ENGINE,
    ),
    Operation(
        method="POST",
        path="/v1/chat/completions",
        name="createChatCompletion",
        summary="Continue a conversation",
        tag="Generation",
        body=ChatBody,
        required=("messages",),
        example={"messages": [{"role": "user", "content": "Name three rivers."}], "stream": True},
        answers=(shapes.ChatAnswer,),
        events=shapes.ChatChunk,
        end_mark="[DONE]",
        errors=OF_ENGINE,
    ),
    Operation(
        method="POST",
        path="/v1/responses",
        name="createResponse",
        summary="Make a response",
        tag="Responses",
        body=ResponsesBody,
        required=("input",),
        example={"input": "Name three rivers.", "stream": True},
        answers=(responses_shapes.ResponseObject,),
        events=responses_shapes.ResponseEvent,
        errors=OF_ENGINE,
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response_id}",
        name="getResponse",
        summary="A stored response",
        tag="Responses",
        answers=(responses_shapes.ResponseObject,),
        events=responses_shapes.ResponseEvent,
        errors=(404,),
        path_parameters=RESPONSE_ID,
        query=(
            ("stream", "Give the events of a background response instead.", {"type": "boolean"}),
            (
                "starting_after",
                "With `stream`: only events with greater numbers.",
                {"type": "integer", "minimum": -1},
            ),
        ),
    ),
    Operation(
        method="DELETE",
        path="/v1/responses/{response_id}",
        name="deleteResponse",
        summary="Delete a stored response; one that is running ends",
        tag="Responses",
        answers=(responses_shapes.DeletedResponse,),
        errors=(404,),
        path_parameters=RESPONSE_ID,
    ),
    Operation(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        name="cancelResponse",
        summary="End a response that runs in the background",
        tag="Responses",
        answers=(responses_shapes.ResponseObject,),
        errors=(404,),
        path_parameters=RESPONSE_ID,
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response_id}/input_items",
        name="listInputItems",
        summary="What a stored response answers",
        tag="Responses",
        answers=(responses_shapes.InputItemList,),
        errors=(404,),
        path_parameters=RESPONSE_ID,
        query=(
            (
                "limit",
                "Most items of a page.",
                {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
            ),
            ("order", "The oldest or the newest first.", {"enum": ["asc", "desc"], "default": "desc"}),
            ("after", "The id of an item, which the page begins behind.", {"type": "string"}),
        ),
    ),
    Operation(
        method="POST",
        path="/v1/messages",
        name="createMessage",
        summary="Continue a conversation, in Anthropic's shapes",
        tag="Messages",
        body=MessagesBody,
        example={
            "max_tokens": 64,
            "messages": [{"role": "user", "content": "Name three rivers."}],
            "stream": True,
        },
        answers=(messages_shapes.MessagesAnswer,),
        error=messages_shapes.MessagesError,
        events=messages_shapes.MessagesEvent,
        errors=OF_ENGINE,
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        name="countMessageTokens",
        summary="How many tokens the prompt of such a message has",
        tag="Messages",
        body=CountTokensBody,
        example={"messages": [{"role": "user", "content": "Name three rivers."}]},
        answers=(messages_shapes.TokenCount,),
        error=messages_shapes.MessagesError,
        errors=(404, 503),
    ),
    Operation(
        method="POST",
        path="/v1/completions/render",
        name="renderCompletion",
        summary="The token ids a completion would be generated from",
        tag="Tokens",
        description="Takes what `/v1/completions` takes, and generates nothing. One entry per prompt.",
        body=CompletionBody,
        required=("prompt",),
        example={"prompt": "San Francisco is a"},
        answers=(list[shapes.Rendered],),
        errors=(404, 503),
    ),
    Operation(
        method="POST",
        path="/v1/chat/completions/render",
        name="renderChatCompletion",
        summary="The token ids an answer would be generated from",
        tag="Tokens",
        description="Takes what `/v1/chat/completions` takes, and generates nothing.",
        body=ChatBody,
        required=("messages",),
        example={"messages": [{"role": "user", "content": "Name three rivers."}]},
        answers=(shapes.Rendered,),
        errors=(404, 503),
    ),
    Operation(
        method="POST",
        path="/tokenize",
        name="tokenize",
        summary="Text or messages to token ids",
        tag="Tokens",
        description="Give either `prompt` or `messages`.",
        body=TokenizeBody,
        example={"prompt": "Name three rivers."},
        answers=(shapes.TokenizeAnswer,),
        errors=(404, 503),
    ),
    Operation(
        method="POST",
        path="/detokenize",
        name="detokenize",
        summary="Token ids to text",
        tag="Tokens",
        body=DetokenizeBody,
        example={"tokens": [1, 2, 3]},
        answers=(shapes.DetokenizeAnswer,),
        errors=(404, 503),
    ),
    Operation(
        method="GET",
        path="/v1/models",
        name="listModels",
        summary="The names the model is served under",
        tag="Models",
        answers=(shapes.ModelList, messages_shapes.MessagesModelList),
        errors=(503,),
    ),
    Operation(
        method="GET",
        path="/v1/models/{name}",
        name="getModel",
        summary="One of these names",
        tag="Models",
        answers=(shapes.ModelBody, messages_shapes.MessagesModel),
        errors=(404, 503),
        path_parameters={"name": "A served name; it may hold slashes."},
    ),
    Operation(
        method="GET",
        path="/health",
        name="health",
        summary="Whether work makes progress",
        tag="State",
        answers=(shapes.HealthAnswer,),
        errors=(503,),
        needs_key=False,
    ),
    *(
        Operation(
            method=method,
            path="/ping",
            name=name,
            summary="The same as /health",
            tag="State",
            answers=(shapes.HealthAnswer,),
            errors=(503,),
            needs_key=False,
        )
        for method, name in (("GET", "ping"), ("POST", "postPing"))
    ),
    Operation(
        method="GET",
        path="/live",
        name="live",
        summary="Whether the engine has not died",
        tag="State",
        answers=(shapes.LiveAnswer,),
        errors=(503,),
        needs_key=False,
    ),
    Operation(
        method="GET",
        path="/ready",
        name="ready",
        summary="Whether new requests are taken",
        tag="State",
        answers=(shapes.ReadyAnswer,),
        errors=(503,),
        needs_key=False,
    ),
    Operation(
        method="GET",
        path="/version",
        name="version",
        summary="The server's version",
        tag="State",
        answers=(shapes.VersionAnswer,),
    ),
    Operation(
        method="GET",
        path="/load",
        name="load",
        summary="How much there is to do",
        tag="State",
        answers=(shapes.LoadAnswer,),
        errors=(503,),
    ),
    Operation(
        method="GET",
        path="/kv_cache",
        name="kvCache",
        summary="The memory ledger of the KV cache",
        tag="State",
        answers=(shapes.KVLedger,),
        errors=(503,),
    ),
    Operation(
        method="GET",
        path="/server_info",
        name="serverInfo",
        summary="Versions, options and what came of them on this device",
        tag="State",
        answers=(shapes.ServerInfo,),
        errors=(503,),
    ),
    Operation(
        method="GET",
        path="/tokenizer_info",
        name="tokenizerInfo",
        summary="What a client must know to count tokens itself",
        tag="State",
        answers=(shapes.TokenizerInfo,),
        errors=(503,),
    ),
    Operation(
        method="GET",
        path="/metrics",
        name="metrics",
        summary="Prometheus metrics",
        tag="State",
        media="text/plain",
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        name="openapi",
        summary="This document",
        tag="Documentation",
        answers=(shapes.JsonObject,),
    ),
    Operation(
        method="GET",
        path="/docs",
        name="docs",
        summary="A page to read this document and to try the API",
        tag="Documentation",
        media="text/html",
        needs_key=False,
    ),
)
