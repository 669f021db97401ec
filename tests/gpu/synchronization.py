"""Finding where the host waits for the GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Make every operation raise that lets the host wait for the GPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the mode does not yet find all of them
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
