"""Body of POST /v1/responses → input items as they are kept, and the `ChatBody` that says the same.

Items get ids and the one form in which they are stored, listed and read again when a later response goes on.
Each turn of the assistant (reasoning, messages, calls) becomes one message. What OpenAI hosts and this server
does not have (tools, files, images, conversations, prompt templates) is refused by name. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from asyncserve.errors import InvalidRequest
from asyncserve.http.field_names import FieldNames
from asyncserve.http.message_schema import (
    AllowedTool,
    AllowedTools,
    ChosenTool,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    Message,
    MessageToolCall,
    Tool,
)
from asyncserve.http.responses.events import (
    FUNCTION_CALL,
    FUNCTION_CALL_OUTPUT,
    ID_PREFIXES,
    MESSAGE,
    REASONING,
    new_id,
    text_part,
)
from asyncserve.http.responses.schema import (
    MAX_ITEMS,
    MAX_METADATA,
    MAX_METADATA_KEY_LEN,
    MAX_METADATA_VALUE_LEN,
    InputItem,
    InputPart,
    ResponsesBody,
    ResponseTextFormat,
    ResponseTool,
    ResponseToolChoice,
)
from asyncserve.http.responses.store import StoredResponse
from asyncserve.http.schema import ChatBody
from asyncserve.http.structure import JsonSchemaFormat, ResponseFormat

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""What clients may ask to be included. All but the log-probabilities belong to things that are not here."""
ROLES = ("user", "assistant", "system", "developer")
MAX_SHOWN_LEN = 64
"""What a client wrote is shown in messages up to so many characters."""
MAX_ID_LEN = 256

