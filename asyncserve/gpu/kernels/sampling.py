"""From logits to token ids in two kernels: the argmax, or the draw of `gpu/sampling/gumbel.py`.

The first cuts the vocabulary among programs. Each takes some blocks of 128 tokens and notes which of them
wins: the one with the largest logit, or, where a token is drawn, that with the largest ratio of its summed
weight to its noise. Weights are relative to the program's own maximum, so no other need be known. In the
second, a program takes a row, finds the winner among the parts' winners, reads that block again, finds the
token in it by the same rule, and writes it wherever the next step and the host look for it. Noise is hashed
from the slot's seed, the position and the token, so nothing depends on the batch; sums of a block are formed
within one program in an order that is the same for every row. Rows of slot -1 are padding.
Plain torch beside it: `argmax` in `gpu/sampling/selection.py`, `draw` in `gpu/sampling/gumbel.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from asyncserve.gpu.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from asyncserve.gpu.kernels.truncation import load_logits, weights_below

_BLOCK_LEN = tl.constexpr(128)
_LOG2_E = tl.constexpr(1.4426950408889634)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceConfig:
    """How the work is cut; powers of two.

    Args:
        blocks_per_program: Blocks of 128 tokens of a program of the first kernel.
        num_warps: Of such a program.
    """

    blocks_per_program: int = 32
    num_warps: int = 4


# 32 logits a thread: programs enough to fill the device with one row, and few enough for the second kernel.
DEFAULT_CONFIG = ChoiceConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where the tokens go besides the returned tensor.

    Args:
        history: `[…] int32`, flat.
        write_back: `[num_samples] int64`, each row's place in `history`; what stands for no token is written
            there as 0.
        results: `[depth, num_slots] int64`, on the device or in pinned memory of the host.
        result_row: `[1] int32`, row of `results` that takes the tokens.
    """

    history: torch.Tensor
    write_back: torch.Tensor
    results: torch.Tensor
    result_row: torch.Tensor


def choose_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    seed_keys: torch.Tensor,
    inv_temperature: torch.Tensor,
    thresholds: torch.Tensor | None,
    bad_token: int,
    empty_token: int,
    destination: Destination | None = None,
    config: ChoiceConfig = DEFAULT_CONFIG,
) -> torch.Tensor:
    """Choose a token for each row; only launches.

    Args:
        logits: `[num_samples, vocab]` float32, float16 or bfloat16, rows contiguous in themselves.
        slots: `[num_samples] int32`, of each row; -1: no token is chosen or written.
        positions: `[num_samples] int64`, that the tokens will take.
        seed_keys: `[num_slots] int64`, of `gumbel.seed_keys`.
        inv_temperature: `[num_slots] float32`; 0: the first of the largest logits.
        thresholds: `[num_samples] float32`, smallest logit that may be drawn; None: all may.
        bad_token: Stands for the token of a row with a NaN or infinity.
        empty_token: Stands for the token of a row of minus infinity.
        destination: Where the tokens go besides.
        config: How the work is cut.

    Returns:
        Token ids `[num_samples] int64`; anything where the slot is -1.
    """
    num_rows, vocab = logits.shape
    num_parts = triton.cdiv(vocab, _BLOCK_LEN.value * config.blocks_per_program)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    # Not halves of one tensor: kernels are compiled for the alignment of what they are given.
    maxima = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    scores = torch.empty_like(maxima)
    blocks = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    _find_winners[(num_parts, num_rows)](
        logits,
        logits.stride(0),
        slots,
        positions,
        seed_keys,
        inv_temperature,
        thresholds,
        maxima,
        scores,
        blocks,
        VOCAB=vocab,
        BLOCKS=config.blocks_per_program,
        HAS_THRESHOLDS=thresholds is not None,
        num_warps=config.num_warps,
        **launch_options(),
    )
    _finish_rows[(num_rows,)](
        logits,
        logits.stride(0),
        slots,
        positions,
        seed_keys,
        inv_temperature,
        thresholds,
        maxima,
        scores,
        blocks,
        token_ids,
        None if destination is None else destination.history,
        None if destination is None else destination.write_back,
        None if destination is None else destination.results,
        None if destination is None else destination.result_row,
        0 if destination is None else destination.results.stride(0),
        VOCAB=vocab,
        NUM_PARTS=num_parts,
        PADDED_PARTS=triton.next_power_of_2(num_parts),
        HAS_THRESHOLDS=thresholds is not None,
        HAS_DESTINATION=destination is not None,
        BAD_TOKEN=bad_token,
        EMPTY_TOKEN=empty_token,
        num_warps=1,
        **launch_options(),
    )
    return token_ids


