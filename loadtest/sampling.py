"""What it costs on a GPU to turn logits into tokens: `python -m loadtest.sampling`, run in the repository's
root.

The sampler's kernels on bfloat16 logits of two vocabularies, for each way to choose: the likeliest token, a
draw, and draws after truncation; beside torch's own argmax, softmax or sort, the least that a sampler made of
those would launch. Logits are like a language model's (few tokens have most of the mass) or normal (nearly
all have some, so that top-p must search). µs is device time of one call inside a CUDA graph of many, which
take logits in turn from more than the L2 cache holds; `threshold` is the part that truncation takes. % is the
share of a copy's bandwidth, each logit counted once. `--sweep` instead times other ways to cut the work than
the ones chosen.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from asyncserve.gpu.kernels import sampling, truncation
from asyncserve.gpu.kernels.sampling import ChoiceConfig
from asyncserve.gpu.kernels.truncation import TruncationConfig
from asyncserve.gpu.sampling.choice import choose
from asyncserve.gpu.sampling.slot_values import DeviceValues, SlotValues
from asyncserve.request import SamplingParams
from asyncserve.step import BAD_LOGITS
from loadtest.figures import Rows
from loadtest.kernel_benchmark import (
    DTYPE,
    compile_ahead,
    device_us,
    kernel_shapes,
    num_inputs,
    run_benchmark,
)

NUM_ROWS = (1, 8, 64, 256)
SWEPT_ROWS = (1, 256)
SWEPT = (("peaked", "draw"), ("peaked", "top-p 0.9"), ("peaked", "k 20, p 0.95"), ("normal", "top-p 0.9"))
RULES = {
    "greedy": SamplingParams(temperature=0.0),
    "draw": SamplingParams(temperature=1.0),
    "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "top-k 50": SamplingParams(temperature=1.0, top_k=50),
    "k 20, p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "min-p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
}

CHOICES = [
    ChoiceConfig(blocks_per_program=blocks, num_warps=warps)
    for blocks, warps in ((8, 2), (8, 4), (16, 2), (16, 4), (32, 4), (32, 8), (64, 8), (128, 16))
]
FIRST_CUTS = [
    TruncationConfig(groups_per_program=groups, num_warps=warps)
    for groups, warps in ((64, 2), (64, 4), (128, 4), (128, 8), (256, 8))
]
SECOND_CUTS = [
    TruncationConfig(row_warps=warps, groups_listed=listed, groups_searched=searched)
    for warps, listed, searched in (
        (4, 128, 128),
        (8, 128, 256),
        (8, 256, 256),
        (8, 512, 256),
        (8, 256, 512),
        (16, 256, 256),
        (16, 512, 512),
        (32, 512, 512),
    )
]
SECOND_CUTS += [
    TruncationConfig(list_len=1024),
    TruncationConfig(list_len=4096),
    TruncationConfig(list_len=1024, row_warps=16, groups_searched=512),
    TruncationConfig(row_registers=128),
    TruncationConfig(row_warps=16, row_registers=64),
    TruncationConfig(list_len=1024, row_registers=128),
]


class Inputs(NamedTuple):
    """Rows of one kind and the slots they belong to.

    Args:
        logits: Sets of `[num_rows, vocab]`, to be taken in turn.
        slots: `[num_rows] int32`.
        positions: `[num_rows] int64`.
        values: Of the slots.
    """

    logits: Sequence[torch.Tensor]
    slots: torch.Tensor
    positions: torch.Tensor
    values: DeviceValues


def peaked_logits(num_rows: int, vocab: int, *, device: torch.device) -> torch.Tensor:
    """Return logits whose probabilities fall with their rank as a model's do, in an order of their own.

    The likeliest token has about a tenth of the mass, 0.9 of it is with about 150 tokens.
    """
    generator = torch.Generator(device).manual_seed(vocab)
    ranks = torch.rand(num_rows, vocab, generator=generator, device=device).argsort(1)
    return (20.0 - 1.6 * (ranks.float() + 2.0).log()).to(DTYPE)


def normal_logits(num_rows: int, vocab: int, *, device: torch.device) -> torch.Tensor:
    """Return logits of which most have some mass."""
    generator = torch.Generator(device).manual_seed(vocab)
    return torch.randn(num_rows, vocab, generator=generator, device=device).to(DTYPE)


KINDS: dict[str, Callable[..., torch.Tensor]] = {"peaked": peaked_logits, "normal": normal_logits}


def make_inputs(kind: str, rule: str, num_rows: int, vocab: int) -> Inputs:
    """Make rows on the GPU."""
    device = torch.device("cuda")
    first = KINDS[kind](num_rows, vocab, device=device)
    copies = num_inputs(2 * first.numel())
    slots = SlotValues(num_rows, device)
    for slot in range(num_rows):
        slots.set(slot, RULES[rule], seed=slot)
    slots.upload()
    return Inputs(
        logits=[first.roll(997 * i, dims=1) for i in range(copies)],
        slots=torch.arange(num_rows, dtype=torch.int32, device=device),
        positions=torch.full((num_rows,), 1000, device=device),
        values=slots.on_device,
    )


def find_thresholds(inputs: Inputs, i: int, *, config: TruncationConfig) -> torch.Tensor:
    """Truncate the rows of that number."""
    values = inputs.values
    return truncation.find_thresholds(
        inputs.logits[i],
        inputs.slots,
        inv_temperature=values.inv_temperature,
        top_k=values.top_k,
        top_p=values.top_p,
        min_p=values.min_p,
        config=config,
    )


def choose_tokens(
    inputs: Inputs, i: int, *, config: ChoiceConfig, thresholds: torch.Tensor | None
) -> torch.Tensor:
    """Choose a token for each of the rows of that number."""
    return sampling.choose_tokens(
        inputs.logits[i],
        inputs.slots,
        inputs.positions,
        seed_keys=inputs.values.seed_keys,
        inv_temperature=inputs.values.inv_temperature,
        thresholds=thresholds,
        bad_token=BAD_LOGITS,
        empty_token=BAD_LOGITS,
        config=config,
    )


def compose(rule: str, logits: torch.Tensor) -> torch.Tensor:
    """Launch the least of torch's own kernels that a sampler would be made of."""
    sampling_params = RULES[rule]
    if sampling_params.is_greedy:
        return logits.argmax(1)
    if rule == "draw":
        weights = logits.float().softmax(1)
        return weights.div_(torch.empty_like(weights).exponential_()).argmax(1)
    return logits.float().sort(dim=1, descending=True).values


