"""A model small enough to build in a millisecond, whose next token depends on all tokens before it.

Two layers of attention over random embeddings, no feed-forward network. Implements the `Model` protocol
without a checkpoint, so that runner and executor are tested without loading anything. `fail_on` makes a
forward pass raise, as a device error would.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from asyncserve.gpu.attention.interface import AttentionLayer, StepAttention
from asyncserve.gpu.attention.reference import ReferenceAttention
from asyncserve.gpu.batch import Batch
from asyncserve.gpu.device import CpuDevice, Device
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.gpu.runner import ModelRunner
from asyncserve.gpu.sampling.sampler import Sampler
from asyncserve.gpu.startup import group_layers
from asyncserve.kv_spec import FullAttention, KVSpec
from asyncserve.step import ExecutorInfo

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
SIZE = NUM_HEADS * HEAD_DIM


class AttentionModel(nn.Module):
    """The model; `config` may hold `vocab_size` (default 160) and `seed`."""

    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(config.get("seed", 0))
        self.vocab_size = int(config.get("vocab_size", 160))
        self.embedding = torch.randn(self.vocab_size, SIZE, generator=generator).to(dtype)
        self.output = torch.randn(SIZE, self.vocab_size, generator=generator).to(dtype)
        kv_size = NUM_KV_HEADS * HEAD_DIM
        self.projections = [
            torch.randn(SIZE, SIZE + 2 * kv_size, generator=generator).to(dtype) / 4 for _ in range(2)
        ]
        self.fail_on: int | None = None

    def move_to(self, device: torch.device) -> None:
        """Put the weights on a device."""
        self.embedding, self.output = self.embedding.to(device), self.output.to(device)
        self.projections = [projection.to(device) for projection in self.projections]

    def kv_specs(self, *, block_len: int, dtype: str) -> tuple[KVSpec, ...]:
        """Return the specs of both layers, which are equal."""
        spec = FullAttention(block_len=block_len, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
        return (spec, spec)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Do nothing: the weights are random."""

    def finish_loading(self) -> None:
        """Do nothing."""

    def forward(self, batch: Batch, attention: StepAttention) -> torch.Tensor:
        """Return hidden states; raise if token `fail_on` is in the batch."""
        if self.fail_on is not None and bool((batch.input_ids == self.fail_on).any()):
            raise RuntimeError(f"the device met token {self.fail_on}")
        hidden = self.embedding[batch.input_ids.long()]
        # Something that tells positions apart, so that a wrong position changes the result.
        rates = torch.arange(1, SIZE + 1, device=hidden.device) / SIZE
        hidden = hidden + torch.sin(batch.positions[:, None] * rates)
        for layer_id, projection in enumerate(self.projections):
            heads = (hidden @ projection).view(batch.num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
            q, k, v = torch.split(heads, [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
            layer = AttentionLayer(
                layer_id=layer_id,
                num_heads=NUM_HEADS,
                num_kv_heads=NUM_KV_HEADS,
                head_dim=HEAD_DIM,
                scale=HEAD_DIM**-0.5,
            )
            hidden = hidden + attention.run(layer, q, k, v)
        return hidden

    def logits(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by the output matrix."""
        return torch.mm(hidden, self.output, out=out)


def small_runner(
    *,
    num_slots: int = 4,
    num_blocks: int = 64,
    block_len: int = 4,
    max_model_len: int = 64,
    model: AttentionModel | None = None,
    device: Device | None = None,
    runner_class: type[ModelRunner] = ModelRunner,
) -> tuple[ModelRunner, ExecutorInfo]:
    """Return a runner of an `AttentionModel` and what it offers."""
    model = model or AttentionModel({})
    device = device or CpuDevice(num_threads=1)
    model.move_to(device.torch_device)
    groups = tuple(
        dataclasses.replace(group, num_blocks=num_blocks)
        for group in group_layers(model.kv_specs(block_len=block_len, dtype="float32"))
    )
    runner = runner_class(
        model=model,
        device=device,
        kv_cache=KVCache(groups, device=device.torch_device),
        attention=ReferenceAttention(),
        sampler=Sampler(num_slots, model.vocab_size, max_model_len, device.torch_device),
        num_slots=num_slots,
        max_model_len=max_model_len,
    )
    info = ExecutorInfo(
        num_slots=num_slots,
        kv_groups=groups,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        max_num_batched_tokens=64,
        device_name=device.name,
    )
    return runner, info
