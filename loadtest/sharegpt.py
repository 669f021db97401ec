"""Conversations from a file in ShareGPT's format, chosen as `vllm bench serve --dataset-name sharegpt` does.

The file is a JSON list, or JSON lines, of objects with `conversations`, a list of `{"from": "human" | "gpt",
"value": …}`; `messages` with `role` and `content` are understood as well. `samples` takes the first exchange
of each: what the person says is the prompt, the answer's length is the output length. `conversations` takes
whole ones, for load that grows by turns. Lengths are counted by a function that is given: see
`token_counts`. Which ones are taken, and in which order, comes from a seed.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from loadtest.workload import Conversation, Sample, pauses

LEAST_TOKENS = 4
"""Shorter prompts and answers are left out, as vLLM does."""
MOST_PROMPT_TOKENS = 1024
MOST_TOKENS = 2048
"""Longer prompts, and longer prompts with their answers, are left out, as vLLM does."""
USER_NAMES = frozenset({"human", "user"})

Item = TypeVar("Item")
Exchange = tuple[str, str]
"""What the person says, and the answer."""


def read(path: Path) -> list[list[Exchange]]:
    """Return the exchanges of each conversation that has one.

    Raises:
        ValueError: The file is no such list.
        OSError: It cannot be read.
    """
    content = path.read_text(encoding="utf-8-sig")
    try:
        if content.lstrip().startswith("["):
            entries = json.loads(content)
        else:
            entries = [json.loads(line) for line in content.splitlines() if line.strip()]
        found = [_exchanges(entry) for entry in entries]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not in ShareGPT's format: {type(error).__name__}: {error}") from error
    return [exchanges for exchanges in found if exchanges]


def _exchanges(entry: dict[str, Any]) -> list[Exchange]:
    turns = entry.get("conversations") or entry.get("conversation") or entry.get("messages") or []
    said = [
        (turn.get("from") or turn["role"], turn.get("value") or turn.get("content") or "") for turn in turns
    ]
    if said and said[0][0] == "system":
        said = said[1:]
    pairs = []
    for (asker, prompt), (answerer, answer) in zip(said[::2], said[1::2], strict=False):
        if asker not in USER_NAMES or answerer in USER_NAMES:
            break
        pairs.append((prompt, answer))
    return pairs


def samples(
    dialogues: Sequence[Sequence[Exchange]],
    num_requests: int,
    *,
    count: Callable[[str], int],
    output_len: int | None = None,
    seed: int | str = 0,
) -> list[Sample]:
    """Choose prompts: the first exchange of each conversation.

    Args:
        dialogues: What `read` gave.
        num_requests: How many. If fewer fit, they come again, drawn at random.
        count: Text → its tokens.
        output_len: Length of every output; None for that of the answer in the file.
        seed: The same seed and counts give the same samples.

    Raises:
        ValueError: No conversation fits.
    """
    chosen: list[Sample] = []
    source = random.Random(seed)
    for exchanges in _shuffled(dialogues, source):
        if len(chosen) == num_requests:
            return chosen
        prompt, answer = exchanges[0]
        num_answer = count(answer) if output_len is None else output_len
        num_prompt = count(prompt)
        if num_prompt < LEAST_TOKENS or (output_len is None and num_answer < LEAST_TOKENS):
            continue
        if num_prompt <= MOST_PROMPT_TOKENS and num_prompt + num_answer <= MOST_TOKENS:
            chosen.append(Sample(prompt, num_answer))
    return _enough(chosen, num_requests, source)


def conversations(
    dialogues: Sequence[Sequence[Exchange]],
    num_conversations: int,
    *,
    num_turns: int,
    count: Callable[[str], int],
    output_len: int | None = None,
    think_time_s: float = 0.0,
    seed: int | str = 0,
) -> list[Conversation]:
    """Choose conversations of two turns and more.

    Args:
        dialogues: What `read` gave.
        num_conversations: How many. If fewer fit, they come again, drawn at random.
        num_turns: Most turns of one; later ones are left out, and so are turns beyond the greatest length.
        count: Text → its tokens.
        output_len: Length of every answer; None for that of the answer in the file.
        think_time_s: Mean seconds between an answer and the next turn.
        seed: The same seed and counts give the same conversations.

    Raises:
        ValueError: No conversation fits.
    """
    chosen: list[Conversation] = []
    source = random.Random(seed)
    for exchanges in _shuffled(dialogues, source):
        if len(chosen) == num_conversations:
            return chosen
        turns: list[Sample] = []
        num_tokens = 0
        for prompt, answer in exchanges[:num_turns]:
            num_answer = max(count(answer), 1) if output_len is None else output_len
            num_tokens += count(prompt) + num_answer
            if num_tokens > MOST_TOKENS:
                break
            turns.append(Sample(prompt, num_answer))
        if len(turns) > 1:
            chosen.append(Conversation(turns=tuple(turns), pauses_s=pauses(source, len(turns), think_time_s)))
    return _enough(chosen, num_conversations, source)


def _shuffled(dialogues: Sequence[Sequence[Exchange]], source: random.Random) -> Iterator[Sequence[Exchange]]:
    order = list(range(len(dialogues)))
    source.shuffle(order)
    return (dialogues[number] for number in order)


def _enough(chosen: list[Item], count: int, source: random.Random) -> list[Item]:
    if not chosen:
        raise ValueError("no conversation of the data set has the lengths that are wanted")
    return chosen + source.choices(chosen, k=count - len(chosen))
