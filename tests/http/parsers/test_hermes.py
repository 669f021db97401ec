import pytest

from asyncserve.http.parsers.interface import ToolCallDelta
from tests.http.parsers.reading import choice, message, read_text, written_as

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def test_a_call_is_read() -> None:
    assert read_text("hermes", CALL) == message("", ("get_weather", '{"city": "Oslo"}'))


def test_text_around_calls_is_content_and_white_space_between_them_is_not() -> None:
    text = f"Let me see.\n\n{CALL}\n{CALL}\n\nDone.\n"
    call = ("get_weather", '{"city": "Oslo"}')
    assert read_text("hermes", text) == message("Let me see.\n\n\n\nDone.\n", call, call)


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "arguments": { "a":\n1 }}', '{ "a":\n1 }'),
        ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"id": [1, {"x": null}], "name": "f", "type": "function", "arguments": {}}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}', '{"a": "é"}'),
        ('{"name": "f", "arguments": {"a": "</tool_call>"}}', '{"a": "</tool_call>"}'),
        ('{"name": "f", "arguments": {"a": "<tool_call>{"}}', '{"a": "<tool_call>{"}'),
        ('{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}, "name": "g"}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}}}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
    ],
)
def test_calls_are_read_as_models_write_them(inside: str, arguments: str) -> None:
    for text in (f"<tool_call>{inside}</tool_call>", f"<tool_call>\n{inside}\n</tool_call>"):
        assert read_text("hermes", text) == message("", ("f", arguments))


def test_a_line_break_inside_a_string_comes_out_escaped() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"code": "a\nb\tc\x00"}}</tool_call>'
    assert read_text("hermes", text) == message("", ("f", '{"code": "a\\nb\\tc\\u0000"}'))


def test_a_function_that_the_request_does_not_name_is_a_call() -> None:
    assert read_text("hermes", '<tool_call>{"name": "other"}</tool_call>') == message("", ("other", "{}"))


@pytest.mark.parametrize(
    "inside",
    [
        "no JSON",
        "[1]",
        "{",
        '{"name": 5, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": tru}',
        '{"name": "f", "arguments": "text"}',
        '{"name": "f", "arguments": "{} {}"}',
        '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
        '{"name": "f" "arguments": {}}',
        '{"name" "f"}',
        "{name: 1}",
        '{"a": 01, "name": "f"}',
        '{"a": "\\x", "name": "f"}',
        '{"a": "\\u00g0", "name": "f"}',
        '{"a": "\\u00e", "name": "f"}',
        '{"a": [1, ], "name": "f"}',
        '{"a": [1}, "name": "f"}',
        '{,"name": "f"}',
    ],
)
def test_a_call_that_breaks_before_its_arguments_is_content_word_for_word(inside: str) -> None:
    text = f"a <tool_call>\n{inside}\n</tool_call> b"
    assert read_text("hermes", text) == message(text)


def test_a_call_that_breaks_inside_its_arguments_gives_them_as_written() -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": oops, "b": 1}}}}</tool_call>\n{CALL} b'
    expected = message(" b", ("f", '{"a": oops, "b": 1}}'), ("get_weather", '{"city": "Oslo"}'))
    assert read_text("hermes", text) == expected


def test_a_call_that_breaks_behind_its_arguments_has_them_and_the_rest_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1} oops}</tool_call>'
    assert read_text("hermes", text) == message("oops}</tool_call>", ("f", '{"a": 1}'))


def test_reading_goes_on_where_a_call_broke() -> None:
    text = f"<tool_call><tool_call>x{CALL}"
    assert read_text("hermes", text) == message(
        "<tool_call><tool_call>x", ("get_weather", '{"city": "Oslo"}')
    )


@pytest.mark.parametrize("end", ["", "</tool_", "\n"])
def test_a_missing_end_tag_does_no_harm(end: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{}}}}{end}'
    assert read_text("hermes", text) == message("", ("f", "{}"))


def test_text_that_is_cut_off_inside_arguments_gives_those_so_far() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": [1, "Os'
    assert read_text("hermes", text) == message("", ("f", '{"a": [1, "Os'))


def test_text_that_is_cut_off_before_the_arguments_is_content() -> None:
    text = '<tool_call>{"name": "get_weather", "argu'
    assert read_text("hermes", text) == message(text)


def test_only_the_first_call_counts_if_calls_are_not_parallel() -> None:
    call = ("get_weather", '{"city": "Oslo"}')
    assert read_text("hermes", f"{CALL}\n{CALL}", parallel=False) == message("", call)
    assert read_text("hermes", f"{CALL}\n{CALL} b", mode="named", name="get_weather") == message(" b", call)


def test_the_name_comes_when_the_arguments_begin_and_they_come_as_they_are_written() -> None:
    parser = written_as("hermes").parser(choice())
    assert parser is not None
    assert not parser.feed('<tool_call>\n{"name": "get_weather", "arguments":')
    assert parser.feed(' {"ci').tool_calls == [ToolCallDelta(0, "get_weather", '{"ci')]
    assert parser.feed('ty": "O').tool_calls == [ToolCallDelta(0, None, 'ty": "O')]
    assert parser.feed('slo"}').tool_calls == [ToolCallDelta(0, None, 'slo"}')]
    assert not parser.feed("}\n</tool_call>")
    assert not parser.finish()


def test_text_comes_at_once_unless_it_may_begin_a_tag() -> None:
    parser = written_as("hermes").parser(choice())
    assert parser is not None
    assert parser.feed("a < b <tool").content == "a < b "
    assert parser.feed("s>").content == "<tools>"
