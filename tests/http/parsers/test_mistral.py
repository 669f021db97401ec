import pytest

from tests.http.parsers.reading import message, read_text

OBJECT = '{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "abcdefghi"}'
READ = ("get_weather", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        (f"[TOOL_CALLS] [{OBJECT}]", 1),
        (f"[TOOL_CALLS][{OBJECT}, {OBJECT}]", 2),
        (f"[TOOL_CALLS] [\n {OBJECT}\n,\n{OBJECT} ] ", 2),
        (f"[TOOL_CALLS] [{OBJECT}", 1),
        (f"[TOOL_CALLS]{OBJECT}", 1),
        ('[TOOL_CALLS]get_weather{"city": "Oslo"}', 1),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}', 1),
        ('[TOOL_CALLS] get_weather [ARGS] {"city": "Oslo"}', 1),
        ('[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}', 1),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]get_weather{"city": "Oslo"}', 2),
    ],
)
def test_both_forms_are_read(text: str, num_calls: int) -> None:
    assert read_text("mistral", text) == message("", *[READ] * num_calls)
    assert read_text("mistral_args", "So: " + text) == message("So: ", *[READ] * num_calls)


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS] [1]",
        "[TOOL_CALLS] [",
        "[TOOL_CALLS][TOOL_RESULTS]",
        "[TOOL_CALLS](x)",
        "[TOOL_CALLS]name and more",
        "[TOOL_CALLS]name[ARG]{}",
        "[TOOL_CALLS]name[ARGS]",
        "[TOOL_CALLS]name[CALL_ID]x",
        f"[TOOL_CALLS]{'n' * 300}{{}}",
        "[1] [TOOL_",
    ],
)
def test_what_is_no_call_is_content_word_for_word(text: str) -> None:
    assert read_text("mistral", text) == message(text)


def test_a_marker_right_after_a_marker_is_found() -> None:
    text = '[TOOL_CALLS][TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}'
    assert read_text("mistral", text) == message("[TOOL_CALLS]", ("f", '{"a": "[TOOL_CALLS]"}'))


def test_a_call_that_breaks_inside_its_arguments_goes_on_to_the_next_marker() -> None:
    text = '[TOOL_CALLS]f[ARGS]{"a": oops}[TOOL_[TOOL_CALLS]g[ARGS]{}'
    assert read_text("mistral", text) == message("", ("f", '{"a": oops}[TOOL_'), ("g", "{}"))


def test_only_the_first_call_of_a_list_counts_if_calls_are_not_parallel() -> None:
    text = f"[TOOL_CALLS] [{OBJECT}, {OBJECT}] x"
    assert read_text("mistral", text, parallel=False) == message(" x", READ)
