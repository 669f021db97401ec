"""What a soak asks: questions whose answer is always the same, and some that must fail.

Takes lengths and a seed, gives `Question`s; those of one seed are the same in every run. Sound ones are
greedy and of a fixed length, so that what an undisturbed server answers is what every server must answer.
Knows no server.
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.workload import FIRST_TOKEN_ID, random_tokens, text

NAN_TOKEN, CULPRIT_TOKEN = 7, 8
"""Tokens of prompts that are to fail, by `nan-row=token:7` and `fail-step=token:8` of `ASYNCSERVE_FAULTS`.
They are below those that other prompts are made of."""
POISON = "PO1SON"
"""Text that cannot be encoded, by `tokenizer=PO1SON`."""
assert max(NAN_TOKEN, CULPRIT_TOKEN) < FIRST_TOKEN_ID

CHAT_SHARE, SEVERAL_SHARE, SHAPED_SHARE = 0.3, 0.1, 0.1
SHAPE = {"choice": ["the harbour", "the light at the end of the mole", "the notebooks"]}
"""One of these is what a shaped answer says."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request that may be sent any number of times.

    Args:
        path: Of the endpoint.
        fields: Of the body, without those that say how the answer comes.
        num_choices: Answers asked for.
        fails: Why it must end with an error, in a word; "" if it must not.
        is_encodable: Whether its prompt can be encoded, so that it becomes a sequence.
    """

    path: str
    fields: Mapping[str, Any]
    num_choices: int = 1
    fails: str = ""
    is_encodable: bool = True

    def body(self, *, stream: bool, **more: Any) -> bytes:
        """Return the body that asks for it."""
        return json.dumps({**self.fields, "stream": stream, **more}).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """All that is asked in a soak.

    Args:
        sound: To be answered.
        failing: To end with an error, by why.
    """

    sound: Sequence[Question]
    failing: Mapping[str, Question] = field(default_factory=dict)


def draw(
    count: int, *, input_len: int, output_len: int, vocab_size: int, seed: int, shapes: bool = True
) -> Questions:
    """Draw questions of mixed lengths.

    Args:
        count: Sound ones.
        input_len: Most words or tokens of a prompt; the shortest has one, most have few.
        output_len: Most tokens of an answer, in the same way.
        vocab_size: Token ids are below it.
        seed: The same seed gives the same questions.
        shapes: Whether some answers must be of a given shape.
    """
    source = random.Random(seed)
    common = {"temperature": 0, "ignore_eos": True}
    sound = []
    for number in range(count):
        lengths: dict[str, Any] = {
            "input_len": _spread(source, input_len),
            "output_len": 1,
            "seed": f"{seed}, question {number}",
        }
        fields: dict[str, Any] = {**common, "max_tokens": _spread(source, output_len)}
        draw_kind = source.random()
        if draw_kind < CHAT_SHARE:
            [sample] = text(1, **lengths)
            fields["messages"] = [{"role": "user", "content": sample.prompt}]
            sound.append(Question("/v1/chat/completions", fields))
            continue
        if shapes and draw_kind < CHAT_SHARE + SHAPED_SHARE:
            [sample] = text(1, **lengths)
            shaped = {"temperature": 0, "max_tokens": 48, "structured_outputs": SHAPE}
            sound.append(Question("/v1/completions", {**shaped, "prompt": sample.prompt}))
            continue
        is_text = source.random() < 0.5
        [sample] = text(1, **lengths) if is_text else random_tokens(1, vocab_size=vocab_size, **lengths)
        fields["prompt"] = sample.prompt
        num_choices = 2 if source.random() < SEVERAL_SHARE else 1
        if num_choices > 1:
            fields["n"] = num_choices
        sound.append(Question("/v1/completions", fields, num_choices))
    failing = {
        why: Question(
            "/v1/completions",
            {**common, "prompt": prompt, "max_tokens": 8},
            fails=why,
            is_encodable=prompt != POISON,
        )
        for why, prompt in (
            ("nan row", (NAN_TOKEN, FIRST_TOKEN_ID)),
            ("step of its own fails", (CULPRIT_TOKEN, FIRST_TOKEN_ID)),
            ("tokenizer", POISON),
        )
    }
    return Questions(sound=sound, failing=failing)


def _spread(source: random.Random, most: int) -> int:
    """Return a length up to `most`: as many between 1 and 10 as between 10 and 100."""
    return max(1, round(math.exp(math.log(most) * source.random())))
