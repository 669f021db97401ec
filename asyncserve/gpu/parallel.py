"""Tensor parallelism as an object: what ranks that share a model say to one another.

A model split over one rank needs no process group and pays nothing, so code that may run on several is
written once.
"""

from dataclasses import dataclass

import torch
import torch.distributed


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank's view of the ranks that share a model.

    Args:
        rank: This one, in [0, size).
        size: How many there are. Above 1, torch's default process group must have been made with as many.
    """

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place; returns `x`."""
        if self.size > 1:
            torch.distributed.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate every rank's `x` (all of one shape) along the last dimension, in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)
