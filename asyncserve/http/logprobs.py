"""Log-probabilities as the two endpoints show them: token ids in, JSON values out.

A token's `bytes` come from the vocabulary, never from decoded text, so characters split over tokens are
right; its text is those bytes with a replacement character where they are not UTF-8. JSON has no infinity:
impossible tokens get -9999.0.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from asyncserve.request import TokenLogprobs

LOWEST = -9999.0


class TokenTexts:
    """Text and bytes of tokens, by id, remembered.

    Args:
        token_bytes: Gives the bytes a token stands for.
        is_special: Whether `skip_special_tokens` leaves a token out.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], is_special: Callable[[int], bool]) -> None:
        self._token_bytes = token_bytes
        self.is_special = is_special
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __getitem__(self, token_id: int) -> tuple[str, list[int]]:
        """Return (text, bytes as numbers) of a token."""
        known = self._known.get(token_id)
        if known is None:
            data = self._token_bytes(token_id)
            known = self._known[token_id] = (data.decode("utf-8", "replace"), list(data))
        return known


def as_number(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    # A NaN compares false, so it becomes the lowest too.
    return max(LOWEST, logprob)


def name_of_id(token_id: int) -> str:
    """Return what a token is called where tokens are named by their ids."""
    return f"token_id:{token_id}"


def chat_content(
    entries: Sequence[TokenLogprobs], texts: TokenTexts, *, names_ids: bool = False
) -> list[dict[str, Any]]:
    """Return the `logprobs.content` entries of chat, one per token.

    Args:
        names_ids: Tokens are named by their ids instead of their texts.
    """
    content = []
    for entry in entries:
        shown = []
        for token_id, logprob in ((entry.token_id, entry.logprob), *entry.top):
            text, data = texts[token_id]
            name = name_of_id(token_id) if names_ids else text
            shown.append({"token": name, "logprob": as_number(logprob), "bytes": data})
        content.append({**shown[0], "top_logprobs": shown[1:]})
    return content


def prompt_scores(
    entries: Sequence[TokenLogprobs], texts: TokenTexts, num_top: int | None = None
) -> list[dict[str, dict[str, Any]] | None]:
    """Return `prompt_logprobs`, in vLLM's shape: null for the first token, then an object per prompt token.

    An object has token ids as its names: the prompt's token and then the likeliest ones.

    Args:
        entries: Of the prompt's tokens from the second on.
        num_top: How many likeliest tokens to show, as `entries` may have more; None shows all.
    """
    shown: list[dict[str, dict[str, Any]] | None] = [None]
    for entry in entries:
        scores = {entry.token_id: (entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1):
            scores.setdefault(token_id, (logprob, rank))
        shown.append(
            {
                str(token_id): {
                    "logprob": as_number(logprob),
                    "rank": rank,
                    "decoded_token": texts[token_id][0],
                }
                for token_id, (logprob, rank) in scores.items()
            }
        )
    return shown


class CompletionLogprobs:
    """The parallel lists of one choice of /v1/completions; offsets run on from one call to the next.

    An offset counts the characters of the choice's text before the token: bytes of an unfinished character
    count when the token that completes it is in.

    Args:
        skips_special: Whether special tokens are left out of the text.
        strips_prompt: Whether an echoed prompt has lost the space that SentencePiece puts at its beginning.
        strips_output: Whether the output has.
        names_ids: Tokens are named by their ids instead of their texts.
        num_top: How many likeliest tokens to show, as entries may have more; None shows all.
    """

    def __init__(
        self,
        texts: TokenTexts,
        *,
        skips_special: bool,
        strips_prompt: bool,
        strips_output: bool,
        num_top: int | None = None,
        names_ids: bool = False,
    ) -> None:
        self._texts = texts
        self._num_top = num_top
        self._names_ids = names_ids
        self._skips_special = skips_special
        self._strips_prompt = strips_prompt
        self._strips_output = strips_output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], echoed: str
    ) -> dict[str, list[Any]]:
        """Return the lists of an echoed prompt; its first token has no log-probability.

        Args:
            token_ids: The prompt's tokens.
            entries: Of the prompt's tokens from the second on.
            echoed: The text the prompt is shown as: a special token, or the space that SentencePiece may put
                after one, counts if it is spelled out there.
        """
        lists = _empty()
        for index, token_id in enumerate(token_ids):
            text, data = self._texts[token_id]
            if self._texts.is_special(token_id) and not echoed.startswith(text, self._offset):
                data = []
            elif text.startswith(" ") and (self._strips_prompt or not echoed.startswith(" ", self._offset)):
                data = data[1:]
                self._strips_prompt = False
            entry = entries[index - 1] if 0 < index <= len(entries) else None
            self._add(lists, token_id, bytes(data), entry)
        return lists

    def output(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """Return the lists of new output tokens."""
        lists = _empty()
        for entry in entries:
            text, data = self._texts[entry.token_id]
            if self._skips_special and self._texts.is_special(entry.token_id):
                data = []
            if self._strips_output and data:
                self._strips_output = False
                data = data[1:] if text.startswith(" ") else data
            self._add(lists, entry.token_id, bytes(data), entry)
        return lists

    def _name(self, token_id: int) -> str:
        return name_of_id(token_id) if self._names_ids else self._texts[token_id][0]

    def _add(
        self, lists: dict[str, list[Any]], token_id: int, data: bytes, entry: TokenLogprobs | None
    ) -> None:
        name = self._name(token_id)
        lists["tokens"].append(name)
        lists["text_offset"].append(self._offset)
        self._offset += len(self._decoder.decode(data))
        if entry is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        lists["token_logprobs"].append(as_number(entry.logprob))
        # Different tokens can have the same text: the chosen one and the likelier one win.
        top = {name: as_number(entry.logprob)}
        for rival, logprob in entry.top[: self._num_top]:
            top.setdefault(self._name(rival), as_number(logprob))
        lists["top_logprobs"].append(top)


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def join(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the parallel lists of `first` followed by those of `second`."""
    return {name: first[name] + second[name] for name in first}