@triton.jit
def _find_winners(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    seed_keys_ptr: tl.tensor,
    inv_temperature_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)
    slot = tl.load(slots_ptr + row)
    block = part * BLOCKS + tl.arange(0, BLOCKS)
    ids = block[:, None] * _BLOCK_LEN + tl.arange(0, _BLOCK_LEN)[None, :]
    # For padding, too: these loads need not wait for that of the slot.
    x = load_logits(logits_ptr + row * logits_stride + ids, ids < VOCAB)
    if slot >= 0:
        block_maxima = tl.max(x, 1)
        maximum = tl.max(block_maxima, 0)
        inv_temperature = tl.load(inv_temperature_ptr + slot)
        scores = block_maxima
        if inv_temperature > 0:
            weights = weights_below(x, maximum, inv_temperature * _LOG2_E)
            if HAS_THRESHOLDS:
                weights = tl.where(x >= tl.load(thresholds_ptr + row), weights, 0.0)
            key = _row_key(tl.load(seed_keys_ptr + slot), tl.load(positions_ptr + row))
            # Blocks take negative ids, so that their noise has nothing to do with that of tokens.
            scores = tl.sum(weights, 1) / _exponential(key, -1 - block)
        winner = tl.argmax(scores, 0)
        place = row * tl.num_programs(0) + part
        tl.store(maxima_ptr + place, maximum)
        tl.store(scores_ptr + place, tl.max(scores, 0))
        tl.store(blocks_ptr + place, part * BLOCKS + winner)


@triton.jit
def _finish_rows(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    seed_keys_ptr: tl.tensor,
    inv_temperature_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    history_ptr: tl.tensor,
    write_back_ptr: tl.tensor,
    results_ptr: tl.tensor,
    result_row_ptr: tl.tensor,
    results_stride: tl.tensor,
    VOCAB: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_DESTINATION: tl.constexpr,
    BAD_TOKEN: tl.constexpr,
    EMPTY_TOKEN: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)
    slot = tl.load(slots_ptr + row)
    part = tl.arange(0, PADDED_PARTS)
    has_part = part < NUM_PARTS
    place = row * NUM_PARTS + part
    maxima = tl.load(maxima_ptr + place, mask=has_part, other=float("-inf"))
    scores = tl.load(scores_ptr + place, mask=has_part, other=float("-inf"))
    blocks = tl.load(blocks_ptr + place, mask=has_part, other=0)
    if slot >= 0:
        inv_temperature = tl.load(inv_temperature_ptr + slot)
        scale = inv_temperature * _LOG2_E
        is_drawn = inv_temperature > 0
        maximum = tl.max(maxima, 0)
        if is_drawn:
            # From the part's maximum to the row's; that of the parts that are not there is 0.
            scores = tl.where(has_part, scores, 0.0) * weights_below(maxima, maximum, scale)
        block = tl.sum(tl.where(part == tl.argmax(scores, 0), blocks, 0), 0)

        ids = block * _BLOCK_LEN + tl.arange(0, _BLOCK_LEN)
        x = load_logits(logits_ptr + row * logits_stride + ids, ids < VOCAB)
        ratios = x
        if is_drawn:
            weights = weights_below(x, tl.max(x, 0), scale)
            if HAS_THRESHOLDS:
                weights = tl.where(x >= tl.load(thresholds_ptr + row), weights, 0.0)
            key = _row_key(tl.load(seed_keys_ptr + slot), tl.load(positions_ptr + row))
            ratios = weights / _exponential(key, ids)
        token_id = block * _BLOCK_LEN + tl.argmax(ratios, 0)
        token_id = tl.where(maximum == float("inf"), BAD_TOKEN, token_id)
        token_id = tl.where(maximum == float("-inf"), EMPTY_TOKEN, token_id)
        tl.store(token_ids_ptr + row, token_id.to(tl.int64))
        if HAS_DESTINATION:
            tl.store(history_ptr + tl.load(write_back_ptr + row), tl.maximum(token_id, 0))
            result_row = tl.load(result_row_ptr).to(tl.int64)
            tl.store(results_ptr + result_row * results_stride + row, token_id.to(tl.int64))


@triton.jit
def _row_key(seed_key: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Mix a slot's key and a position, as `gumbel.row_keys` does; uint64."""
    bits = seed_key.to(tl.uint64, bitcast=True) + position.to(tl.uint64, bitcast=True) * _GOLDEN
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def _exponential(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Return the noise of `gumbel.exponential` for int32 ids, float32."""
    bits = ids.to(tl.int64).to(tl.uint64, bitcast=True) * _GOLDEN
    bits = bits ^ key
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    uniform = ((bits >> 32).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, _LARGEST_UNIFORM)
    # -log(1 - u). Near 0, where the noise that decides is, from log((1 + s) / (1 - s)) = 2 atanh(s) with
    # s = u / (2 - u), whose series to s**15 is exact to float32 for u up to a half.
    s = uniform / (2.0 - uniform)
    q = s * s
    series = 0.07692308 + q * 0.06666667
    series = 0.11111111 + q * (0.09090909 + q * series)
    series = 0.2 + q * (0.14285714 + q * series)
    series = 1.0 + q * (0.33333333 + q * series)
    return tl.where(uniform < 0.5, 2.0 * s * series, -tl.log(1.0 - uniform))
