"""What reaches the engine of a conversation: its prompt, its shape, its sampling."""

import json
from typing import Any

import msgspec
import pytest

from asyncserve.http.caller import Caller
from asyncserve.http.conversation import chat_call
from asyncserve.http.schema import ChatBody
from asyncserve.http.serving import SERVING
from asyncserve.request import ChatPrompt, FinishReason, Request, StructureKind
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tokenizer import FakeTokenizer
from tests.http.live import Answer, live_server

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
WITH_TOOLS = "{{ tools }}<tool_call>"
WITH_REASONING = "{{ tools }}<tool_call><think></think>"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def send(
    fields: dict[str, Any],
    *,
    template: str = WITH_TOOLS,
    engine: ScriptedEngine | None = None,
    **options: Any,
) -> tuple[Answer, list[Request]]:
    engine = engine or ScriptedEngine(["a"], tokenizer=FakeTokenizer(chat_template_text=template))
    async with live_server(engine=engine, **options) as live:
        answer = await live.chat(**fields)
    return answer, engine.requests


async def prompt_of(fields: dict[str, Any], **options: Any) -> ChatPrompt:
    answer, [request] = await send(fields, **options)
    assert answer.status == 200, answer.body
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt


async def test_template_gets_the_tools_that_may_be_used() -> None:
    prompt = await prompt_of({"tools": [TOOL]})
    assert prompt.template_kwargs == {"tools": [TOOL]}
    assert prompt.messages == (USER,)
    assert (await prompt_of({"tools": [TOOL], "tool_choice": "none"})).template_kwargs == {}


async def test_tools_are_told_in_a_message_if_the_template_knows_none() -> None:
    prompt = await prompt_of({"tools": [TOOL]}, template="{{ messages }}")
    assert prompt.template_kwargs == {}
    system, user = prompt.messages
    assert "<tool_call>" in system["content"]
    assert '"name": "f"' in system["content"]
    assert user == USER


async def test_calls_are_read_as_the_model_was_told_to_write_them() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    engine = ScriptedEngine([text], tokenizer=FakeTokenizer(chat_template_text="{{ messages }}"))
    answer, _ = await send({"tools": [TOOL]}, engine=engine, tool_call_parser="llama3_json")
    assert answer.json["choices"][0]["finish_reason"] == "tool_calls"


async def test_how_the_model_is_told_to_write_calls_is_worked_out_once() -> None:
    """It takes milliseconds where special tokens are many."""
    engine = ScriptedEngine(["a"], tokenizer=FakeTokenizer(chat_template_text="{{ messages }}"))
    body = msgspec.convert({"messages": [USER], "tools": [TOOL]}, ChatBody)
    async with live_server(engine=engine) as live:
        serving = live.runner.app[SERVING]
        first, second = [
            await chat_call(serving, body, num_bytes=0, response_id="r", caller=Caller()) for _ in range(2)
        ]
    assert first.message_format.tool_parser == "hermes"
    assert first.message_format is second.message_format


async def test_documents_effort_and_variables_reach_the_template() -> None:
    documents = [{"title": "t", "text": "x"}]
    prompt = await prompt_of(
        {
            "documents": documents,
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    assert prompt.template_kwargs == {
        "documents": documents,
        "reasoning_effort": "low",
        "enable_thinking": False,
    }


async def test_only_a_trusting_server_takes_templates_and_its_own_variables() -> None:
    for fields in ({"chat_template": "x"}, {"chat_template_kwargs": {"bos_token": "x"}}):
        answer, requests = await send(fields)
        assert (answer.status, answer.error["param"]) == (400, next(iter(fields)))
        assert not requests
        await prompt_of(fields, trusts_request_templates=True)
    prompt = await prompt_of({"chat_template": "{{ tools }}", "tools": [TOOL]}, trusts_request_templates=True)
    assert prompt.chat_template == "{{ tools }}"
    assert "tools" in prompt.template_kwargs
    long = {"chat_template": "x" * 300_000}
    answer, _ = await send(long, trusts_request_templates=True)
    assert answer.error["param"] == "chat_template"


async def test_special_tokens_are_added_on_demand() -> None:
    assert not (await prompt_of({})).add_special_tokens
    assert (await prompt_of({"add_special_tokens": True})).add_special_tokens


async def test_shape_of_the_answer_is_the_engines_business() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    _, [request] = await send({"response_format": schema})
    structured = request.sampling.structured
    assert structured is not None
    assert structured.kind is StructureKind.JSON_SCHEMA
    assert json.loads(structured.source) == SCHEMA
    _, [request] = await send({"structured_outputs": {"regex": "a+"}})
    assert request.sampling.structured is not None
    assert request.sampling.structured.source == "a+"
    _, [request] = await send({})
    assert request.sampling.structured is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_calls_that_must_be_made_are_held_to_a_grammar(choice: Any) -> None:
    _, [request] = await send({"tools": [TOOL], "tool_choice": choice})
    assert request.sampling.structured is not None
    assert request.sampling.structured.kind is StructureKind.STRUCTURAL_TAG
    _, [request] = await send({"tools": [TOOL]})
    assert request.sampling.structured is None


async def test_answer_that_must_call_needs_no_other_shape() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    _, [alone] = await send({"tools": [TOOL], "tool_choice": "required"})
    _, [both] = await send({"tools": [TOOL], "tool_choice": "required", "response_format": schema})
    assert both.sampling.structured == alone.sampling.structured
    assert both.sampling.structured is not None
    assert both.sampling.structured.param == "tools"


@pytest.mark.parametrize(
    ("template", "call_id"), [(WITH_TOOLS, "call_1"), ("{{ tools }}[TOOL_CALLS]", "74196fe72")]
)
async def test_ids_of_calls_are_shown_as_the_family_of_templates_takes_them(
    template: str, call_id: str
) -> None:
    seen: list[Any] = []

    class Recorder(FakeTokenizer):
        def render_chat(self, prompt: ChatPrompt) -> str:
            seen.extend(prompt.messages)
            return "text"

    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "call_1"},
    ]
    async with live_server(
        engine=ScriptedEngine(["a"], tokenizer=Recorder(chat_template_text=template))
    ) as live:
        assert (await live.call("/tokenize", {"messages": messages})).status == 200
    assert [seen[1]["tool_calls"][0]["id"], seen[2]["tool_call_id"]] == [call_id, call_id]


