"""The C library's allocator, kept from giving back to the kernel what the next step needs again.

The logits of 256 rows over 49,152 tokens are 50 MB. glibc asks the kernel for each block above 32 MB anew,
and gives whole heaps back that no thread uses for a moment; the kernel then fills new pages with zeros, which
can take as long as a small model's step. So what a step frees is kept. What lasts as long as the device, its
weights above all, gets pages of its own: they go when it goes, and a device that is opened anew finds no
holes of the old one that are too small for it. For servers that compute on a CPU. Without glibc nothing
happens.
"""

import contextlib
import ctypes

KEPT_BLOCK_BYTES = 1 << 30
"""Larger blocks do go back to the kernel when they are freed."""
LASTING_BLOCK_BYTES = 1 << 20
"""Of what lasts, blocks from this size on are mapped one by one."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def share_one_heap() -> None:
    """Let all threads allocate from the heap that never goes; to be called while there is one thread."""
    _set(_M_ARENA_MAX, 1)


def map_large_blocks() -> None:
    """Take large blocks from the kernel, zeroed, and give them back when they are freed.

    Holds until `keep_freed_memory`, and for blocks allocated meanwhile for good.
    """
    _set(_M_MMAP_THRESHOLD, LASTING_BLOCK_BYTES)


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
