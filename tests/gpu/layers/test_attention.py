"""The attention layer with the kernel against the layer without: results, and what the cache holds."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncserve.gpu.attention.interface import StepAttention
from asyncserve.gpu.attention.reference import ReferenceAttention
from asyncserve.gpu.batch import Batch
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.gpu.layers.attention import Attention
from asyncserve.gpu.layers.loading import finish_layers
from asyncserve.gpu.layers.norm import RMSNorm
from asyncserve.gpu.layers.rotary import Rotary
from asyncserve.kv_spec import FullAttention, KVGroup
from tests.gpu.kernels.machine import DEVICE, MARKS, random
from tests.gpu.models.paged import no_samples

pytest.importorskip("triton")
from asyncserve.gpu.attention.triton import TritonAttention

pytestmark = MARKS
HIDDEN_SIZE, BLOCK_LEN = 24, 4


def layer(
    *, fused: bool, dtype: torch.dtype, qk_norm_eps: float | None, window_len: int | None = None
) -> tuple[Attention, RMSNorm]:
    norm = RMSNorm(HIDDEN_SIZE, eps=1e-5, dtype=dtype).to(DEVICE)
    norm.weight.data.copy_(random(HIDDEN_SIZE, dtype=dtype, seed=40))
    finish_layers(norm, fused=fused)
    made = Attention(
        layer_id=0,
        hidden_size=HIDDEN_SIZE,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        qkv_bias=True,
        output_bias=False,
        window_len=window_len,
        qk_norm_eps=qk_norm_eps,
        dtype=dtype,
    ).to(DEVICE)
    for seed, parameter in enumerate(made.parameters()):
        parameter.data.copy_(random(*parameter.shape, dtype=dtype, seed=seed, scale=0.5))
    finish_layers(made, fused=fused)
    return made, norm


def cache(dtype: str) -> KVCache:
    spec = FullAttention(block_len=BLOCK_LEN, num_kv_heads=2, head_dim=10, dtype=dtype)
    return KVCache([KVGroup(group_id=0, spec=spec, layer_ids=(0,), num_blocks=9)], device=DEVICE)


def prompts(query_lens: list[int], starts: list[int]) -> Batch:
    """Make a step of two sequences whose blocks are 1, 3, 5, 7 and 2, 4, 6, 8."""
    positions, slots = [], []
    tables = [[1, 3, 5, 7], [2, 4, 6, 8]]
    for table, length, start in zip(tables, query_lens, starts, strict=True):
        positions += range(start, start + length)
        slots += [
            table[position // BLOCK_LEN] * BLOCK_LEN + position % BLOCK_LEN
            for position in range(start, start + length)
        ]
    seq_lens = [start + length for start, length in zip(starts, query_lens, strict=True)]
    int32 = {"dtype": torch.int32, "device": DEVICE}
    return Batch(
        input_ids=torch.zeros(sum(query_lens), **int32),
        positions=torch.tensor(positions, device=DEVICE),
        query_start=torch.tensor([0, query_lens[0], sum(query_lens)], **int32),
        seq_lens=torch.tensor(seq_lens, **int32),
        slot_mapping=(torch.tensor(slots, device=DEVICE),),
        block_tables=(torch.tensor(tables, **int32),),
        sample_tokens=torch.tensor([query_lens[0] - 1, sum(query_lens) - 1], device=DEVICE),
        sample_rows=no_samples(DEVICE),
        query_lens_host=tuple(query_lens),
        seq_lens_host=tuple(seq_lens),
        num_decode_rows=2 if query_lens == [1, 1] else 0,
        is_decode=query_lens == [1, 1],
    )


@pytest.mark.parametrize("window_len", [None, 3])
@pytest.mark.parametrize("qk_norm_eps", [None, 1e-6])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "tolerance"),
    [("float32", "float32", 1e-5), ("float16", "float16", 4e-3), ("float32", "float16", 4e-3)],
)
def test_with_the_kernel_it_gives_and_caches_what_it_does_without(
    dtype: str, cache_dtype: str, tolerance: float, qk_norm_eps: float | None, window_len: int | None
) -> None:
    torch_dtype = getattr(torch, dtype)
    rotary = Rotary({"rope_theta": 100.0}, head_dim=10)
    rotary.finish_loading(DEVICE)
    plain_cache, fused_cache = cache(cache_dtype), cache(cache_dtype)
    backend = ReferenceAttention()
    for starts, query_lens in (([0, 0], [5, 3]), ([5, 3], [3, 6]), ([8, 9], [1, 1])):
        batch = prompts(query_lens, starts)
        hidden = random(batch.num_tokens, HIDDEN_SIZE, dtype=torch_dtype, seed=sum(starts))
        results = []
        for fused, kv_cache in ((False, plain_cache), (True, fused_cache)):
            attention = StepAttention(backend, batch, kv_cache, backend.plan(batch, kv_cache))
            attend, norm = layer(
                fused=fused, dtype=torch_dtype, qk_norm_eps=qk_norm_eps, window_len=window_len
            )
            result = hidden.clone()
            attend.forward(result, norm, rotary.forward(batch.positions), attention)
            results.append(result)
        assert not torch.equal(results[0], hidden)
        torch.testing.assert_close(results[1], results[0], atol=tolerance, rtol=tolerance)
        for plain, fused_one in zip(
            (plain_cache.keys[0], plain_cache.values[0]),
            (fused_cache.keys[0], fused_cache.values[0]),
            strict=True,
        ):
            torch.testing.assert_close(fused_one, plain, atol=tolerance, rtol=tolerance)
            assert torch.equal(fused_one == 0, plain == 0)


class Counted(TritonAttention):
    """Counts what it is asked."""

    num_projected = num_run = 0

    def run_projected(self, *arguments: Any) -> torch.Tensor:
        self.num_projected += 1
        return super().run_projected(*arguments)

    def run(self, *arguments: Any) -> torch.Tensor:
        self.num_run += 1
        return super().run(*arguments)


@pytest.mark.parametrize("qk_norm_eps", [None, 1e-6])
@pytest.mark.parametrize("window_len", [None, 3])
def test_a_decode_steps_projection_goes_to_a_backend_that_rotates_and_gives_the_same(
    window_len: int | None, qk_norm_eps: float | None
) -> None:
    rotary = Rotary({"rope_theta": 100.0}, head_dim=10)
    rotary.finish_loading(DEVICE)
    attend, norm = layer(fused=True, dtype=torch.float32, qk_norm_eps=qk_norm_eps, window_len=window_len)
    results, caches = [], []
    for rotates in (False, True):
        backend, kv_cache = Counted(), cache("float32")
        for starts, query_lens in (([0, 0], [5, 3]), ([5, 3], [1, 1]), ([6, 4], [1, 1])):
            batch = prompts(query_lens, starts)
            batch = replace(batch, is_decode=batch.is_decode and rotates)
            hidden = random(batch.num_tokens, HIDDEN_SIZE, dtype=torch.float32, seed=sum(starts))
            attention = StepAttention(backend, batch, kv_cache, backend.plan(batch, kv_cache))
            attend.forward(hidden, norm, rotary.forward(batch.positions), attention)
        assert (backend.num_projected, backend.num_run) == ((2, 1) if rotates else (0, 3))
        results.append(hidden)
        caches.append((kv_cache.keys[0], kv_cache.values[0]))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(caches[1], caches[0], atol=1e-5, rtol=1e-5)
