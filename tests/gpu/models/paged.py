"""Runs a model step by step over a real paged cache, as the runner would, but for hand-made batches.

The block tables are deliberately out of order, so that an error in page addressing cannot cancel out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from asyncserve.gpu.attention.interface import AttentionBackend, StepAttention
from asyncserve.gpu.attention.reference import ReferenceAttention
from asyncserve.gpu.batch import Batch, SampleRows
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.gpu.layers.loading import finish_layers
from asyncserve.gpu.models.interface import Model
from asyncserve.gpu.models.registry import load_model_class
from asyncserve.gpu.startup import group_layers

CPU = torch.device("cpu")
BLOCK_LEN = 4
BLOCKS_PER_SEQUENCE = 24


def build_model(
    config: Mapping[str, Any],
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    fused: bool | None = None,
) -> Model:
    """Build on the meta device, load and finish a model on a device, in the order startup does.

    Args:
        config: The model's.
        weights: As a checkpoint's.
        dtype: Of weights and activations.
        device: Where.
        fused: As in `finish_layers`.
    """
    with torch.device("meta"):
        model = load_model_class(config["architectures"][0])(config, dtype=dtype)
    assert isinstance(model, torch.nn.Module)
    model.to_empty(device=device)
    model.load_weights(weights)
    if fused is None:
        model.finish_loading()
    else:
        finish_layers(model, fused=fused)
    return model


def no_samples(device: torch.device) -> SampleRows:
    """Return the rows of a batch whose tokens nobody samples."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return SampleRows(slots=nothing.to(torch.int32), positions=nothing, write_back=nothing, result_row=None)


class PagedRun:
    """A model, a cache, and up to `num_sequences` growing sequences.

    Args:
        model: Loaded and finished.
        num_sequences: Whose pages exist.
        dtype: Of the cache.
        device: Where the model is.
        backend: Who attends; None: the reference.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_sequences: int = 1,
        dtype: str = "float32",
        device: torch.device = CPU,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.backend = backend or ReferenceAttention()
        specs = model.kv_specs(block_len=BLOCK_LEN, dtype=dtype)
        groups = group_layers(specs)
        num_blocks = 1 + len(groups) * num_sequences * BLOCKS_PER_SEQUENCE
        self.kv_cache = KVCache([replace(group, num_blocks=num_blocks) for group in groups], device=device)
        shuffled = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(7)) + 1
        # Of each group and sequence; no block is anybody else's.
        self.block_tables = shuffled.view(len(groups), num_sequences, BLOCKS_PER_SEQUENCE)
        self.lens = [0] * num_sequences

    @torch.inference_mode()
    def step(self, rows: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Compute each sequence's next tokens in one batch.

        Returns:
            Logits of each, `[num_tokens, vocab]`, on the CPU.
        """
        ordered = sorted(rows, key=lambda sequence: len(rows[sequence]) > 1)
        query_lens = [len(rows[sequence]) for sequence in ordered]
        positions = [torch.arange(self.lens[s], self.lens[s] + len(rows[s])) for s in ordered]
        slot_mappings = [
            torch.cat(
                [
                    table[s][p // BLOCK_LEN] * BLOCK_LEN + p % BLOCK_LEN
                    for s, p in zip(ordered, positions, strict=True)
                ]
            )
            for table in self.block_tables
        ]
        for sequence in ordered:
            self.lens[sequence] += len(rows[sequence])
        seq_lens = [self.lens[sequence] for sequence in ordered]
        query_start = torch.tensor([0, *query_lens]).cumsum(0)
        slots = torch.tensor(ordered)
        batch = Batch(
            input_ids=torch.tensor(
                [token for s in ordered for token in rows[s]], dtype=torch.int32, device=self.device
            ),
            positions=torch.cat(positions).to(self.device),
            query_start=query_start.to(self.device, torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self.device),
            slot_mapping=tuple(mapping.to(self.device) for mapping in slot_mappings),
            block_tables=tuple(table[slots].to(self.device, torch.int32) for table in self.block_tables),
            sample_tokens=(query_start[1:] - 1).to(self.device),
            sample_rows=no_samples(self.device),
            query_lens_host=tuple(query_lens),
            seq_lens_host=tuple(seq_lens),
            num_decode_rows=sum(1 for length in query_lens if length == 1),
        )
        planned = self.backend.plan(batch, self.kv_cache)
        attention = StepAttention(self.backend, batch, self.kv_cache, planned)
        logits = self.model.logits(self.model.forward(batch, attention)).cpu()
        return dict(zip(ordered, logits.split_with_sizes(query_lens), strict=True))
