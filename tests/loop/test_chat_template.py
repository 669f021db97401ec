from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pytest

from asyncserve.errors import CheckpointError, InvalidRequest
from asyncserve.loop.chat_template import ChatTemplate, RequestTemplates
from asyncserve.request import ChatPrompt

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _message(content: object, role: str = "user", **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def _render(source: str, *messages: Mapping[str, Any], special: Mapping[str, str] = {}, **prompt: Any) -> str:
    template = ChatTemplate({"default": source}, special_tokens=special)
    return template.render(ChatPrompt(messages=messages or (_message("hi"),), **prompt))


def test_a_conversation_is_rendered_with_the_opening_of_the_answer() -> None:
    assert _render(_CHATML, _message("hi")) == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    closed = _render(_CHATML, _message("hi"), add_generation_prompt=False)
    assert closed == "<|im_start|>user\nhi<|im_end|>\n"


def test_blocks_on_lines_of_their_own_leave_no_trace() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    assert _render(source) == "hi\n"


def test_special_tokens_and_further_names_can_be_used() -> None:
    source = "{{ bos_token }}{{ style }}{% if tools is none and documents is none %}!{% endif %}"
    text = _render(source, special={"bos_token": "<s>"}, template_kwargs={"style": "brief"})
    assert text == "<s>brief!"


def test_a_request_cannot_replace_the_messages() -> None:
    with_kwargs = _render("{{ messages[0].content }}", template_kwargs={"messages": []})
    assert with_kwargs == "hi"


def test_loop_controls_json_dates_and_generation_marks_work_as_in_transformers() -> None:
    assert _render("{% for m in messages %}a{% break %}{% endfor %}", _message("x"), _message("y")) == "a"
    value = {"b": "<é>", "a": [1]}
    assert _render("{{ v | tojson }}", template_kwargs={"v": value}) == '{"b": "<é>", "a": [1]}'
    assert _render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert _render("{% generation %}x{% endgeneration %}y") == "xy"
    assert _render("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}") == "2"


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert _render("{{ messages[0].content }}", _message(parts)) == "one\ntwo"
    assert _render("{{ messages[0].content }}", _message([{"type": "text", "text": "one"}])) == "one"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "messages[0].content[0].type"),
        (["a", {"type": "text"}], "messages[0].content[1].text"),
        ([{"type": "text", "text": 3}], "messages[0].content[0].text"),
        ([None], "messages[0].content[0].text"),
        (3, "messages[0].content"),
    ],
)
def test_content_that_is_no_text_is_refused_by_its_place(content: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        _render("{{ messages[0].content }}", _message(content))
    assert raised.value.param == param


def test_a_message_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\] is of the type str") as raised:
        _render("{{ messages }}", "hello")  # type: ignore[arg-type]
    assert raised.value.param == "messages"


def test_null_fields_are_as_good_as_absent() -> None:
    message = _message(None, role="assistant", tool_calls=None)
    source = "{{ 'content' in messages[0] }} {{ messages[0].tool_calls is defined }}"
    assert _render(source, message) == "False False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content.x }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_goes_wrong_in_a_template_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        _render(source)
    assert raised.value.param == "messages"
    assert "template" in str(raised.value)


def test_the_templates_own_message_reaches_the_client() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        _render("{{ raise_exception('roles must alternate') }}")


def test_a_message_that_quotes_the_request_reaches_the_client_in_part() -> None:
    with pytest.raises(InvalidRequest, match="xxx") as raised:
        _render("{{ raise_exception(messages[0].content) }}", _message("x" * 100_000))
    assert len(raised.value.message) < 600


def test_no_messages_are_refused() -> None:
    template = ChatTemplate({"default": _CHATML}, special_tokens={})
    with pytest.raises(InvalidRequest, match="messages is empty"):
        template.render(ChatPrompt(messages=()))


def test_the_final_message_can_be_left_open() -> None:
    messages = (_message("hi"), _message("Sure, ", role="assistant"))
    text = _render(_CHATML, *messages, continue_final_message=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSure, "


def test_a_template_that_trims_leaves_the_final_message_trimmed() -> None:
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    text = _render(source, _message("Sure, ", role="assistant"), continue_final_message=True)
    assert text == "[Sure,"


@pytest.mark.parametrize("message", [_message(None), {"role": "user"}])
def test_a_final_message_without_text_cannot_be_continued(message: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="no text to continue"):
        _render(_CHATML, message, continue_final_message=True)


def test_a_final_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="does not keep its text"):
        _render("fixed", continue_final_message=True)


def test_of_several_templates_the_one_for_tools_is_used_with_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, special_tokens={})
    messages = (_message("hi"),)
    assert template.render(ChatPrompt(messages=messages)) == "plain"
    assert template.render(ChatPrompt(messages=messages, template_kwargs={"tools": []})) == "plain"
    with_tools = ChatPrompt(messages=messages, template_kwargs={"tools": [{"type": "function"}]})
    assert template.render(with_tools) == "tools"


def test_a_broken_template_is_refused_with_its_line() -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate({"default": "a\n{% if %}"}, special_tokens={})


def test_several_templates_without_a_default_are_refused() -> None:
    with pytest.raises(CheckpointError, match="none named 'default'"):
        ChatTemplate({"rag": "x"}, special_tokens={})


def test_template_of_a_request_is_compiled_once_and_the_oldest_is_forgotten() -> None:
    templates = RequestTemplates({"bos_token": "<s>"})
    prompt = ChatPrompt(messages=(_message("hi"),))
    assert templates.render("{{ bos_token }}{{ messages[0].content }}", prompt) == "<s>hi"
    first = templates.compiled("a")
    assert templates.compiled("a") is first
    for number in range(RequestTemplates.MAX_KEPT):
        templates.compiled(f"b{number}")
    assert templates.compiled("a") is not first


@pytest.mark.parametrize(
    "source",
    [
        "{{ a",
        "{% for %}",
        "{% if true %}" * 150 + "{% endif %}" * 150,
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    ],
)
def test_template_of_a_request_that_cannot_be_compiled_is_its_own_fault(source: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        RequestTemplates({}).render(source, ChatPrompt(messages=(_message("hi"),)))
    assert raised.value.param == "chat_template"
