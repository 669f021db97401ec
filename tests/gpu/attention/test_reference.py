import torch

from asyncserve.gpu.attention.reference import ReferenceAttention
from asyncserve.gpu.batch import Batch, SampleRows
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.kv_spec import FullAttention, KVGroup
from tests.contracts.attention_contract import AttentionContract

CPU = torch.device("cpu")
MIB = 2**20


class ReferenceInPieces(ReferenceAttention):
    """With so little memory that the smallest steps are taken apart."""

    def __init__(self) -> None:
        super().__init__(most_gathered_bytes=1024, free_padding_bytes=0, most_scores=60)


class TestReference(AttentionContract):
    backend_class = ReferenceAttention
    device = CPU


class TestReferenceInPieces(AttentionContract):
    backend_class = ReferenceInPieces
    device = CPU


def decode_batch(seq_lens: list[int]) -> Batch:
    num_rows = len(seq_lens)
    return Batch(
        input_ids=torch.zeros(num_rows, dtype=torch.int32),
        positions=torch.tensor(seq_lens) - 1,
        query_start=torch.arange(num_rows + 1, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        slot_mapping=(torch.zeros(num_rows, dtype=torch.int64),),
        block_tables=(torch.zeros(num_rows, -(-max(seq_lens) // 16), dtype=torch.int32),),
        sample_tokens=torch.arange(num_rows),
        query_lens_host=(1,) * num_rows,
        seq_lens_host=tuple(seq_lens),
        num_decode_rows=num_rows,
        sample_rows=SampleRows(
            slots=torch.arange(num_rows, dtype=torch.int32),
            positions=torch.tensor(seq_lens),
            write_back=torch.zeros(num_rows, dtype=torch.int64),
            result_row=None,
        ),
    )


def test_a_long_row_beside_many_short_ones_does_not_make_them_long() -> None:
    spec = FullAttention(block_len=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    group = KVGroup(group_id=0, spec=spec, layer_ids=(0,), num_blocks=2)
    cache = KVCache([group], device=CPU)
    batch = decode_batch([1024] * 64 + [32768] + [1024] * 63)
    (step,) = ReferenceAttention().plan(batch, cache)
    page_bytes = 16 * 128 * 2
    gathered = [decodes.page_rows.numel() * page_bytes for decodes in step.decodes]
    assert max(gathered) <= 128 * MIB
    # All K there is: 2 KiB a position and head; padding adds little.
    assert sum(gathered) < 1.1 * (32768 + 127 * 1024) * 2048
    assert sum(decodes.num_rows for decodes in step.decodes) == 128


def test_rows_of_like_length_are_few_groups() -> None:
    spec = FullAttention(block_len=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    cache = KVCache([KVGroup(group_id=0, spec=spec, layer_ids=(0,), num_blocks=2)], device=CPU)
    (step,) = ReferenceAttention().plan(decode_batch([200 + row for row in range(32)]), cache)
    assert len(step.decodes) == 1
    assert step.decodes[0].rows is None
