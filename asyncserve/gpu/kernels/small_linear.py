"""Matrix products of a few tokens, which take the time of reading the weight once.

In one launch the rows of x are normalized (if asked), multiplied, and the product gets its bias, goes through
the gate of an MLP or is added to the residual. A program takes some rows of the weight; of a gate, the same
rows of both halves. What it reads of them first is under way before it waits for the kernel that makes x.

* one token: a warp multiplies rows of its own in float32, without tensor cores, and meets no other warp;
* short rows: a program has its rows whole in registers;
* long rows: a program runs over the columns of its rows.

In the last two each warp multiplies a part of the columns of its own, so that 16 rows keep all warps busy.
Rounds where the composition of kernels does: x after the norm, the product with its bias, SiLU, the gated
product, the sum with the residual; all between is float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from asyncserve.gpu.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from asyncserve.gpu.kernels.paging import product_dtype

MOST_TOKENS = 16
"""As many as the smallest tensor-core product has to take anyway."""

_LONGEST_SHORT_ROW = 2048
_MOST_ROWS = 64 * 1024
"""Of a weight with short rows, for several tokens: output heads have more, and there cuBLAS is quicker (on an
H200 79 µs for eight tokens and 151,936 rows of 1,024, where this would take 92)."""

_MOST_NORMALIZED = 16 * 1024
"""Elements of x that each program may normalize for itself. Above that a kernel of its own costs less: it
does once what here every program repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallLinearConfig:
    """How the work is cut: rows, columns and warps in powers of two.

    Args:
        rows: Features of the result that a program makes at once.
        tile_len: Columns at once. For several tokens, one that covers a row means the kernel for short rows.
        num_warps: Of a program; `tile_len` / 16 at most if there are several tokens.
        warps_per_row: How many share a row; only for one token, where they must meet if they are several.
        num_stages: Tiles of the weight in flight, the one being multiplied included; only for several tokens
            with long rows.
        prefetch_len: Columns of the first rows that are asked into the L2 cache before the wait, at most a
            row; pieces of 16 bytes.
    """

    rows: int
    tile_len: int
    num_warps: int
    warps_per_row: int = 1
    num_stages: int = 1
    prefetch_len: int = 0


def takes(num_tokens: int, in_features: int, weight_rows: int, dtype: torch.dtype) -> bool:
    """Whether `small_linear` serves that many tokens, and sooner than cuBLAS does."""
    if num_tokens == 1:
        return True
    if dtype.itemsize != 2 or (in_features <= _LONGEST_SHORT_ROW and weight_rows > _MOST_ROWS):
        return False
    return num_tokens <= (MOST_TOKENS if in_features < 4096 else 8)


def takes_norm(num_tokens: int, in_features: int) -> bool:
    """Whether the norm belongs into the product, and not into a kernel before it."""
    return _padded(num_tokens) * in_features <= _MOST_NORMALIZED


def _padded(num_tokens: int) -> int:
    return 1 if num_tokens == 1 else 8 if num_tokens <= 8 else MOST_TOKENS