async def test_special_tokens_are_shown_to_the_parser_if_markers_are_among_them() -> None:
    class Marked(FakeTokenizer):
        def __init__(self) -> None:
            super().__init__(chat_template_text=WITH_TOOLS)
            self.special_tokens |= {"<tool_call>"}

    engine = ScriptedEngine(["a"], tokenizer=Marked())
    await send({"tools": [TOOL]}, engine=engine)
    await send({}, engine=engine)
    assert [request.sampling.skip_special_tokens for request in engine.requests] == [False, True]


def engine_that_reasons(*pieces: str) -> ScriptedEngine:
    return ScriptedEngine(pieces, tokenizer=FakeTokenizer(chat_template_text=WITH_REASONING))


async def test_prompt_that_opens_the_reasoning_is_read_so() -> None:
    class Opens(FakeTokenizer):
        def render_chat(self, prompt: ChatPrompt) -> str:
            return super().render_chat(prompt) + "<think>\n"

    engine = ScriptedEngine(["so", "</think>", "a"], tokenizer=Opens(chat_template_text=WITH_REASONING))
    answer, [request] = await send({}, engine=engine)
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.rendered == "<bos><turn>user:hi<end><turn>assistant:<think>\n"
    message = answer.json["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("so", "a")
    begun = {"role": "assistant", "content": "<think>" + "so " * 200}
    fields = {"messages": [USER, begun], "continue_final_message": True}
    answer, _ = await send(fields, engine=engine_that_reasons("more", "</think>", "a"))
    message = answer.json["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("more", "a")
    closed = ScriptedEngine(["so", "a"], tokenizer=FakeTokenizer(chat_template_text=WITH_REASONING))
    answer, _ = await send({}, engine=closed)
    assert answer.json["choices"][0]["message"]["content"] == "soa"


async def test_reasoning_is_left_out_on_demand() -> None:
    tokenizer = FakeTokenizer(chat_template_text=WITH_REASONING)
    engine = ScriptedEngine(["<think>so</think>", "a"], tokenizer=tokenizer)
    shown, _ = await send({}, engine=engine)
    hidden, _ = await send({"include_reasoning": False}, engine=engine)
    assert shown.json["choices"][0]["message"]["reasoning_content"] == "so"
    assert hidden.json["choices"][0]["message"] == {"role": "assistant", "content": "a", "refusal": None}


async def test_refused_template_is_the_requests_fault_also_when_rendered_early() -> None:
    tokenizer = FakeTokenizer(chat_template_text=WITH_REASONING)
    engine = ScriptedEngine(["a"], tokenizer=tokenizer)
    answer, requests = await send({"messages": [{"role": "tool", "content": "a"}]}, engine=engine)
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert not requests


async def test_json_nested_too_deeply_for_the_server_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    for template in (WITH_TOOLS, WITH_REASONING, "{{ messages }}"):
        answer, _ = await send({"tools": [tool], "tool_choice": "required"}, template=template)
        assert answer.status in (200, 400), answer.body
        if answer.status == 400:
            assert "nested too deeply" in answer.error["message"]


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_json_that_is_nested_almost_too_deeply_is_no_fault_of_the_servers(path: str) -> None:
    """Between what can be read and what can be written are a few levels; where they are depends on Python."""
    engine = ScriptedEngine(["a"], tokenizer=FakeTokenizer(chat_template_text="{{ messages }}"))
    statuses = set()
    async with live_server(engine=engine) as live:
        for depth in range(850, 1000, 2):
            body = json.dumps({"messages": [USER], "tools": [{**TOOL, "function": {"name": "f"}}]})
            deep = '"parameters": ' + '{"a": ' * depth + "1" + "}" * depth
            data = body.replace('"name": "f"', f'"name": "f", {deep}').encode()
            statuses.add((await live.call(path, data=data)).status)
    assert statuses <= {200, 400}


@pytest.mark.parametrize(
    ("choice", "reason", "expected"),
    [
        ("auto", FinishReason.STOP, "tool_calls"),
        ("required", FinishReason.STOP, "tool_calls"),
        ({"type": "function", "function": {"name": "f"}}, FinishReason.STOP, "stop"),
        ("auto", FinishReason.LENGTH, "length"),
        ("required", FinishReason.LENGTH, "length"),
    ],
)
async def test_finish_reason_tells_of_calls_but_never_hides_a_limit(
    choice: Any, reason: FinishReason, expected: str
) -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    engine = ScriptedEngine([text], reason=reason, tokenizer=FakeTokenizer(chat_template_text=WITH_TOOLS))
    answer, _ = await send({"tools": [TOOL], "tool_choice": choice}, engine=engine)
    [shown] = answer.json["choices"]
    assert shown["finish_reason"] == expected
    assert shown["message"]["content"] is None
    [call] = shown["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}
