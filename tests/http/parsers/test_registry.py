import re
from collections.abc import Mapping

import pytest

from asyncserve.cli import option_help
from asyncserve.errors import ConfigError
from asyncserve.http.parsers.detection import REASONING_RULES, TOOL_RULES
from asyncserve.http.parsers.interface import ToolChoice
from asyncserve.http.parsers.registry import (
    AUTO,
    NONE,
    REASONING_PARSERS,
    TOOL_PARSERS,
    MessageFormat,
    message_format,
)
from tests.http.parsers.reading import choice, message, read, written_as

NO_TOOLS = ToolChoice()

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- "# Tools\\n\\nYou are given signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nFor each call, return:\\n<tool_call>\\n{\\"name\\": <function-name>, " }}
    {{- "\\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- endif %}"""
QWEN_3 = (
    QWEN
    + """{%- if '</think>' in content %}
    {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n') %}
{%- endif %}
{%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}"""
)
QWEN_CODER = """{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}{{- '<parameter=' + key + '>\\n' }}
{{- '</function>\\n</tool_call>' }}"""
GLM = """<tool_call>{{ tc.name }}
{% for k, v in tc.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>{{ '</think>' }}"""
LLAMA_3_1 = """{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of its arguments}.' }}
{%- if builtin_tools is defined and tool_call.name in builtin_tools %}
    {{- "<|python_tag|>" + tool_call.name + ".call(" }}
{%- else %}
    {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}
{%- endif %}"""
LLAMA_3_2 = """{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of its arguments}.' }}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}"""
LLAMA_PYTHONIC = """{{- "<|header_start|>system<|header_end|>\\n\\n" }}
{{- "Use this format: [func_name1(params_name1=params_value1, params_name2=params_value2...), " }}
{{- "func_name2(params)]" }}{{- tool_call.name + '(' -}}{{- param + '=' -}}"""
MISTRAL_V3 = """{{- "[AVAILABLE_TOOLS] [" }}{{- "[TOOL_CALLS] [" }}{%- set out = tool_call.function|tojson %}
{{- out[:-1] }}{{- ', "id": "' + tool_call.id + '"}' }}"""
MISTRAL_V13 = """{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}"""
MAGISTRAL = MISTRAL_V13 + """{{- '[THINK]' + block['thinking'] + '[/THINK]' }}"""
DEEPSEEK_R1 = """{% set content = content.split('</think>')[-1] %}{{'<\uff5ctool▁calls▁begin\uff5c>'}}
{% if add_generation_prompt %}{{'<\uff5cAssistant\uff5c><think>\\n'}}{% endif %}"""
CHATML = "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"


def of_template(template: str | None, *special: str) -> MessageFormat:
    return message_format(
        tool_call_parser="auto", reasoning_parser="auto", chat_template=template, special_tokens=special
    )


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (QWEN, "hermes", None),
        (QWEN_3, "hermes", "think"),
        (QWEN_CODER, None, None),
        (GLM, None, "think"),
        (LLAMA_3_1, "llama3_json", None),
        (LLAMA_3_2, "llama3_json", None),
        (LLAMA_PYTHONIC, "pythonic", None),
        (MISTRAL_V3, "mistral", None),
        (MISTRAL_V13, "mistral_args", None),
        (MAGISTRAL, "mistral_args", "mistral"),
        (DEEPSEEK_R1, None, "think"),
        (CHATML, None, None),
        (None, None, None),
    ],
)
def test_parsers_are_told_by_the_template(
    template: str | None, tools: str | None, reasoning: str | None
) -> None:
    found = of_template(template)
    assert (found.tool_parser, found.reasoning_parser) == (tools, reasoning)


def test_every_rule_names_a_parser() -> None:
    assert {rule.parser for rule in TOOL_RULES} <= TOOL_PARSERS.keys()
    assert {rule.parser for rule in REASONING_RULES} <= REASONING_PARSERS.keys()