SHARED_FIELDS = (
    "model",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
    "request_id",
)
"""Fields that mean the same in a `ChatBody`."""
FIELD_NAMES = FieldNames(
    {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "truncate_prompt_tokens": "truncation",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseInput:
    """What a response is made from.

    Args:
        items: The whole conversation, earlier responses included, as it is stored: a list as JSON.
        chat: The same, and all else that was asked, for the engine.
    """

    items: bytes
    chat: ChatBody


def check_body(body: ResponsesBody) -> None:
    """Refuse what no `ChatBody` can say.

    Raises:
        InvalidRequest: A field asks for something that is not here, or is out of range.
    """
    for name, instead in (
        ("conversation", "use previous_response_id"),
        ("prompt", "there are no stored prompt templates here"),
        ("context_management", "nothing is compacted here; see truncation"),
    ):
        if getattr(body, name):
            raise InvalidRequest(f"{name} is not supported: {instead}", param=name)
    if body.truncation not in (None, "auto", "disabled"):
        raise InvalidRequest(
            f"truncation is {body.truncation[:MAX_SHOWN_LEN]!r}; it must be auto or disabled",
            param="truncation",
        )
    for name in body.include or ():
        if name not in INCLUDABLE:
            raise InvalidRequest(
                f"include holds {name[:MAX_SHOWN_LEN]!r}; it may hold {', '.join(sorted(INCLUDABLE))}",
                param="include",
            )
    if body.background and body.store is False:
        raise InvalidRequest(
            "background needs store: there would be no way to fetch the response", param="background"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options are for streams; set stream to true", param="stream_options")
    if body.max_tool_calls is not None and not 0 < body.max_tool_calls < 2**31:
        raise InvalidRequest("max_tool_calls must be at least 1 and below 2**31", param="max_tool_calls")
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(
            f"metadata has {len(metadata)} entries; at most {MAX_METADATA} are kept", param="metadata"
        )
    for name, value in metadata.items():
        if len(name) > MAX_METADATA_KEY_LEN or len(value) > MAX_METADATA_VALUE_LEN:
            raise InvalidRequest(
                f"metadata has {name[:MAX_METADATA_KEY_LEN]!r} with {len(value)} characters; names have at"
                f" most {MAX_METADATA_KEY_LEN} and values {MAX_METADATA_VALUE_LEN}",
                param="metadata",
            )


def gives_logprobs(body: ResponsesBody) -> bool:
    """Return whether log-probabilities are asked for."""
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def response_input(body: ResponsesBody, previous: StoredResponse | None, *, max_bytes: int) -> ResponseInput:
    """Bring a body into the forms that are stored and served.

    Args:
        previous: The response whose conversation goes on.
        max_bytes: Most bytes of the conversation's items.

    Raises:
        InvalidRequest: An item is incomplete, or holds what this model cannot take; or there are too many.
    """
    items = [] if previous is None else _items_of(previous)
    num_earlier = len(items)
    match body.input:
        case None:
            raise InvalidRequest("input is missing", param="input")
        case str(text):
            items.append(_message_item(InputItem(role="user", content=text), "input"))
        case given:
            items += [
                _kept_item(item, f"input[{index}]") for index, item in enumerate(given[: MAX_ITEMS + 1])
            ]
    if not items:
        raise InvalidRequest("input is empty", param="input")
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(
            f"the conversation has more than {MAX_ITEMS} items; no more are taken", param="input"
        )
    _check_links(items, num_earlier)
    _tell_apart(items)
    messages = _messages(items)
    if body.instructions is not None:
        messages.insert(0, Message(role="system", content=body.instructions))
    kept = orjson.dumps(items)
    if len(kept) > max_bytes:
        raise InvalidRequest(
            f"the conversation has {len(kept)} bytes; at most {max_bytes} are taken", param="input"
        )
    return ResponseInput(items=kept, chat=_chat_body(body, messages))


def _items_of(response: StoredResponse) -> list[dict[str, Any]]:
    """Return the conversation that a response ends."""
    items: list[dict[str, Any]] = orjson.loads(response.items)
    for item in orjson.loads(response.body)["output"]:
        if item["type"] == MESSAGE:
            # Only the answer they came with shows log-probabilities.
            item["content"] = [text_part(part["text"]) for part in item["content"]]
        items.append(item)
    return items


# ---- items ---------------------------------------------------------------------------------------------


def _kept_item(item: InputItem, where: str) -> dict[str, Any]:
    match item.type:
        case None | "message":
            return _message_item(item, where)
        case "function_call":
            _need(item, where, "call_id", "name", "arguments")
            return {
                "id": _id_of(item, ID_PREFIXES[FUNCTION_CALL], where),
                "type": FUNCTION_CALL,
                "status": "completed",
                "arguments": item.arguments,
                "call_id": item.call_id,
                "name": item.name,
            }
        case "function_call_output":
            _need(item, where, "call_id", "output")
            return {
                "id": _id_of(item, ID_PREFIXES[FUNCTION_CALL_OUTPUT], where),
                "type": FUNCTION_CALL_OUTPUT,
                "status": "completed",
                "call_id": item.call_id,
                "output": item.output
                if isinstance(item.output, str)
                else [
                    {"type": "input_text", "text": text}
                    for text in _texts(item.output or (), f"{where}.output")
                ],
            }
        case "reasoning":
            return {
                "id": _id_of(item, ID_PREFIXES[REASONING], where),
                "type": REASONING,
                "summary": [
                    {"type": "summary_text", "text": text}
                    for text in _texts(item.summary or (), f"{where}.summary")
                ],
                "content": [{"type": "reasoning_text", "text": text} for text in _content_texts(item, where)],
            }
        case "item_reference":
            raise InvalidRequest(
                f"{where} refers to an item by its id, which is not supported: send the item itself, or"
                " previous_response_id",
                param=where,
            )
        case other:
            raise InvalidRequest(
                f"{where} has the type {other[:MAX_SHOWN_LEN]!r}; types are message, function_call,"
                " function_call_output and reasoning",
                param=f"{where}.type",
            )


def _message_item(item: InputItem, where: str) -> dict[str, Any]:
    if item.role not in ROLES:
        shown = "missing" if item.role is None else repr(item.role[:MAX_SHOWN_LEN])
        raise InvalidRequest(f"{where}.role is {shown}; roles are {', '.join(ROLES)}", param=f"{where}.role")
    if item.content is None:
        raise InvalidRequest(f"{where} has no content", param=f"{where}.content")
    texts = _content_texts(item, where)
    return {
        "id": _id_of(item, ID_PREFIXES[MESSAGE], where),
        "type": MESSAGE,
        "status": "completed",
        "role": item.role,
        "content": [
            text_part(text) if item.role == "assistant" else {"type": "input_text", "text": text}
            for text in texts
        ],
    }


def _content_texts(item: InputItem, where: str) -> list[str]:
    if isinstance(item.content, str):
        return [item.content]
    return _texts(item.content or (), f"{where}.content")


def _texts(parts: Sequence[InputPart], where: str) -> list[str]:
    texts = []
    for index, part in enumerate(parts):
        match part.type:
            case "input_text" | "output_text" | "text" | "reasoning_text" | "summary_text":
                text = part.text
            case "refusal":
                text = part.refusal
            case other:
                raise InvalidRequest(
                    f"{where}[{index}] has the type {other[:MAX_SHOWN_LEN]!r}; this model takes only text",
                    param=f"{where}[{index}].type",
                )
        if text is None:
            raise InvalidRequest(f"{where}[{index}] has no text", param=f"{where}[{index}]")
        texts.append(text)
    return texts


def _need(item: InputItem, where: str, *names: str) -> None:
    for name in names:
        if getattr(item, name) is None:
            raise InvalidRequest(f"{where} has no {name}", param=f"{where}.{name}")


def _id_of(item: InputItem, prefix: str, where: str) -> str:
    for name in ("id", "call_id", "name"):
        if len(getattr(item, name) or "") > MAX_ID_LEN:
            raise InvalidRequest(
                f"{where}.{name} has more than {MAX_ID_LEN} characters", param=f"{where}.{name}"
            )
    return item.id or new_id(prefix)


def _check_links(items: Sequence[Mapping[str, Any]], num_earlier: int) -> None:
    """Refuse outputs of calls that nobody made."""
    call_ids = set()
    for index, item in enumerate(items):
        if item["type"] == FUNCTION_CALL:
            call_ids.add(item["call_id"])
        elif item["type"] == FUNCTION_CALL_OUTPUT and item["call_id"] not in call_ids:
            where = f"input[{index - num_earlier}]"
            raise InvalidRequest(
                f"{where} is the output of a call {item['call_id'][:MAX_SHOWN_LEN]!r}, but there is no such"
                " call before it",
                param=f"{where}.call_id",
            )


def _tell_apart(items: Sequence[dict[str, Any]]) -> None:
    """Give an item with an id that an earlier one has another id: lists are paged by it."""
    seen: set[str] = set()
    for item in items:
        if item["id"] in seen:
            item["id"] = new_id(ID_PREFIXES[item["type"]])
        seen.add(item["id"])


# ---- items → messages ----------------------------------------------------------------------------------


def _messages(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    turn: Message | None = None
    """The assistant's message that further items of the same turn belong to."""
    for item in items:
        kind = item["type"]
        if kind == FUNCTION_CALL_OUTPUT:
            output = item["output"]
            text = output if isinstance(output, str) else _joined(output)
            messages.append(Message(role="tool", content=text, tool_call_id=item["call_id"]))
            turn = None
        elif kind == MESSAGE and item["role"] != "assistant":
            messages.append(Message(role=item["role"], content=_joined(item["content"])))
            turn = None
        else:
            if turn is None or not _has_room(turn, kind):
                turn = Message(role="assistant")
                messages.append(turn)
            _add_to_turn(turn, item)
    for message in messages:
        if message.role == "assistant" and message.content is None:
            message.content = ""
    return messages


def _has_room(turn: Message, kind: str) -> bool:
    """Return whether an item can follow in the same message: reasoning, then content, then calls."""
    if kind == FUNCTION_CALL:
        return True
    return not turn.tool_calls and turn.content is None and not (kind == REASONING and turn.reasoning)


def _add_to_turn(turn: Message, item: Mapping[str, Any]) -> None:
    match item["type"]:
        case "message":
            turn.content = _joined(item["content"])
        case "reasoning":
            turn.reasoning = _joined(item.get("content") or item["summary"]) or None
        case _:
            function = FunctionCall(name=item["name"], arguments=item["arguments"])
            call = MessageToolCall(id=item["call_id"], function=function)
            turn.tool_calls = [*(turn.tool_calls or ()), call]


def _joined(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join([part["text"] for part in parts])


# ---- everything else -----------------------------------------------------------------------------------


def _chat_body(body: ResponsesBody, messages: list[Message]) -> ChatBody:
    chat = ChatBody(
        messages=messages,
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_response_format(body.text.format if body.text is not None else None),
        max_completion_tokens=body.max_output_tokens,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
    )
    if gives_logprobs(body):
        chat.logprobs = True
        chat.top_logprobs = body.top_logprobs
    if body.truncation == "auto":
        chat.truncate_prompt_tokens = -1
    for name in SHARED_FIELDS:
        setattr(chat, name, getattr(body, name))
    return chat


def _tool(where: str, tool: ResponseTool) -> Tool:
    if tool.type != "function":
        raise InvalidRequest(
            f"{where} has the type {tool.type[:MAX_SHOWN_LEN]!r}; this server hosts no tools: only functions"
            " of the client's own are supported",
            param=f"{where}.type",
        )
    if tool.name is None:
        raise InvalidRequest(f"{where} has no name", param=f"{where}.name")
    return Tool(
        function=FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
    )


def _tool_choice(choice: str | ResponseToolChoice | None) -> str | ChosenTool | None:
    if choice is None or isinstance(choice, str):
        return choice
    match choice.type:
        case "function" if choice.name is not None:
            return ChosenTool(function=FunctionName(name=choice.name))
        case "allowed_tools" if choice.mode is not None and choice.tools is not None:
            allowed = [
                AllowedTool(
                    type=tool.type, function=None if tool.name is None else FunctionName(name=tool.name)
                )
                for tool in choice.tools
            ]
            return ChosenTool(
                type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=allowed)
            )
    raise InvalidRequest(
        f"tool_choice has the type {choice.type[:MAX_SHOWN_LEN]!r} or lacks what belongs to it; give a"
        " function with its name, or allowed_tools with mode and tools",
        param="tool_choice",
    )


def _response_format(given: ResponseTextFormat | None) -> ResponseFormat | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_schema":
        if given.schema is None:
            raise InvalidRequest("text.format has the type json_schema but no schema", param="text.format")
        return ResponseFormat(
            type="json_schema",
            json_schema=JsonSchemaFormat(name=given.name, schema=given.schema, strict=given.strict),
        )
    if given.type != "json_object":
        raise InvalidRequest(
            f"text.format has the type {given.type[:MAX_SHOWN_LEN]!r}; types are text, json_object and"
            " json_schema",
            param="text.format",
        )
    return ResponseFormat(type="json_object")
