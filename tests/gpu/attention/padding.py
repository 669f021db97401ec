"""Batches as captured graphs see them."""

import dataclasses

import torch
import torch.nn.functional as F

from asyncserve.gpu.batch import Batch, Padded
from tests.gpu.kernels.machine import DEVICE


def padded(batch: Batch, *, num_rows: int, num_tokens: int, num_long_rows: int, any_block: int) -> Batch:
    """Return the batch as a captured graph sees it: with room for more, and no lengths on the host."""
    more_rows, more_tokens = num_rows - batch.num_rows, num_tokens - batch.num_tokens
    return dataclasses.replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, more_tokens)),
        query_start=F.pad(batch.query_start, (0, more_rows), value=batch.num_tokens),
        seq_lens=F.pad(batch.seq_lens, (0, more_rows)),
        # Behind a row's own blocks a graph's table holds anything.
        block_tables=tuple(
            F.pad(table, (0, 3, 0, more_rows), value=any_block) for table in batch.block_tables
        ),
        query_lens_host=(),
        seq_lens_host=(),
        num_decode_rows=num_rows,
        padded=Padded(
            num_long_rows=num_long_rows,
            first_long_row=torch.tensor([batch.num_decode_rows], dtype=torch.int32, device=DEVICE),
        ),
    )
