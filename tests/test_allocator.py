import ctypes
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from asyncserve import allocator
from tests.architecture.sources import ROOT
from tests.fakes.tiny_model import tiny_llama_folder

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


LIBC = f"""
import ctypes

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.sbrk.restype = ctypes.c_void_p

def make_hole(size):
    # What stands behind it is too large for any hole there is.
    hole, behind = libc.malloc(size), libc.malloc({BLOCK_BYTES} // 2)
    libc.free(hole)
    return hole

with open("/proc/self/maps") as maps:
    heap_begin = next(int(line.partition("-")[0], 16) for line in maps if line.endswith("[heap]\\n"))

def is_in_heap(address):
    return heap_begin <= address < libc.sbrk(0)
"""
LASTING = f"""
import os, pathlib
from asyncserve.allocator import keep_freed_memory, large_blocks_mapped, share_one_heap
{LIBC}
def resident():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

share_one_heap()
keep_freed_memory()
hole = make_hole(2 * {BLOCK_BYTES})
print(is_in_heap(hole))
with large_blocks_mapped():
    before = resident()
    block = libc.malloc({BLOCK_BYTES})
    print(not is_in_heap(block), resident() - before < {BLOCK_BYTES} / 4)
    libc.memset(block, 1, {BLOCK_BYTES})
    small = [libc.malloc(1 << 16) for _ in range({BLOCK_BYTES} >> 16)]
    for each in small:
        libc.memset(each, 1, 1 << 16)
    behind = libc.malloc(1 << 16)
    for each in small:
        libc.free(each)
libc.free(block)
# More than all that is free beside the hole, which may have grown at its beginning.
again = libc.malloc({BLOCK_BYTES} * 3 // 2)
print(resident() - before < {BLOCK_BYTES} / 4, abs(again - hole) < {BLOCK_BYTES} / 4)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another C library, or an old one")
def test_what_lasts_is_mapped_though_the_heap_has_room_which_is_there_afterwards() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LASTING], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == 5 * ["True"]


OPENED_TWICE = f"""
import sys
from pathlib import Path
from asyncserve.allocator import share_one_heap
{LIBC}
share_one_heap()
from asyncserve.checkpoint import open_checkpoint
from asyncserve.gpu.startup import start_runner

for _ in range(2):
    runner, _ = start_runner(
        open_checkpoint(sys.argv[1]), device="cpu", dtype="float32", num_gpu_blocks_override=32
    )
    large = [each for each in runner._model.parameters() if each.numel() * 4 > 1 << 20]
    print(len(large), *(is_in_heap(each.data_ptr()) for each in large))
    del runner, large
    make_hole({BLOCK_BYTES})
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another C library, or an old one")
@pytest.mark.parametrize("stack", ["8192", "unlimited"])
def test_weights_of_a_device_that_is_opened_anew_lie_in_no_hole_that_steps_have_left(
    tmp_path: Path, stack: str
) -> None:
    """They did: each opening put a fifth more of them into the heap, between what steps take and leave.

    With an unlimited stack the kernel maps below the heap, not above it.
    """
    if stack == "unlimited" and resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY:
        pytest.skip("the stack may not be unlimited")
    folder = tiny_llama_folder(tmp_path, vocab_size=8192)
    limited = [
        "sh",
        "-c",
        f'ulimit -S -s {stack}; exec "$0" "$@"',
        sys.executable,
        "-c",
        OPENED_TWICE,
        str(folder),
    ]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1 False", "1 False"]


def test_a_glibc_that_refuses_the_threshold_gets_the_largest_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the low threshold of what lasts would stay, and every step's large blocks be mapped anew."""
    asked: list[tuple[int, int]] = []

    def old_mallopt(option: int, value: int) -> bool:
        asked.append((option, value))
        return option != -3 or value <= 32 << 20

    monkeypatch.setattr(allocator, "_set", old_mallopt)
    allocator.keep_freed_memory()
    thresholds = [value for option, value in asked if option == -3]
    assert thresholds == [1 << 30, 32 << 20]
