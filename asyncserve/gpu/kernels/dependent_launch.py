"""Programmatic dependent launch: a kernel begins while the one before it ends.

Without it a kernel starts when the last program of the one before has left and its writes are visible, which
costs about a microsecond of an idle device each time; with it the start is hidden (an H200 runs a graph of
280 tiny kernels at 0.77 instead of 1.05 µs each). The rules, for every kernel of a step:

* before `wait_for_previous` a program touches only what no kernel of a step writes: weights and tables of the
  model. After it, everything written by earlier kernels is visible.
* `let_next_begin` comes after the wait, never before. So a kernel begins when all before the previous one are
  complete, and a chain of them keeps its order.
* one exception follows from that: decode attention reads lengths, tables, slots and angles before its wait,
  because the kernel launched just before it, a projection, `rotate_and_write` or attention of the step's
  other rows, never writes them.

Hopper and later; elsewhere, and in Triton's interpreter, both do nothing.
"""

import functools

import torch
import triton
import triton.language as tl

_LEAST_CAPABILITY = (9, 0)


@triton.jit
def wait_for_previous(USE_PDL: tl.constexpr) -> None:
    """Wait until the kernels launched before are complete and what they wrote is visible."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin(USE_PDL: tl.constexpr) -> None:
    """Let the kernel launched next begin, up to its wait, when all programs of this one came here."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def launch_options() -> dict[str, bool]:
    """Return the keywords for every launch of such a kernel: `kernel[grid](..., **launch_options())`.

    They are the kernel's `USE_PDL` and, where it is understood, the launcher's own switch.
    """
    if not isinstance(wait_for_previous, triton.JITFunction):  # the interpreter
        return {"USE_PDL": False}
    is_new_enough = torch.cuda.get_device_capability() >= _LEAST_CAPABILITY
    return {"USE_PDL": is_new_enough, "launch_pdl": is_new_enough}
