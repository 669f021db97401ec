"""Tokens by kernels: truncation where a row may ask for it, then argmax or draw.

Takes logits of any float dtype and each row's slot and position on the device; only launches, so that a graph
can hold it. Knows no stage that changes logits. What it computes is what `argmax`, `drawing` and their parts
compute on a CPU.
"""

from torch import Tensor

from asyncserve.gpu.kernels.sampling import Destination, choose_tokens
from asyncserve.gpu.kernels.truncation import find_thresholds
from asyncserve.gpu.sampling.slot_values import DeviceValues
from asyncserve.step import BAD_LOGITS


def choose(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    values: DeviceValues,
    *,
    truncates: bool,
    empty_token: int = BAD_LOGITS,
    destination: Destination | None = None,
) -> Tensor:
    """Choose one token for each row.

    Args:
        logits: `[num_samples, vocab]`, rows contiguous in themselves; left as they are.
        slots: `[num_samples] int32`; -1 for padding.
        positions: `[num_samples] int64`, absolute position that each row's token will take.
        values: Of the slots.
        truncates: Whether some row may have a top-k, top-p or min-p; if not, two kernels are saved.
        empty_token: Stands for the token of a row of minus infinity.
        destination: Where the tokens go besides.

    Returns:
        Token ids `[num_samples] int64`; `BAD_LOGITS` where a logit is NaN or infinite.
    """
    thresholds = None
    if truncates:
        thresholds = find_thresholds(
            logits,
            slots,
            inv_temperature=values.inv_temperature,
            top_k=values.top_k,
            top_p=values.top_p,
            min_p=values.min_p,
        )
    return choose_tokens(
        logits,
        slots,
        positions,
        seed_keys=values.seed_keys,
        inv_temperature=values.inv_temperature,
        thresholds=thresholds,
        bad_token=BAD_LOGITS,
        empty_token=empty_token,
        destination=destination,
    )