def cases() -> Iterator[tuple[str, str, int, int]]:
    """Yield kind of logits, rule, rows and vocabulary."""
    for shape in kernel_shapes():
        for kind in KINDS:
            for rule in RULES:
                if kind == "normal" and rule in ("greedy", "draw"):  # cost the same whatever the logits
                    continue
                for num_rows in NUM_ROWS:
                    yield kind, rule, num_rows, shape.vocab_size


def measure(copy: float) -> Rows:
    """Measure every case and print its row."""
    print(
        f"{'logits':8}{'rule':14}{'vocab':>8}{'rows':>6}{'µs':>9}{'threshold':>11}{'%':>6}{'torch µs':>10}"
        f"{'times':>7}"
    )
    found: Rows = []
    for kind, rule, num_rows, vocab in cases():
        inputs = make_inputs(kind, rule, num_rows, vocab)
        truncates = rule not in ("greedy", "draw")

        def call(i: int, inputs: Inputs = inputs, truncates: bool = truncates) -> torch.Tensor:
            return choose(
                inputs.logits[i], inputs.slots, inputs.positions, inputs.values, truncates=truncates
            )

        us = device_us(call, len(inputs.logits))
        threshold_us = 0.0
        if truncates:
            only_threshold = functools.partial(find_thresholds, inputs, config=truncation.DEFAULT_CONFIG)
            threshold_us = device_us(only_threshold, len(inputs.logits))
        torch_us = None
        if kind == "peaked":
            torch_us = device_us(
                lambda i, inputs=inputs, rule=rule: compose(rule, inputs.logits[i]),  # type: ignore[misc]
                len(inputs.logits),
            )
        share = 100 * 2 * num_rows * vocab / us / 1e3 / copy
        beside = f"{torch_us:10.1f}{torch_us / us:7.1f}" if torch_us is not None else ""
        print(
            f"{kind:8}{rule:14}{vocab:8}{num_rows:6}{us:9.2f}{threshold_us:11.2f}{share:6.0f}{beside}",
            flush=True,
        )
        found.append(
            {
                "logits": kind,
                "rule": rule,
                "vocab": vocab,
                "num_rows": num_rows,
                "us": round(us, 3),
                "threshold_us": round(threshold_us, 3),
                "torch_us": None if torch_us is None else round(torch_us, 3),
            }
        )
    return found


def named(config: ChoiceConfig | TruncationConfig) -> str:
    """Return what is not the default's, in words."""
    default = type(config)()
    changed = [
        f"{field.name} {getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(default, field.name)
    ]
    return ", ".join(changed) or "default"


def launch_way(way: tuple[int, ChoiceConfig | TruncationConfig]) -> None:
    """Compile what a way to cut needs, for a vocabulary."""
    vocab, config = way
    inputs = make_inputs("normal", "k 20, p 0.95", 1, vocab)
    if isinstance(config, TruncationConfig):
        find_thresholds(inputs, 0, config=config)
        return
    choose_tokens(inputs, 0, config=config, thresholds=None)


def sweep() -> Rows:
    """Time other ways to cut the work; print each case's best first."""
    vocab = max(shape.vocab_size for shape in kernel_shapes())
    cuts = list(dict.fromkeys([*FIRST_CUTS, *SECOND_CUTS]))  # both have the chosen one
    configs: list[ChoiceConfig | TruncationConfig] = [*CHOICES, *cuts]
    compile_ahead(launch_way, [(vocab, config) for config in configs])
    found: Rows = []
    for kind, rule in SWEPT:
        for num_rows in SWEPT_ROWS:
            inputs = make_inputs(kind, rule, num_rows, vocab)
            times: dict[str, float] = {}
            if rule == "draw":
                for choice in CHOICES:
                    call = functools.partial(choose_tokens, inputs, config=choice, thresholds=None)
                    times[named(choice)] = device_us(call, len(inputs.logits))
            else:
                for cut in cuts:
                    call = functools.partial(find_thresholds, inputs, config=cut)
                    times[named(cut)] = device_us(call, len(inputs.logits))
            ranked = sorted(times.items(), key=lambda item: item[1])
            shown = "; ".join(f"{name} {us:.2f}" for name, us in ranked)
            print(f"{kind} {rule}, {num_rows} x {vocab}: {shown}", flush=True)
            found.append(
                {
                    "logits": kind,
                    "rule": rule,
                    "vocab": vocab,
                    "num_rows": num_rows,
                    "ways": {name: round(us, 3) for name, us in ranked},
                }
            )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    run_benchmark(
        arguments,
        description=__doc__,
        search_option="--sweep",
        search_help="time other ways to cut the work than the ones chosen",
        measure=measure,
        search=sweep,
    )


if __name__ == "__main__":
    main()
