"""What structured output costs: `python -m loadtest.structured`, run in the repository's root.

Three tables. Compiling: the first structure of all (which starts the worker process), then each schema for
the first time and again, as a request sees it. Masks: CPU time of one row's part of a step (matcher moved
on, mask filled), and of applying the masks of several rows to their logits. Whole: time per output token of
several streams at once on a model, half of them with a schema, all of them and none. Random text follows
each schema, drawn from what its mask allows.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncserve import LLM, SamplingParams
from asyncserve.checkpoint import open_checkpoint
from asyncserve.gpu.device import open_device
from asyncserve.gpu.sampling.sampler import Sampler
from asyncserve.grammar import Grammar
from asyncserve.loop.grammar import XGrammarCompiler
from asyncserve.loop.grammar_cache import GrammarCache
from asyncserve.loop.tokenizer import Tokenizer, load_tokenizer
from asyncserve.request import StructuredOutput, StructureKind
from asyncserve.step import SlotAssignment

DEMO_MODEL = Path("models/SmolLM2-135M-Instruct.Q4_1.gguf")

_STRING = {"type": "string"}
_PERSON = {
    "type": "object",
    "properties": {
        "name": _STRING,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": _STRING, "maxItems": 5},
    },
    "required": ["name", "age"],
}
SCHEMAS: dict[str, Any] = {
    "any object": {"type": "object"},
    "person": _PERSON,
    "list of people": {"type": "array", "items": _PERSON, "minItems": 2},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "text": _STRING,
                    "nodes": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["text", "nodes"],
            }
        },
    },
    "fifty fields": {
        "type": "object",
        "properties": {f"field_{index}": {"type": "string", "maxLength": 40} for index in range(50)},
        "required": [f"field_{index}" for index in range(50)],
    },
}


def structured(schema: Any) -> StructuredOutput:
    """Return a schema as a structure."""
    return StructuredOutput(kind=StructureKind.JSON_SCHEMA, source=json.dumps(schema))


async def measure_compiling(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Grammar]:
    """Print how long grammars take, and return them."""
    cache = GrammarCache(XGrammarCompiler(tokenizer, vocab_size, timeout_s=60))
    try:
        started_s = time.perf_counter()
        choice = StructuredOutput(kind=StructureKind.CHOICE, source='["yes"]')
        await cache.compile(choice, lambda: True)
        print(f"\nthe first of all, a choice of one word: {time.perf_counter() - started_s:.2f} s\n")
        print("| schema | first, ms | cached, µs | kept, KiB |\n|---|---|---|---|")
        grammars: dict[str, Grammar] = {}
        for name, schema in SCHEMAS.items():
            started_s = time.perf_counter()
            grammar = await cache.compile(structured(schema), lambda: True)
            first_ms = 1e3 * (time.perf_counter() - started_s)
            asked = structured(schema)
            started_s = time.perf_counter()
            assert cache.find(asked) is grammar
            cached_us = 1e6 * (time.perf_counter() - started_s)
            print(f"| {name} | {first_ms:.1f} | {cached_us:.1f} | {grammar.num_bytes / 1024:.0f} |")
            grammars[name] = grammar
    finally:
        await asyncio.to_thread(cache.close)
    return grammars


def measure_masks(grammars: dict[str, Grammar], vocab_size: int, num_tokens: int) -> None:
    """Print what following each grammar costs per token and row."""
    print("\n| schema | fill, µs mean | p99 | max | accept, µs mean |\n|---|---|---|---|---|")
    for name, grammar in grammars.items():
        rng = random.Random(0)
        words = np.zeros(-(-vocab_size // 32), np.int32)
        fills: list[float] = []
        accepts: list[float] = []
        matcher = grammar.matcher()
        while len(fills) < num_tokens:
            if matcher.is_done:
                matcher = grammar.matcher()
            began_s = time.thread_time()
            matcher.fill_mask(words.data)
            fills.append(1e6 * (time.thread_time() - began_s))
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            token_id = int(rng.choice(allowed))
            began_s = time.thread_time()
            matcher.accept(token_id)
            accepts.append(1e6 * (time.thread_time() - began_s))
        p99 = float(np.percentile(fills, 99))
        print(
            f"| {name} | {statistics.mean(fills):.1f} | {p99:.1f} | {max(fills):.1f}"
            f" | {statistics.mean(accepts):.1f} |"
        )


def measure_sampling(grammar: Grammar, vocab_size: int, device: str, num_steps: int) -> None:
    """Print what a step of the sampler takes with masks and without."""
    opened = open_device(device)
    opened.activate()
    print("\n| rows | a step without masks, µs | with masks | more per row |\n|---|---|---|---|")
    for num_rows in (1, 8, 32, 128):
        took_us = []
        for follows in (None, grammar):
            sampler = Sampler(num_rows, vocab_size, 4096, opened.torch_device)
            logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
            logits = logits.to(opened.torch_device)
            slots = list(range(num_rows))
            for slot in slots:
                sampler.admit(_greedy(slot, follows))
            times = []
            for step in range(num_steps):
                row = logits.clone()
                opened.synchronize()
                began_s = time.perf_counter()
                sampled = sampler.sample(row, slots, [1 + step] * num_rows)
                (copy,), copied = opened.copy_out([sampled.token_ids])
                sampler.expect(slots, copy, copied)
                copied.wait()
                times.append(1e6 * (time.perf_counter() - began_s))
            took_us.append(statistics.median(times))
        free, masked = took_us
        print(f"| {num_rows} | {free:.0f} | {masked:.0f} | {(masked - free) / num_rows:.1f} |")


def _greedy(slot: int, follows: Grammar | None) -> SlotAssignment:
    return SlotAssignment(
        slot=slot,
        token_ids=array("i", [0]),
        prompt_len=1,
        sampling=SamplingParams(temperature=0.0, max_tokens=1000),
        seed=slot,
        stop_token_ids=frozenset() if follows is None else follows.stop_token_ids,
        grammar=follows,
    )


def measure_model(
    model: Path, num_streams: int, num_tokens: int, num_rounds: int, options: dict[str, Any]
) -> None:
    """Print the time per output token of streams on a model, with a schema and without."""
    free = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    # Long enough to fill the length asked for, whatever the model writes.
    held = SamplingParams(
        max_tokens=num_tokens,
        temperature=0.0,
        structured=structured({"type": "array", "items": _PERSON, "minItems": 1000}),
    )
    prompts = [f"Write about the number {index}:" for index in range(num_streams)]
    print("\n| streams with a schema | ms per token of a stream |\n|---|---|")
    with LLM(str(model), **options) as llm:
        llm.generate(prompts, held, progress=False)
        for num_held in (0, num_streams // 2, num_streams):
            each = [held] * num_held + [free] * (num_streams - num_held)
            rounds = []
            for _ in range(num_rounds):
                began_s = time.perf_counter()
                llm.generate(prompts, each, progress=False)
                rounds.append(1e3 * (time.perf_counter() - began_s) / num_tokens)
            median = statistics.median(rounds)
            print(f"| {num_held} of {num_streams} | {median:.2f} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="GGUF file or folder")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--streams", type=int, default=8, help="streams at once on the model")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each stream")
    parser.add_argument("--steps", type=int, default=2000, help="masks of each schema that are measured")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds on the model, of which the median counts"
    )
    options = parser.parse_args(arguments)
    checkpoint = open_checkpoint(str(options.model), needs_weights=False)
    tokenizer = load_tokenizer(checkpoint, chat_template=None)
    vocab_size = int(checkpoint.config.get("vocab_size", tokenizer.vocab_size))
    print(f"{checkpoint.name}, {vocab_size} tokens, {options.device}")
    grammars = asyncio.run(measure_compiling(tokenizer, vocab_size))
    measure_masks(grammars, vocab_size, options.steps)
    measure_sampling(grammars["tree"], vocab_size, options.device, min(options.steps, 200))
    measure_model(options.model, options.streams, options.tokens, options.rounds, {"device": options.device})


if __name__ == "__main__":
    main()
