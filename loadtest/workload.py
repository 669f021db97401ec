"""What is asked: prompts and output lengths, drawn from a seed.

Gives `Sample`s and `Conversation`s; knows no server and no time. `random_tokens` sends token ids, so that
lengths are exact without a tokenizer; its lengths are drawn as `vllm bench serve --dataset-name random` does.
`text` cuts prompts from a small built-in text, for chat and for tokenizers at work; its lengths are in words.
Both can share one beginning, or several in turn. `multi_turn` makes conversations of such text, each turn of
which sends again what was said before. What is drawn with different seeds shares no prompt and no beginning,
so that a server cannot have either in its cache. Conversations from a file: `sharegpt`.
"""

import math
import random
from dataclasses import dataclass

FIRST_TOKEN_ID = 10
"""Lower ids are special tokens in most vocabularies and are left out of random prompts."""

TEXT = tuple(
    """
    The harbour wakes before the town does. Long before the bakers light their ovens, the first boats
    come in with their lamps still burning, and the men and women on the quay count the boxes by voice
    because it is too dark to read. Nothing is weighed until the sun is up. Everybody knows what a full
    box looks like, and a buyer who doubts it loses more than he gains. By six the fish is on the road,
    by seven the cafés have put out their chairs, and by eight a visitor would think that nothing had
    happened here at all. My grandmother kept the light at the end of the mole for thirty-one years. She
    wrote down every ship that passed, the hour, the weather, and what the crew had hung out to dry.
    People laughed about the last column until the winter the customs officers asked to see it. From the
    washing alone she could tell how long a ship had been at sea, and two captains who swore that they
    had come straight from the north were shown to have spent a week in the islands. She never spoke
    about it. She only bought a second notebook, larger than the first, and sharpened her pencils. When
    the light was made to work by itself, nobody thought of the notebooks. I found them in a biscuit
    tin, forty of them, each with its year on the cover. An engineer from the city wanted the columns of
    wind and rain; a historian wanted the names of the ships. I lent them both what they asked for and
    kept the washing for myself. It is the only part that still makes me see her: the window open in any
    weather, the kettle on, and her finger on the glass, following a line of shirts along the horizon
    until it was gone.
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to send.

    Args:
        prompt: Token ids, or text.
        max_tokens: Output length; the request ignores EOS, so that this is what comes.
        history: What was said before, as (role, text).
    """

    prompt: tuple[int, ...] | str
    max_tokens: int
    history: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests that go one after the other, each with all that was said before it.

    Args:
        turns: What the user says, and how long the answer is to be. Their histories are what the server has
            answered by then.
        system: What the conversation begins with, "" for nothing.
        pauses_s: Seconds before each turn but the first.
    """

    turns: tuple[Sample, ...]
    system: str = ""
    pauses_s: tuple[float, ...] = ()


def random_tokens(
    num_requests: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    num_prefixes: int = 1,
    vocab_size: int = 32_000,
    seed: int | str = 0,
) -> list[Sample]:
    """Draw prompts of random token ids.

    Args:
        num_requests: How many.
        input_len: Mean tokens of a prompt, without the shared prefix.
        output_len: Mean tokens of an output.
        range_ratio: Lengths are uniform between `len * (1 - ratio)`, rounded down, and
            `len * (1 + ratio)`, rounded up, and at least 1; a ratio of 0 fixes them. In [0, 1).
        prefix_len: Tokens of a beginning that prompts share.
        num_prefixes: How many such beginnings there are; as many prompts have each, in random order.
        vocab_size: Ids are below it.
        seed: The same seed gives the same samples.
    """
    source = random.Random(seed)
    ids = range(FIRST_TOKEN_ID, vocab_size)
    prefixes = [tuple(source.choices(ids, k=prefix_len)) for _ in range(num_prefixes)]
    return [
        Sample(
            prefixes[number] + tuple(source.choices(ids, k=_length(source, input_len, range_ratio))),
            _length(source, output_len, range_ratio),
        )
        for number in _turns(source, num_requests, num_prefixes)
    ]


def text(
    num_requests: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    num_prefixes: int = 1,
    seed: int | str = 0,
) -> list[Sample]:
    """Cut prompts from the built-in text, each from a place of its own.

    Args:
        num_requests: How many.
        input_len: Mean words of a prompt, without the shared prefix; the first is a number that no other has.
        output_len: Mean tokens of an output.
        range_ratio: As in `random_tokens`.
        prefix_len: Words of a beginning that prompts share; the first is a number that no other has.
        num_prefixes: How many such beginnings there are; as many prompts have each, in random order.
        seed: The same seed gives the same samples.
    """
    source = random.Random(seed)
    # A number at the front keeps two prompts from sharing a cached beginning.
    numbers = source.sample(range(10**9), num_prefixes + num_requests)
    prefixes = [_words(number, source.randrange(len(TEXT)), prefix_len) for number in numbers[:num_prefixes]]
    samples = []
    turns = _turns(source, num_requests, num_prefixes)
    for number, turn in zip(numbers[num_prefixes:], turns, strict=True):
        start, count = source.randrange(len(TEXT)), _length(source, input_len, range_ratio)
        prompt = " ".join(prefixes[turn] + _words(number, start, count))
        samples.append(Sample(prompt, _length(source, output_len, range_ratio)))
    return samples


def multi_turn(
    num_conversations: int,
    *,
    num_turns: int,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    think_time_s: float = 0.0,
    seed: int | str = 0,
) -> list[Conversation]:
    """Make conversations of the built-in text.

    Args:
        num_conversations: How many.
        num_turns: Mean turns of one.
        input_len: Mean words of what the user says in a turn.
        output_len: Mean tokens of an answer.
        range_ratio: Of turns and lengths, as in `random_tokens`.
        prefix_len: Words of the system message that all conversations share; 0 for none.
        think_time_s: Mean seconds between an answer and the next turn, exponentially distributed.
        seed: The same seed gives the same conversations.
    """
    source = random.Random(seed)
    counts = [_length(source, num_turns, range_ratio) for _ in range(num_conversations)]
    said = iter(
        text(
            sum(counts),
            input_len=input_len,
            output_len=output_len,
            range_ratio=range_ratio,
            seed=f"{seed}, said",
        )
    )
    # Its number is the seed's: no conversation of another seed shares it.
    system = " ".join(_words(source.randrange(10**9), source.randrange(len(TEXT)), prefix_len))
    return [
        Conversation(
            turns=tuple(next(said) for _ in range(count)),
            system=system,
            pauses_s=pauses(source, count, think_time_s),
        )
        for count in counts
    ]


def pauses(source: random.Random, num_turns: int, think_time_s: float) -> tuple[float, ...]:
    """Draw the seconds before each turn but the first; none if the mean is 0."""
    if not think_time_s:
        return ()
    return tuple(source.expovariate(1 / think_time_s) for _ in range(num_turns - 1))


def longest(mean: int, ratio: float) -> int:
    """Return the most that a length of this mean and spread can be."""
    return max(1, math.ceil(mean * (1 + ratio)))


def _length(source: random.Random, mean: int, ratio: float) -> int:
    return source.randint(max(1, math.floor(mean * (1 - ratio))), longest(mean, ratio))


def _turns(source: random.Random, count: int, num_prefixes: int) -> list[int]:
    """Say which beginning each prompt has."""
    turns = [number % num_prefixes for number in range(count)]
    if num_prefixes > 1:
        source.shuffle(turns)
    return turns


def _words(number: int, start: int, count: int) -> list[str]:
    return [f"{number}.", *(TEXT[(start + offset) % len(TEXT)] for offset in range(count - 1))][:count]
