"""What a request must satisfy before it becomes sequences: pure, and the last check before the device.

Takes a `Request`, gives its prompt's token ids (`encode_prompt`, the only expensive part, fit for a worker
thread) and then its `TokenizedRequest`s, or an error that names the field at fault with the numbers.
Knows no coroutine and no queue; how long a sequence may be is asked of `sequence_limits`.
"""

import dataclasses
import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncserve.errors import InvalidRequest, PromptTooLong
from asyncserve.grammar import Grammar
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
LONG_TEXT_LEN = 65536
"""Texts above this many characters are long: encoding one may take seconds."""
CHARACTERS_PER_TOKEN = 4
"""Of a text whose tokens are not known yet; so in English, fewer in most other languages."""
TEXT_MARGIN = 2
"""Of a text that is truncated, so many times what the most tokens can stand for is looked at."""
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
            # A template may do anything, so it runs in a thread.
            return prompt.rendered is not None and len(prompt.rendered) <= SMALL_TEXT_LEN


def is_quick(request: Request) -> bool:
    """Whether a request takes so little work before `admit` that it can be done on the event loop."""
    sampling = request.sampling
    num_allowed = len(sampling.allowed_token_ids or ())
    return not sampling.bad_words and num_allowed <= SMALL_TOKENS_LEN and is_small(request.prompt)


def is_long(prompt: Prompt) -> bool:
    """Whether encoding the prompt may take so long that short ones should not wait for it.

    A conversation's length is known when it has been rendered.
    """
    text = prompt.text if isinstance(prompt, TextPrompt) else None
    if isinstance(prompt, ChatPrompt):
        text = prompt.rendered
    return text is not None and len(text) > LONG_TEXT_LEN


def estimated_len(request: Request) -> int:
    """Return about how many tokens a request's prompt has, before it is encoded.

    Token ids are counted. A text has a token for each `CHARACTERS_PER_TOKEN` characters; that of a
    conversation which is not rendered yet is the text in its messages. What is cut off does not count.
    """
    try:
        num_tokens = _estimated_len(request.prompt)
    except (TypeError, AttributeError):
        return 1  # something in it is no text; its encoding will say what
    num_kept = request.truncate_prompt_tokens
    return num_tokens if num_kept is None or num_kept < 0 else min(num_tokens, num_kept)


def _estimated_len(prompt: Prompt) -> int:
    if isinstance(prompt, TokensPrompt):
        return len(prompt.token_ids)
    text = prompt.text if isinstance(prompt, TextPrompt) else prompt.rendered
    if text is not None or isinstance(prompt, TextPrompt):
        num_characters = len(text or "")
    else:
        num_characters = sum(map(_num_characters, prompt.messages))
    return 1 + num_characters // CHARACTERS_PER_TOKEN


def _num_characters(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list | tuple):
        return 0
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return sum(len(text) for text in texts if isinstance(text, str))


