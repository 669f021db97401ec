"""What every attention backend must do, checked against a per-token float64 oracle.

A suite for a backend is a subclass with two attributes:

    class TestReference(AttentionContract):
        backend_class = ReferenceAttention
        device = torch.device("cpu")

The oracle keeps each sequence's K and V as plain lists of positions and knows no block, batch or chunk.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from asyncserve.gpu.attention.interface import (
    AttentionBackend,
    AttentionLayer,
    Projected,
    RotatingBackend,
    StepAttention,
)
from asyncserve.gpu.batch import Batch, SampleRows
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.kv_spec import FullAttention, KVGroup, SlidingWindow

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""Largest absolute error on outputs of magnitude about 1, by dtype of q, k and v."""


@dataclass
class Shape:
    """Of the layers and their cache."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_len: int = 4
    window_len: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: str = "float32"
    cache_dtype: str | None = None
    num_layers: int = 2
    num_groups: int = 1
    frees_passed_blocks: bool = False
    """Whether the window's groups keep no more than they must: what it has passed is given to others."""


class Simulation:
    """Drives one backend step by step, with the oracle beside it."""

    def __init__(self, backend: AttentionBackend, device: torch.device, shape: Shape) -> None:
        self.backend = backend
        self.device = device
        self.shape = shape
        self.generator = torch.Generator().manual_seed(0)
        spec = FullAttention(
            block_len=shape.block_len,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.cache_dtype or shape.dtype,
        )
        if shape.frees_passed_blocks:
            assert shape.window_len is not None
            fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
            spec = SlidingWindow(**fields, window_len=shape.window_len)
        self.num_blocks = 128
        self.groups = tuple(
            KVGroup(
                group_id=group_id,
                spec=spec,
                layer_ids=tuple(range(group_id, shape.num_layers, shape.num_groups)),
                num_blocks=self.num_blocks,
            )
            for group_id in range(shape.num_groups)
        )
        self.kv_cache = KVCache(self.groups, device=device)
        # Blocks are handed out in an order that is not ascending.
        self.free = (torch.randperm(self.num_blocks - 1, generator=self.generator) + 1).tolist()
        self.tables: list[list[list[int]]] = []
        self.history: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def add_sequence(self, *, shares_blocks_of: int | None = None, num_shared: int = 0) -> int:
        """Start a sequence, with the first blocks of another one if told; return its index."""
        sequence = len(self.tables)
        if shares_blocks_of is None:
            self.tables.append([[] for _ in self.groups])
            self.history.append([])
        else:
            self.tables.append([table[:num_shared] for table in self.tables[shares_blocks_of]])
            cached_len = num_shared * self.shape.block_len
            self.history.append(self.history[shares_blocks_of][:cached_len])
        return sequence

    def step(self, rows: list[tuple[int, int]]) -> None:
        """Run one step of (sequence, num_tokens) rows in every layer and compare with the oracle."""
        shape = self.shape
        starts = [len(self.history[sequence]) for sequence, _ in rows]
        for sequence, start in zip((sequence for sequence, _ in rows), starts, strict=True):
            self._give_away_passed_blocks(sequence, start)
        batch = self.batch(rows, starts)
        planned = self.backend.plan(batch, self.kv_cache)
        attention = StepAttention(self.backend, batch, self.kv_cache, planned)
        dtype = getattr(torch, shape.dtype)
        cache_dtype = getattr(torch, shape.cache_dtype or shape.dtype)
        num_tokens = batch.num_tokens
        q, k, v = (
            torch.randn(num_tokens, heads, shape.num_layers, shape.head_dim, generator=self.generator).to(
                dtype
            )
            for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        )
        token = 0
        for sequence, length in rows:
            self.history[sequence] += [
                (k[token + i].to(cache_dtype), v[token + i].to(cache_dtype)) for i in range(length)
            ]
            token += length
        for layer_id in range(shape.num_layers):
            sinks = torch.linspace(-2.0, 3.0, shape.num_heads, device=self.device)
            layer = AttentionLayer(
                layer_id=layer_id,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                scale=0.3,
                window_len=shape.window_len,
                softcap=shape.softcap,
                sinks=sinks if shape.has_sinks else None,
            )
            # Slices of a wider tensor, as a fused projection gives them: not contiguous.
            heads = [part[:, :, layer_id].to(self.device) for part in (q, k, v)]
            out = attention.run(layer, *heads)
            assert out.shape == (num_tokens, shape.num_heads * shape.head_dim)
            assert out.dtype == dtype
            expected = self._oracle(layer, q[:, :, layer_id], rows, starts)
            torch.testing.assert_close(
                out.cpu().double(), expected, rtol=0, atol=TOLERANCE[shape.dtype], check_dtype=False
            )

            if isinstance(self.backend, RotatingBackend):
                self._check_projected(layer, torch.cat(heads, 1), out, batch)

    def _give_away_passed_blocks(self, sequence: int, start: int) -> None:
        """Let others write NaN into what the windows have passed; the sequence's tables do not tell."""
        for group, table in zip(self.groups, self.tables[sequence], strict=True):
            passed = torch.tensor(table[: group.spec.num_unseen(start)], dtype=torch.int64)
            for layer_id in group.layer_ids:
                for tensor in (self.kv_cache.keys[layer_id], self.kv_cache.values[layer_id]):
                    tensor[passed.to(self.device)] = torch.nan

    def _check_projected(
        self, layer: AttentionLayer, heads: torch.Tensor, expected: torch.Tensor, batch: Batch
    ) -> None:
        """Hold what the backend makes of projections against `run`; heads that turn by nothing stay."""
        if any(length != 1 for length in batch.query_lens_host):
            return
        batch = dataclasses.replace(batch, is_decode=True)
        attention = StepAttention(self.backend, batch, self.kv_cache, self.backend.plan(batch, self.kv_cache))
        _, _, slots = attention.cache_of(layer)
        block, offset = slots // self.shape.block_len, slots % self.shape.block_len
        cos = torch.ones(batch.num_rows, 1, layer.head_dim, device=self.device)
        projected = Projected(heads.flatten(1), cos, torch.zeros_like(cos), None)
        caches = [tensors[layer.layer_id] for tensors in (self.kv_cache.keys, self.kv_cache.values)]
        written = [cache.clone() for cache in caches]
        for cache in caches:
            cache[block, :, offset] = torch.nan
        out = attention.run_projected(layer, projected)
        assert out is not None
        tolerance = TOLERANCE[self.shape.dtype]
        torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
        for cache, before in zip(caches, written, strict=True):
            torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)

    def batch(self, rows: list[tuple[int, int]], starts: list[int]) -> Batch:
        """Make the step of (sequence, num_tokens) rows that begin at `starts`, with blocks for them."""
        block_len = self.shape.block_len
        query_lens = [length for _, length in rows]
        seq_lens = [start + length for start, length in zip(starts, query_lens, strict=True)]
        positions = [
            start + i for start, length in zip(starts, query_lens, strict=True) for i in range(length)
        ]
        owners = [sequence for sequence, length in rows for _ in range(length)]
        max_blocks = max(-(-seq_len // block_len) for seq_len in seq_lens)
        slot_mappings, block_tables = [], []
        for group in self.groups:
            group_id = group.group_id
            for (sequence, _), seq_len in zip(rows, seq_lens, strict=True):
                table = self.tables[sequence][group_id]
                while len(table) * block_len < seq_len:
                    table.append(self.free.pop())
            slot_mappings.append(
                [
                    self.tables[owner][group_id][position // block_len] * block_len + position % block_len
                    for owner, position in zip(owners, positions, strict=True)
                ]
            )
            block_tables.append(
                [(self.tables[sequence][group_id] + [0] * max_blocks)[:max_blocks] for sequence, _ in rows]
            )
        query_start = [sum(query_lens[:i]) for i in range(len(rows) + 1)]
        num_decode_rows = next((i for i, length in enumerate(query_lens) if length != 1), len(rows))
        int32 = functools.partial(torch.tensor, dtype=torch.int32, device=self.device)
        int64 = functools.partial(torch.tensor, dtype=torch.int64, device=self.device)
        return Batch(
            input_ids=int32([0] * len(positions)),
            positions=int64(positions),
            query_start=int32(query_start),
            seq_lens=int32(seq_lens),
            slot_mapping=tuple(int64(mapping) for mapping in slot_mappings),
            block_tables=tuple(int32(table) for table in block_tables),
            sample_tokens=int64([start - 1 for start in query_start[1:]]),
            query_lens_host=tuple(query_lens),
            seq_lens_host=tuple(seq_lens),
            num_decode_rows=num_decode_rows,
            sample_rows=SampleRows(
                slots=int32([0] * len(rows)),
                positions=int64(seq_lens),
                write_back=int64([0] * len(rows)),
                result_row=None,
            ),
        )

    def _oracle(
        self, layer: AttentionLayer, q: torch.Tensor, rows: list[tuple[int, int]], starts: list[int]
    ) -> torch.Tensor:
        group_len = layer.num_heads // layer.num_kv_heads
        outputs = []
        token = 0
        for (sequence, length), start in zip(rows, starts, strict=True):
            for position in range(start, start + length):
                first = 0 if layer.window_len is None else max(0, position + 1 - layer.window_len)
                seen = self.history[sequence][first : position + 1]
                heads = []
                for head in range(layer.num_heads):
                    kv_head = head // group_len
                    key = torch.stack([k[kv_head, layer.layer_id] for k, _ in seen]).double()
                    value = torch.stack([v[kv_head, layer.layer_id] for _, v in seen]).double()
                    scores = layer.scale * key @ q[token, head].double()
                    if layer.softcap is not None:
                        scores = layer.softcap * torch.tanh(scores / layer.softcap)
                    if layer.sinks is not None:
                        # A position more, of which nothing is read.
                        scores = torch.cat((scores, layer.sinks[head].cpu().double()[None]))
                        value = torch.cat((value, torch.zeros_like(value[:1])))
                    heads.append(torch.softmax(scores, dim=0) @ value)
                outputs.append(torch.cat(heads))
                token += 1
        return torch.stack(outputs)


class AttentionContract:
    """Inherit from it and set the two attributes."""

    backend_class: ClassVar[type[AttentionBackend]]
    device: ClassVar[torch.device]

    def simulate(self, shape: Shape) -> Simulation:
        """Return a fresh simulation, or skip the test if the backend does not serve such a cache."""
        simulation = Simulation(self.backend_class(), self.device, shape)
        reason = simulation.backend.supports(simulation.groups[0].spec, self.device)
        if reason is not None:
            pytest.skip(reason)
        return simulation

    @pytest.mark.parametrize("prompt_len", [1, 2, 3, 4, 5, 8, 13])
    def test_prompt_computed_at_once_and_continued_token_by_token(self, prompt_len: int) -> None:
        simulation = self.simulate(Shape())
        sequence = simulation.add_sequence()
        simulation.step([(sequence, prompt_len)])
        for _ in range(5):
            simulation.step([(sequence, 1)])

    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (3, 1), (6, 2), (8, 2), (9, 3)])
    def test_query_heads_share_kv_heads_in_consecutive_groups(
        self, num_heads: int, num_kv_heads: int
    ) -> None:
        simulation = self.simulate(Shape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=8))
        first, second = simulation.add_sequence(), simulation.add_sequence()
        simulation.step([(first, 6), (second, 3)])
        simulation.step([(second, 1), (first, 4)])
        simulation.step([(first, 1), (second, 1)])

    def test_ragged_decode_rows_see_only_their_own_positions(self) -> None:
        simulation = self.simulate(Shape())
        lengths = [1, 4, 5, 17, 2]
        sequences = [simulation.add_sequence() for _ in lengths]
        simulation.step([(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)])
        for _ in range(4):
            simulation.step([(sequence, 1) for sequence in sequences])

    def test_rows_of_equal_full_blocks_need_no_padding(self) -> None:
        simulation = self.simulate(Shape())
        sequences = [simulation.add_sequence() for _ in range(3)]
        simulation.step([(sequence, 7) for sequence in sequences])
        simulation.step([(sequence, 1) for sequence in sequences])

    def test_prompt_in_chunks_of_any_length(self) -> None:
        simulation = self.simulate(Shape())
        sequence, other = simulation.add_sequence(), simulation.add_sequence()
        for chunk in (3, 1, 6, 2, 5):
            simulation.step([(sequence, chunk)])
        simulation.step([(sequence, 1), (other, 5)])
        simulation.step([(sequence, 1), (other, 3)])

    def test_decode_rows_and_prefill_chunks_in_one_step(self) -> None:
        simulation = self.simulate(Shape())
        decoding = [simulation.add_sequence() for _ in range(3)]
        for length, sequence in enumerate(decoding, start=3):
            simulation.step([(sequence, length)])
        fresh, chunked = simulation.add_sequence(), simulation.add_sequence()
        simulation.step([(chunked, 9)])
        simulation.step([*((sequence, 1) for sequence in decoding), (fresh, 11), (chunked, 2)])

    def test_row_of_one_token_after_a_prefill_chunk(self) -> None:
        simulation = self.simulate(Shape())
        first, second = simulation.add_sequence(), simulation.add_sequence()
        simulation.step([(first, 5), (second, 1)])
        simulation.step([(first, 2), (second, 1)])

    def test_rows_without_tokens_behind_a_prefill_chunk(self) -> None:
        simulation = self.simulate(Shape())
        first, second, branch = (simulation.add_sequence() for _ in range(3))
        for sequence in (second, branch):
            simulation.step([(sequence, 6)])
        simulation.step([(second, 1), (first, 5), (branch, 0)])
        simulation.step([(second, 1), (first, 1), (branch, 0)])
        simulation.step([(first, 3), (branch, 0), (second, 4)])

    def test_sequences_share_the_blocks_of_a_common_beginning(self) -> None:
        simulation = self.simulate(Shape())
        first = simulation.add_sequence()
        simulation.step([(first, 10)])
        second = simulation.add_sequence(shares_blocks_of=first, num_shared=2)
        simulation.step([(first, 1), (second, 5)])
        simulation.step([(second, 1), (first, 1)])

    @pytest.mark.parametrize("window_len", [1, 3, 4, 7, 100])
    def test_window_hides_what_lies_further_back(self, window_len: int) -> None:
        simulation = self.simulate(Shape(window_len=window_len))
        first, second = simulation.add_sequence(), simulation.add_sequence()
        simulation.step([(first, 6), (second, 11)])
        simulation.step([(first, 5), (second, 3)])
        simulation.step([(first, 1), (second, 1)])
        simulation.step([(second, 1), (first, 4)])

    @pytest.mark.parametrize("window_len", [1, 6, 21])
    def test_what_a_window_has_passed_may_be_anybodys(self, window_len: int) -> None:
        simulation = self.simulate(Shape(window_len=window_len, frees_passed_blocks=True))
        first, second, third = (simulation.add_sequence() for _ in range(3))
        simulation.step([(first, 26), (second, 11)])
        simulation.step([(second, 1), (third, 2), (first, 5)])
        simulation.step([(first, 1), (third, 1), (second, 1)])
        simulation.step([(first, 1), (second, 9), (third, 18)])
        simulation.step([(third, 1)])

    def test_rows_of_unequal_length_are_of_equal_length_in_a_window(self) -> None:
        simulation = self.simulate(Shape(window_len=9, frees_passed_blocks=True))
        rows = [(simulation.add_sequence(), length) for length in (40, 3, 12)]
        simulation.step(rows)
        for _ in range(2):
            simulation.step([(sequence, 1) for sequence, _ in rows])

    @pytest.mark.parametrize("window_len", [None, 3, 7])
    @pytest.mark.parametrize(
        ("softcap", "has_sinks"), [(0.5, False), (None, True), (0.5, True)], ids=["cap", "sinks", "both"]
    )
    def test_capped_scores_and_sinks_in_rows_of_every_kind(
        self, softcap: float | None, has_sinks: bool, window_len: int | None
    ) -> None:
        simulation = self.simulate(Shape(softcap=softcap, has_sinks=has_sinks, window_len=window_len))
        first, second, third = (simulation.add_sequence() for _ in range(3))
        simulation.step([(first, 6), (second, 11)])
        simulation.step([(first, 1), (third, 2), (second, 3)])
        simulation.step([(first, 1), (second, 1), (third, 1)])
        simulation.step([(second, 1), (first, 4)])
        simulation.step([(third, 1)])

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_capped_scores_and_sinks_in_sixteen_bits(self, dtype: str) -> None:
        shape = Shape(num_heads=8, softcap=2.0, has_sinks=True, window_len=5, dtype=dtype)
        simulation = self.simulate(shape)
        first, second = simulation.add_sequence(), simulation.add_sequence()
        simulation.step([(first, 9), (second, 4)])
        simulation.step([(second, 1), (first, 1)])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_every_dtype_within_its_tolerance(self, dtype: str) -> None:
        simulation = self.simulate(Shape(num_heads=8, num_kv_heads=2, head_dim=32, dtype=dtype))
        first, second = simulation.add_sequence(), simulation.add_sequence()
        simulation.step([(first, 30), (second, 7)])
        simulation.step([(second, 1), (first, 20)])
        simulation.step([(second, 1), (first, 1)])

    def test_cache_of_another_dtype_than_the_activations(self) -> None:
        simulation = self.simulate(Shape(dtype="float32", cache_dtype="bfloat16"))
        first, second = simulation.add_sequence(), simulation.add_sequence()
        simulation.step([(first, 9), (second, 5)])
        simulation.step([(second, 1), (first, 4)])

    @pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128])
    @pytest.mark.parametrize("block_len", [1, 5, 16])
    def test_odd_head_and_block_sizes(self, head_dim: int, block_len: int) -> None:
        simulation = self.simulate(Shape(num_heads=2, num_kv_heads=1, head_dim=head_dim, block_len=block_len))
        first, second = simulation.add_sequence(), simulation.add_sequence()
        simulation.step([(first, 6), (second, 7)])
        simulation.step([(second, 1), (first, 3)])
        simulation.step([(second, 1), (first, 1)])

    def test_layers_of_several_groups_have_their_own_blocks(self) -> None:
        simulation = self.simulate(Shape(num_layers=3, num_groups=2))
        first, second = simulation.add_sequence(), simulation.add_sequence()
        simulation.step([(first, 6), (second, 9)])
        simulation.step([(second, 1), (first, 3)])

    def test_empty_tail_of_a_block_is_never_attended(self) -> None:
        """A row's last block is partly unwritten: large finite leftovers there must not be seen."""
        simulation = self.simulate(Shape())
        for tensor in (*simulation.kv_cache.keys, *simulation.kv_cache.values):
            tensor[1:] = 1e4
        first, second = simulation.add_sequence(), simulation.add_sequence()
        simulation.step([(first, 5), (second, 2)])
        simulation.step([(first, 1), (second, 1)])
        simulation.step([(first, 2), (second, 3)])

    def test_what_an_earlier_owner_left_in_a_block_does_not_spread_unless_it_is_said_to(self) -> None:
        simulation = self.simulate(Shape(head_dim=24))
        if simulation.backend.reads_unwritten:
            pytest.skip("somebody zeroes what it reads")
        for tensor in (*simulation.kv_cache.keys, *simulation.kv_cache.values):
            tensor[:] = torch.nan
        first, second = simulation.add_sequence(), simulation.add_sequence()
        simulation.step([(first, 5), (second, 2)])
        simulation.step([(first, 1), (second, 1)])
        simulation.step([(first, 1), (second, 9)])

    def test_nothing_but_the_steps_positions_is_written(self) -> None:
        simulation = self.simulate(Shape())
        sequence = simulation.add_sequence()
        simulation.step([(sequence, 5)])
        before = [tensor.clone() for tensor in (*simulation.kv_cache.keys, *simulation.kv_cache.values)]
        simulation.step([(sequence, 1)])
        block_id = simulation.tables[sequence][0][1]
        for old, new in zip(before, (*simulation.kv_cache.keys, *simulation.kv_cache.values), strict=True):
            assert not torch.equal(old[block_id, :, 1], new[block_id, :, 1])
            new[block_id, :, 1] = old[block_id, :, 1]
            assert torch.equal(old, new)
