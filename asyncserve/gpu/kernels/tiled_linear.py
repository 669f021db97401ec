"""Matrix products of up to 64 tokens, which take the time of reading the weight once, with what follows them.

A program takes some rows of the weight and all tokens, and runs over the columns; tiles of both come by
bulk copies (TMA), several of them under way. The product gets its bias, goes through the gate of an MLP or is
added to the residual. Where rows are few and long, several programs share them, each for a part of the
columns: each leaves its sums, and the one that comes last adds them up, always in the same order.

The shortest products of up to eight tokens are `small_linear`'s; of more than 64 tokens cuBLAS is quicker.
Rounds where `small_linear` does. Plain torch beside it: `gpu/layers/linear.py` and `gpu/layers/mlp.py`.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from asyncserve.gpu.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from asyncserve.gpu.kernels.paging import IS_INTERPRETED, product_dtype, shared_bytes

MOST_TOKENS = 64

MOST_SHARED = 128
"""Groups of rows that several programs share: so many counters a launch needs at most."""

_LEAST_CAPABILITY = (9, 0)
_FEW_PROGRAMS = 128
_LEAST_PART = 768
"""Columns of a program, below which sharing rows costs more than it gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledLinearConfig:
    """How the work is cut, in powers of two but for the stages.

    Args:
        rows: Features of the result that a program makes; of a gate it reads as many rows of both halves.
        tile_len: Columns at once.
        num_warps: Of a program.
        num_stages: Tiles in flight, the one being multiplied included.
        num_splits: Programs that share the same rows.
        has_tokens_first: Whether the tokens are the side of a product that the hardware takes 64 at a time:
            the way for fewer rows. Only for 33 tokens and more.
    """

    rows: int
    tile_len: int
    num_warps: int
    num_stages: int
    num_splits: int = 1
    has_tokens_first: bool = False


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `tiled_linear` serves these: few tokens of 16 bits, rows of 16-byte pieces, Hopper or later."""
    num_tokens, in_features = x.shape
    return (
        num_tokens <= MOST_TOKENS
        and x.dtype.itemsize == 2
        and in_features % 8 == 0
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
        and _has_bulk_copies()
    )


@functools.cache
def _has_bulk_copies() -> bool:
    return IS_INTERPRETED or torch.cuda.get_device_capability() >= _LEAST_CAPABILITY


def _padded(num_tokens: int) -> int:
    return 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else MOST_TOKENS


def tiled_linear_config(
    num_tokens: int, in_features: int, out_features: int, *, is_gated: bool, shared_bytes: int
) -> TiledLinearConfig:
    """Return the way that suits a product.

    Args:
        num_tokens: Rows of x.
        in_features: Columns of the weight.
        out_features: Of the result.
        is_gated: Whether the weight has two rows for each feature of the result.
        shared_bytes: Shared memory a program may take.
    """
    # Within some 2 % of the quickest ways found on an H200 in bfloat16 for qwen3-0.6b and llama-3.1-8b, one
    # product after the other as in a layer (`python -m loadtest.linears --sweep` times them one by one).
    has_many = num_tokens > 32
    if is_gated:
        rows, tile_len, num_warps, num_stages = (32, 128, 4, 6) if has_many else (64, 128, 8, 4)
    elif not has_many:
        rows, tile_len, num_warps, num_stages = 64, 128, 4, 6
    elif out_features <= 16 * 1024:
        rows, tile_len, num_warps, num_stages = 32, 256, 4, 4
    else:
        rows, tile_len, num_warps, num_stages = 128, 128, 8, 4
    num_tiles = triton.cdiv(out_features, rows)
    tile_bytes = 2 * tile_len * (rows * (2 if is_gated else 1) + _padded(num_tokens))
    room = shared_bytes
    if num_warps == 4 and num_tiles > 2 * _FEW_PROGRAMS:
        # Two programs a multiprocessor, since there are so many. Fewer take it for themselves: programs that
        # begin while the kernel before ends would else meet in twos where it left first, beside idle ones.
        room = min(room, 100 * 1024)
    return TiledLinearConfig(
        rows=rows,
        tile_len=tile_len,
        num_warps=num_warps,
        num_stages=max(2, min(num_stages, room // tile_bytes)),
        num_splits=1 if is_gated else _count_splits(num_tiles, in_features),
        has_tokens_first=rows == 32,
    )


def _count_splits(num_tiles: int, in_features: int) -> int:
    most = min(4, _FEW_PROGRAMS // num_tiles, in_features // _LEAST_PART)
    return 4 if most == 4 else 2 if most >= 2 else 1


def tiled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    arrived: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: TiledLinearConfig | None = None,
) -> torch.Tensor:
    """Multiply some rows by a weight.

    Args:
        x: `[num_tokens, in_features]`, rows contiguous in themselves; `takes` says which.
        weight: `[out_features, in_features]`, contiguous; of a gate `[2 * out_features, in_features]`, the
            rows of the gates first.
        arrived: `[MOST_SHARED] int32`, how many programs are done with rows that they share; zeros between
            launches. Nobody else may use it until the kernel has run.
        bias: `[rows of the weight]`; None: there is none.
        is_gated: Whether the result is `silu(gate) * up`.
        residual: `[num_tokens, out_features]`, the product is added to it in place; None: there is none.
        out: `[num_tokens, out_features]`, gets the result if there is no residual; None: a new tensor does.
        config: How the work is cut; None: as suits it.

    Returns:
        The residual, `out`, or a new contiguous tensor.
    """
    num_tokens, in_features = x.shape
    sides = 2 if is_gated else 1
    out_features = weight.shape[0] // sides
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    config = config or tiled_linear_config(
        num_tokens, in_features, out_features, is_gated=is_gated, shared_bytes=shared_bytes(x.device)
    )
    tokens = _padded(num_tokens)
    num_tiles = triton.cdiv(out_features, config.rows)
    num_splits = config.num_splits
    sums = out
    if num_splits > 1:
        assert num_tiles <= arrived.shape[0]
        shape = (num_tiles, num_splits, sides, config.rows * tokens)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    _tiled_linear[(num_tiles, num_splits)](
        TensorDescriptor(x, [num_tokens, in_features], [x.stride(0), 1], [tokens, config.tile_len]),
        TensorDescriptor(
            weight, [weight.shape[0], in_features], [in_features, 1], [config.rows, config.tile_len]
        ),
        weight if bias is None else bias,
        out,
        sums,
        arrived,
        out.stride(0),
        num_tokens,
        out_features,
        IN_FEATURES=in_features,
        SIDES=sides,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ROWS=config.rows,
        TOKENS=tokens,
        TILE_LEN=config.tile_len,
        NUM_STAGES=config.num_stages,
        NUM_SPLITS=num_splits,
        TOKENS_FIRST=config.has_tokens_first,
        DOT_DTYPE=product_dtype(x.dtype),
        num_warps=config.num_warps,
        **launch_options(),
    )
    return out


@triton.jit
def _sum(
    x: tl.tensor, weight: tl.tensor, total: tl.tensor, TOKENS_FIRST: tl.constexpr, DOT_DTYPE: tl.constexpr
) -> tl.tensor:
    x = x.to(DOT_DTYPE)
    weight = weight.to(DOT_DTYPE)
    if TOKENS_FIRST:
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    else:
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit
def _sum_of_parts(parts_at: tl.tensor, DISTANCE: tl.constexpr, NUM_SPLITS: tl.constexpr) -> tl.tensor:
    # Not from the L1 cache: other multiprocessors wrote them, perhaps where this one read before.
    total = tl.load(parts_at, cache_modifier=".cg")
    for number in tl.static_range(1, NUM_SPLITS):
        total += tl.load(parts_at + number * DISTANCE, cache_modifier=".cg")
    return total


# Whether `out_features` is a multiple of 16 decides how wide results are stored, so it is looked at.
@triton.jit(do_not_specialize=["num_tokens"])
def _tiled_linear(
    x_tiles: tl.tensor_descriptor,
    weight_tiles: tl.tensor_descriptor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    out_stride: tl.tensor,
    num_tokens: tl.tensor,
    out_features: tl.tensor,
    IN_FEATURES: tl.constexpr,
    SIDES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE_LEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """A program makes ROWS features for all tokens from a part of the columns.

    What lies outside of x and of the weight is read as zeros.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    NUM_TILES: tl.constexpr = (IN_FEATURES + TILE_LEN - 1) // TILE_LEN
    PART: tl.constexpr = (NUM_TILES + NUM_SPLITS - 1) // NUM_SPLITS
    SIZE: tl.constexpr = ROWS * TOKENS
    # The two sides of a tile of the result.
    HEIGHT: tl.constexpr = TOKENS if TOKENS_FIRST else ROWS
    WIDTH: tl.constexpr = ROWS if TOKENS_FIRST else TOKENS
    group = tl.program_id(0)
    split = tl.program_id(1)
    first_row = group * ROWS
    down = tl.arange(0, HEIGHT)[:, None]
    across = tl.arange(0, WIDTH)[None, :]
    token = down if TOKENS_FIRST else across
    row = first_row + (across if TOKENS_FIRST else down)
    is_row = row < out_features
    bias = tl.zeros([HEIGHT, WIDTH], tl.float32)
    up_bias = tl.zeros([HEIGHT, WIDTH], tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
        if SIDES == 2:
            up_bias += tl.load(bias_ptr + out_features + row, mask=is_row, other=0.0).to(tl.float32)
    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    up = tl.zeros([HEIGHT, WIDTH], tl.float32)
    end = tl.minimum((split + 1) * PART, NUM_TILES)
    for number in tl.range(split * PART, end, num_stages=NUM_STAGES):
        column = number * TILE_LEN
        x = x_tiles.load([0, column])
        weight = weight_tiles.load([first_row, column])
        total = _sum(x, weight, total, TOKENS_FIRST, DOT_DTYPE)
        if SIDES == 2:
            weight = weight_tiles.load([out_features + first_row, column])
            up = _sum(x, weight, up, TOKENS_FIRST, DOT_DTYPE)

    if NUM_SPLITS > 1:
        DISTANCE: tl.constexpr = SIDES * SIZE
        parts_at = sums_ptr + group.to(tl.int64) * (NUM_SPLITS * DISTANCE) + down * WIDTH + across
        tl.store(parts_at + split * DISTANCE, total)
        if SIDES == 2:
            tl.store(parts_at + split * DISTANCE + SIZE, up)
        # All threads have stored before one of them says so; whoever is told that all have, sees it.
        tl.debug_barrier()
        num_arrived = tl.atomic_add(arrived_ptr + group, 1, sem="acq_rel", scope="gpu")
        if num_arrived != NUM_SPLITS - 1:
            return
        tl.store(arrived_ptr + group, 0)
        total = _sum_of_parts(parts_at, DISTANCE, NUM_SPLITS)
        if SIDES == 2:
            up = _sum_of_parts(parts_at + SIZE, DISTANCE, NUM_SPLITS)

    result = (total + bias).to(dtype).to(tl.float32)
    if SIDES == 2:
        activated = (result / (1.0 + tl.exp(-result))).to(dtype).to(tl.float32)
        result = (activated * (up + up_bias).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    mask = is_row & (token < num_tokens)
    out_at = out_ptr + token * out_stride + row
    if HAS_RESIDUAL:
        result += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at, result.to(dtype), mask=mask)
