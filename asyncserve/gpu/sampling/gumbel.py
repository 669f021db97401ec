"""The random choice: the Gumbel-max trick with noise that is a pure function of (seed, position, token id).

Whatever else is in the batch, whichever row a sequence has and however often it was preempted, a position
gets the same noise, so the same logits give the same token. There is no generator and no state.

`argmax(log w + Gumbel)` is computed as `argmax(w / E)` with `E` exponential, which is the same choice. From a
whole vocabulary a token is drawn in two such races, first among blocks of tokens by their summed weight and
then among the tokens of the winning block: exactly the same distribution, with noise for hundreds of
elements instead of tens of thousands. A GPU's kernel is the same function (`gpu/kernels/sampling.py`).

Source: the mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, with the
constants of Stafford's variant 13).
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK_LEN = 128
"""Tokens per block of a draw from the whole vocabulary: about the square root of twice its usual size."""

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_LARGEST_UNIFORM = 1.0 - 2.0**-24


def seed_keys(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Mix seeds into 64-bit keys, `[num]`: the part of a row's key that stays the same for a sequence."""
    return _mix_host(seeds + np.uint64(_GOLDEN)).view(np.int64)


def row_keys(keys: npt.NDArray[np.int64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Mix keys of seeds and positions into one 64-bit key per row.

    Args:
        keys: `[num_rows]`, of `seed_keys`.
        positions: `[num_rows]`, absolute position of the token to be drawn.
    """
    return _mix_host(keys.view(np.uint64) + positions * np.uint64(_GOLDEN)).view(np.int64)


def exponential(keys: Tensor, ids: Tensor) -> Tensor:
    """Return exponentially distributed noise, one value per (key, id).

    Args:
        keys: `[num_rows, 1] int64`, of `row_keys`.
        ids: `[num_rows or 1, num_ids] int64`; any integers.

    Returns:
        `[num_rows, num_ids] float32`, in about `[1e-10, 17]`.
    """
    # int64 products wrap around; `>>` copies the sign bit, hence the masks.
    bits = (ids * _signed(_GOLDEN)).bitwise_xor(keys)
    bits = bits.bitwise_xor_((bits >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(_MIX_1))
    bits = bits.bitwise_xor_((bits >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_MIX_2))
    # The high half is the well-mixed one. Small noise decides, so precision is kept near uniform = 0.
    uniform = (bits >> 32).bitwise_and_((1 << 32) - 1).to(torch.float32).add_(0.5).mul_(2.0**-32)
    return uniform.clamp_(max=_LARGEST_UNIFORM).neg_().log1p_().neg_()


def draw_among(weights: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """Draw one of the given tokens per row; neither their order nor absent ones change the outcome.

    Args:
        weights: `[num_rows, num_ids] float32`, not negative, in proportion to the probabilities.
        ids: `[num_rows, num_ids] int64`, distinct token ids.
        keys: `[num_rows, 1] int64`.

    Returns:
        Token ids `[num_rows] int64`.
    """
    winner = (weights / exponential(keys, ids)).argmax(dim=1, keepdim=True)
    return ids.gather(1, winner).squeeze(1)


def draw(weights: Tensor, keys: Tensor) -> Tensor:
    """Draw one token of the whole vocabulary per row.

    Args:
        weights: `[num_rows, vocab] float32`, not negative, in proportion to the probabilities.
        keys: `[num_rows, 1] int64`.

    Returns:
        Token ids `[num_rows] int64`.
    """
    vocab = weights.shape[1]
    num_whole, rest = divmod(vocab, BLOCK_LEN)
    sums = weights[:, : num_whole * BLOCK_LEN].view(weights.shape[0], num_whole, BLOCK_LEN).sum(dim=2)
    if rest:
        sums = torch.cat((sums, weights[:, num_whole * BLOCK_LEN :].sum(dim=1, keepdim=True)), dim=1)
    # Blocks take negative ids, so that their noise has nothing to do with that of tokens.
    block_ids = torch.arange(-1, -sums.shape[1] - 1, -1, device=weights.device).unsqueeze(0)
    blocks = (sums / exponential(keys, block_ids)).argmax(dim=1, keepdim=True)
    ids = blocks * BLOCK_LEN + torch.arange(BLOCK_LEN, device=weights.device)
    if rest:
        inside = ids < vocab
        ids = ids.clamp_(max=vocab - 1)
        return draw_among(weights.gather(1, ids) * inside, ids, keys)
    return draw_among(weights.gather(1, ids), ids, keys)


def _mix_host(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_MIX_1)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_MIX_2)
    return bits ^ (bits >> np.uint64(31))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