def test_a_name_or_none_counts_more_than_the_template() -> None:
    named = message_format(
        tool_call_parser="pythonic", reasoning_parser="none", chat_template=QWEN_3, special_tokens=()
    )
    assert (named.tool_parser, named.reasoning_parser) == ("pythonic", None)
    mistral = message_format(
        tool_call_parser="mistral", reasoning_parser="none", chat_template=MISTRAL_V13, special_tokens=()
    )
    assert mistral.tool_parser == "mistral_args"


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        ConfigError, match=r"--tool-call-parser is 'x'; known: auto, none, hermes, llama3_json"
    ):
        written_as("x")
    with pytest.raises(ConfigError, match=r"--reasoning-parser is 'hermes'; known: auto, none, deepseek_r1"):
        written_as("hermes", "hermes")


@pytest.mark.parametrize("asked", [NO_TOOLS, choice("none"), ToolChoice(mode="auto")])
def test_plain_text_needs_no_parser(asked: ToolChoice) -> None:
    assert written_as("hermes").parser(asked) is None
    assert written_as("hermes", "think").parser(asked) is not None


def test_calls_are_read_in_the_hermes_form_if_no_form_is_known() -> None:
    parser = written_as("none").parser(choice())
    assert read(parser, ['<tool_call>{"name": "f"}</tool_call>']) == message("", ("f", "{}"))


def test_special_tokens_are_needed_if_markers_are_among_them() -> None:
    special = ("<|im_end|>", "[TOOL_CALLS]", "<tool_call>", "</think>")
    assert written_as("mistral", "none", *special).needs_special_tokens(choice())
    assert written_as("hermes", "none", *special).needs_special_tokens(choice())
    assert not written_as("hermes", "none", *special).needs_special_tokens(choice("none"))
    assert not written_as("llama3_json", "none", *special).needs_special_tokens(choice())
    assert not written_as("hermes", "none", "<|im_end|>").needs_special_tokens(choice())
    assert written_as("none", "think", *special).needs_special_tokens(choice("none"))


def test_special_tokens_that_are_no_markers_are_left_out_where_all_are_shown() -> None:
    special = ("[TOOL_CALLS]", "[ARGS]", "<|x|>", "<|xy|>", "</s>")
    parser = written_as("mistral", "none", *special).parser(choice())
    text = 'a<|x|>b<|xy|><s>c</s>[TOOL_CALLS]f<|x|>[ARGS]{"a": "<|x|>"}<|x'
    expected = message("ab<s>c</s><|x", ("f", '{"a": ""}'))
    assert read(parser, [text]) == expected
    parser = written_as("mistral", "none", *special).parser(choice())
    assert read(parser, text) == expected
    reasoned = written_as("mistral", "think", "</think>", *special).parser(choice("none"))
    assert read(reasoned, ["<think>a</think>b[ARGS]c"]) == message("bc", reasoning="a")
    shown = written_as("hermes", "none", *special).parser(choice())
    assert read(shown, ["a<|x|>"]) == message("a<|x|>")


@pytest.mark.parametrize(
    ("prompt_end", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\nLet me", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
    ],
)
def test_a_prompt_that_ends_inside_reasoning_is_told(prompt_end: str, is_open: bool) -> None:
    written = written_as("none", "think", "<|im_start|>", "<|im_end|>")
    assert written.template_starts_reasoning(prompt_end) is is_open
    assert not written_as("none", "none").template_starts_reasoning(prompt_end)


def test_without_special_tokens_the_end_of_a_prompt_tells_too() -> None:
    written = written_as("none", "think")
    assert written.template_starts_reasoning("<think>\n")
    assert not written.template_starts_reasoning("<think>a</think>")


@pytest.mark.parametrize(
    ("option", "parsers"), [("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)]
)
def test_the_help_names_every_parser(option: str, parsers: Mapping[str, object]) -> None:
    named = set(re.findall(r"\w+", option_help()[option]))
    assert {*parsers, AUTO, NONE} <= named
