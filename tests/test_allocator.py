import platform
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT

BLOCK_BYTES = 48 * 1024 * 1024
SCRIPT = f"""
import ctypes, resource, threading
from asyncserve.allocator import give_back_memory, keep_freed_memory, share_one_heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def use_blocks():
    for _ in range(3):
        before = page_faults()
        blocks = [libc.malloc({BLOCK_BYTES}) for _ in range(2)]
        for block in blocks:
            libc.memset(block, 1, {BLOCK_BYTES})
        for block in blocks:
            libc.free(block)
        print(page_faults() - before)

def in_a_thread():
    thread = threading.Thread(target=use_blocks)
    thread.start()
    thread.join()

if SETS:
    share_one_heap()
    keep_freed_memory()
in_a_thread()
if SETS:
    give_back_memory()
    in_a_thread()
"""


def page_faults(*, sets: bool) -> list[int]:
    """Return the pages asked of the kernel by each turn of a thread that uses and frees large blocks."""
    script = SCRIPT.replace("SETS", str(sets))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return list(map(int, done.stdout.split()))


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_large_blocks_that_a_thread_frees_are_there_for_its_next_turn() -> None:
    first, *later = page_faults(sets=False)
    assert min(later) > first / 2, "it is not so by itself"
    first, second, third, anew, *_ = page_faults(sets=True)
    assert max(second, third) < first / 100
    assert anew > first / 2, "what was free is given back when that is asked for"


LASTING = f"""
import ctypes, os, pathlib
from asyncserve.allocator import keep_freed_memory, map_large_blocks, share_one_heap

libc = ctypes.CDLL(None)
libc.calloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def resident():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

share_one_heap()
keep_freed_memory()
for lasts in (True, False):
    before = resident()
    for _ in range(2):
        if lasts:
            map_large_blocks()
        block = libc.calloc(1, {BLOCK_BYTES})
        print(resident() - before)
        libc.memset(block, 1, {BLOCK_BYTES})
        keep_freed_memory()
        libc.free(block)
        print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_lasts_is_resident_once_it_is_written_and_goes_when_it_is_freed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LASTING], cwd=ROOT, capture_output=True, text=True, check=True
    )
    figures = [int(each) for each in done.stdout.split()]
    small = BLOCK_BYTES / 4
    assert max(figures[:4]) < small
    # Not the first of what does not last: where the heap grows, its memory may be new, and untouched, or not.
    assert min(figures[5:]) > small, "it is not so by itself"
