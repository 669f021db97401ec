"""What a request must satisfy before it becomes sequences: pure, and the last check before the device.

Takes a `Request`, gives its prompt's token ids (`encode_prompt`, the only expensive part, fit for a worker
thread) and then its `TokenizedRequest`s, or an error that names the field at fault with the numbers.
Knows no coroutine and no queue; what the KV pool can hold is asked of the scheduler.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from asyncserve.errors import InvalidRequest, PromptTooLong
from asyncserve.loop.tokenizer import Tokenizer
from asyncserve.request import (
    DEFAULT_MAX_TOKENS,
    ChatPrompt,
    Prompt,
    Request,
    TextPrompt,
    TokenizedRequest,
    TokensPrompt,
)

SMALL_TEXT_LEN = 1024
"""Texts up to this many characters are encoded in place (about 0.3 ms): a thread costs as much."""
SMALL_TOKENS_LEN = 8192
"""Token prompts up to this length are checked in place (about 0.3 ms)."""
_CHECKED_AT_ONCE = 65536
"""Ids looked through in one go (about 1 ms); between two, another thread may have the interpreter."""
_MAX_SEED = 2**63 - 1


def prompt_field(prompt: Prompt) -> str:
    """Name of the request field the prompt came from, for error messages."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def check_token_ids(token_ids: Sequence[int], vocab_size: int, *, field: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        InvalidRequest: Names the field and one such id.
    """
    for start in range(0, len(token_ids), _CHECKED_AT_ONCE):
        part = token_ids[start : start + _CHECKED_AT_ONCE]
        for token_id in (min(part), max(part)):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"{field} holds token id {token_id}; the vocabulary has ids 0 to {vocab_size - 1}",
                    param=field,
                )


def is_small(prompt: Prompt) -> bool:
    """Whether encoding the prompt takes so little that it can be done on the event loop."""
    match prompt:
        case TextPrompt():
            return len(prompt.text) <= SMALL_TEXT_LEN
        case TokensPrompt():
            return len(prompt.token_ids) <= SMALL_TOKENS_LEN
        case ChatPrompt():
            return False  # a template may do anything, so it runs in a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The limits that requests are held against.

    Args:
        tokenizer: Encodes prompts and tells the EOS ids.
        vocab_size: Every token id is below it.
        max_sequence_len: Most tokens of one sequence, by the model's context and the KV pool.
        check_admissible: Given prompt and output length, raises `PromptTooLong` if they can never fit.
            Nothing further on checks lengths again.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_sequence_len: int
    check_admissible: Callable[[int, int], None]

    def encode_prompt(self, request: Request) -> "array[int]":
        """Return the prompt's token ids, at least one. Thread-safe.

        Raises:
            InvalidRequest: An id is outside the vocabulary, the prompt is empty, or the chat template
                refuses it.
            PromptTooLong: It is given as token ids, too many; longer than that, no prompt is looked at.
        """
        sampling = request.sampling
        for name, token_ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", sampling.logit_bias),
        ):
            check_token_ids(_as_array(token_ids, name), self.vocab_size, field=name)
        field = prompt_field(request.prompt)
        try:
            ids = self._encode(request.prompt)
        except InvalidRequest as error:
            if error.param in (None, "prompt"):
                error.param = field  # the tokenizer cannot know where its text came from
            raise
        if not ids:
            raise InvalidRequest(f"{field} is empty: it has no tokens", param=field)
        check_token_ids(ids, self.vocab_size, field=field)
        return ids

    def admit(
        self, request: Request, prompt_token_ids: "array[int]", *, seed: int, sequence_ids: Iterator[int]
    ) -> list[TokenizedRequest]:
        """Return the request's `n` sequences.

        Args:
            prompt_token_ids: As `encode_prompt` gave them.
            seed: Of the first sequence; the others count up from it.
            sequence_ids: Gives as many fresh ids as there are sequences.

        Raises:
            PromptTooLong: Prompt, or prompt plus a given `max_tokens`, exceeds the context or the KV pool.
        """
        sampling = request.sampling
        max_output_len = self._max_output_len(request.prompt, len(prompt_token_ids), sampling.max_tokens)
        stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_token_ids |= self.tokenizer.eos_token_ids
        return [
            TokenizedRequest(
                request=request,
                sequence_id=next(sequence_ids),
                index=index,
                prompt_token_ids=prompt_token_ids,
                max_output_len=max_output_len,
                stop_token_ids=stop_token_ids,
                seed=(seed + index) & _MAX_SEED,
            )
            for index in range(sampling.n)
        ]

    def _encode(self, prompt: Prompt) -> "array[int]":
        match prompt:
            case TextPrompt():
                return self.tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
            case ChatPrompt():
                return self.tokenizer.encode(self.tokenizer.render_chat(prompt), add_special_tokens=False)
            case TokensPrompt():
                if (num_tokens := len(prompt.token_ids)) > 0:
                    self.check_admissible(num_tokens, 1)
                return _as_array(prompt.token_ids, "prompt")

    def _max_output_len(self, prompt: Prompt, prompt_len: int, max_tokens: int | None) -> int:
        rest_len = max(1, self.max_sequence_len - prompt_len)
        max_output_len = rest_len if max_tokens is None else max_tokens
        if max_tokens is DEFAULT_MAX_TOKENS:
            max_output_len = min(max_tokens, rest_len)
        try:
            self.check_admissible(prompt_len, max_output_len)
        except PromptTooLong as error:
            if error.param == "prompt":
                error.param = prompt_field(prompt)
            raise
        return max_output_len


def _as_array(token_ids: Iterable[int], field: str) -> "array[int]":
    """Return ids that a caller gave as an array, which is quick and takes nothing but integers."""
    try:
        return array("i", token_ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{field} holds something that is no token id: {error}", param=field) from error
