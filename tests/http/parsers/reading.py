"""What the parser tests share: tools, formats by name, and a text read in pieces."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from asyncserve.http.parsers.interface import MessageParser, ParsedMessage, ToolCall, ToolChoice
from asyncserve.http.parsers.registry import MessageFormat, message_format

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
TIME = {"name": "get_time"}
TOOLS = (WEATHER, TIME)


def choice(mode: str = "auto", *, parallel: bool = True, name: str | None = None) -> ToolChoice:
    return ToolChoice(tools=TOOLS, mode=mode, parallel=parallel, name=name)


def written_as(tool_parser: str, reasoning_parser: str = "none", *special: str) -> MessageFormat:
    return message_format(
        tool_call_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        chat_template=None,
        special_tokens=special,
    )


def read(parser: MessageParser | None, pieces: Iterable[str]) -> ParsedMessage:
    """Return what the deltas add up to; the calls in them must be numbered as they come."""
    assert parser is not None
    message = ParsedMessage()
    for piece in pieces:
        message.add(_numbered(parser.feed(piece), message))
    message.add(_numbered(parser.finish(), message))
    return message


def _numbered(delta: Any, message: ParsedMessage) -> Any:
    num_calls = len(message.tool_calls)
    for call in delta.tool_calls:
        num_calls += call.name is not None
        assert call.index == num_calls - 1
    return delta


def cut(text: str, places: Iterable[int]) -> list[str]:
    """Return the text cut at some places."""
    ends = sorted({0, len(text), *places})
    return [text[begin:end] for begin, end in pairwise(ends)]


def read_text(tool_parser: str, text: str, **options: Any) -> ParsedMessage:
    """Return a text read by a format's parser, the same whole and character by character."""
    written = written_as(tool_parser)
    whole = read(written.parser(choice(**options)), [text])
    assert read(written.parser(choice(**options)), text) == whole
    return whole


def message(content: str = "", *calls: tuple[str, str], reasoning: str = "") -> ParsedMessage:
    return ParsedMessage(reasoning, content, [ToolCall(name, arguments) for name, arguments in calls])
