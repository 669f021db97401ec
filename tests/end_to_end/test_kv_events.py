"""What a cache-aware router is told by a real server, and whether it could compute the hashes itself."""

import hashlib
import json
from pathlib import Path

import cbor2
import httpx2 as httpx
import pytest

from tests.end_to_end.server_process import TINY, running_server
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer
from tests.kv_events.subscriber import BlockStored, Subscriber

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

BLOCK_LEN = 16


def hashes(token_ids: list[int], seed: str) -> list[int]:
    """Return what a router that knows vLLM's sha256_cbor makes of a prompt's full blocks."""
    parent = hashlib.sha256(cbor2.dumps(seed, canonical=True)).digest()
    found = []
    for end in range(BLOCK_LEN, len(token_ids) + 1, BLOCK_LEN):
        block = (parent, tuple(token_ids[end - BLOCK_LEN : end]), None)
        parent = hashlib.sha256(cbor2.dumps(block, canonical=True)).digest()
        found.append(int.from_bytes(parent, "big") & (2**64 - 1))
    return found


def test_a_router_is_told_which_prefixes_a_server_holds_by_hashes_it_can_compute(tmp_path: Path) -> None:
    model = tiny_llama_folder(tmp_path / "tiny")
    write_tiny_tokenizer(model, vocab_size=320)
    endpoints = (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    config = {"enable_kv_cache_events": True, "endpoint": endpoints[0], "replay_endpoint": endpoints[1]}
    options = (*TINY, "--kv-events-config", json.dumps({**config, "topic": "kv"}), "--block-size", "16")
    with running_server(
        model, *options, "--kv-cache-memory-bytes", "32MiB", environ={"PYTHONHASHSEED": "7"}
    ) as server:
        assert f"KV events: published on {endpoints[0]}" in server.log
        router = Subscriber(endpoints, topic="kv")
        try:
            prompt = list(range(3, 43))
            for asked in (prompt, [*prompt[:32], *range(100, 120)]):
                body = {"model": str(model), "prompt": asked, "max_tokens": 1, "temperature": 0}
                assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
            events = [event for _, batch in router.ask(0) for event in batch.events]
        finally:
            router.close()
    first, second = [event for event in events if isinstance(event, BlockStored)]
    assert (first.token_ids, first.parent_block_hash) == (prompt[:32], None)
    assert first.block_hashes == hashes(prompt, "7")
    assert (second.token_ids, second.parent_block_hash) == (list(range(100, 116)), first.block_hashes[1])
    assert second.block_hashes == hashes([*prompt[:32], *range(100, 116)], "7")[2:]
    assert (first.block_size, first.medium, first.group_idx) == (16, "GPU", 0)
