"""`python -m loadtest.host_tier`: what a sequence costs that comes back from the host, and a prefix cache.

Swap against recompute: the device side is driven directly. A sequence of each length is computed in chunks,
stored in the host's memory and brought back; beside it runs a short one, as in a server. What it waits for
when it comes back is set against computing it again; what the stores hold up the others by stands beside.

Prefix cache: the same load through `LLM` without a cache, with one in which nothing is found, with 75 % of
each prompt found on the device, and with 75 % found on the host, because the pool is too small. Best of
several repeats. Weights are random: times do not depend on them.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncserve import LLM, SamplingParams
from asyncserve.checkpoint import open_checkpoint
from loadtest import figures
from loadtest.engine_options import read_option
from loadtest.figures import Row, Rows
from loadtest.gpu.vocabulary import write_tokenizer
from loadtest.model_shapes import Shape, known_shapes
from loadtest.workload import random_tokens

SHARED = 0.75
"""Of each prompt, where prefixes are shared."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line says, print it, and write it if a file is named."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.host_tier", description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b", help="Name in loadtest/shapes, or a folder.")
    parser.add_argument(
        "--lens", type=int, nargs="+", default=[1024, 4096, 16384], help="Of swapped sequences."
    )
    parser.add_argument("--num-prompts", type=int, default=256, help="Of the prefix cache's load.")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument(
        "--host-gib",
        type=float,
        help="Of the host's memory. Default: half as much again as a repeat's prompts take; 16 for swaps.",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip", nargs="+", default=[], choices=("swap", "prefixes"))
    parser.add_argument(
        "--option", nargs="+", default=[], metavar="NAME=VALUE", help="Options of the engine."
    )
    parser.add_argument("--json", type=Path, help="File that gets the figures.")
    parser.add_argument("--label", default="", help="Said in the file.")
    arguments = parser.parse_args(argv)
    try:
        (shape,) = known_shapes([arguments.shape])
        further = dict(map(read_option, arguments.option))
    except ValueError as error:
        print(f"loadtest.host_tier: error: {error}", file=sys.stderr)
        return 2
    rows: Rows = []

    def note(measured: Iterator[Row]) -> None:
        for row in measured:
            rows.append(row)
            print(json.dumps({"shape": shape.name, **row}), flush=True)

    if "swap" not in arguments.skip:
        note(swap(shape, arguments.lens, arguments.host_gib or 16.0, arguments.repeats, further))
        gc.collect()
    if "prefixes" not in arguments.skip:
        lens = (arguments.prompt_len, arguments.output_len)
        taken_bytes = arguments.num_prompts * sum(lens) * shape.kv_bytes_per_token()
        host_gib = arguments.host_gib or 1.5 * taken_bytes / 2**30
        note(prefixes(shape, arguments.num_prompts, lens, host_gib, arguments.repeats, further))
    if arguments.json is not None:
        figures.write(
            arguments.json, label=arguments.label, commit=figures.commit(), shape=shape.name, rows=rows
        )
    return 0


def swap(
    shape: Shape, lens: Sequence[int], host_gib: float, repeats: int, further: Mapping[str, Any]
) -> Iterator[Row]:
    """Measure sequences of each length that come back, and that are computed again."""
    # They bring torch.
    from asyncserve.gpu.runner import ModelRunner
    from asyncserve.gpu.startup import start_runner
    from asyncserve.kv_spec import pool_bytes_per_block
    from asyncserve.step import (
        BlockAppend,
        BlockTransfer,
        ExecutorInfo,
        ScheduledSequence,
        SlotAssignment,
        StepPlan,
    )

    def admit(slot: int, length: int, blocks: Sequence[int], group_id: int = 0) -> dict[str, Any]:
        assignment = SlotAssignment(
            slot=slot,
            token_ids=array("i", [7]) * length,
            prompt_len=length,
            sampling=SamplingParams(temperature=0.0),
            seed=0,
        )
        return {
            "admitted": (assignment,),
            "block_appends": (BlockAppend(group_id, slot, tuple(blocks)),),
        }

    class Driver:
        """Runs plans, and knows where the short sequence stands that is in all of them."""

        def __init__(self, runner: ModelRunner, info: ExecutorInfo) -> None:
            self.runner = runner
            self._step_id = 0
            self._short_len = 1
            (group,) = info.kv_groups
            self._block_len = group.spec.block_len
            self._most = info.max_model_len - 1
            self.first_block = 1 + group.spec.blocks_for(self._most + 1)
            self.run((), **admit(0, 1, range(1, self.first_block)), starts=True)

        def run(self, rows: Sequence[ScheduledSequence], *, starts: bool = False, **parts: Any) -> float:
            """Return the seconds of a step."""
            start = self._short_len - 1
            short = ScheduledSequence(0, start, 1, True)
            plan = StepPlan(step_id=self._step_id, sequences=(short, *rows), **parts)
            self._step_id += 1
            # One that has all its tokens writes its last position again and again.
            self._short_len = min(self._short_len + 1, self._most) if not starts else 2
            began_s = time.perf_counter()
            self.runner.run(plan).wait()
            return time.perf_counter() - began_s

    runner, info = start_runner(
        open_checkpoint(str(shape.folder), needs_weights=False),
        **{
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": max(lens) + 1,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 8192,
            "enforce_eager": True,
            "swap_space_gib": host_gib,
            # What starts the device side calls one option otherwise.
            **{{"block_size": "block_len"}.get(name, name): value for name, value in further.items()},
        },
    )
    driver = Driver(runner, info)
    budget = info.max_num_batched_tokens - 1
    block_bytes = pool_bytes_per_block(info.kv_groups)
    for length in lens:
        num_blocks = info.kv_groups[0].spec.blocks_for(length)
        blocks = range(driver.first_block, driver.first_block + num_blocks)
        transfers = tuple(BlockTransfer(block, 1 + idx) for idx, block in enumerate(blocks))
        best: dict[str, float] = {}
        for _ in range(repeats):
            times = {"recompute_ms": 0.0}
            parts: dict[str, Any] = admit(1, length, blocks)
            for start in range(0, length, budget):
                num_tokens = min(budget, length - start)
                row = ScheduledSequence(1, start, num_tokens, start + num_tokens == length)
                times["recompute_ms"] += 1e3 * driver.run([row], **parts)
                parts = {}
            times["step_ms"] = 1e3 * driver.run((), released_slots=(1,))
            began_s = time.perf_counter()
            # The step that stores, and those behind it, go on; the copies are done when all is.
            times["storing_step_ms"] = 1e3 * driver.run((), block_stores=transfers)
            runner.device.synchronize()
            times["store_ms"] = 1e3 * (time.perf_counter() - began_s)
            times["load_ms"] = 1e3 * driver.run(
                [ScheduledSequence(1, length - 1, 1, True)],
                block_loads=transfers,
                **admit(1, length, blocks),
            )
            driver.run((), released_slots=(1,))
            best = {name: min(ms, best.get(name, ms)) for name, ms in times.items()}
        num_bytes = num_blocks * block_bytes
        yield {
            "kind": "swap",
            "device": info.device_name,
            "context_len": length,
            "num_bytes": num_bytes,
            **{name: round(ms, 3) for name, ms in best.items()},
            "store_gbps": round(num_bytes / best["store_ms"] / 1e6, 2),
            "load_gbps": round(num_bytes / best["load_ms"] / 1e6, 2),
            "measured_at_start_gbps": round(2 * block_bytes / info.host_block_s / 1e9, 2),
        }


def prefixes(
    shape: Shape,
    num_prompts: int,
    lens: tuple[int, int],
    host_gib: float,
    repeats: int,
    further: Mapping[str, Any],
) -> Iterator[Row]:
    """Measure a load without a prefix cache, with one that does not help, and with one that does."""
    prompt_len, output_len = lens
    options: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": prompt_len + output_len,
        **further,
    }
    block_size = int(options.get("block_size", 16))
    # Too small for all prompts, so that what one repeat leaves is evicted by the next.
    few_blocks = max(num_prompts // 8, 2) * -(-(prompt_len + output_len) // block_size) + 2
    ways: Mapping[str, tuple[float, dict[str, Any]]] = {
        "no cache": (0.0, {"enable_prefix_caching": False}),
        "0 %": (0.0, {}),
        "75 % on the device": (SHARED, {}),
        "no cache, small pool": (
            0.0,
            {"enable_prefix_caching": False, "num_gpu_blocks_override": few_blocks},
        ),
        "0 %, evicted to the host": (
            0.0,
            {"kv_offloading_size": host_gib, "num_gpu_blocks_override": few_blocks},
        ),
        "75 % on the host": (
            SHARED,
            {"kv_offloading_size": host_gib, "num_gpu_blocks_override": few_blocks},
        ),
    }
    with tempfile.TemporaryDirectory(prefix="loadtest-tokenizer-") as folder:
        options["tokenizer"] = str(write_tokenizer(Path(folder) / shape.name, shape.vocab_size))
        for name, (share, changes) in ways.items():
            with LLM(str(shape.folder), **(_without_pool(options, changes) | changes)) as llm:
                llm.wait_until_warm()
                yield {
                    "kind": "prefixes",
                    "way": name,
                    **_timed(llm, shape, num_prompts, lens, share, repeats),
                }
            gc.collect()


def _without_pool(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, without a size of the pool where a way has its own."""
    own = "num_gpu_blocks_override" in changes
    return {name: value for name, value in options.items() if not (own and name == "kv_cache_memory_bytes")}


def _timed(
    llm: LLM, shape: Shape, num_prompts: int, lens: tuple[int, int], share: float, repeats: int
) -> dict[str, Any]:
    """Answer the load several times; of each prompt `share` was in an earlier one of its own."""
    prompt_len, output_len = lens
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    num_shared = int(share * prompt_len)
    heads = _random(shape, num_prompts, num_shared, "heads") if num_shared else [[]] * num_prompts

    def answer(repeat: int) -> float:
        tails = _random(shape, num_prompts, prompt_len - num_shared, f"tails {repeat}")
        prompts = [head + tail for head, tail in zip(heads, tails, strict=True)]
        began_s = time.perf_counter()
        llm.generate(prompts, params, progress=False)
        return time.perf_counter() - began_s

    answer(-1)  # fills the cache, and warms what is made on first use
    before = llm.statistics()
    times_s = [answer(repeat) for repeat in range(repeats)]
    after = llm.statistics()
    num_looked_up = after.prefix_cache_queries - before.prefix_cache_queries
    return {
        "num_prompts": num_prompts,
        "prompt_len": prompt_len,
        "output_len": output_len,
        "s": round(min(times_s), 4),
        "all_s": [round(each, 4) for each in times_s],
        "prompt_tps": round(num_prompts * prompt_len / min(times_s)),
        "hit_share": (after.prefix_cache_hits - before.prefix_cache_hits) / max(1, num_looked_up),
        "repeats": repeats,
        "host_hit_tokens": after.host_cache_hits - before.host_cache_hits,
        "stored_bytes": after.host_stored_bytes - before.host_stored_bytes,
        "loaded_bytes": after.host_loaded_bytes - before.host_loaded_bytes,
    }


def _random(shape: Shape, count: int, length: int, seed: str) -> list[list[int]]:
    samples = random_tokens(
        count, input_len=length, output_len=1, vocab_size=shape.vocab_size, seed=f"{shape.name} {seed}"
    )
    return [list(sample.prompt) for sample in samples if not isinstance(sample.prompt, str)]


if __name__ == "__main__":
    sys.exit(main())
