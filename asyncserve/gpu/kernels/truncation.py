"""The smallest logit that top-k, min-p and top-p keep of each row, found without sorting whole rows.

Two kernels. The first cuts the vocabulary among programs and notes the maximum of every 32 logits, called a
group, and each program's sum of weights. In the second a program takes a row. It sorts the maxima of longer
blocks, and takes from them a bound above which enough must lie (top-k: as many maxima) or likely does (top-p:
their weights). It lists the logits above the bound, of those groups only whose maximum is, and sorts these.
If they are too many, or too light, it lists by a lower bound, and at last searches: what is kept is all above
a cut, the largest value above which there is still enough, which it brackets between integers in the order of
the logits. A row takes the same way whatever stands beside it, and all sums are formed in an order that
depends on the row alone. Rows that cut nothing leave both kernels at once.
Plain torch beside it: `truncate` in `gpu/sampling/truncation.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from asyncserve.gpu.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous

_LOG2_E = tl.constexpr(1.4426950408889634)
_GROUP_LEN = tl.constexpr(32)
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
_FEWEST_FINITE = tl.constexpr(-1e30)
_BY_VALUE = tl.constexpr(3)  # so many rounds divide the values' range evenly, the others that of the integers
_ROUNDS = tl.constexpr(64)
_ROUNDING = tl.constexpr(4e-6)  # more than float32 sums are off, as a share
_LEAST_SORTED = 32

# Low bits of a float32 that are 0 in every value of the dtype.
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationConfig:
    """How the work is cut; powers of two. It changes the order of sums, so it is the same for all batches.

    Args:
        groups_per_program: Groups of 32 logits of a program of the first kernel.
        num_warps: Of such a program.
        row_warps: Of a row's program in the second kernel.
        list_len: Most values that such a program sorts, logits or maxima; at least 16.
        groups_listed: Groups whose logits it lists together.
        groups_searched: Groups that it searches together.
        row_registers: Most registers of its threads, so that more rows fit a multiprocessor; 0: no bound.
    """

    groups_per_program: int = 128
    num_warps: int = 4
    row_warps: int = 8
    list_len: int = 2048
    groups_listed: int = 256
    groups_searched: int = 256
    row_registers: int = 0


# 32 logits a thread in the first kernel, 64 bytes: programs enough to fill the device with one row. In the
# second eight warps, two for each scheduler, keep it busy, and what waits for all of them waits for few; a
# tile of it is 32 logits a thread, which is all that its registers hold without spilling.
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
        `[num_samples] float32`; minus infinity where nothing is cut or the row's logits are not finite,
        anything where its slot is -1.
    """
    num_rows, vocab = logits.shape
    num_groups = triton.cdiv(vocab, _GROUP_LEN.value)
    num_parts = triton.cdiv(num_groups, config.groups_per_program)
    list_len = min(config.list_len, max(triton.next_power_of_2(vocab), 4 * _LEAST_SORTED))
    block_groups = triton.next_power_of_2(triton.cdiv(num_groups, list_len))
    num_blocks = triton.cdiv(num_groups, block_groups)
    device = logits.device
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=device)
    group_maxima = torch.empty((num_rows, num_groups), dtype=torch.float32, device=device)
    listed_groups = torch.empty((num_rows, num_groups), dtype=torch.int32, device=device)
    listed = torch.empty((num_rows, list_len), dtype=torch.float32, device=device)
    # Not halves of one tensor: kernels are compiled for the alignment of what they are given.
    part_maxima = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    part_sums = torch.empty_like(part_maxima)
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
        listed_groups,
        listed,
        thresholds,
        VOCAB=vocab,
        NUM_GROUPS=num_groups,
        NUM_PARTS=num_parts,
        PADDED_PARTS=triton.next_power_of_2(num_parts),
        BLOCK_GROUPS=block_groups,
        PADDED_BLOCKS=max(triton.next_power_of_2(num_blocks), _LEAST_SORTED),
        LIST_LEN=list_len,
        GROUPS_LISTED=config.groups_listed,
        GROUPS_SEARCHED=config.groups_searched,
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
    listed_groups_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    LIST_LEN: tl.constexpr,
    GROUPS_LISTED: tl.constexpr,
    GROUPS_SEARCHED: tl.constexpr,
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
                # The largest integer that is certainly cut.
                low = _key_of(tl.full((), float("-inf"), tl.float32), SHIFT)
                if min_p > 0:
                    cut = maximum + tl.log2(min_p) / scale
                    at = _key_of(cut, SHIFT)
                    low = tl.maximum(low, tl.where(_value_of(at, SHIFT) < cut, at, at - 1))
                threshold = _value_of(low + 1, SHIFT)
                if (top_k < VOCAB) | (top_p < 1.0):
                    threshold = _threshold_of_row(
                        logits_ptr + row * logits_stride,
                        group_maxima_ptr + row * NUM_GROUPS,
                        listed_groups_ptr + row * NUM_GROUPS,
                        listed_ptr + row * LIST_LEN,
                        threshold,
                        maximum,
                        total,
                        scale,
                        top_k,
                        top_p,
                        min_p > 0,
                        VOCAB,
                        NUM_GROUPS,
                        BLOCK_GROUPS,
                        PADDED_BLOCKS,
                        LIST_LEN,
                        GROUPS_LISTED,
                        GROUPS_SEARCHED,
                        SHIFT,
                    )
                tl.store(thresholds_ptr + row, threshold)
            else:
                tl.store(thresholds_ptr + row, float("-inf"))
        else:
            tl.store(thresholds_ptr + row, float("-inf"))


