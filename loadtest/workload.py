"""What is asked: prompts and output lengths, drawn from a seed.

Gives `Sample`s; knows no server and no time. `random_tokens` sends token ids, so that lengths are exact
without a tokenizer; its lengths are drawn as `vllm bench serve --dataset-name random` does. `text` cuts
prompts from a small built-in text, for chat and for tokenizers at work; its lengths are in words. Samples of
different seeds share no prompt and no shared prefix, so that a server cannot have either in its cache.
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
    """

    prompt: tuple[int, ...] | str
    max_tokens: int


def random_tokens(
    num_requests: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
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
        prefix_len: Tokens that all prompts begin with, the same for all.
        vocab_size: Ids are below it.
        seed: The same seed gives the same samples.
    """
    source = random.Random(seed)
    prefix = tuple(source.choices(range(FIRST_TOKEN_ID, vocab_size), k=prefix_len))
    ids = range(FIRST_TOKEN_ID, vocab_size)
    return [
        Sample(
            prefix + tuple(source.choices(ids, k=_length(source, input_len, range_ratio))),
            _length(source, output_len, range_ratio),
        )
        for _ in range(num_requests)
    ]


def text(
    num_requests: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int | str = 0,
) -> list[Sample]:
    """Cut prompts from the built-in text, each from a place of its own.

    Args:
        num_requests: How many.
        input_len: Mean words of a prompt, without the shared prefix; the first is a number that no other has.
        output_len: Mean tokens of an output.
        range_ratio: As in `random_tokens`.
        prefix_len: Words that all prompts begin with; the first is a number of this seed.
        seed: The same seed gives the same samples.
    """
    source = random.Random(seed)
    # A number at the front keeps two prompts from sharing a cached beginning.
    prefix_number, *numbers = source.sample(range(10**9), num_requests + 1)
    prefix = _words(prefix_number, source.randrange(len(TEXT)), prefix_len)
    samples = []
    for number in numbers:
        start, count = source.randrange(len(TEXT)), _length(source, input_len, range_ratio)
        samples.append(
            Sample(" ".join(prefix + _words(number, start, count)), _length(source, output_len, range_ratio))
        )
    return samples


def longest(mean: int, ratio: float) -> int:
    """Return the most that a length of this mean and spread can be."""
    return max(1, math.ceil(mean * (1 + ratio)))


def _length(source: random.Random, mean: int, ratio: float) -> int:
    return source.randint(max(1, math.floor(mean * (1 - ratio))), longest(mean, ratio))


def _words(number: int, start: int, count: int) -> list[str]:
    return [f"{number}.", *(TEXT[(start + offset) % len(TEXT)] for offset in range(count - 1))][:count]
