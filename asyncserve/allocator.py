"""The C library's allocator, kept from giving back to the kernel what the next step needs again.

The logits of 256 rows over 49,152 tokens are 50 MB. glibc asks the kernel for each block above 32 MB anew,
and gives whole heaps back that no thread uses for a moment; the kernel then fills new pages with zeros, which
can take as long as a small model's step. For servers that compute on a CPU. Without glibc nothing happens.
"""

import contextlib
import ctypes

KEPT_BLOCK_BYTES = 1 << 30
"""Larger blocks do go back to the kernel when they are freed."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def share_one_heap() -> None:
    """Let all threads allocate from the heap that never goes; to be called while there is one thread."""
    _set(_M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Keep what is freed for the next step."""
    _set(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
    _set(_M_TRIM_THRESHOLD, KEPT_BLOCK_BYTES)


def give_back_memory() -> None:
    """Give the kernel what is free now."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _set(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(option, value)
