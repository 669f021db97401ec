import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from asyncserve.gpu.layers import norm as composition
from asyncserve.gpu.layers.rotary import Rotary, Rotation, rotate
from tests.gpu.kernels.machine import DEVICE, DTYPES, FP8_DTYPES, MARKS, ON_GPU, ROUNDING, assert_near, random

pytest.importorskip("triton")
from asyncserve.gpu.kernels.rotary import QKNorm, make_rotation, rotate_and_write

pytestmark = MARKS
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32768}
EPS = 1e-6
UNTOUCHED = 7.0


@dataclass(frozen=True)
class Shape:
    num_tokens: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_len: int = 4
    has_norm: bool = False


SHAPES: list[Any] = [
    Shape(num_tokens=1, num_heads=1, num_kv_heads=1, head_dim=2, block_len=1),
    Shape(),
    Shape(has_norm=True),
    Shape(num_heads=9, num_kv_heads=3, head_dim=64, block_len=16),
    Shape(num_heads=3, num_kv_heads=1, head_dim=80, block_len=5),
    Shape(num_heads=6, num_kv_heads=6, head_dim=96, has_norm=True),
    Shape(num_tokens=2, num_heads=32, num_kv_heads=8, head_dim=128, block_len=16),
    Shape(num_tokens=2, num_heads=16, num_kv_heads=8, head_dim=128, block_len=16, has_norm=True),
    Shape(num_tokens=2, num_heads=4, num_kv_heads=1, head_dim=256, block_len=32, has_norm=True),
    Shape(num_tokens=6, num_heads=3, num_kv_heads=1, head_dim=12, has_norm=True),
]
if ON_GPU:
    SHAPES += [
        dataclasses.replace(shape, num_tokens=num_tokens)
        for num_tokens in (1, 64, 65, 2047, 8192)
        for shape in (SHAPES[6], SHAPES[7], SHAPES[3], SHAPES[5])
    ]


