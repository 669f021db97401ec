"""What the paged attention kernels share: soft-capped scores, the base of their logarithms, dtypes, memory.

Scores are kept in base 2, so that softmax is exp2: a scale, a cap and a sink are multiplied by log2(e). The
cache is `[num_blocks, num_kv_heads, block_len, head_dim]`; a *cell* is one position of one of its heads,
`(block * num_kv_heads + head) * block_len + offset`, in int64, because a cache can have over 2**31 elements.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def softcapped(scores: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Return cap * tanh(scores / cap)."""
    # tanh(x) = sign(x) * (1 - e) / (1 + e) with e = exp(-2|x|), which cannot overflow.
    ratio = scores / cap
    small = tl.exp2(tl.abs(ratio) * -2.8853900817779268)
    capped = cap * (1.0 - small) / (1.0 + small)
    return tl.where(ratio < 0, -capped, capped)


IS_INTERPRETED = not isinstance(softcapped, triton.JITFunction)
"""Whether kernels run in Triton's interpreter, which takes tensors of a CPU."""


def product_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype in which matrix products of `dtype` take their operands."""
    if IS_INTERPRETED and dtype == torch.bfloat16:
        # The interpreter keeps bfloat16 as bits, and its tl.dot would multiply those.
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def shared_bytes(device: torch.device) -> int:
    """Return the shared memory that one program may have on the device of a tensor (it has an index)."""
    if IS_INTERPRETED:
        return 2**30
    properties: dict[str, int] = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["max_shared_mem"]
