"""A tiny shape and a tiny extent: everything is measured in a second on a processor."""

import json
from pathlib import Path
from typing import Any

from loadtest.gpu.extent import Extent, OnlineLoad
from loadtest.model_shapes import Shape
from tests.fakes.tiny_model import tiny_llama_config

TINY = Extent(
    batches={1: 2, 2: 1},
    decode_input_len=16,
    decode_output_lens=(4, 12),
    first_token_len=16,
    first_token_repeats=2,
    prefill_requests=3,
    prefill_repeats=1,
    offline_requests={"": 4},
    offline_lens=(8, 6),
    offline_repeats=2,
    mix_requests=3,
    mix_lens=(2, 10),
    mix_repeats={"": 1},
    capacity_requests=12,
    capacity_lens=(24, 8),
    online_lens=(8, 6),
    online_loads={"": (OnlineLoad(concurrency=1, num_requests=2), OnlineLoad(concurrency=4, num_requests=8))},
    num_clients=2,
    max_model_len=64,
    max_num_seqs=8,
)

ON_CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 1 << 22}
"""Options that go before those for a GPU."""


def tiny_shape(folder: Path, **overrides: Any) -> Shape:
    """Write a `config.json` of a tiny Llama into a folder, which is made, and return the shape."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **tiny_llama_config(**overrides)}
    (folder / "config.json").write_text(json.dumps(config))
    return Shape.read(folder)
