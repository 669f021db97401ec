"""The C library's allocator, kept from giving back to the kernel what the next step needs again.

The logits of 256 rows over 49,152 tokens are 50 MB. glibc asks the kernel for each block above 32 MB anew,
and gives whole heaps back that no thread uses for a moment; the kernel then fills new pages with zeros, which
can take as long as a small model's step. So what a step frees is kept. What lasts as long as the device, its
weights above all, gets pages of its own, even where the heap has room: they go when it goes. In the heap they
would part what steps use, and a device that is opened anew would find holes of the old one, a little too
small for it between things that live on. For servers that compute on a CPU. Without glibc nothing happens.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator

KEPT_BLOCK_BYTES = 1 << 30
"""Larger blocks do go back to the kernel when they are freed."""

_LARGEST_OF_OLD_GLIBC = 32 << 20
"""Before 2.35 a larger threshold was refused, and the one before stayed."""

LASTING_BLOCK_BYTES = 1 << 20
"""Of what lasts, blocks from this size on are mapped one by one."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


class _Usage(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    ] + [("free_bytes", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


def share_one_heap() -> None:
    """Let all threads allocate from the heap that never goes; to be called while there is one thread."""
    _set(_M_ARENA_MAX, 1)


@contextlib.contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Take large blocks from the kernel, zeroed, for the duration of the block.

    They go back to the kernel when they are freed, whenever that is. So does, before and afterwards, what is
    free in the heap. Not to be nested: the inner one would end it for both.
    """
    give_back_memory()  # the end of the heap: small things go there, and not behind what is held
    held: list[int] = []
    try:
        _set(_M_MMAP_THRESHOLD, LASTING_BLOCK_BYTES)
        _hold_large_holes(held)
        yield
    finally:
        keep_freed_memory()
        for address in held:
            _libc().free(address)
        give_back_memory()


def keep_freed_memory() -> None:
    """Keep what is freed for the next step."""
    if not _set(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES):
        _set(_M_MMAP_THRESHOLD, _LARGEST_OF_OLD_GLIBC)
    _set(_M_TRIM_THRESHOLD, KEPT_BLOCK_BYTES)


def give_back_memory() -> None:
    """Give the kernel what is free now."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _hold_large_holes(held: list[int]) -> None:
    """Take the heap's free blocks that are large, for glibc maps nothing while one of them would do.

    Args:
        held: Gets their addresses; nothing is written to the blocks, so they cost no memory.
    """
    try:
        libc = _libc()
        usage = libc.mallinfo2()
        left = int(usage.free_bytes)
        # Which of the two lies lower, the heap or what is mapped, is the kernel's affair: after
        # `ulimit -s unlimited` it is what is mapped.
        bottom = libc.sbrk(0) - int(usage.arena)
        size = KEPT_BLOCK_BYTES
        while size >= LASTING_BLOCK_BYTES:
            address = libc.malloc(size) if size <= left else None
            if address is not None and bottom <= address < libc.sbrk(0):
                held.append(address)
                left -= size
            else:
                # No free block is as large: it was mapped.
                libc.free(address)
                size //= 2
    except (AttributeError, OSError):  # another C library, or an old one
        pass


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.sbrk.argtypes, libc.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
    libc.mallinfo2.restype = _Usage
    return libc


def _set(option: int, value: int) -> bool:
    """Set one of glibc's options; returns whether it was taken."""
    with contextlib.suppress(AttributeError, OSError):
        return bool(ctypes.CDLL(None).mallopt(option, value))
    return False
