"""A tokenizer without files: a token is a byte, a special token or a word, so tests can read ids as text.

Ids 0 to 255 are the bytes, then come BOS, EOS and the two marks of a chat turn, then words that no text
encodes to but a fake device may sample.
"""

import re
import threading
from array import array
from collections.abc import Sequence

from asyncserve.errors import InvalidRequest
from asyncserve.request import ChatPrompt

BOS_ID, EOS_ID, TURN_ID, END_TURN_ID = 256, 257, 258, 259
SPECIAL_TEXTS = {BOS_ID: "<bos>", EOS_ID: "<eos>", TURN_ID: "<turn>", END_TURN_ID: "<end>"}
_SPECIAL_IDS = {text: token_id for token_id, text in SPECIAL_TEXTS.items()}
_SPECIALS = re.compile("(" + "|".join(re.escape(text) for text in _SPECIAL_IDS) + ")")


class FakeTokenizer:
    """Implements `Tokenizer`.

    Args:
        vocab_size: At least 260.
        has_chat_template: Whether `render_chat` works.
        chat_template_text: What is told of the template; `render_chat` does not follow it.
        strips_leading_space: As in the protocol.
        gate: If given, `encode` of a text waits in its thread until it is set. Texts that are encoded in
            place do not wait: they would block the loop.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 512,
        has_chat_template: bool = True,
        chat_template_text: str = "{{ messages }}",
        strips_leading_space: bool = False,
        gate: threading.Event | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.strips_leading_space = strips_leading_space
        self.eos_token_ids = frozenset({EOS_ID})
        self.special_tokens = frozenset(SPECIAL_TEXTS.values())
        self.chat_template_text = chat_template_text if has_chat_template else None
        self.encoding_threads: list[str] = []
        """Name of the thread of each call of `encode`."""
        self._has_chat_template = has_chat_template
        self._gate = gate

    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Return BOS, if asked for, and the text's bytes; marks in the text become their ids."""
        thread = threading.current_thread()
        self.encoding_threads.append(thread.name)
        if self._gate is not None and thread is not threading.main_thread():
            self._gate.wait(timeout=30)
        ids = array("i", [BOS_ID] if add_special_tokens else [])
        if self.strips_leading_space:
            text = " " + text
        for part in _SPECIALS.split(text):
            if part in _SPECIAL_IDS:
                ids.append(_SPECIAL_IDS[part])
                continue
            try:
                ids.extend(part.encode())
            except UnicodeEncodeError as error:
                raise InvalidRequest(f"the text holds a lone surrogate: {error}", param="prompt") from error
        return ids

    def render_chat(self, prompt: ChatPrompt) -> str:
        """Return `<turn>role:content<end>` for each message, after `<bos>`."""
        if not self._has_chat_template:
            raise InvalidRequest("the model has no chat template", param="messages")
        turns = []
        for message in prompt.messages:
            if message["role"] not in ("system", "user", "assistant"):
                raise InvalidRequest(f"the template knows no role {message['role']!r}", param="messages")
            turns.append(f"<turn>{message['role']}:{message['content']}<end>")
        text = "<bos>" + "".join(turns)
        if prompt.continue_final_message:
            return text.removesuffix("<end>")
        return text + "<turn>assistant:" if prompt.add_generation_prompt else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token stands for; nothing, for an id outside the vocabulary."""
        if token_id < 256:
            return bytes([token_id])
        if token_id in SPECIAL_TEXTS:
            return SPECIAL_TEXTS[token_id].encode()
        return f" w{token_id}".encode() if token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is one of the four marks."""
        return token_id in SPECIAL_TEXTS

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the whole text."""
        text = b"".join(
            self.token_bytes(token_id)
            for token_id in token_ids
            if not (skip_special_tokens and token_id in SPECIAL_TEXTS)
        ).decode(errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text
