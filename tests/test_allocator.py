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
