import json

import pytest

from tests.http.parsers.reading import message, read_text


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[get_time()]", [("get_time", "{}")]),
        ('[get_weather(city="Oslo")]', [("get_weather", '{"city": "Oslo"}')]),
        (
            "[get_weather(city='Oslo', days=3), get_time()]",
            [("get_weather", '{"city": "Oslo", "days": 3}'), ("get_time", "{}")],
        ),
        (
            '[ get_weather( city = "Oslo" , days = 3 , ) , ]',
            [("get_weather", '{"city": "Oslo", "days": 3}')],
        ),
    ],
)
def test_calls_are_read(text: str, calls: list[tuple[str, str]]) -> None:
    assert read_text("pythonic", text) == message("", *calls)
    assert read_text("llama4_pythonic", f"So: {text}\n") == message("So: ", *calls)


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("True", True),
        ("false", False),
        ("None", None),
        ("null", None),
        ("-1.5e3", -1500.0),
        ("1_000", 1000),
        ("0x10", 16),
        ("+5", 5),
        (".5", 0.5),
        ("5.", 5.0),
        ("''", ""),
        ('"" ', ""),
        ("'it\\'s \"so\"'", 'it\'s "so"'),
        ('"a\\n\\t\\\\\\x41\\u00e9\\U0001F600\\/"', "a\n\t\\Aé😀/"),
        ("'\\ud83d\\ude00'", "😀"),
        ("'\\d+\\w'", "\\d+\\w"),
        ("'a\\\nb'", "ab"),
        ('"a\nb"', "a\nb"),
        ('"""a "quoted" ""text"""', 'a "quoted" ""text'),
        ("'''it's\n'''", "it's\n"),
        ('""""""', ""),
        ("[1, 'a', [], {}, ]", [1, "a", [], {}]),
        ("{'a': {'b': [True]}, \"c\": None,}", {"a": {"b": [True]}, "c": None}),
        ("'[get_weather(city=1)]'", "[get_weather(city=1)]"),
    ],
)
def test_a_literal_becomes_its_json(literal: str, value: object) -> None:
    [call] = read_text("pythonic", f"[get_weather(city={literal})]").tool_calls
    assert json.loads(call.arguments) == {"city": value}


def test_json_is_spaced_as_json_dumps_does_it() -> None:
    [call] = read_text("pythonic", "[get_weather(city={'a':[1,2,],'b':'x'},days=1)]").tool_calls
    assert call.arguments == json.dumps({"city": {"a": [1, 2], "b": "x"}, "days": 1})


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "[link](https://example.org)",
        "[other(a=1)]",
        "[get_weather]",
        "[get_weather(5)]",
        "[get_weather('Oslo')]",
        "[get_weather(city)]",
        "[get_weather(",
        "[]",
        "[",
        "[[[get_",
        "[ get_time",
        "a[get_weather_of_places(1)",
    ],
)
def test_what_is_no_call_of_a_function_of_the_request_is_content(text: str) -> None:
    assert read_text("pythonic", text) == message(text)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[get_weather(city=Oslo)]", '{"city": Oslo)]'),
        ("[get_weather(city=(1, 2))]", '{"city": (1, 2))]'),
        ("[get_weather(city=1 + 2)]", '{"city": 1+ 2)]'),
        ("[get_weather(city=1, 2)]", '{"city": 1, 2)]'),
        ("[get_weather(city=1, days 2)]", '{"city": 1, days 2)]'),
        ("[get_weather(city={1: 2})]", '{"city": {1: 2})]'),
        ("[get_weather(city=1e99, days=nan)]", '{"city": 1e99, "days": nan)]'),
        ("[get_weather(city='a' 'b')]", '{"city": "a"\'b\')]'),
        ("[get_weather(city='\\x4g')]", '{"city": "\\x4g\')]'),
        ("[get_weather(city='\\UFFFFFFFF', days=1)]", '{"city": "\\UFFFFFFFF\', days=1)]'),
    ],
)
def test_a_call_that_breaks_inside_its_arguments_gives_the_rest_as_written(text: str, arguments: str) -> None:
    [call] = read_text("pythonic", text).tool_calls
    assert call.arguments == arguments


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[get_weather(city='Os", '{"city": "Os'),
        ("[get_weather(city=[1, 'Os", '{"city": [1, "Os'),
        ("[get_weather(city=1, da", '{"city": 1'),
        ("[get_weather(city=1, days=", '{"city": 1, "days": '),
    ],
)
def test_text_that_is_cut_off_inside_arguments_gives_those_so_far(text: str, arguments: str) -> None:
    assert read_text("pythonic", text) == message("", ("get_weather", arguments))


def test_only_the_first_call_counts_if_calls_are_not_parallel() -> None:
    text = "[get_time(), get_weather(city='Oslo')][get_time()]"
    assert read_text("pythonic", text, parallel=False) == message("", ("get_time", "{}"))