@triton.jit
def _threshold_of_row(
    logits_ptr: tl.tensor,
    group_maxima_ptr: tl.tensor,
    listed_groups_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    floor: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    scale: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    has_min_p: tl.tensor,
    VOCAB: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    LIST_LEN: tl.constexpr,
    GROUPS_LISTED: tl.constexpr,
    GROUPS_SEARCHED: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """Return the smallest kept logit of a row with top-k or top-p; `floor` is the least that min-p leaves."""
    has_top_k = top_k < VOCAB
    is_restricted = has_top_k | has_min_p
    # All that can be kept is at least `bound`; all that is kept is likely to be at least `likely`.
    bound = floor
    likely = floor
    is_sure = 1
    attempt = 1
    if has_top_k | (has_min_p == 0):
        block = tl.arange(0, PADDED_BLOCKS)
        group = block[:, None] * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)[None, :]
        maxima = tl.load(group_maxima_ptr + group, mask=group < NUM_GROUPS, other=float("-inf"))
        maxima = tl.sort(tl.max(maxima, 1), descending=True)
        if has_top_k:
            # Down to the k-th maximum there are k logits at least.
            kth = tl.max(tl.where(block == top_k - 1, maxima, float("-inf")), 0)
            bound = tl.maximum(bound, kth)
        else:
            # Were the whole vocabulary as light as the bound, it would be too light to be kept.
            dropped = ((1.0 - top_p) * 0.99 / VOCAB).to(tl.float32) * total
            bound = tl.maximum(bound, maximum + tl.log2(tl.maximum(dropped, 1e-37)) / scale)
            # Down to some value the maxima alone may have p of the whole weight. Else what has nearly all of
            # theirs is tried: lighter maxima stand for more logits that are not maxima.
            weights = weights_below(maxima, maximum, scale)
            sums = tl.cumsum(weights, 0)
            weight_of_maxima = tl.max(sums, 0).to(tl.float64)
            nearly_all = (0.875 + 0.125 * top_p) * weight_of_maxima
            enough = top_p * total * 1.000001  # whatever the order of the sums
            is_sure = (enough <= nearly_all).to(tl.int32)
            is_needed = (sums - weights).to(tl.float64) < tl.minimum(enough, nearly_all)
            likely = tl.maximum(bound, tl.min(tl.where(is_needed, maxima, float("inf")), 0))
            # Of flat logits maxima say nothing.
            attempt = (weight_of_maxima < 0.5 * top_p * total).to(tl.int32)
    num_groups = 0
    num_listed = 0
    while attempt < 2:
        least = tl.where(attempt == 0, likely, bound)
        num_groups = _list_groups(
            group_maxima_ptr, listed_groups_ptr, least, NUM_GROUPS, PADDED_BLOCKS * BLOCK_GROUPS
        )
        num_listed = _list_logits(
            logits_ptr, listed_groups_ptr, listed_ptr, num_groups, least, VOCAB, LIST_LEN, GROUPS_LISTED
        )
        is_done = num_listed <= LIST_LEN
        if is_done & (attempt == 0) & (is_sure == 0):
            place = tl.arange(0, LIST_LEN)
            x = tl.load(listed_ptr + place, mask=place < num_listed, other=float("-inf"))
            is_done = tl.sum(weights_below(x, maximum, scale), 0) >= top_p * total
        attempt += tl.where(is_done, 2, 1)
    # Not in the loop: a compiler would keep what sorting needs in registers around it.
    if num_listed <= LIST_LEN // 4:
        threshold = _threshold_of_list(
            listed_ptr, num_listed, maximum, total, scale, top_k, top_p, is_restricted, LIST_LEN // 4
        )
    elif num_listed <= LIST_LEN:
        threshold = _threshold_of_list(
            listed_ptr, num_listed, maximum, total, scale, top_k, top_p, is_restricted, LIST_LEN
        )
    else:
        low = _key_of(bound, SHIFT) - 1
        # First what top-k keeps, then what top-p keeps of that.
        for stage in range(2):
            is_count = stage == 0
            if (is_count & has_top_k) | ((stage == 1) & (top_p < 1.0)):
                low = _search(
                    logits_ptr,
                    listed_groups_ptr,
                    num_groups,
                    low,
                    maximum,
                    scale,
                    tl.where(is_count, top_k.to(tl.float64), top_p * total),
                    tl.where((stage == 1) & is_restricted, top_p, 0.0),
                    is_count,
                    VOCAB,
                    GROUPS_SEARCHED,
                    SHIFT,
                )
        threshold = _value_of(low + 1, SHIFT)
    return threshold


