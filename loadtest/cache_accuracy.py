"""What a KV cache of fewer bits costs in accuracy: `python -m loadtest.cache_accuracy --model X.gguf`.

Passages of a text in the repository are scored, token by token, once with a KV cache of the model's own dtype
and once with each other dtype. Of each the perplexity is stated, and how far its log-probabilities are from
those with the model's own dtype, in nats. Passages are computed in chunks, so that most positions are read
from the cache; a chunk's own K and V are rounded as the cache rounds them, too. All else (weights,
activations, device) is the same in all runs. A passage begins without what stands before it in the text.
"""

import argparse
import hashlib
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from asyncserve import LLM
from asyncserve.checkpoint import open_checkpoint
from asyncserve.loop.tokenizer import load_tokenizer
from asyncserve.request import TokenLogprobs
from loadtest import figures
from loadtest.accuracy import KV_CACHE_BYTES, TEXT, Errors, errors, score

DTYPES = ("bfloat16", "fp8_e4m3", "fp8_e5m2")
"""What is held against the model's own; bfloat16 is a yardstick beside a float32 model."""
CHUNK_LEN = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one cache dtype gave.

    Args:
        kv_cache_dtype: As the option has it.
        perplexity: Over all scored tokens.
        errors: Of their log-probabilities, beside those with the model's own dtype.
        same_likeliest: Share of the positions at which the likeliest token is the same as there.
    """

    kv_cache_dtype: str
    perplexity: float
    errors: Errors
    same_likeliest: float


def cut_passages(
    token_ids: Sequence[int], count: int, length: int, *, head: Sequence[int] = ()
) -> list[list[int]]:
    """Cut passages of equal length out of a text, from its beginning to its end, none over another.

    Args:
        token_ids: The text.
        count: How many.
        length: Tokens of each, the head not counted.
        head: What the tokenizer puts before every prompt.

    Raises:
        ValueError: The text is too short.
    """
    if len(token_ids) < count * length:
        raise ValueError(f"the text has {len(token_ids)} tokens; {count} passages take {count * length}")
    stride = len(token_ids) // count
    return [[*head, *token_ids[index * stride : index * stride + length]] for index in range(count)]


def perplexity(logprobs: Sequence[float]) -> float:
    """Return e to the mean of what tokens were found less likely than certain."""
    return math.exp(-statistics.fmean(logprobs))


def compare(
    kv_cache_dtype: str,
    found: Sequence[Sequence[TokenLogprobs]],
    reference: Sequence[Sequence[TokenLogprobs]],
) -> Result:
    """Put together what is known of one dtype.

    Args:
        kv_cache_dtype: Its name.
        found: Of each passage's tokens, with it.
        reference: Likewise, with the model's own.
    """
    own, true = ([entry for entries in each for entry in entries] for each in (found, reference))
    logprobs = [entry.logprob for entry in own]
    return Result(
        kv_cache_dtype=kv_cache_dtype,
        perplexity=perplexity(logprobs),
        errors=errors(logprobs, [entry.logprob for entry in true]),
        same_likeliest=statistics.fmean(
            one.top[0][0] == other.top[0][0] for one, other in zip(own, true, strict=True)
        ),
    )


def measure(
    model: str, passages: Sequence[Sequence[int]], others: Sequence[str], *, device: str, dtype: str
) -> Iterator[Result]:
    """Score the passages with the model's own cache dtype, then with others; yield what was found at once."""
    reference: list[list[TokenLogprobs]] | None = None
    for kv_cache_dtype in ("auto", *others):
        began_s = time.perf_counter()
        with LLM(
            model,
            device=device,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            max_num_seqs=4,
            max_num_batched_tokens=4 * CHUNK_LEN,
            long_prefill_token_threshold=CHUNK_LEN,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            enable_prefix_caching=False,
        ) as llm:
            found = score(llm, passages)
        print(f"{kv_cache_dtype}: {time.perf_counter() - began_s:.1f} s", file=sys.stderr, flush=True)
        reference = reference or found
        yield compare(kv_cache_dtype, found, reference)


def table(results: Sequence[Result]) -> str:
    """Return the results as a table in Markdown."""
    lines = [
        "| KV cache | perplexity | log-probabilities: error mean / p99 / max | bias | same likeliest token |",
        "|---|---|---|---|---|",
    ]
    for each in results:
        error = each.errors
        lines.append(
            f"| {each.kv_cache_dtype} | {each.perplexity:.4f} | {error.mean:.2g} / {error.p99:.2g} / "
            f"{error.max:.2g} | {error.bias:+.2g} | {each.same_likeliest:.2%} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file or folder")
    parser.add_argument("--device", default="auto", help="where the model runs")
    parser.add_argument("--dtype", default="auto", help="of weights and activations")
    parser.add_argument(
        "--kv-cache-dtype", nargs="+", default=DTYPES, help="what is held against the model's own"
    )
    parser.add_argument("--passages", type=int, default=8, help="how many")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each")
    parser.add_argument("--text", type=Path, default=TEXT, help="file that passages are cut from")
    parser.add_argument("--json", type=Path, help="file that gets the figures")
    parser.add_argument("--label", default="", help="said in the file: commit, machine")
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer(open_checkpoint(options.model), chat_template=None)
    text = options.text.read_bytes()
    passages = cut_passages(
        tokenizer.encode(text.decode("utf-8"), add_special_tokens=False),
        options.passages,
        options.length,
        head=tokenizer.encode("", add_special_tokens=True),
    )
    if options.device != "cpu" and torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    else:
        where = str(figures.host()["processor"])
    model = Path(options.model).name
    results: list[Result] = []
    for result in measure(
        options.model, passages, options.kv_cache_dtype, device=options.device, dtype=options.dtype
    ):
        results.append(result)
        print(table([result]), flush=True)
        if options.json is not None:  # each time: a run that is ended keeps what it found
            figures.write(
                options.json,
                label=options.label,
                model=model,
                device=where,
                dtype=options.dtype,
                text=options.text.name,
                text_sha256=hashlib.sha256(text).hexdigest(),
                num_passages=len(passages),
                passage_len=options.length,
                results=[asdict(each) for each in results],
            )
    about = f"{model} in {options.dtype} on {where}, {len(passages)} passages of {options.length} tokens"
    print(f"{about}\n\n{table(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