def seed_of_choice(seed: int, index: int) -> int:
    """Return the sampler's seed for one choice of a request: the first has the request's own.

    The others are spread by a hash, or choices of requests with neighbouring seeds would be the same.
    """
    if index:
        digest = hashlib.blake2b(b"%d/%d" % (seed, index), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
    return seed & _MAX_SEED


@dataclass(slots=True, kw_only=True)
class Admission:
    """The limits that requests are held against.

    Args:
        tokenizer: Encodes prompts and tells the EOS ids.
        vocab_size: Every token id is below it.
        max_sequence_len: Most tokens of one sequence, by the model's context and the KV pool.
        check_admissible: Given prompt and output length, raises `PromptTooLong` if they can never fit.
            Nothing further on checks lengths again.
        check_search: Given the rows of a beam search, prompt and output length, raises `InvalidRequest` if
            they can never run together.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_sequence_len: int
    check_admissible: Callable[[int, int], None]
    check_search: Callable[[int, int, int], None]
    _longest_token_bytes: int | None = dataclasses.field(default=None, init=False)

    def rendered(self, prompt: Prompt) -> TextPrompt | TokensPrompt:
        """Return the prompt with a conversation put through the chat template. Thread-safe.

        Raises:
            InvalidRequest: The chat template refuses it.
        """
        if isinstance(prompt, ChatPrompt):
            text = self.tokenizer.render_chat(prompt) if prompt.rendered is None else prompt.rendered
            return TextPrompt(text=text, add_special_tokens=prompt.add_special_tokens)
        return prompt

    def encode_prompt(
        self, request: Request, rendered: TextPrompt | TokensPrompt | None = None
    ) -> "array[int]":
        """Return the prompt's token ids, at least one. Thread-safe.

        Args:
            rendered: The request's prompt as `rendered` gave it, if it has been called already.

        Raises:
            InvalidRequest: An id is outside the vocabulary, the prompt is empty, or the chat template
                refuses it.
            PromptTooLong: It is given as token ids, too many, or as more text than the most tokens can
                stand for. Such a prompt is not looked at further.
        """
        sampling = request.sampling
        for name, token_ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", sampling.logit_bias),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ):
            check_token_ids(_as_array(token_ids, name), self.vocab_size, field=name)
        name = prompt_field(request.prompt)
        try:
            ids = self._encode(rendered or self.rendered(request.prompt), name, self._num_kept(request))
        except InvalidRequest as error:
            if error.param in (None, "prompt"):
                error.param = name  # the tokenizer cannot know where its text came from
            raise
        if not ids:
            raise InvalidRequest(f"{name} is empty: it has no tokens", param=name)
        check_token_ids(ids, self.vocab_size, field=name)
        return ids

    def encode_bad_words(self, request: Request) -> tuple[tuple[int, ...], ...]:
        """Return the spellings of the request's bad words, each as its tokens. Thread-safe.

        A word is spelled as at the beginning of a text and as after a space.

        Raises:
            InvalidRequest: A word is no valid text.
        """
        spellings: dict[tuple[int, ...], None] = {}  # a set that keeps the order
        for word in request.sampling.bad_words:
            bare = word.lstrip()
            for text in (bare, f" {bare}") if bare else (word,):
                try:
                    spelling = tuple(self.tokenizer.encode(text, add_special_tokens=False))
                except InvalidRequest as error:
                    error.param = "bad_words"
                    raise
                # What the model cannot generate needs no ban.
                if spelling and max(spelling) < self.vocab_size:
                    spellings[spelling] = None
        return tuple(spellings)

    def admit(
        self,
        request: Request,
        prompt_token_ids: "array[int]",
        *,
        seed: int,
        sequence_ids: Iterator[int],
        bad_words: tuple[tuple[int, ...], ...] = (),
        grammar: Grammar | None = None,
    ) -> list[TokenizedRequest]:
        """Return the request's sequences; in their request, the prompt is its tokens.

        Args:
            prompt_token_ids: As `encode_prompt` gave them.
            seed: Of the first sequence; the others' are made from it.
            sequence_ids: Gives as many fresh ids as there are sequences.
            bad_words: As `encode_bad_words` gave them.
            grammar: The request's structured output, compiled.

        Raises:
            PromptTooLong: Prompt, or prompt plus a given `max_tokens`, exceeds the context or the KV pool.
            InvalidRequest: Every allowed token is forbidden, or a beam search cannot be served.
        """
        sampling = request.sampling
        max_output_len = self._max_output_len(request, len(prompt_token_ids))
        if sampling.use_beam_search:
            max_output_len = self._search_output_len(request, len(prompt_token_ids), max_output_len)
        stop_token_ids = frozenset(sampling.stop_token_ids)
        if grammar is not None:
            # Also with `ignore_eos`: nothing follows a complete text.
            stop_token_ids |= grammar.stop_token_ids
        if not sampling.ignore_eos:
            stop_token_ids |= self.tokenizer.eos_token_ids
        forbidden = {spelling[0] for spelling in bad_words if len(spelling) == 1}
        if sampling.min_tokens:
            forbidden |= stop_token_ids
        allowed = sampling.allowed_token_ids
        if allowed is not None and forbidden.issuperset(allowed):
            raise InvalidRequest(
                "allowed_token_ids holds nothing but tokens that bad_words or min_tokens forbid",
                param="allowed_token_ids",
            )
        # The prompt may have come as megabytes of text, of which few tokens are kept, and run for long.
        request = dataclasses.replace(request, prompt=TokensPrompt(token_ids=prompt_token_ids))
        return [
            TokenizedRequest(
                request=request,
                sequence_id=next(sequence_ids),
                index=index,
                prompt_token_ids=prompt_token_ids,
                max_output_len=max_output_len,
                stop_token_ids=stop_token_ids,
                seed=seed_of_choice(seed, index),
                bad_words=bad_words,
                grammar=grammar,
            )
            for index in range(sampling.num_sequences)
        ]

    def _num_kept(self, request: Request) -> int | None:
        """Return how many of the prompt's tokens are kept at most, if it is to be truncated."""
        num_kept = request.truncate_prompt_tokens
        if num_kept != -1:
            return num_kept
        return max(1, self.max_sequence_len - (request.sampling.max_tokens or 1))

    def _encode(self, prompt: TextPrompt | TokensPrompt, name: str, num_kept: int | None) -> "array[int]":
        match prompt:
            case TextPrompt():
                text = prompt.text
                if num_kept is None:
                    self._check_text_len(text, name)
                elif len(text) > SMALL_TEXT_LEN:
                    # The last tokens are the same whatever stands so far before them.
                    text = text[-TEXT_MARGIN * self.max_sequence_len * self._longest_token() :]
                ids = self.tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens)
                return ids if num_kept is None else ids[-num_kept:]
            case TokensPrompt():
                token_ids = prompt.token_ids if num_kept is None else prompt.token_ids[-num_kept:]
                if (num_tokens := len(token_ids)) > 0:
                    self.check_admissible(num_tokens, 1)
                return _as_array(token_ids, "prompt")

    def _check_text_len(self, text: str, name: str) -> None:
        """Refuse a text that cannot fit whatever its tokens are: encoding it would take seconds."""
        if len(text) <= SMALL_TEXT_LEN:
            return  # not worth the look at the vocabulary, and it is encoded on the loop
        longest = self._longest_token()
        limit = self.max_sequence_len * longest
        # In characters first: they are never more than the bytes.
        if len(text) > limit or (num_bytes := len(text.encode("utf-8", "surrogatepass"))) > limit:
            size = f"{len(text)} characters" if len(text) > limit else f"{num_bytes} bytes"
            raise PromptTooLong(
                f"{name} has {size} and cannot fit: this server holds at most {self.max_sequence_len} tokens"
                f" of a sequence, and a token of this model stands for at most {longest} bytes",
                param=name,
            )

    def _longest_token(self) -> int:
        """Return the most bytes a token stands for."""
        if self._longest_token_bytes is None:
            # Two threads may both find it, and find the same.
            token_bytes = self.tokenizer.token_bytes
            self._longest_token_bytes = max(
                (len(token_bytes(token_id)) for token_id in range(self.tokenizer.vocab_size)), default=0
            )
        return self._longest_token_bytes

    def _max_output_len(self, request: Request, prompt_len: int) -> int:
        max_tokens = request.sampling.max_tokens
        rest_len = max(1, self.max_sequence_len - prompt_len)
        max_output_len = rest_len if max_tokens is None else max_tokens
        if max_tokens is not None and (max_tokens is DEFAULT_MAX_TOKENS or request.cuts_max_tokens):
            max_output_len = min(max_tokens, rest_len)
        try:
            self.check_admissible(prompt_len, max_output_len)
        except PromptTooLong as error:
            if error.param == "prompt":
                error.param = prompt_field(request.prompt)
            raise
        return max_output_len

    def _search_output_len(self, request: Request, prompt_len: int, max_output_len: int) -> int:
        """Return how long the outputs of a beam search are; as long as its rows fit if nobody said."""
        sampling = request.sampling
        width = sampling.num_sequences

        def is_too_long(output_len: int) -> bool:
            try:
                self.check_search(width, prompt_len, output_len)
            except InvalidRequest:
                return True
            return False

        if (
            sampling.max_tokens is None
            or sampling.max_tokens is DEFAULT_MAX_TOKENS
            or request.cuts_max_tokens
        ):
            num_fitting = bisect_left(range(1, max_output_len + 1), True, key=is_too_long)
            max_output_len = max(1, num_fitting)
        try:
            self.check_search(width, prompt_len, max_output_len)
        except InvalidRequest as error:
            if error.param == "best_of" and sampling.best_of is None:
                error.param = "n"
            raise
        return max_output_len


def _as_array(token_ids: Iterable[int], field: str) -> "array[int]":
    """Return ids that a caller gave as an array, which is quick and takes nothing but integers."""
    try:
        return array("i", token_ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{field} holds something that is no token id: {error}", param=field) from error
