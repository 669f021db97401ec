"""The smallest logit that top-k, min-p and top-p keep of each row, found without sorting.

Two kernels. The first cuts the vocabulary among programs and notes the maximum of every 32 logits, called a
group, and each program's sum of weights. In the second a program takes a row: what is kept is a beginning of
the sorted row, hence all above a cut, and the cut is the largest value above which there is still enough,
counted (top-k) or weighed (top-p). It is bracketed first among the maxima, each of which stands for at least
one logit, and then among the logits of those groups only whose maximum lies above. Logits are searched as
integers of the same order, so the search ends. A row takes the same way whatever stands beside it: all sums
are formed in an order that depends on the row alone. Rows that cut nothing leave both kernels at once.
Plain torch beside it: `truncate` in `gpu/sampling/truncation.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from asyncserve.gpu.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous

_LOG2_E = tl.constexpr(1.4426950408889634)
_GROUP_LEN = tl.constexpr(32)
_LIST_LEN = tl.constexpr(2048)
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
_FEWEST_FINITE = tl.constexpr(-1e30)
_BY_VALUE = tl.constexpr(3)  # so many rounds divide the values' range evenly, the others that of the integers
_ROUNDS_AMONG_MAXIMA = tl.constexpr(5)
_ROUNDS = tl.constexpr(64)

# Low bits of a float32 that are 0 in every value of the dtype.
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationConfig:
    """How the work is cut; powers of two. It changes the order of sums, so it is the same for all batches.

    Args:
        groups_per_program: Groups of 32 logits of a program of the first kernel.
        num_warps: Of such a program.
        groups_at_once: Groups that a row's program looks at together in the second kernel.
        row_warps: Of such a program.
        row_registers: Most registers of its threads, so that more rows fit a multiprocessor; 0: no bound.
    """

    groups_per_program: int = 128
    num_warps: int = 4
    groups_at_once: int = 256
    row_warps: int = 16
    row_registers: int = 0


# 32 logits a thread in the first kernel, 64 bytes: programs enough to fill the device with one row. In the
# second a row alone keeps the four schedulers of its multiprocessor busy, and spills no register.
DEFAULT_CONFIG = TruncationConfig()


def find_thresholds(
    logits: torch.Tensor,
    slots: torch.Tensor,
    *,
    inv_temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    config: TruncationConfig = DEFAULT_CONFIG,
) -> torch.Tensor:
    """Return each row's smallest kept logit; only launches.

    Args:
        logits: `[num_samples, vocab]` float32, float16 or bfloat16, rows contiguous in themselves.
        slots: `[num_samples] int32`, of each row; -1: left alone.
        inv_temperature: `[num_slots] float32`; 0: greedy, cuts nothing.
        top_k: `[num_slots] int64`; at least the vocabulary: off.
        top_p: `[num_slots] float64`; 1 or more: off.
        min_p: `[num_slots] float32`; 0: off.
        config: How the work is cut.

    Returns:
        `[num_samples] float32`; minus infinity where nothing is cut, anything where the row's slot is -1 or
        its logits are not finite.
    """
    num_rows, vocab = logits.shape
    num_groups = triton.cdiv(vocab, _GROUP_LEN.value)
    num_parts = triton.cdiv(num_groups, config.groups_per_program)
    device = logits.device
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=device)
    group_maxima = torch.empty((num_rows, num_groups), dtype=torch.float32, device=device)
    listed = torch.empty((num_rows, num_groups), dtype=torch.int32, device=device)
    part_maxima, part_sums = torch.empty((2, num_rows, num_parts), dtype=torch.float32, device=device)
    _note_maxima[(num_parts, num_rows)](
        logits,
        logits.stride(0),
        slots,
        inv_temperature,
        top_k,
        top_p,
        min_p,
        group_maxima,
        part_maxima,
        part_sums,
        VOCAB=vocab,
        NUM_GROUPS=num_groups,
        GROUPS=config.groups_per_program,
        num_warps=config.num_warps,
        **launch_options(),
    )
    _find_thresholds[(num_rows,)](
        logits,
        logits.stride(0),
        slots,
        inv_temperature,
        top_k,
        top_p,
        min_p,
        group_maxima,
        part_maxima,
        part_sums,
        listed,
        thresholds,
        VOCAB=vocab,
        NUM_GROUPS=num_groups,
        NUM_PARTS=num_parts,
        PADDED_PARTS=triton.next_power_of_2(num_parts),
        GROUPS=config.groups_at_once,
        SHIFT=_UNUSED_BITS[logits.dtype],
        num_warps=config.row_warps,
        **({"maxnreg": config.row_registers} if config.row_registers else {}),
        **launch_options(),
    )
    return thresholds


@triton.jit
def load_logits(ptrs: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Return logits as float32: minus infinity where there are none, and infinity for NaN.

    Either makes a row's maximum infinite, which is how a row that is not finite is known.
    """
    x = tl.load(ptrs, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def weights_below(x: tl.tensor, maximum: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return the weights of logits, 1 at the maximum; `scale` is log2(e) over the temperature.

    An infinite maximum gives no NaN: 0 for a row of minus infinity, infinity where there is infinity.
    """
    base = tl.minimum(tl.where(maximum == float("-inf"), 0.0, maximum), 3e38)
    return tl.exp2((x - base) * scale)


@triton.jit
def _does_truncate(
    inv_temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor, VOCAB: tl.constexpr
) -> tl.tensor:
    return (inv_temperature > 0) & ((top_k < VOCAB) | (top_p < 1.0) | (min_p > 0))


@triton.jit
def _note_maxima(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    slots_ptr: tl.tensor,
    inv_temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    group_maxima_ptr: tl.tensor,
    part_maxima_ptr: tl.tensor,
    part_sums_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        inv_temperature = tl.load(inv_temperature_ptr + slot)
        if _does_truncate(
            inv_temperature,
            tl.load(top_k_ptr + slot),
            tl.load(top_p_ptr + slot),
            tl.load(min_p_ptr + slot),
            VOCAB,
        ):
            group = part * GROUPS + tl.arange(0, GROUPS)
            ids = group[:, None] * _GROUP_LEN + tl.arange(0, _GROUP_LEN)[None, :]
            x = load_logits(logits_ptr + row * logits_stride + ids, ids < VOCAB)
            group_maxima = tl.max(x, 1)
            tl.store(group_maxima_ptr + row * NUM_GROUPS + group, group_maxima, mask=group < NUM_GROUPS)
            maximum = tl.max(group_maxima, 0)
            total = tl.sum(tl.sum(weights_below(x, maximum, inv_temperature * _LOG2_E), 1), 0)
            place = row * tl.num_programs(0) + part
            tl.store(part_maxima_ptr + place, maximum)
            tl.store(part_sums_ptr + place, total)


@triton.jit
def _find_thresholds(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    slots_ptr: tl.tensor,
    inv_temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    group_maxima_ptr: tl.tensor,
    part_maxima_ptr: tl.tensor,
    part_sums_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        inv_temperature = tl.load(inv_temperature_ptr + slot)
        top_k = tl.load(top_k_ptr + slot)
        top_p = tl.load(top_p_ptr + slot)
        min_p = tl.load(min_p_ptr + slot)
        if _does_truncate(inv_temperature, top_k, top_p, min_p, VOCAB):
            scale = inv_temperature * _LOG2_E
            part = tl.arange(0, PADDED_PARTS)
            has_part = part < NUM_PARTS
            maxima = tl.load(part_maxima_ptr + row * NUM_PARTS + part, mask=has_part, other=float("-inf"))
            sums = tl.load(part_sums_ptr + row * NUM_PARTS + part, mask=has_part, other=0.0)
            maximum = tl.max(maxima, 0)
            if tl.abs(maximum) < float("inf"):
                total = tl.sum(sums * weights_below(maxima, maximum, scale), 0)
                threshold = _threshold_of_row(
                    logits_ptr + row * logits_stride,
                    group_maxima_ptr + row * NUM_GROUPS,
                    listed_ptr + row * NUM_GROUPS,
                    maximum,
                    total,
                    scale,
                    top_k,
                    top_p,
                    min_p,
                    VOCAB,
                    NUM_GROUPS,
                    GROUPS,
                    SHIFT,
                )
                tl.store(thresholds_ptr + row, threshold)
        else:
            tl.store(thresholds_ptr + row, float("-inf"))


@triton.jit
def _threshold_of_row(
    logits_ptr: tl.tensor,
    group_maxima_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    scale: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    VOCAB: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """Return a row's smallest kept logit. `low` is always the largest integer that is certainly cut."""
    has_top_k = top_k < VOCAB
    is_restricted = has_top_k | (min_p > 0)
    low = _key_of(tl.full((), float("-inf"), tl.float32), SHIFT)
    if min_p > 0:
        cut = maximum + tl.log2(min_p) / scale
        at = _key_of(cut, SHIFT)
        low = tl.maximum(low, tl.where(_value_of(at, SHIFT) < cut, at, at - 1))
    num_listed = GROUPS + 1
    # First what top-k keeps, then what top-p keeps of that.
    for stage in range(2):
        is_count = stage == 0
        if (is_count & has_top_k) | ((stage == 1) & (top_p < 1.0)):
            wanted = tl.where(is_count, top_k.to(tl.float64), top_p * total)
            if (is_count & (top_k <= NUM_GROUPS)) | ((stage == 1) & (is_restricted == 0)):
                if is_count:  # all maxima are enough
                    least = _least_maximum(group_maxima_ptr, NUM_GROUPS)
                else:
                    # Were the whole vocabulary as light as this, it would be too light to be kept.
                    dropped = ((1.0 - top_p) * 0.99 / VOCAB).to(tl.float32) * total
                    least = maximum + tl.log2(tl.maximum(dropped, 1e-37)) / scale
                low = tl.maximum(low, _key_of(least, SHIFT) - 1)
                low = _search(
                    group_maxima_ptr,
                    listed_ptr,
                    NUM_GROUPS,
                    low,
                    maximum,
                    scale,
                    wanted,
                    0.0,
                    is_count,
                    NUM_GROUPS,
                    GROUPS,
                    SHIFT,
                    _ROUNDS_AMONG_MAXIMA,
                    False,
                )
            if num_listed > GROUPS:  # else the list of top-k serves top-p, too
                num_listed = _list_groups(group_maxima_ptr, listed_ptr, _value_of(low, SHIFT), NUM_GROUPS)
            low = _search(
                logits_ptr,
                listed_ptr,
                num_listed,
                low,
                maximum,
                scale,
                wanted,
                tl.where((stage == 1) & is_restricted, top_p, 0.0),
                is_count,
                VOCAB,
                GROUPS,
                SHIFT,
                _ROUNDS,
                True,
            )
    return _value_of(low + 1, SHIFT)


@triton.jit
def _search(
    values_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    num_groups: tl.tensor,
    low: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    wanted: tl.tensor,
    share: tl.tensor,
    is_count: tl.tensor,
    NUM_VALUES: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
    ROUNDS: tl.constexpr,
    IS_LISTED: tl.constexpr,
) -> tl.tensor:
    """Return the largest integer above which there is still `wanted`, or one below it if rounds run out.

    Args:
        values_ptr: Of the row.
        listed_ptr: The groups to look at, if IS_LISTED; else all groups are.
        num_groups: How many.
        low: Below the result; returned if there is too little above it.
        maximum: The largest value.
        scale: Of the weights.
        wanted: A count or a weight, float64.
        share: If not 0, `wanted` is this share of all above the first `low`; only if IS_LISTED.
        is_count: Whether values are counted or weighed.
        NUM_VALUES: Of the row; there are none behind.
        GROUPS: Groups at once.
        SHIFT: Of `_key_of`.
        ROUNDS: How many at most.
        IS_LISTED: See above.
    """
    high = _key_of(maximum, SHIFT)
    above_high = 0.0
    turn = 0
    is_open = high - low > 1
    while is_open:
        low_value = tl.maximum(_value_of(low, SHIFT), _FEWEST_FINITE)
        step = (_value_of(high, SHIFT) - low_value) * 0.25
        by_value = (turn < _BY_VALUE) & (low_value > _FEWEST_FINITE)
        first = _pivot(low, high, low_value + step, 1, by_value, SHIFT)
        second = _pivot(low, high, low_value + step * 2.0, 2, by_value, SHIFT)
        third = _pivot(low, high, low_value + step * 3.0, 3, by_value, SHIFT)
        at_low = _value_of(low, SHIFT)
        at_first = _value_of(first, SHIFT)
        at_second = _value_of(second, SHIFT)
        at_third = _value_of(third, SHIFT)
        sums_low = tl.zeros([GROUPS], tl.float32)
        sums_first = tl.zeros([GROUPS], tl.float32)
        sums_second = tl.zeros([GROUPS], tl.float32)
        sums_third = tl.zeros([GROUPS], tl.float32)
        for begin in range(0, num_groups, GROUPS):
            group = begin + tl.arange(0, GROUPS)
            exists = group < num_groups
            if IS_LISTED:
                group = tl.load(listed_ptr + group, mask=exists, other=0)
            ids = group[:, None] * _GROUP_LEN + tl.arange(0, _GROUP_LEN)[None, :]
            x = load_logits(values_ptr + ids, exists[:, None] & (ids < NUM_VALUES))
            weights = tl.where(is_count, 1.0, weights_below(x, maximum, scale))
            sums_low += tl.sum(tl.where(x > at_low, weights, 0.0), 1)
            sums_first += tl.sum(tl.where(x > at_first, weights, 0.0), 1)
            sums_second += tl.sum(tl.where(x > at_second, weights, 0.0), 1)
            sums_third += tl.sum(tl.where(x > at_third, weights, 0.0), 1)
        # One reduction of four sums instead of four.
        sums = tl.sum(tl.join(tl.join(sums_low, sums_first), tl.join(sums_second, sums_third)), 0)
        which = tl.arange(0, 2)[:, None] + 2 * tl.arange(0, 2)[None, :]
        above_low = tl.sum(tl.where(which == 0, sums, 0.0))
        above_first = tl.sum(tl.where(which == 1, sums, 0.0))
        above_second = tl.sum(tl.where(which == 2, sums, 0.0))
        above_third = tl.sum(tl.where(which == 3, sums, 0.0))
        if IS_LISTED:
            is_share = (turn == 0) & (share > 0.0)
            wanted = tl.where(is_share, share * above_low.to(tl.float64), wanted)
        # What lies above grows smaller with the pivot: the last one with enough is the new low end.
        low_is_cut = above_low.to(tl.float64) >= wanted
        first_is_cut = above_first.to(tl.float64) >= wanted
        second_is_cut = above_second.to(tl.float64) >= wanted
        third_is_cut = above_third.to(tl.float64) >= wanted
        high = tl.where(third_is_cut, high, third)
        above_high = tl.where(third_is_cut, above_high, above_third)
        high = tl.where(second_is_cut, high, second)
        above_high = tl.where(second_is_cut, above_high, above_second)
        high = tl.where(first_is_cut, high, first)
        above_high = tl.where(first_is_cut, above_high, above_first)
        high = tl.where(low_is_cut, high, low)
        low = tl.where(first_is_cut, first, low)
        above_low = tl.where(first_is_cut, above_first, above_low)
        low = tl.where(second_is_cut, second, low)
        above_low = tl.where(second_is_cut, above_second, above_low)
        low = tl.where(third_is_cut, third, low)
        above_low = tl.where(third_is_cut, above_third, above_low)
        # With less than two of the lightest between the ends there is only one left: the smallest kept.
        lightest = tl.where(is_count, 1.0, weights_below(_value_of(low, SHIFT), maximum, scale))
        turn += 1
        is_open = (high - low > 1) & (above_low - above_high > 1.5 * lightest) & (turn < ROUNDS)
    return low


@triton.jit
def _pivot(
    low: tl.tensor,
    high: tl.tensor,
    value: tl.tensor,
    quarter: tl.constexpr,
    by_value: tl.tensor,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """Return an integer strictly between the ends: that of `value`, or so many quarters of the way."""
    between = tl.where(by_value, _key_of(value, SHIFT), low + (high - low) * quarter // 4)
    return tl.minimum(tl.maximum(between, low + 1), high - 1)


@triton.jit
def _least_maximum(group_maxima_ptr: tl.tensor, NUM_GROUPS: tl.constexpr) -> tl.tensor:
    least = tl.full([_LIST_LEN], float("inf"), tl.float32)
    for begin in range(0, NUM_GROUPS, _LIST_LEN):
        group = begin + tl.arange(0, _LIST_LEN)
        maxima = tl.load(group_maxima_ptr + group, mask=group < NUM_GROUPS, other=float("inf"))
        least = tl.minimum(least, maxima)
    return tl.min(least, 0)


@triton.jit
def _list_groups(
    group_maxima_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    low_value: tl.tensor,
    NUM_GROUPS: tl.constexpr,
) -> tl.tensor:
    """List the groups that have a logit above `low_value`, in order; return how many."""
    tl.debug_barrier()  # the threads have read what they still wanted of the list before
    num_listed = 0
    for begin in range(0, NUM_GROUPS, _LIST_LEN):
        group = begin + tl.arange(0, _LIST_LEN)
        maxima = tl.load(group_maxima_ptr + group, mask=group < NUM_GROUPS, other=float("-inf"))
        is_above = (maxima > low_value).to(tl.int32)
        place = num_listed + tl.cumsum(is_above, 0) - 1
        tl.store(listed_ptr + place, group, mask=is_above == 1)
        num_listed += tl.sum(is_above, 0)
    tl.debug_barrier()  # they read what others wrote
    return num_listed


@triton.jit
def _key_of(value: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the integer (int64) of a float32; they are in the order of the values, and both zeros are 0.

    There is one for each value of a dtype that leaves SHIFT low bits 0; any other gets that of the next one
    towards 0.
    """
    bits = value.to(tl.int32, bitcast=True)
    magnitude = ((bits & _MAGNITUDE_BITS) >> SHIFT).to(tl.int64)
    return tl.where(bits < 0, -magnitude, magnitude)


@triton.jit
def _value_of(key: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the float32 of an integer of `_key_of`."""
    magnitude = (tl.abs(key).to(tl.int32) << SHIFT).to(tl.float32, bitcast=True)
    return tl.where(key < 0, -magnitude, magnitude)
