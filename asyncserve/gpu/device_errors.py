"""What an exception of a step means: this step alone, too little memory for it, or the end of the device.

Takes what torch, Triton or anything below raised and gives an error of ours, with the original as its
`__cause__`. Some CUDA errors are sticky: after them every call to the device in this process fails, whatever
it is, and only a new process can use the device again. They are told by their text, because the layers that
raise them (torch, Triton, cuBLAS) have no class in common. Knows no plan and no thread.
"""

import traceback

import torch

from asyncserve.errors import DeviceLost, StepFailed, StepOutOfMemory

STICKY = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "illegal instruction",
    "illegal address",
    "misaligned address",
    "invalid program counter",
    "invalid address space",
    "hardware stack error",
    "launch timed out",
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "cuda error: unknown error",
    "cuda-capable device(s) is/are busy or unavailable",
    "context is destroyed",
    "gpu is lost",
)
"""Words of errors after which a CUDA context is of no more use, in lower case."""


def step_error(step_id: int, error: Exception) -> StepFailed | DeviceLost:
    """Translate what was raised in a step."""
    said = _first_line(error)
    translated: StepFailed | DeviceLost
    if is_sticky(error):
        translated = DeviceLost(f"step {step_id} lost the device: {said}")
    elif is_out_of_memory(error):
        translated = StepOutOfMemory(said, step_id=step_id)
    else:
        translated = StepFailed(said, step_id=step_id)
    translated.__cause__ = error
    # Its frames hold the step's activations, which must not live as long as the error is looked at.
    traceback.clear_frames(error.__traceback__)
    return translated


def is_sticky(error: BaseException) -> bool:
    """Return whether the device is lost to this process after such an error."""
    text = str(error).lower()
    return isinstance(error, DeviceLost) or any(words in text for words in STICKY)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was lacking, the device's or the host's."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
