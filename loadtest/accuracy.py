"""Whether a GPU says what a CPU says: `python -m loadtest.accuracy --model X.gguf`, in the repository's root.

The reference is the model in float32 on the CPU. Each way to run it (the device in float32 and bfloat16, with
and without CUDA graphs; the CPU in bfloat16 as a yardstick) continues the same prompts greedily, all in one
batch, and scores the same texts. In float32 the tokens must be the reference's, else the exit status is 1.
Of every way the error of log-probabilities is stated, in nats: of prompts, where the reference's own texts
are scored, and of decode steps, where the reference scores what the way itself has said. Prompts are passages
of a text in the repository, in the model's own tokens.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from asyncserve import LLM, SamplingParams
from asyncserve.checkpoint import open_checkpoint
from asyncserve.loop.tokenizer import load_tokenizer
from asyncserve.request import TokenLogprobs
from loadtest import figures

TEXT = Path("README.md")
SHORTEST, LONGEST = 3, 200
"""Tokens of the shortest and the longest prompt: less than a KV block, and several tiles of every kernel."""
KV_CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a model is run: options of the engine."""

    device: str
    dtype: str
    enforce_eager: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.device} {self.dtype}{', no graphs' if self.enforce_eager else ''}"


REFERENCE = Way(device="cpu", dtype="float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Greedy continuations.

    Args:
        tokens: Of each prompt, as a plain request gets them.
        logprobs: Of each prompt, as a request that asks for log-probabilities gets them: one per token, with
            the two likeliest.
    """

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two lists of continuations part first.

    Args:
        prompt: Index of the prompt.
        position: Index among its output tokens.
        gap: How much likelier the reference finds its own token there than its second, in nats.
    """

    prompt: int
    position: int
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far log-probabilities are from the reference's, over tokens, in nats.

    Args:
        num_tokens: How many were compared.
        mean: Of the absolute differences.
        p99: Their 99th percentile.
        max: The largest.
        bias: Mean of the differences, sign kept.
    """

    num_tokens: int
    mean: float
    p99: float
    max: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one way gave beside the reference.

    Args:
        way: Its name.
        is_exact: Whether its dtype is the reference's, so that its tokens must be, too.
        num_equal: Prompts continued with the reference's tokens.
        num_prompts: Of all.
        first_difference: None if all are equal.
        is_steady: Whether requests for log-probabilities got the same tokens as plain ones.
        prefill: Errors on the reference's texts, scored as prompts.
        decode: Errors on the way's own tokens, as it decoded them.
        same_likeliest: Share of the texts' positions at which the likeliest token is the reference's.
    """

    way: str
    is_exact: bool
    num_equal: int
    num_prompts: int
    first_difference: Difference | None
    is_steady: bool
    prefill: Errors
    decode: Errors
    same_likeliest: float

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong: in another dtype tokens may differ."""
        return self.is_steady and (not self.is_exact or self.num_equal == self.num_prompts)


def cut_prompts(token_ids: Sequence[int], count: int, *, head: Sequence[int] = ()) -> list[list[int]]:
    """Cut passages out of a text, from its beginning to its end, each longer than the one before.

    Args:
        token_ids: The text.
        count: How many.
        head: What the tokenizer puts before every prompt.

    Raises:
        ValueError: The text is too short.
    """
    if len(token_ids) < LONGEST + count:
        raise ValueError(f"the text has {len(token_ids)} tokens; {count} prompts take {LONGEST + count}")
    growth = (LONGEST / SHORTEST) ** (1 / max(1, count - 1))
    lengths = [round(SHORTEST * growth**index) for index in range(count)]
    stride = (len(token_ids) - LONGEST) // count
    starts = range(0, count * stride, stride)
    return [[*head, *token_ids[start : start + n]] for start, n in zip(starts, lengths, strict=True)]


def ways(device: str, *, has_graphs: bool) -> list[Way]:
    """Return what is held against the reference, the yardstick last.

    Args:
        device: auto, cuda, cuda:N or cpu.
        has_graphs: Whether the device replays graphs unless told not to.
    """
    found = []
    for dtype in ("float32", "bfloat16"):
        found.append(Way(device=device, dtype=dtype))
        if has_graphs:
            found.append(Way(device=device, dtype=dtype, enforce_eager=True))
    found.append(Way(device="cpu", dtype="bfloat16"))
    return list(dict.fromkeys(found))


def open_way(way: Way, model: str, *, num_prompts: int) -> LLM:
    """Load the model; nothing is taken from a prefix cache, for everything is to be computed."""
    llm = LLM(
        model,
        device=way.device,
        dtype=way.dtype,
        enforce_eager=way.enforce_eager,
        max_num_seqs=num_prompts,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        enable_prefix_caching=False,
    )
    llm.wait_until_warm()
    return llm


def answer(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> Answers:
    """Continue the prompts in one batch, plainly and then with log-probabilities."""
    plain, scored = (
        [
            completion.outputs[0]
            for completion in llm.generate(
                prompts,
                SamplingParams(
                    max_tokens=num_tokens, temperature=0.0, ignore_eos=True, num_logprobs=num_logprobs
                ),
                progress=False,
            )
        ]
        for num_logprobs in (None, 2)
    )
    return Answers(
        tokens=[list(output.token_ids) for output in plain],
        logprobs=[list(output.logprobs or ()) for output in scored],
    )


def score(llm: LLM, texts: Sequence[Sequence[int]]) -> list[list[TokenLogprobs]]:
    """Return the log-probability of every token of the texts from the second on, with the likeliest."""
    params = SamplingParams(max_tokens=1, temperature=0.0, num_prompt_logprobs=1)
    return [
        list(completion.prompt_logprobs or ()) for completion in llm.generate(texts, params, progress=False)
    ]


def first_difference(found: Answers, reference: Answers) -> Difference | None:
    """Return where continuations part first, the earliest position of all prompts; None if nowhere."""
    parted = [
        (next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), prompt)
        for prompt, (one, other) in enumerate(zip(found.tokens, reference.tokens, strict=True))
        if one != other
    ]
    if not parted:
        return None
    position, prompt = min(parted)
    (_, best), (_, second) = reference.logprobs[prompt][position].top[:2]
    return Difference(prompt=prompt, position=position, gap=best - second)


def errors(found: Sequence[float], reference: Sequence[float]) -> Errors:
    """Compare log-probabilities of the same tokens, at least one."""
    differences = [one - other for one, other in zip(found, reference, strict=True)]
    sizes = [abs(difference) for difference in differences]
    return Errors(
        num_tokens=len(sizes),
        mean=statistics.fmean(sizes),
        p99=float(np.percentile(sizes, 99)),
        max=max(sizes),
        bias=statistics.fmean(differences),
    )


def compare(
    way: Way,
    prompts: Sequence[Sequence[int]],
    found: Answers,
    reference: Answers,
    scores: tuple[Sequence[Sequence[TokenLogprobs]], Sequence[Sequence[TokenLogprobs]]],
    judged: Sequence[Sequence[TokenLogprobs]],
) -> Result:
    """Put everything known of one way together.

    Args:
        way: The way.
        prompts: As asked.
        found: Its continuations.
        reference: The reference's.
        scores: Of the reference's texts: by the way, and by the reference.
        judged: Of the way's texts with log-probabilities, by the reference.
    """
    own, true = ([entry for entries in each for entry in entries] for each in scores)
    decoded = [entry.logprob for entries in found.logprobs for entry in entries]
    rescored = [
        entry.logprob
        for prompt, entries in zip(prompts, judged, strict=True)
        for entry in entries[len(prompt) - 1 :]
    ]
    return Result(
        way=way.name,
        is_exact=way.dtype == REFERENCE.dtype,
        num_equal=sum(map(list.__eq__, found.tokens, reference.tokens)),
        num_prompts=len(prompts),
        first_difference=first_difference(found, reference),
        is_steady=found.tokens == _tokens_of(found.logprobs),
        prefill=errors([entry.logprob for entry in own], [entry.logprob for entry in true]),
        decode=errors(decoded, rescored),
        same_likeliest=statistics.fmean(
            one.top[0][0] == other.top[0][0] for one, other in zip(own, true, strict=True)
        ),
    )


def _tokens_of(logprobs: Sequence[Sequence[TokenLogprobs]]) -> list[list[int]]:
    return [[entry.token_id for entry in entries] for entries in logprobs]


def measure(
    model: str, candidates: Sequence[Way], prompts: Sequence[Sequence[int]], num_tokens: int
) -> Iterator[Result]:
    """Run the reference, then each way beside it, and yield what was found of it at once."""
    with open_way(REFERENCE, model, num_prompts=len(prompts)) as reference_llm:
        reference = answer(reference_llm, prompts, num_tokens)
        texts = _joined(prompts, reference.tokens)
        true = score(reference_llm, texts)
        for way in candidates:
            began_s = time.perf_counter()
            with open_way(way, model, num_prompts=len(prompts)) as llm:
                found = answer(llm, prompts, num_tokens)
                own = score(llm, texts)
            said = _tokens_of(found.logprobs)
            judged = true if said == reference.tokens else score(reference_llm, _joined(prompts, said))
            print(f"{way.name}: {time.perf_counter() - began_s:.1f} s", file=sys.stderr, flush=True)
            yield compare(way, prompts, found, reference, (own, true), judged)


def _joined(prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*prompt, *continuation] for prompt, continuation in zip(prompts, tokens, strict=True)]


def table(results: Sequence[Result]) -> str:
    """Return the results as a table in Markdown."""
    lines = [
        "| run | same tokens | parts first at | prompts: error mean / p99 / max | decoding: mean / p99 / max "
        "| same likeliest token |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        where = "" if result.is_steady else "with log-probabilities; "
        if (parts := result.first_difference) is not None:
            where += f"token {parts.position} of prompt {parts.prompt}, gap {parts.gap:.2g}"
        cells = [
            result.way,
            f"{result.num_equal} of {result.num_prompts}",
            where,
            *(
                f"{each.mean:.2g} / {each.p99:.2g} / {each.max:.2g}"
                for each in (result.prefill, result.decode)
            ),
            f"{result.same_likeliest:.2%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0 if every way in float32 gives the reference's tokens, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file or folder")
    parser.add_argument("--device", default="cuda", help="what is held against the CPU")
    parser.add_argument("--prompts", type=int, default=16, help="how many")
    parser.add_argument("--tokens", type=int, default=64, help="generated for each prompt")
    parser.add_argument("--text", type=Path, default=TEXT, help="file that prompts are cut from")
    parser.add_argument("--json", type=Path, help="file that gets the figures")
    parser.add_argument("--label", default="", help="said in the file: commit, machine")
    options = parser.parse_args(arguments)
    if options.device != "cpu" and not torch.cuda.is_available():
        print("there is no CUDA device", file=sys.stderr)
        return 2
    tokenizer = load_tokenizer(open_checkpoint(options.model), chat_template=None)
    text = options.text.read_text(encoding="utf-8")
    prompts = cut_prompts(
        tokenizer.encode(text, add_special_tokens=False),
        options.prompts,
        head=tokenizer.encode("", add_special_tokens=True),
    )
    candidates = ways(options.device, has_graphs=options.device != "cpu")
    model = Path(options.model).name
    results: list[Result] = []
    for result in measure(options.model, candidates, prompts, options.tokens):
        results.append(result)
        print(table([result]), flush=True)
        if options.json is not None:  # each time: a run that is ended keeps what it found
            figures.write(
                options.json,
                label=options.label,
                model=model,
                num_prompts=len(prompts),
                num_tokens=options.tokens,
                results=[asdict(each) for each in results],
            )
    about = f"{model}, {len(prompts)} prompts, {options.tokens} tokens each; {figures.machine()}"
    print(f"{about}\n\n{table(results)}")
    return 0 if all(result.is_sound for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
