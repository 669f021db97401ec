"""What a shape should reach on one H200, and what another server reaches on one, measured the same way.

Plain figures, shown beside what was measured. The other server is vLLM 0.26.0 (2026-11-29: torch
2.11.0+cu130, FlashAttention 3, CUDA graphs, bfloat16, random weights, `max_model_len` 8192, `max_num_seqs`
256, no prefix caching), on the same kind of GPU, with the lengths and request counts that `offline` and
`online` use; online figures are of its default front end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one shape; what is not known is left out.

    Args:
        tpot_ms: Rows of the batch → milliseconds between two tokens.
        offline_tps: Output tokens per second of `LLM.generate`.
        first_token_ms: Of one prompt of 1,024 tokens, offline.
        prefill_tps: Prompt tokens per second.
        online_tps: Concurrency → output tokens per second over HTTP.
        online_ttft_p99_ms: At concurrency 256.
        ready_s: From the start of the process to the first token.
    """

    tpot_ms: Mapping[int, float] = field(default_factory=dict)
    offline_tps: float | None = None
    first_token_ms: float | None = None
    prefill_tps: float | None = None
    online_tps: Mapping[int, float] = field(default_factory=dict)
    online_ttft_p99_ms: float | None = None
    ready_s: float | None = None


AIMS: Mapping[str, Figures] = {
    "qwen3-0.6b": Figures(
        tpot_ms={1: 0.90, 8: 1.0, 64: 3.1, 256: 9.5},
        offline_tps=33_000,
        first_token_ms=10,
        online_tps={256: 23_000},
        online_ttft_p99_ms=600,
        ready_s=10,
    ),
    "llama-3.1-8b": Figures(
        tpot_ms={1: 4.5, 8: 4.7, 64: 6.8, 256: 16.0},
        offline_tps=11_500,
        first_token_ms=25,
        online_tps={256: 7_500},
        ready_s=10,
    ),
}

OTHERS: Mapping[str, Figures] = {
    "qwen3-0.6b": Figures(
        tpot_ms={1: 2.59, 8: 2.56, 64: 4.07, 256: 10.51},
        offline_tps=27_812,
        first_token_ms=33.2,
        online_tps={1: 411, 64: 12_671, 256: 9_575},
        online_ttft_p99_ms=1603,
        ready_s=75,
    ),
    "llama-3.1-8b": Figures(
        tpot_ms={1: 4.88, 8: 5.22, 64: 7.47, 256: 16.86},
        offline_tps=10_076,
        first_token_ms=42.4,
        prefill_tps=43_000,
        online_tps={1: 202, 64: 5_053, 256: 5_772},
        online_ttft_p99_ms=3234,
        ready_s=75,
    ),
}

UNKNOWN = Figures()


def aims_of(shape: str) -> Figures:
    """Return what is wanted of a shape."""
    return AIMS.get(shape, UNKNOWN)


def others_of(shape: str) -> Figures:
    """Return what the other server reaches."""
    return OTHERS.get(shape, UNKNOWN)