def small_linear_config(
    num_tokens: int, in_features: int, out_features: int, *, is_gated: bool, itemsize: int
) -> SmallLinearConfig:
    """Return the way that suits a product.

    Args:
        num_tokens: Rows of x.
        in_features: Columns of the weight.
        out_features: Of the result.
        is_gated: Whether the weight has two rows for each feature of the result.
        itemsize: Bytes of an element.
    """
    # The quickest that `python -m loadtest.linears --sweep` found on an H200 in bfloat16, for products of
    # qwen3-0.6b (rows of 1,024 to 3,072) and llama-3.1-8b (4,096 and 14,336).
    row_len = triton.next_power_of_2(in_features)
    sides = 2 if is_gated else 1
    if num_tokens == 1:
        # What a thread holds of x, of the norm's weight and of its rows must fit its registers.
        row_bytes = row_len * itemsize
        if row_bytes <= 2048:
            rows = max(1, 16 * 2048 // row_bytes // sides)
            return SmallLinearConfig(rows=min(rows, 16), tile_len=row_len, num_warps=4, warps_per_row=sides)
        if row_bytes <= 4096:
            return SmallLinearConfig(rows=4, tile_len=row_len, num_warps=4, warps_per_row=sides)
        if row_bytes <= 8192 and (is_gated or in_features < 4096 or out_features > 4096):
            return SmallLinearConfig(rows=4 // sides, tile_len=row_len, num_warps=4, warps_per_row=4)
        tile_len = 2048 // itemsize
        if is_gated or row_bytes <= 8192:
            return SmallLinearConfig(rows=8 // sides, tile_len=tile_len, num_warps=4, warps_per_row=2)
        return SmallLinearConfig(rows=4, tile_len=tile_len, num_warps=8, warps_per_row=4)
    # A warp's part of a tile is 16 columns at least.
    tile_len = max(128, row_len)
    if tile_len <= _LONGEST_SHORT_ROW:
        # One tile a program, 16 rows of the weight.
        return SmallLinearConfig(rows=16 // sides, tile_len=tile_len, num_warps=4 if tile_len <= 1024 else 8)
    # What is asked for ahead comes in pieces of 16 bytes.
    prefetch_len = 1024 if in_features * itemsize % 16 == 0 else 0
    if out_features <= 4096 and in_features <= 4096:
        return SmallLinearConfig(
            rows=16 // sides, tile_len=1024, num_warps=8, num_stages=3, prefetch_len=prefetch_len
        )
    rows = 32 if in_features > 8192 else 16
    return SmallLinearConfig(
        rows=rows // sides, tile_len=512, num_warps=8, num_stages=4, prefetch_len=prefetch_len
    )


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: SmallLinearConfig | None = None,
) -> torch.Tensor:
    """Multiply a few rows by a weight.

    Args:
        x: `[num_tokens, in_features]`, as many as `takes` says, rows contiguous in themselves.
        weight: `[out_features, in_features]`, contiguous; of a gate `[2 * out_features, in_features]`, the
            rows of the gates first.
        bias: `[rows of the weight]`; None: there is none.
        norm_weight: `[in_features]`: x goes through RMSNorm with this weight first; None: it does not.
        eps: Of the norm, added to the mean squares.
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
    config = config or small_linear_config(
        num_tokens, in_features, out_features, is_gated=is_gated, itemsize=x.dtype.itemsize
    )
    num_tiles = triton.cdiv(out_features, config.rows)
    tensors = (
        x,
        weight,
        weight if bias is None else bias,
        weight if norm_weight is None else norm_weight,
        out,
    )
    shared = {
        "IN_FEATURES": in_features,
        "SIDES": sides,
        "HAS_BIAS": bias is not None,
        "HAS_NORM": norm_weight is not None,
        "HAS_RESIDUAL": residual is not None,
        "ROWS": config.rows,
        "PREFETCH_LEN": config.prefetch_len,
        "NUM_WARPS": config.num_warps,
        "num_warps": config.num_warps,
        **launch_options(),
    }
    if num_tokens == 1:
        span = min(config.tile_len, config.warps_per_row * 512 // x.dtype.itemsize)
        _one_token[(num_tiles,)](
            *tensors,
            out_features,
            eps,
            SPAN=span,
            CHUNKS=config.tile_len // span,
            ROWS_ABREAST=min(config.num_warps // config.warps_per_row, sides * config.rows),
            **shared,
        )
        return out
    is_short = in_features <= config.tile_len
    kernel = _short_rows if is_short else _long_rows
    kernel[(num_tiles,)](
        *tensors,
        x.stride(0),
        out.stride(0),
        num_tokens,
        out_features,
        eps,
        TOKENS=_padded(num_tokens),
        TILE_ROWS=max(16, sides * config.rows),
        PART_LEN=config.tile_len // config.num_warps,
        **({} if is_short else {"NUM_STAGES": config.num_stages}),
        DOT_DTYPE=product_dtype(x.dtype),
        **shared,
    )
    return out


@triton.jit
def _prefetch(
    weight_ptr: tl.tensor,
    first_row: tl.tensor,
    out_features: tl.tensor,
    IN_FEATURES: tl.constexpr,
    SIDES: tl.constexpr,
    ROWS: tl.constexpr,
    PREFETCH_LEN: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Ask the first columns of a program's rows into the L2 cache, and wait for nothing."""
    if USE_PDL and PREFETCH_LEN > 0:
        # The instruction is one for a warp: its threads agree on the row, and a row is one piece.
        warp = tl.arange(0, NUM_WARPS * 32) // 32
        num_bytes = tl.full(
            [NUM_WARPS * 32], PREFETCH_LEN * weight_ptr.dtype.element_ty.primitive_bitwidth // 8, tl.int32
        )
        for first in tl.static_range(0, SIDES * ROWS, NUM_WARPS):
            in_tile = (first + warp) % (SIDES * ROWS)
            row = tl.minimum(first_row + in_tile // SIDES, out_features - 1) + in_tile % SIDES * out_features
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
                "=r,l,r",
                [(weight_ptr + row.to(tl.int64) * IN_FEATURES).to(tl.int64), num_bytes],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def _normalized(x: tl.tensor, inverse: tl.tensor, gain: tl.tensor) -> tl.tensor:
    """`inverse` is 1 / the root of the mean square; all broadcast."""
    return (x.to(tl.float32) * inverse * gain.to(tl.float32)).to(x.dtype)


@triton.jit
def _bias(
    bias_ptr: tl.tensor,
    first_row: tl.tensor,
    out_features: tl.tensor,
    SIDES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
) -> tl.tensor:
    """Load the bias of a tile's rows, `[TILE_ROWS] float32`; zeros if there is none."""
    bias = tl.zeros([TILE_ROWS], tl.float32)
    if HAS_BIAS:
        in_tile = tl.arange(0, TILE_ROWS)
        row = first_row + in_tile // SIDES
        is_row = (in_tile < SIDES * ROWS) & (row < out_features)
        bias = tl.load(bias_ptr + row + in_tile % SIDES * out_features, mask=is_row, other=0.0).to(tl.float32)
    return bias


@triton.jit
def _residual(
    out_ptr: tl.tensor,
    out_stride: tl.tensor,
    first_row: tl.tensor,
    num_tokens: tl.tensor,
    out_features: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    SIDE_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """Load what the result is added to, `[SIDE_ROWS, TOKENS] float32`; zeros if that is nothing."""
    residual = tl.zeros([SIDE_ROWS, TOKENS], tl.float32)
    if HAS_RESIDUAL:
        feature = tl.arange(0, SIDE_ROWS)[:, None]
        token = tl.arange(0, TOKENS)[None, :]
        row = first_row + feature
        mask = (feature < ROWS) & (row < out_features) & (token < num_tokens)
        residual = tl.load(out_ptr + token * out_stride + row, mask=mask, other=0.0).to(tl.float32)
    return residual


@triton.jit
def _finish(
    sums: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out_ptr: tl.tensor,
    out_stride: tl.tensor,
    first_row: tl.tensor,
    num_tokens: tl.tensor,
    out_features: tl.tensor,
    SIDES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Do what follows the product, with `[TILE_ROWS, TOKENS] float32`, and write it.

    Of a gate each feature has two rows, one behind the other.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    SIDE_ROWS: tl.constexpr = TILE_ROWS // SIDES
    if HAS_BIAS:
        sums += bias[:, None]
    result = sums.to(dtype).to(tl.float32)
    if SIDES == 2:
        both = tl.reshape(result, (SIDE_ROWS, 2, TOKENS))
        is_gate = (tl.arange(0, 2) == 0)[None, :, None]
        gate = tl.sum(tl.where(is_gate, both, 0.0), 1)
        up = tl.sum(tl.where(is_gate, 0.0, both), 1)
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        result = (activated * up).to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        result += residual
    feature = tl.arange(0, SIDE_ROWS)[:, None]
    token = tl.arange(0, TOKENS)[None, :]
    row = first_row + feature
    mask = (feature < ROWS) & (row < out_features) & (token < num_tokens)
    tl.store(out_ptr + token * out_stride + row, result.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["out_features"])
def _one_token(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_features: tl.tensor,
    eps: tl.tensor,
    IN_FEATURES: tl.constexpr,
    SIDES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    PREFETCH_LEN: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    USE_PDL: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS_ABREAST: tl.constexpr,
) -> None:
    """A program makes ROWS features, its warps as many rows of the weight abreast.

    Tiles are `[ROWS_ABREAST, rounds, CHUNKS, SPAN]`: the span of a row is what its warps load at once; the
    other columns of the tile and the further rows are a thread's own. A tile is loaded while the one before
    it is multiplied, the first before the wait.
    """
    TILE_LEN: tl.constexpr = CHUNKS * SPAN
    ROUNDS: tl.constexpr = SIDES * ROWS // ROWS_ABREAST
    first_row = tl.program_id(0) * ROWS
    in_tile = tl.arange(0, ROWS_ABREAST)[:, None] * ROUNDS + tl.arange(0, ROUNDS)[None, :]
    # Rows behind the last are copies of it: what they give is not stored, and no load needs a mask for them.
    row = tl.minimum(first_row + in_tile // SIDES, out_features - 1) + in_tile % SIDES * out_features
    # `[1, 1, CHUNKS, SPAN]`; x and the norm's weight take their place for every row abreast, so that no warp
    # needs what another one loaded.
    column = (tl.arange(0, CHUNKS)[:, None] * SPAN + tl.arange(0, SPAN)[None, :])[None, None, :, :]
    abreast = column + tl.zeros([ROWS_ABREAST, 1, 1, 1], tl.int32)
    weight_at = weight_ptr + row.to(tl.int64)[:, :, None, None] * IN_FEATURES + column
    weight = tl.load(weight_at, mask=column < IN_FEATURES, other=0.0)
    gain = abreast
    if HAS_NORM:
        gain = tl.load(gain_ptr + abreast, mask=abreast < IN_FEATURES, other=0.0)
    bias = _bias(bias_ptr, first_row, out_features, SIDES, HAS_BIAS, ROWS, SIDES * ROWS)
    _prefetch(weight_ptr, first_row, out_features, IN_FEATURES, SIDES, ROWS, PREFETCH_LEN, NUM_WARPS, USE_PDL)
    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)
    x = tl.load(x_ptr + abreast, mask=abreast < IN_FEATURES, other=0.0)
    residual = _residual(out_ptr, 0, first_row, 1, out_features, HAS_RESIDUAL, ROWS, ROWS, 1)
    inverse = tl.zeros([ROWS_ABREAST, 1, 1, 1], tl.float32)
    if HAS_NORM:
        squares = tl.sum(x.to(tl.float32) * x.to(tl.float32), 2)
        for start in range(TILE_LEN, IN_FEATURES, TILE_LEN):
            more = tl.load(x_ptr + start + abreast, mask=start + abreast < IN_FEATURES, other=0.0)
            squares += tl.sum(more.to(tl.float32) * more.to(tl.float32), 2)
        inverse = tl.rsqrt(tl.sum(squares, 2) / IN_FEATURES + eps)[:, :, None, None]

    products = tl.zeros([ROWS_ABREAST, ROUNDS, SPAN], tl.float32)
    for start in range(TILE_LEN, IN_FEATURES, TILE_LEN):
        next_weight = tl.load(weight_at + start, mask=start + column < IN_FEATURES, other=0.0)
        next_x = tl.load(x_ptr + start + abreast, mask=start + abreast < IN_FEATURES, other=0.0)
        next_gain = gain
        if HAS_NORM:
            next_gain = tl.load(gain_ptr + start + abreast, mask=start + abreast < IN_FEATURES, other=0.0)
            x = _normalized(x, inverse, gain)
        products += tl.sum(weight.to(tl.float32) * x.to(tl.float32), 2)
        weight = next_weight
        x = next_x
        gain = next_gain
    if HAS_NORM:
        x = _normalized(x, inverse, gain)
    products += tl.sum(weight.to(tl.float32) * x.to(tl.float32), 2)
    _finish(
        tl.reshape(tl.sum(products, 2), (SIDES * ROWS, 1)),
        bias,
        residual,
        out_ptr,
        0,
        first_row,
        1,
        out_features,
        SIDES,
        HAS_BIAS,
        HAS_RESIDUAL,
        ROWS,
        SIDES * ROWS,
        1,
    )


@triton.jit(do_not_specialize=["num_tokens", "out_features"])
def _short_rows(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    num_tokens: tl.tensor,
    out_features: tl.tensor,
    eps: tl.tensor,
    IN_FEATURES: tl.constexpr,
    SIDES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    PREFETCH_LEN: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    USE_PDL: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PART_LEN: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """A program makes ROWS features for all tokens, whole rows at once."""
    # `[parts, columns of a part]`
    column = tl.arange(0, NUM_WARPS)[:, None] * PART_LEN + tl.arange(0, PART_LEN)[None, :]
    exists = column < IN_FEATURES
    first_row = tl.program_id(0) * ROWS
    bias = _bias(bias_ptr, first_row, out_features, SIDES, HAS_BIAS, ROWS, TILE_ROWS)
    in_tile = tl.arange(0, TILE_ROWS)
    row = first_row + in_tile // SIDES
    is_row = (in_tile < SIDES * ROWS) & (row < out_features)
    at = (row + in_tile % SIDES * out_features).to(tl.int64)[None, :, None] * IN_FEATURES + column[:, None, :]
    # `[parts, TILE_ROWS, columns of a part]`
    weight = tl.load(weight_ptr + at, mask=is_row[None, :, None] & exists[:, None, :], other=0.0)
    gain = column
    if HAS_NORM:
        gain = tl.load(gain_ptr + column, mask=exists, other=0.0)
    _prefetch(weight_ptr, first_row, out_features, IN_FEATURES, SIDES, ROWS, PREFETCH_LEN, NUM_WARPS, USE_PDL)
    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)
    token = tl.arange(0, TOKENS)
    x_at = x_ptr + token[None, :, None] * x_stride + column[:, None, :]
    residual = _residual(
        out_ptr,
        out_stride,
        first_row,
        num_tokens,
        out_features,
        HAS_RESIDUAL,
        ROWS,
        TILE_ROWS // SIDES,
        TOKENS,
    )
    x = tl.load(x_at, mask=(token < num_tokens)[None, :, None] & exists[:, None, :], other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(tl.sum(wide * wide, 2), 0) / IN_FEATURES + eps)
        x = _normalized(x, inverse[None, :, None], gain[:, None, :])
    x = tl.trans(x.to(DOT_DTYPE), (0, 2, 1))
    nothing = tl.zeros([NUM_WARPS, TILE_ROWS, TOKENS], tl.float32)
    products = tl.dot(weight.to(DOT_DTYPE), x, nothing, input_precision="ieee")
    _finish(
        tl.sum(products, 0),
        bias,
        residual,
        out_ptr,
        out_stride,
        first_row,
        num_tokens,
        out_features,
        SIDES,
        HAS_BIAS,
        HAS_RESIDUAL,
        ROWS,
        TILE_ROWS,
        TOKENS,
    )


@triton.jit(do_not_specialize=["num_tokens", "out_features"])
def _long_rows(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    num_tokens: tl.tensor,
    out_features: tl.tensor,
    eps: tl.tensor,
    IN_FEATURES: tl.constexpr,
    SIDES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    PREFETCH_LEN: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    USE_PDL: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PART_LEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """A program makes ROWS features for all tokens, a tile of columns at a time."""
    TILE_LEN: tl.constexpr = NUM_WARPS * PART_LEN
    first_row = tl.program_id(0) * ROWS
    bias = _bias(bias_ptr, first_row, out_features, SIDES, HAS_BIAS, ROWS, TILE_ROWS)
    _prefetch(weight_ptr, first_row, out_features, IN_FEATURES, SIDES, ROWS, PREFETCH_LEN, NUM_WARPS, USE_PDL)
    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)
    # `[parts, columns of a part]`
    column = tl.arange(0, NUM_WARPS)[:, None] * PART_LEN + tl.arange(0, PART_LEN)[None, :]
    token = tl.arange(0, TOKENS)
    is_token = (token < num_tokens)[None, :, None]
    x_at = x_ptr + token[None, :, None] * x_stride + column[:, None, :]
    residual = _residual(
        out_ptr,
        out_stride,
        first_row,
        num_tokens,
        out_features,
        HAS_RESIDUAL,
        ROWS,
        TILE_ROWS // SIDES,
        TOKENS,
    )
    inverse = tl.zeros([TOKENS], tl.float32)
    if HAS_NORM:
        for start in range(0, IN_FEATURES, TILE_LEN):
            exists = start + column < IN_FEATURES
            wide = tl.load(x_at + start, mask=is_token & exists[:, None, :], other=0.0).to(tl.float32)
            inverse += tl.sum(tl.sum(wide * wide, 2), 0)
        inverse = tl.rsqrt(inverse / IN_FEATURES + eps)

    in_tile = tl.arange(0, TILE_ROWS)
    feature = first_row + in_tile // SIDES
    is_row = (in_tile < SIDES * ROWS) & (feature < out_features)
    row = feature + in_tile % SIDES * out_features
    weight_at = weight_ptr + row.to(tl.int64)[None, :, None] * IN_FEATURES + column[:, None, :]
    products = tl.zeros([NUM_WARPS, TILE_ROWS, TOKENS], tl.float32)
    for start in tl.range(0, IN_FEATURES, TILE_LEN, num_stages=NUM_STAGES):
        exists = start + column < IN_FEATURES
        weight = tl.load(weight_at + start, mask=is_row[None, :, None] & exists[:, None, :], other=0.0)
        x = tl.load(x_at + start, mask=is_token & exists[:, None, :], other=0.0)
        if HAS_NORM:
            gain = tl.load(gain_ptr + start + column, mask=exists, other=0.0)
            x = _normalized(x, inverse[None, :, None], gain[:, None, :])
        x = tl.trans(x.to(DOT_DTYPE), (0, 2, 1))
        products = tl.dot(weight.to(DOT_DTYPE), x, products, input_precision="ieee")
    _finish(
        tl.sum(products, 0),
        bias,
        residual,
        out_ptr,
        out_stride,
        first_row,
        num_tokens,
        out_features,
        SIDES,
        HAS_BIAS,
        HAS_RESIDUAL,
        ROWS,
        TILE_ROWS,
        TOKENS,
    )
