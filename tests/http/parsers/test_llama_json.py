import pytest

from tests.http.parsers.reading import message, read_text

CALL = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
READ = ("get_weather", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (CALL, "", 1),
        (f"\n{CALL}\n", "", 1),
        (f"Sure: {CALL}", "Sure: ", 1),
        (f"{CALL}; {CALL}", "", 2),
        (f"{CALL}\n{CALL}", "", 2),
        (f"{CALL},{CALL};", "", 2),
        (f"{CALL}; that is all", "; that is all", 1),
        (f"<|python_tag|>{CALL}", "", 1),
        (f"{CALL};<|python_tag|>\n{CALL}", "", 2),
        ('{"type": "function", "function": "get_weather", "parameters": {"city": "Oslo"}}', "", 1),
        ('{"parameters": {"city": "Oslo"}, "name": "get_weather"}', "", 1),
    ],
)
def test_calls_are_read(text: str, content: str, num_calls: int) -> None:
    assert read_text("llama3_json", text) == message(content, *[READ] * num_calls)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "parameters": {}}',
        '{"name": "get_weather"}',
        '{"name": "get_weather", "description": "Tells the weather"}',
        '{"answer": {"name": 5}}',
        "{{{",
        "function f() { return {}; }",
        '<|python_tag|>brave_search.call(query="Oslo")',
        "<|python_tag|>",
        "a {",
    ],
)
def test_what_names_no_function_of_the_request_is_content(text: str) -> None:
    assert read_text("llama3_json", text) == message(text)


def test_after_the_tag_any_function_is_a_call() -> None:
    text = '<|python_tag|>{"name": "other", "parameters": {}}'
    assert read_text("llama3_json", text) == message("", ("other", "{}"))


def test_an_answer_in_json_is_not_held_back() -> None:
    text = '{"title": "A long story", "text": "…"}'
    assert read_text("llama3_json", text) == message(text)


def test_a_call_that_breaks_inside_its_arguments_gives_the_rest_as_written() -> None:
    text = '{"name": "get_weather", "parameters": {"city": Oslo}}'
    assert read_text("llama3_json", text) == message("", ("get_weather", '{"city": Oslo}}'))
