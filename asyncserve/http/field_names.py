"""Errors about a `ChatBody` in terms of the body it was made from: fields have the names the client knows.

/v1/responses and /v1/messages ask by way of a `ChatBody`, whose checks name its fields. Takes such an error
and puts its message and its `param` right. Pure.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from asyncserve.errors import RequestError

_TOOL = re.compile(r"(\btools\[\d+\])\.function\b")
"""A tool as `ChatBody` has it; elsewhere there is no `function` between the tool and its fields."""


class FieldNames:
    """How one kind of body names what a `ChatBody` has.

    Args:
        asked_as: Field of a `ChatBody` → what the client calls it. What is below it (`messages[3].content`)
            is not told apart: it may stand elsewhere in the client's body.
    """

    def __init__(self, asked_as: Mapping[str, str]) -> None:
        self._asked_as = asked_as

    def as_asked(self, error: BaseException) -> BaseException:
        """Return the error, its fields named as the client named them."""
        if isinstance(error, RequestError) and error.param is not None:
            name = re.split(r"[.\[]", error.param, maxsplit=1)[0]
            if name in self._asked_as:
                error.param = self._asked_as[name]
                error.message = self._renamed(error.message)
            else:
                error.param = _TOOL.sub(r"\1", error.param)
                error.message = _TOOL.sub(r"\1", error.message)
            error.args = (error.message,)
        return error

    @contextmanager
    def errors_as_asked(self) -> Iterator[None]:
        """Do so with an error that is raised inside."""
        try:
            yield
        except RequestError as error:
            self.as_asked(error)
            raise

    def _renamed(self, message: str) -> str:
        """Name every field once: a field's name may be an ordinary word in the rest of a sentence."""
        seen: set[str] = set()

        def rename(found: re.Match[str]) -> str:
            name = found[0]
            if name in seen:
                return name
            seen.add(name)
            return self._asked_as[name]

        return re.sub(rf"\b({'|'.join(self._asked_as)})\b", rename, message)
