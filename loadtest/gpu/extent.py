"""How much is measured: lengths, batch sizes, request counts, repeats.

`FULL` is what figures to be kept come from, `QUICK` a third of it for a look in between. The lengths and
counts are those that `aims.OTHERS` was measured with, and `QUICK` keeps the lengths.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MEASUREMENTS = ("first-token", "decode", "prefill", "throughput", "mix")
"""Of the offline ones, those that are made unless others are asked for, in order."""
ALL_MEASUREMENTS = (*MEASUREMENTS, "capacity")
"""The last one says something of a pool of a given size only (`kv_cache_memory_bytes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineLoad:
    """One load over HTTP: `concurrency` requests at once until `num_requests` are answered."""

    concurrency: int
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of everything; lengths in tokens.

    Args:
        batches: Rows that decode together → repeats.
        decode_input_len: Prompts of the decode measurement.
        decode_output_lens: A short and a long output; the time between them is divided by the tokens between
            them. The short one must outlast the prefill of all rows, so that the batch is full in between.
        first_token_len: The one prompt whose first token is waited for.
        first_token_repeats: Times.
        prefill_requests: Prompts of `decode_input_len` that are computed together.
        prefill_repeats: Times.
        offline_requests: Shape → requests of the offline throughput; "" for any other.
        offline_lens: Their prompt and output.
        offline_temperatures: Each is measured.
        offline_repeats: Times each.
        mix_requests: Requests of lengths that vary.
        mix_lens: Least and greatest length of their prompts and outputs.
        mix_repeats: Shape → times; "" for any other.
        capacity_requests: Requests that are asked at once to see how many a pool holds: more than that.
        capacity_lens: Their prompt and output.
        online_lens: Prompt and output over HTTP.
        online_loads: Shape → loads; "" for any other.
        online_repeats: Times each load.
        num_clients: Processes that ask.
        max_model_len: Of engine and server.
        max_num_seqs: Of engine and server.
    """

    batches: Mapping[int, int] = field(default_factory=lambda: {1: 5, 8: 5, 64: 3, 256: 2})
    decode_input_len: int = 1024
    decode_output_lens: tuple[int, int] = (64, 192)
    first_token_len: int = 1024
    first_token_repeats: int = 8
    prefill_requests: int = 256
    prefill_repeats: int = 2
    offline_requests: Mapping[str, int] = field(default_factory=lambda: {"qwen3-0.6b": 1024, "": 512})
    offline_lens: tuple[int, int] = (512, 256)
    offline_temperatures: tuple[float, ...] = (0.0, 1.0)
    offline_repeats: int = 2
    mix_requests: int = 256
    mix_lens: tuple[int, int] = (100, 1024)
    mix_repeats: Mapping[str, int] = field(default_factory=lambda: {"qwen3-0.6b": 2, "": 1})
    capacity_requests: int = 512
    capacity_lens: tuple[int, int] = (1024, 128)
    online_lens: tuple[int, int] = (512, 128)
    online_loads: Mapping[str, tuple[OnlineLoad, ...]] = field(
        default_factory=lambda: {
            "qwen3-0.6b": (
                OnlineLoad(concurrency=1, num_requests=16),
                OnlineLoad(concurrency=64, num_requests=1024),
                OnlineLoad(concurrency=256, num_requests=1536),
            ),
            "": (
                OnlineLoad(concurrency=1, num_requests=8),
                OnlineLoad(concurrency=64, num_requests=384),
                OnlineLoad(concurrency=256, num_requests=1024),
            ),
        }
    )
    online_repeats: int = 2
    num_clients: int = 4
    max_model_len: int = 8192
    max_num_seqs: int = 256


FULL = Extent()
QUICK = replace(
    FULL,
    batches={1: 2, 8: 2, 64: 1, 256: 1},
    first_token_repeats=4,
    prefill_repeats=1,
    offline_requests={"qwen3-0.6b": 512, "": 256},
    offline_temperatures=(0.0,),
    offline_repeats=1,
    mix_repeats={"qwen3-0.6b": 1, "": 0},
    online_loads={
        "": (OnlineLoad(concurrency=1, num_requests=4), OnlineLoad(concurrency=256, num_requests=512))
    },
    online_repeats=1,
)
"""A figure of one repeat has no spread: not to be kept."""
