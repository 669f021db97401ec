"""Matrix products of up to eight tokens, which take the time of reading the weight once.

In one launch the rows of x are normalized (if asked), multiplied, and the product gets its bias, goes through
the gate of an MLP or is added to the residual. A program takes some rows of the weight; of a gate, the same
rows of both halves. What it reads of them first is under way before it waits for the kernel that makes x.

* one token: a warp multiplies rows of its own in float32, without tensor cores, and meets no other warp;
* several: a program has its rows whole in registers, and each warp multiplies a part of the columns of its
  own, so that 16 rows keep all warps busy. For rows of up to 2,048 columns; `tiled_linear` serves longer.

Rounds where the composition of kernels does: x after the norm, the product with its bias, SiLU, the gated
product, the sum with the residual; all between is float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from asyncserve.gpu.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from asyncserve.gpu.kernels.paging import product_dtype

MOST_TOKENS = 8
"""As many as tensor cores multiply at once."""

_LONGEST_ROW = 2048
_MOST_FEATURES = 16 * 1024
"""With several tokens: what a program holds of a longer row leaves no registers, and what very many programs
load of x takes longer than the weight."""

_MOST_NORMALIZED = 16 * 1024
"""Elements of one token that each program may normalize for itself. Above that a kernel of its own costs
less: it does once what here every program repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallLinearConfig:
    """How the work is cut: rows, columns and warps in powers of two.

    Args:
        rows: Features of the result that a program makes.
        tile_len: Columns at once; for several tokens they cover a row.
        num_warps: Of a program; `tile_len` / 16 at most if there are several tokens.
        warps_per_row: How many share a row; only for one token, where they must meet if they are several.
    """

    rows: int
    tile_len: int
    num_warps: int
    warps_per_row: int = 1


def takes(num_tokens: int, in_features: int, weight_rows: int, dtype: torch.dtype) -> bool:
    """Whether `small_linear` serves that many tokens, and sooner than others do."""
    if num_tokens == 1:
        return True
    is_small = in_features <= _LONGEST_ROW and weight_rows <= _MOST_FEATURES
    return is_small and num_tokens <= MOST_TOKENS and dtype.itemsize == 2


def takes_norm(num_tokens: int, in_features: int) -> bool:
    """Whether the norm belongs into the product, and not into a kernel before it."""
    return num_tokens > 1 or in_features <= _MOST_NORMALIZED


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
    # qwen3-0.6b (rows of 1,024 to 3,072) and, of one token, llama-3.1-8b (4,096 and 14,336).
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
    # A warp's part of a row is 16 columns at least.
    tile_len = max(128, row_len)
    return SmallLinearConfig(rows=16 // sides, tile_len=tile_len, num_warps=4 if tile_len <= 1024 else 8)


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
    _whole_rows[(num_tiles,)](
        *tensors,
        x.stride(0),
        out.stride(0),
        num_tokens,
        out_features,
        eps,
        TOKENS=MOST_TOKENS,
        TILE_ROWS=max(16, sides * config.rows),
        NUM_PARTS=config.num_warps,
        PART_LEN=config.tile_len // config.num_warps,
        DOT_DTYPE=product_dtype(x.dtype),
        **shared,
    )
    return out


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
def _whole_rows(
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
    USE_PDL: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PART_LEN: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """A program makes ROWS features for all tokens. Tiles: `[parts, rows or tokens, columns of a part]`."""
    column = tl.arange(0, NUM_PARTS)[:, None] * PART_LEN + tl.arange(0, PART_LEN)[None, :]
    exists = column < IN_FEATURES
    first_row = tl.program_id(0) * ROWS
    in_tile = tl.arange(0, TILE_ROWS)
    row = first_row + in_tile // SIDES
    is_row = (in_tile < SIDES * ROWS) & (row < out_features)
    at = (row + in_tile % SIDES * out_features).to(tl.int64)[None, :, None] * IN_FEATURES + column[:, None, :]
    weight = tl.load(weight_ptr + at, mask=is_row[None, :, None] & exists[:, None, :], other=0.0)
    bias = _bias(bias_ptr, first_row, out_features, SIDES, HAS_BIAS, ROWS, TILE_ROWS)
    gain = column
    if HAS_NORM:
        gain = tl.load(gain_ptr + column, mask=exists, other=0.0)
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
    nothing = tl.zeros([NUM_PARTS, TILE_ROWS, TOKENS], tl.float32)
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
