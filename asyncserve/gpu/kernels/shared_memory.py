"""One split of a multiprocessor's memory between L1 cache and shared memory, for all kernels.

Left to itself the driver gives a kernel the shared memory it needs and leaves the rest to the cache. Then two
kernels in a row ask for different splits, and a multiprocessor changes its split only when it is empty: the
second does not begin while the first ends. Kernels that stream have no use for a large cache, so all of ours
ask for the largest shared memory, as cuBLAS's do.
"""

import ctypes

import triton

_PREFERRED_SHARED_MEMORY_CARVEOUT = 9
"""`CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT` of the driver's interface; its value is in percent."""


def prefer_shared_memory() -> None:
    """Let every kernel that Triton loads from now on ask for as much shared memory as there is."""
    driver = ctypes.CDLL("libcuda.so.1")

    def ask(_module: object, function: int, *_others: object) -> None:
        # A preference: where it is not understood, kernels only run less side by side.
        driver.cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_SHARED_MEMORY_CARVEOUT, 100)

    triton.knobs.runtime.kernel_load_end_hook.add(ask)
