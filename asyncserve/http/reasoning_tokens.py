"""How many tokens of a choice were spent on reasoning: token ids in, a count out.

Counted by the ids of the opening and the closing marker, so only for models that have a token for each: then
the count is exact, and markers count as reasoning. Knows neither text nor parsers.
"""

from collections.abc import Callable, Sequence

from asyncserve.http.parsers.registry import REASONING_PARSERS, MessageFormat
from asyncserve.loop.tokenizer import Tokenizer


def reasoning_ids(tokenizer: Tokenizer, message_format: MessageFormat) -> tuple[int, int] | None:
    """Return the tokens of the two markers; None if the model does not reason, or one is not one token."""
    if message_format.reasoning_parser is None:
        return None
    tags = REASONING_PARSERS[message_format.reasoning_parser]
    ids = [tokenizer.encode(marker, add_special_tokens=False) for marker in (tags.begin, tags.end)]
    return None if any(len(each) != 1 for each in ids) else (ids[0][0], ids[1][0])


class ReasoningCount:
    """Counts for one choice.

    Args:
        markers: Ids of the opening and the closing marker.
        is_open: The prompt has opened the reasoning.
        is_space: Tells of a token that it is only white space, which may stand before the reasoning.
    """

    def __init__(self, markers: tuple[int, int], *, is_open: bool, is_space: Callable[[int], bool]) -> None:
        self._begin_id, self._end_id = markers
        self._is_open = is_open
        self._is_space = is_space
        self._is_over = False
        self._num_seen = 0

    @property
    def num_tokens(self) -> int:
        """Tokens spent on reasoning so far."""
        return self._num_seen if self._is_open else 0

    def take(self, token_ids: Sequence[int]) -> None:
        """Count new tokens."""
        if self._is_over:
            return
        for token_id in token_ids:
            self._num_seen += 1
            if token_id == self._begin_id:
                self._is_open = True
            elif self._is_open:
                if token_id == self._end_id:
                    self._is_over = True
                    return
            elif not self._is_space(token_id):
                self._is_over = True
                return
