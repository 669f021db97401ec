import pytest

from asyncserve.http.parsers.interface import ParsedMessage
from tests.http.parsers.reading import choice, message, read, written_as


def reasoned(
    text: str, *, is_open: bool = False, tool_parser: str = "none", **options: bool
) -> ParsedMessage:
    written = written_as(tool_parser, "think")
    asked = choice("none" if tool_parser == "none" else "auto")
    whole = read(written.parser(asked, starts_in_reasoning=is_open, **options), [text])
    assert read(written.parser(asked, starts_in_reasoning=is_open, **options), text) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<think>\nHm. \n\n Hm!\n</think>\n\nHi.\n", "Hi.\n", "Hm. \n\n Hm!"),
        ("\n <think>a</think>b", "b", "a"),
        ("<think></think>b", "b", ""),
        ("<think>\n\n</think>\n\nb", "b", ""),
        ("<think>a</think>  ", "", "a"),
        ("<think>a<think>b</think></think>c", "</think>c", "a<think>b"),
        ("<think>a </thin", "", "a </thin"),
        ("<think> cut off ", "", "cut off"),
        ("<think>", "", ""),
        ("<thin", "<thin", ""),
        ("  <thin", "  <thin", ""),
        ("<thinking>a", "<thinking>a", ""),
        ("a <think>b</think>", "a <think>b</think>", ""),
        ("a</think>b", "a</think>b", ""),
        (" \n a", " \n a", ""),
        (" \n ", " \n ", ""),
        ("", "", ""),
    ],
)
def test_reasoning_is_split_off(text: str, content: str, reasoning: str) -> None:
    assert reasoned(text) == message(content, reasoning=reasoning)


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("\nHm.\n</think>\n\nHi.", "Hi.", "Hm."),
        ("<think>\nHm.</think>Hi.", "Hi.", "Hm."),
        (" <think>Hm.</think>Hi.", "Hi.", "Hm."),
        ("</think>Hi.", "Hi.", ""),
        ("cut off </", "", "cut off </"),
        ("<thin", "", "<thin"),
        ("  ", "", ""),
    ],
)
def test_text_begins_with_reasoning_if_the_prompt_opened_it(text: str, content: str, reasoning: str) -> None:
    assert reasoned(text, is_open=True) == message(content, reasoning=reasoning)


def test_reasoning_is_left_out_if_it_is_not_wanted() -> None:
    assert reasoned("<think>a</think>b", includes_reasoning=False) == message("b")
    assert reasoned("<think>a", includes_reasoning=False) == message("")


def test_calls_are_found_behind_the_reasoning_and_not_in_it() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    text = f"<think>{call}</think>\n{call}"
    assert reasoned(text, tool_parser="hermes") == message("", ("f", "{}"), reasoning=call)


def test_reasoning_comes_as_it_is_written() -> None:
    parser = written_as("none", "think").parser(choice("none"))
    assert parser is not None
    assert not parser.feed("<think>")
    assert parser.feed("\nLet me").reasoning == "Let me"
    assert parser.feed(" see. ").reasoning == " see."
    assert parser.feed("Well").reasoning == " Well"
    assert not parser.feed("</th")
    assert not parser.feed("ink>\n")
    assert parser.feed("\nSo").content == "So"
    assert parser.feed(" be it").content == " be it"
    assert not parser.finish()


def test_reasoning_of_magistral_has_tags_of_its_own() -> None:
    parser = written_as("none", "mistral").parser(choice("none"))
    assert read(parser, ["[THINK]a[/THINK]b"]) == message("b", reasoning="a")