class Case:
    """A layer's inputs for one step, and what float64 makes of them, head by head.

    Slots are handed out in no order; some tokens are padding and have none.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, *, cache_dtype: torch.dtype | None = None, widen: int = 0
    ) -> None:
        self.shape, self.dtype = shape, dtype
        num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        width = (num_heads + 2 * num_kv_heads) * head_dim
        self.wide = random(shape.num_tokens, width + 2 * widen, dtype=dtype)
        self.qkv = self.wide[:, widen : widen + width]
        self.before = self.qkv.clone().view(shape.num_tokens, -1, head_dim)
        generator = torch.Generator().manual_seed(3)
        positions = torch.randint(0, 100_000, (shape.num_tokens,), generator=generator)
        self.rotation = Rotary({"rope_theta": 1e6}, head_dim=head_dim).forward(positions)
        self.rotation = Rotation(*(part.to(DEVICE) for part in self.rotation))
        self.norm: QKNorm | None = None
        if shape.has_norm:
            weights = [random(head_dim, dtype=dtype, seed=seed) for seed in (4, 5)]
            self.norm = QKNorm(weights[0], weights[1], EPS)
        num_blocks = 2 + -(-shape.num_tokens // shape.block_len)
        # With a block in front and one behind, which stand for other memory.
        memory_shape = (num_blocks + 2, num_kv_heads, shape.block_len, head_dim)
        self.memory = [
            torch.full(memory_shape, UNTOUCHED, dtype=cache_dtype or dtype, device=DEVICE) for _ in range(2)
        ]
        self.keys, self.values = (memory[1:-1] for memory in self.memory)
        slots = torch.randperm((num_blocks - 1) * shape.block_len, generator=generator) + shape.block_len
        self.slots = slots[: shape.num_tokens].to(DEVICE)
        self.slots[1::5] = -1

    def run(
        self,
        tile: tuple[int, int] | None = None,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        rotate_and_write(
            self.qkv,
            *self.rotation,
            self.keys,
            self.values,
            self.slots,
            scales,
            num_heads=self.shape.num_heads,
            qk_norm=self.norm,
            tile=tile,
        )

    @property
    def heads(self) -> torch.Tensor:
        return self.qkv.unflatten(1, (-1, self.shape.head_dim))

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k, `[num_tokens, num_heads + num_kv_heads, head_dim]`, and the room for rounding."""
        shape, unit = self.shape, ROUNDING[self.dtype]
        x = self.before[:, : shape.num_heads + shape.num_kv_heads].double()
        uncertain = torch.zeros_like(x)
        if self.norm is not None:
            weight = torch.cat(
                [
                    self.norm.q_weight.double().expand(shape.num_heads, -1),
                    self.norm.k_weight.double().expand(shape.num_kv_heads, -1),
                ]
            )
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
            uncertain = unit * x.abs()
        half = shape.head_dim // 2
        cos, sin = self.rotation.cos[..., half:].double(), self.rotation.sin[..., half:].double()
        (a, b), (da, db) = x.split(half, -1), uncertain.split(half, -1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        terms = torch.cat(((a * cos).abs() + (b * sin).abs(), (b * cos).abs() + (a * sin).abs()), -1)
        carried = torch.cat((da * cos.abs() + db * sin.abs(), db * cos.abs() + da * sin.abs()), -1)
        return rotated, unit * rotated.abs() + carried + 4e-7 * terms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_q_and_k_are_normalized_and_rotated_where_they_stand(shape: Shape, dtype: torch.dtype) -> None:
    case = Case(shape, dtype)
    case.run()
    expected, bound = case.exact()
    num_rotated = shape.num_heads + shape.num_kv_heads
    assert_near(case.heads[:, :num_rotated], expected, bound)
    assert torch.equal(case.heads[:, num_rotated:], case.before[:, num_rotated:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_cache_holds_k_and_v_at_the_tokens_slots_and_nothing_else_is_written(
    shape: Shape, dtype: torch.dtype
) -> None:
    case = Case(shape, dtype)
    case.run()
    k_and_v = case.heads[:, shape.num_heads :].split(shape.num_kv_heads, 1)
    for cache, fresh in zip((case.keys, case.values), k_and_v, strict=True):
        expected = torch.full_like(cache, UNTOUCHED)
        for token, slot in enumerate(case.slots.tolist() if shape.num_tokens <= 100 else []):
            if slot >= 0:
                expected[slot // shape.block_len, :, slot % shape.block_len] = fresh[token]
        if shape.num_tokens > 100:
            is_written = case.slots >= 0
            slots = case.slots[is_written]
            expected[slots // shape.block_len, :, slots % shape.block_len] = fresh[is_written]
        assert torch.equal(cache, expected)
    assert_nothing_around_is_written(case)


def assert_nothing_around_is_written(case: Case) -> None:
    for memory in case.memory:
        assert (memory[0] == UNTOUCHED).all()
        assert (memory[-1] == UNTOUCHED).all()


@pytest.mark.parametrize("has_norm", [False, True])
def test_it_rounds_where_the_composition_does(has_norm: bool) -> None:
    """A head that is not rounded between norm and rotation would differ in a third of its elements."""
    case = Case(Shape(num_tokens=4, head_dim=128, has_norm=has_norm), torch.float16)
    heads = case.before[:, :6].clone()
    if case.norm is not None:
        weight = torch.cat((case.norm.q_weight.expand(4, -1), case.norm.k_weight.expand(2, -1)))
        heads = composition.rms_norm(
            heads, composition.rms_norm_gain(weight), composition.rms_norm_floor(weight, EPS)
        )
    case.run()
    differ = case.heads[:, :6] != rotate(heads, case.rotation)
    assert differ.float().mean() < 0.02


@pytest.mark.parametrize("tile", [(1, 1), (2, 4), (16, 4), (64, 8)])
def test_a_tile_of_any_size_gives_the_same(tile: tuple[int, int]) -> None:
    shape = Shape(num_heads=9, num_kv_heads=3, head_dim=64, has_norm=True)
    chosen, other = Case(shape, torch.float16), Case(shape, torch.float16)
    chosen.run()
    other.run(tile)
    # Sums in another order may round another way, once in a long while: a unit in the last place of 8.
    torch.testing.assert_close(other.qkv, chosen.qkv, rtol=0, atol=2**-7)
    torch.testing.assert_close(other.keys, chosen.keys, rtol=0, atol=2**-7)
    assert torch.equal(other.values, chosen.values)


def test_padding_leaves_the_whole_cache_alone() -> None:
    case = Case(Shape(num_tokens=4), torch.float32)
    case.slots.fill_(-1)
    case.run()
    for memory in case.memory:
        assert (memory == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float32, torch.float16), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)],
)
def test_a_cache_of_another_dtype_gets_what_is_left_in_q_and_k_rounded_once_more(
    dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    case = Case(Shape(), dtype, cache_dtype=cache_dtype)
    case.run()
    k, v = case.heads[:, 4:].split(2, 1)
    block, offset = case.slots // 4, case.slots % 4
    for cache, fresh in ((case.keys, k), (case.values, v)):
        for token in (0, 2):
            written = cache[block[token], :, offset[token]]
            tolerance = 0.0 if ON_GPU or cache_dtype != torch.bfloat16 else ROUNDING[cache_dtype]
            torch.testing.assert_close(written, fresh[token].to(cache_dtype), rtol=tolerance, atol=0)


@pytest.mark.parametrize("cache_dtype", FP8_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_scales", [False, True])
def test_a_cache_of_8_bits_gets_k_and_v_over_their_scales_cut_to_its_range(
    has_scales: bool, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    case = Case(Shape(num_heads=3, num_kv_heads=3), dtype, cache_dtype=cache_dtype)
    # V is such that 8 bits hold it as it is, but for what is beyond their range; powers of two keep it so.
    scales = [torch.tensor([0.5, 4.0, 2.0**-6], device=DEVICE), torch.tensor([2.0, 0.25, 1.0], device=DEVICE)]
    case.heads[:, 6:] = case.heads[:, 6:].float().to(cache_dtype).to(dtype)
    case.heads[2, 7, :3] = torch.tensor([6e4, -6e4, 0.0])
    case.before = case.heads.clone()
    case.run(scales=(scales[0], scales[1]) if has_scales else None)
    block, offset = case.slots // 4, case.slots % 4
    largest = torch.finfo(cache_dtype).max
    for cache, fresh, scale in zip(
        (case.keys, case.values), case.heads[:, 3:].split(3, 1), scales, strict=True
    ):
        for token in (0, 2):
            written = cache[block[token], :, offset[token]].float()
            exact = fresh[token].float() / (scale[:, None] if has_scales else 1.0)
            expected = exact.clamp(-largest, largest).to(cache_dtype).float()
            if ON_GPU or cache is case.values:
                assert torch.equal(written, expected)
            else:
                assert (written != expected).float().mean() < 0.15
                assert (written.abs() >= 0.5 * expected.abs() - 2**-8).all()
                assert (written.abs() <= (1 + torch.finfo(cache_dtype).eps) * expected.abs()).all()
    assert case.values[block[2], 1, offset[2], :2].float().abs().tolist() == [largest] * 2
    assert_nothing_around_is_written(case)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter makes a number of NaN")
@pytest.mark.parametrize("cache_dtype", FP8_DTYPES)
def test_nan_stays_nan_in_8_bits(cache_dtype: torch.dtype) -> None:
    case = Case(Shape(), torch.bfloat16, cache_dtype=cache_dtype)
    case.heads[2, 6, 0] = torch.nan
    case.run()
    slot = int(case.slots[2])
    assert case.values[slot // 4, 0, slot % 4].float().isnan().tolist() == [True, *[False] * 15]


def test_the_projection_may_be_part_of_wider_rows() -> None:
    case = Case(Shape(has_norm=True), torch.float32, widen=8)
    margins = torch.cat((case.wide[:, :8], case.wide[:, -8:])).clone()
    case.run()
    expected, bound = case.exact()
    assert_near(case.heads[:, :6], expected, bound)
    assert torch.equal(torch.cat((case.wide[:, :8], case.wide[:, -8:])), margins)


def test_values_that_are_not_finite_are_stored_as_they_are_and_harm_no_other() -> None:
    clean, dirty = Case(Shape(), torch.float32), Case(Shape(), torch.float32)
    dirty.heads[2, 6, 0] = torch.inf
    dirty.heads[2, 6, 1] = -0.0
    clean.run()
    dirty.run()
    assert torch.equal(dirty.keys, clean.keys)
    slot = int(dirty.slots[2])
    written = dirty.values[slot // 4, 0, slot % 4]
    assert written[0] == torch.inf
    assert written[1].signbit()
    written[:2] = clean.values[slot // 4, 0, slot % 4, :2]
    assert torch.equal(dirty.values, clean.values)


@pytest.mark.parametrize("head_dim", [2, 16, 80, 128])
@pytest.mark.parametrize("num_tokens", [1, 7] + ([8192] if ON_GPU else []))
def test_cosines_and_sines_are_those_of_the_float32_angles(num_tokens: int, head_dim: int) -> None:
    rotary = Rotary({"rope_theta": 1e6}, head_dim=head_dim)
    rotary.finish_loading(DEVICE)
    positions = (torch.arange(num_tokens) * 7919 % 131_072).to(DEVICE)
    positions[0] = 131_071
    cos, sin = make_rotation(positions, rotary.frequencies, 1.0)
    angles = (positions.float()[:, None, None] * rotary.frequencies).double()
    assert cos.shape == sin.shape == (num_tokens, 1, head_dim)
    torch.testing.assert_close(cos.double(), angles.cos(), atol=2e-7, rtol=0)
    torch.testing.assert_close(sin.double(), angles.sin(), atol=2e-7, rtol=0)


def test_a_scaling_by_magnitude_is_that_of_the_composition() -> None:
    rotary = Rotary({"rope_parameters": YARN, "max_position_embeddings": 131072}, head_dim=16)
    rotary.finish_loading(DEVICE)
    positions = torch.tensor([0, 1, 40_000], device=DEVICE)
    plain = rotary.forward(positions)
    rotary.finish_loading(DEVICE, fused=True)
    fused = rotary.forward(positions)
    assert plain.cos[0, 0, 0] > 1.1
    torch.testing.assert_close(fused, plain, atol=4e-7, rtol=0)


@pytest.mark.skipif(not ON_GPU, reason="takes 9 GiB")
def test_blocks_far_into_the_cache_are_found() -> None:
    shape = Shape(num_tokens=1, num_heads=1, num_kv_heads=1, head_dim=64, block_len=16)
    case = Case(shape, torch.bfloat16)
    num_blocks = 2**31 // (16 * 64) + 2
    case.keys, case.values = (
        torch.zeros(num_blocks, 1, 16, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)
    )
    case.slots[0] = num_blocks * 16 - 3
    case.run()
    assert torch.equal(case.keys[-1, 0, -3], case.heads[0, 1])
    assert torch.equal(case.values[-1, 0, -3], case.heads[0, 2])