@triton.jit
def _list_groups(
    group_maxima_ptr: tl.tensor,
    listed_groups_ptr: tl.tensor,
    least: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
) -> tl.tensor:
    """List the groups that have a logit of at least `least`, in order; return how many."""
    tl.debug_barrier()  # the threads have read what they still wanted of the list before
    group = tl.arange(0, PADDED_GROUPS)
    maxima = tl.load(group_maxima_ptr + group, mask=group < NUM_GROUPS, other=float("-inf"))
    is_above = (maxima >= least).to(tl.int32)
    place = tl.cumsum(is_above, 0) - 1
    tl.store(listed_groups_ptr + place, group, mask=is_above == 1)
    tl.debug_barrier()  # they read what others wrote
    return tl.sum(is_above, 0)


@triton.jit
def _list_logits(
    logits_ptr: tl.tensor,
    listed_groups_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    num_groups: tl.tensor,
    least: tl.tensor,
    VOCAB: tl.constexpr,
    LIST_LEN: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """List the logits of at least `least` of the listed groups; return how many, or more than LIST_LEN."""
    num_listed = tl.where(num_groups > LIST_LEN, num_groups, 0)  # each has one
    begin = 0
    while (begin < num_groups) & (num_listed <= LIST_LEN):
        place = begin + tl.arange(0, GROUPS)
        group = tl.load(listed_groups_ptr + place, mask=place < num_groups, other=0)
        ids = group[:, None] * _GROUP_LEN + tl.arange(0, _GROUP_LEN)[None, :]
        x = load_logits(logits_ptr + ids, (place < num_groups)[:, None] & (ids < VOCAB))
        is_above = (x >= least).to(tl.int32)
        within = tl.cumsum(is_above, 1)
        counts = tl.sum(is_above, 1)
        before = num_listed + tl.cumsum(counts, 0) - counts
        to = before[:, None] + within - 1
        tl.store(listed_ptr + to, x, mask=(is_above == 1) & (to < LIST_LEN))
        num_listed += tl.sum(counts, 0)
        begin += GROUPS
    tl.debug_barrier()  # the threads read what others wrote
    return num_listed


@triton.jit
def _threshold_of_list(
    listed_ptr: tl.tensor,
    num_listed: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    scale: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    is_restricted: tl.tensor,
    LEN: tl.constexpr,
) -> tl.tensor:
    """Return the smallest kept logit of a list of the largest, which has all that are kept.

    Args:
        listed_ptr: All logits down to some value, in any order.
        num_listed: How many, at most LEN.
        maximum: The largest.
        total: Weight of the whole vocabulary.
        scale: Of the weights.
        top_k: At least the vocabulary: off; else the list has as many, or all that min-p leaves.
        top_p: 1 or more: off.
        is_restricted: Whether there is a top-k or min-p, and top-p is a share of what they leave of the list.
        LEN: Of what is sorted.
    """
    place = tl.arange(0, LEN)
    x = tl.load(listed_ptr + place, mask=place < num_listed, other=float("-inf"))
    x = tl.sort(x, descending=True)
    last = tl.minimum(top_k, num_listed) - 1
    threshold = tl.min(tl.where(place <= last, x, float("inf")), 0)
    weights = tl.where(x >= threshold, weights_below(x, maximum, scale), 0.0).to(tl.float64)
    sums = tl.cumsum(weights, 0)
    wanted = top_p * tl.where(is_restricted, tl.max(sums, 0), total.to(tl.float64))
    is_kept = (x >= threshold) & (sums - weights < wanted)
    return tl.min(tl.where(is_kept, x, float("inf")), 0)


@triton.jit
def _search(
    logits_ptr: tl.tensor,
    listed_groups_ptr: tl.tensor,
    num_groups: tl.tensor,
    low: tl.tensor,
    maximum: tl.tensor,
    scale: tl.tensor,
    wanted: tl.tensor,
    share: tl.tensor,
    is_count: tl.tensor,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """Return the largest integer above which there is still `wanted`; the smallest kept is the next one.

    Args:
        logits_ptr: Of the row.
        listed_groups_ptr: The groups to look at.
        num_groups: How many.
        low: At most the result; returned if there is too little above it.
        maximum: The largest logit.
        scale: Of the weights.
        wanted: A count or a weight, float64.
        share: If not 0, `wanted` is this share of all above the first `low`.
        is_count: Whether logits are counted or weighed.
        VOCAB: Length of the row.
        GROUPS: Groups at once.
        SHIFT: Of `_key_of`.
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
            place = begin + tl.arange(0, GROUPS)
            group = tl.load(listed_groups_ptr + place, mask=place < num_groups, other=0)
            ids = group[:, None] * _GROUP_LEN + tl.arange(0, _GROUP_LEN)[None, :]
            x = load_logits(logits_ptr + ids, (place < num_groups)[:, None] & (ids < VOCAB))
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
        wanted = tl.where((turn == 0) & (share > 0.0), share * above_low.to(tl.float64), wanted)
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
        # With less than two of the lightest between the ends there is only one left: the smallest kept. Not
        # to be told where one is no more than what rounding makes of the sums.
        lightest = tl.where(is_count, 1.0, weights_below(_value_of(low, SHIFT), maximum, scale))
        is_one = (above_low - above_high < 1.5 * lightest) & (lightest > above_low * _ROUNDING)
        turn += 1
        is_open = (high - low > 1) & (is_one == 0) & (turn < _ROUNDS)
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
