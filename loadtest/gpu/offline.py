"""Measured through `LLM`: first token, prefill, decode by batch size, throughput, what a pool of KV holds.

Takes a shape and how much to measure, gives one row (plain values for JSON) per measurement, as soon as it is
made. Prompts are random token ids, others each time (the mix's apart); outputs have the length asked for,
which is checked. Of repeats, the fastest is the figure and all are kept; what the engine told of its steps
stands beside. Decode time per token is (time with the long output - time with the short one) / (tokens
between them), each the fastest of its repeats.
"""

import gc
import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from asyncserve import LLM, SamplingParams
from asyncserve.kv_spec import DTYPE_BYTES, FP8_DTYPES
from loadtest.figures import Row
from loadtest.gpu.extent import ALL_MEASUREMENTS, MEASUREMENTS, Extent
from loadtest.gpu.step_record import StepRecorder, decode_steps, summarize
from loadtest.model_shapes import BYTES_PER_VALUE, Shape
from loadtest.workload import random_tokens

MIX_VOCAB_SIZE = 10_001
MIX_TEMPERATURE = 0.6


def of_shape(values: Mapping[str, Any], shape: Shape) -> Any:
    """Return a shape's own value, or the one for any other."""
    return values.get(shape.name, values[""])


def engine_options(extent: Extent, further: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's options: random weights, no prefix cache, room for the largest batch."""
    return {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": extent.max_model_len,
        "max_num_seqs": extent.max_num_seqs,
        "enable_prefix_caching": False,
        **further,
    }


def bytes_per_kv_value(further: Mapping[str, Any]) -> int:
    """Return the bytes of one value of the KV cache that an engine with these options has."""
    name = str(further.get("kv_cache_dtype", "auto"))
    return DTYPE_BYTES.get(FP8_DTYPES.get(name, name), BYTES_PER_VALUE)


def measure(
    shape: Shape,
    tokenizer: str,
    extent: Extent,
    *,
    further: Mapping[str, Any],
    only: Sequence[str] = MEASUREMENTS,
) -> Iterator[Row]:
    """Start the engine and make the measurements.

    Args:
        shape: What is served.
        tokenizer: Folder of a tokenizer for it.
        extent: How much to measure.
        further: Options of the engine that go before the usual ones.
        only: Of `ALL_MEASUREMENTS`, those to make.

    Raises:
        RuntimeError: Some of them failed; they are left out.
    """
    recorder = StepRecorder()
    began_s = time.perf_counter()
    options = engine_options(extent, {"tokenizer": tokenizer, **further})
    with LLM(str(shape.folder), observer=recorder, **options) as llm:
        started_s = time.perf_counter()
        llm.wait_until_warm()
        warm_s = time.perf_counter()
        yield {
            "kind": "engine-start",
            "start_s": started_s - began_s,
            "graphs_s": warm_s - started_s,
        }
        bench = OfflineBench(
            llm,
            recorder,
            shape,
            extent,
            kv_cache_dtype=str(further.get("kv_cache_dtype", "auto")),
            bytes_per_kv_value=bytes_per_kv_value(further),
        )
        bench.warm_up()
        makers: dict[str, Callable[[], Iterator[Row]]] = {
            "first-token": bench.first_token,
            "decode": bench.decode,
            "prefill": bench.prefill,
            "throughput": bench.throughput,
            "mix": bench.mix,
            "capacity": bench.capacity,
        }
        failures = []
        for name in ALL_MEASUREMENTS:
            if name in only:
                try:
                    yield from makers[name]()
                except Exception as error:  # the others may be well; told at the end
                    traceback.print_exc()
                    failures.append(f"{name}: {type(error).__name__}: {error}")
        if failures:
            raise RuntimeError("; ".join(failures))


class OfflineBench:
    """The measurements, on an engine that is warm.

    Args:
        llm: The engine.
        recorder: Its observer.
        shape: What it serves.
        extent: How much to measure.
        kv_cache_dtype: As the option has it.
        bytes_per_kv_value: Of the KV cache.
    """

    def __init__(
        self,
        llm: LLM,
        recorder: StepRecorder,
        shape: Shape,
        extent: Extent,
        *,
        kv_cache_dtype: str,
        bytes_per_kv_value: int,
    ) -> None:
        self._llm = llm
        self._recorder = recorder
        self._shape = shape
        self._extent = extent
        self._kv_cache_dtype = kv_cache_dtype
        self._bytes_per_kv_value = bytes_per_kv_value
        self._num_drawn = 0

    def warm_up(self) -> None:
        """Run what is made on first use: kernels of long prompts, of a full batch, of sampling."""
        extent = self._extent
        num_rows = max(extent.batches, default=1)
        for temperature in sorted({0.0, *extent.offline_temperatures}):
            self._timed(self._prompts(1, extent.first_token_len), 2, temperature)
            self._timed(self._prompts(num_rows, extent.offline_lens[0] // 4 or 1), 8, temperature)
        # What lives now stays: the collector's full passes would only be noise.
        gc.collect()
        gc.freeze()

    def first_token(self) -> Iterator[Row]:
        """One prompt alone, until its first token."""
        length = self._extent.first_token_len
        times_ms = [
            1e3 * self._timed(self._prompts(1, length), 1) for _ in range(self._extent.first_token_repeats)
        ]
        yield {"kind": "first-token", "input_len": length, "ms": min(times_ms), "all_ms": times_ms}

    def decode(self) -> Iterator[Row]:
        """Every row of a batch decodes; time per token by batch size."""
        length = self._extent.decode_input_len
        short_len, long_len = self._extent.decode_output_lens
        for batch, repeats in self._extent.batches.items():
            shorts, longs = [], []
            begin = len(self._recorder.steps)
            for _ in range(repeats):
                shorts.append(self._timed(self._prompts(batch, length), short_len))
                longs.append(self._timed(self._prompts(batch, length), long_len))
            num_tokens = long_len - short_len
            pairs_ms = [
                1e3 * (long_s - short_s) / num_tokens for short_s, long_s in zip(shorts, longs, strict=True)
            ]
            context_len = length + (short_len + long_len) / 2
            steps = summarize(decode_steps(self._recorder.steps[begin:], batch))
            yield {
                "kind": "decode",
                "batch": batch,
                "context_len": context_len,
                "tpot_ms": 1e3 * (min(longs) - min(shorts)) / num_tokens,
                "all_ms": pairs_ms,
                "floor_bytes": self._shape.step_bytes(
                    batch, context_len, bytes_per_kv_value=self._bytes_per_kv_value
                ),
                "steps": None if steps is None else steps._asdict(),
            }

    def prefill(self) -> Iterator[Row]:
        """Many prompts at once, each to its first token."""
        num_requests, length = self._extent.prefill_requests, self._extent.decode_input_len
        times_s = [
            self._timed(self._prompts(num_requests, length), 1) for _ in range(self._extent.prefill_repeats)
        ]
        yield {
            "kind": "prefill",
            "num_requests": num_requests,
            "input_len": length,
            "tps": num_requests * length / min(times_s),
            "all_s": times_s,
        }

    def throughput(self) -> Iterator[Row]:
        """Many requests of one length, by temperature."""
        input_len, output_len = self._extent.offline_lens
        num_requests = of_shape(self._extent.offline_requests, self._shape)
        for temperature in self._extent.offline_temperatures:
            prompts = [self._prompts(num_requests, input_len) for _ in range(self._extent.offline_repeats)]
            yield self._throughput_row(
                "throughput",
                [(each, [output_len] * num_requests) for each in prompts],
                temperature,
                {"input_len": input_len, "output_len": output_len},
            )

    def mix(self) -> Iterator[Row]:
        """Requests of lengths that vary, drawn as nano-vllm's benchmark draws them."""
        low, high = self._extent.mix_lens
        repeats = of_shape(self._extent.mix_repeats, self._shape)
        if repeats:
            vocab_size = min(MIX_VOCAB_SIZE, self._shape.vocab_size)
            drawn = mixed_requests(self._extent.mix_requests, low, high, vocab_size=vocab_size)
            yield self._throughput_row(
                "mix", [drawn] * repeats, MIX_TEMPERATURE, {"min_len": low, "max_len": high}
            )

    def capacity(self) -> Iterator[Row]:
        """More requests than the pool of KV holds at once: how many run together, and how fast."""
        input_len, output_len = self._extent.capacity_lens
        prompts = self._prompts(self._extent.capacity_requests, input_len)
        begin = len(self._recorder.steps)
        num_blocks = self._llm.statistics().num_blocks
        row = self._throughput_row(
            "capacity",
            [(prompts, [output_len] * len(prompts))],
            0.0,
            {"input_len": input_len, "output_len": output_len},
        )
        num_running = [step.num_sequences for step in self._recorder.steps[begin:]]
        yield {
            **row,
            "kv_cache_dtype": self._kv_cache_dtype,
            "num_blocks": num_blocks,
            "most_running": max(num_running),
            "median_running": statistics.median(num_running),
        }

    def _throughput_row(
        self,
        kind: str,
        requests: Sequence[tuple[list[list[int]], list[int]]],
        temperature: float,
        about: Mapping[str, Any],
    ) -> Row:
        """Answer each set of prompts and output lengths, and return the figures."""
        times_s = []
        begin = len(self._recorder.steps)
        num_preempted = self._llm.statistics().num_preemptions
        for prompts, output_lens in requests:
            times_s.append(self._timed(prompts, output_lens, temperature))
        steps = summarize(self._recorder.steps[begin:])
        prompts, output_lens = requests[0]
        return {
            "kind": kind,
            "num_requests": len(prompts),
            **about,
            "temperature": temperature,
            "num_prompt_tokens": sum(map(len, prompts)),
            "num_output_tokens": sum(output_lens),
            "tps": sum(output_lens) / min(times_s),
            "all_s": times_s,
            "num_preemptions": self._llm.statistics().num_preemptions - num_preempted,
            "steps": None if steps is None else steps._asdict(),
        }

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        self._num_drawn += 1
        samples = random_tokens(
            count,
            input_len=length,
            output_len=1,
            vocab_size=self._shape.vocab_size,
            seed=f"{self._shape.name} {self._num_drawn}",
        )
        return [list(sample.prompt) for sample in samples if not isinstance(sample.prompt, str)]

    def _timed(
        self, prompts: list[list[int]], output_len: int | Sequence[int], temperature: float = 0.0
    ) -> float:
        """Generate, and return the seconds it took.

        Raises:
            ValueError: An output has another length than was asked for.
        """
        lengths = [output_len] * len(prompts) if isinstance(output_len, int) else list(output_len)
        sampling = [
            SamplingParams(max_tokens=length, temperature=temperature, ignore_eos=True) for length in lengths
        ]
        began_s = time.perf_counter()
        completions = self._llm.generate(prompts, sampling, progress=False)
        took_s = time.perf_counter() - began_s
        made = [len(completion.outputs[0].token_ids) for completion in completions]
        if made != lengths:
            raise ValueError(f"{sum(made)} tokens were made, {sum(lengths)} asked for")
        return took_s


def mixed_requests(
    count: int, low: int, high: int, *, vocab_size: int, seed: int = 0
) -> tuple[list[list[int]], list[int]]:
    """Draw prompts and output lengths, both uniform between `low` and `high`, in nano-vllm's order."""
    source = random.Random(seed)
    prompts = [
        [source.randint(0, vocab_size - 1) for _ in range(source.randint(low, high))] for _ in range(count)
    ]
    return prompts, [source.randint(low, high) for _ in range(count)]
