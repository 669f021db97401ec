"""Collects what a tool parser finds, and gives the news of it as one `MessageDelta` at a time.

It owns the rules that all formats share: white space alone beside a call is no content, all other text is;
calls are counted, and those above the limit are left out as if they had not been written.
"""

from asyncserve.http.parsers.interface import MessageDelta, ToolCallDelta


class MessageBuilder:
    """One message.

    Args:
        max_calls: Calls beyond this number are left out; None allows any number.
    """

    __slots__ = ("_calls", "_content", "_has_text", "_is_left_out", "_max_calls", "_num_calls", "_space")

    def __init__(self, max_calls: int | None) -> None:
        self._max_calls = max_calls
        self._num_calls = 0
        self._is_left_out = False
        self._content: list[str] = []
        self._space: list[str] = []
        self._has_text = False
        self._calls: list[tuple[int, str | None, list[str]]] = []

    def text(self, text: str) -> None:
        """Add text that is no part of a call."""
        if self._has_text:
            self._content.append(text)
        elif text.isspace():
            self._space.append(text)
        elif text:
            self._content += (*self._space, text)
            self._space.clear()
            self._has_text = True

    def begin_call(self, name: str) -> None:
        """Begin the next call."""
        self._space.clear()
        self._has_text = False
        self._is_left_out = self._num_calls == self._max_calls
        if not self._is_left_out:
            self._calls.append((self._num_calls, name, []))
            self._num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that was begun last."""
        if self._is_left_out or not text:
            return
        if not self._calls:
            self._calls.append((self._num_calls - 1, None, []))
        self._calls[-1][2].append(text)

    def take(self) -> MessageDelta:
        """Return what was added since the last call."""
        delta = MessageDelta()
        if self._content:
            delta.content = "".join(self._content)
            self._content.clear()
        if self._calls:
            delta.tool_calls = [
                ToolCallDelta(index, name, "".join(text)) for index, name, text in self._calls
            ]
            self._calls.clear()
        return delta

    def finish(self) -> MessageDelta:
        """Return the last news: nothing is added afterwards."""
        if not self._num_calls:
            self._content += self._space
        return self.take()
