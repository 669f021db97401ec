"""Persistent device rows, one per running sequence: the tokens, and what every step needs of the request.

The token history on the device is where input ids come from, for prefill and decode alike: a gather at
(slot, position). Sampled tokens are written back to it on the device, so step N+1 can be launched before
the host has seen step N's tokens. Changed only by `runner`, in plan order. Sampling parameters live with
the sampler, KV blocks in `block_tables`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from asyncserve.errors import InvariantError
from asyncserve.gpu.device import Device
from asyncserve.gpu.staging import Int64Array, Staging
from asyncserve.step import SlotAssignment


class SlotTable:
    """The rows.

    Args:
        num_slots: Rows.
        max_model_len: Most tokens of a sequence.
        device: Where the token history lives.

    Attributes:
        width: Columns of the history: `max_model_len + 1`, because a full sequence's last step still
            samples a token, for the position after its last.
        num_prompt_logprobs: Slot to how many prompt log-probabilities its request asked for.
        prompt_lens: Slot to prompt length, for the same slots.
    """

    def __init__(self, *, num_slots: int, max_model_len: int, device: Device) -> None:
        self.num_slots = num_slots
        self.width = max_model_len + 1
        self.num_prompt_logprobs: dict[int, int] = {}
        self.prompt_lens: dict[int, int] = {}
        self._occupied: set[int] = set()
        # Zeros and not garbage: after a failed step the one queued behind it gathers tokens that were never
        # written, and its results are dropped, but it must not index outside the vocabulary.
        if device.is_async:
            self.history = torch.zeros(
                num_slots * self.width + 1, dtype=torch.int32, device=device.torch_device
            )
        else:
            # numpy's zeros are not resident until written: most rows stay short.
            self.history = torch.from_numpy(np.zeros(num_slots * self.width + 1, dtype=np.int32))

    @property
    def num_occupied(self) -> int:
        """Slots that belong to a sequence."""
        return len(self._occupied)

    def admit(self, assignments: Sequence[SlotAssignment], staging: Staging) -> None:
        """Give slots to sequences and write their known tokens.

        Raises:
            InvariantError: A slot is taken or its tokens do not fit.
        """
        for assignment in assignments:
            slot = assignment.slot
            if slot in self._occupied or not 0 <= slot < self.num_slots:
                raise InvariantError(f"slot {slot} is admitted while taken or out of range")
            num_tokens = len(assignment.token_ids)
            if num_tokens >= self.width:
                raise InvariantError(f"slot {slot} is given {num_tokens} tokens; rows hold {self.width - 1}")
            self._occupied.add(slot)
            if assignment.sampling.num_prompt_logprobs is not None:
                self.num_prompt_logprobs[slot] = assignment.sampling.num_prompt_logprobs
                self.prompt_lens[slot] = assignment.prompt_len
        uploads = staging.upload([np.array(assignment.token_ids, np.int32) for assignment in assignments])
        for assignment, token_ids in zip(assignments, uploads, strict=True):
            begin = assignment.slot * self.width
            self.history[begin : begin + len(token_ids)].copy_(token_ids)

    def release(self, slot: int) -> None:
        """Take a slot back.

        Raises:
            InvariantError: It was not taken.
        """
        if slot not in self._occupied:
            raise InvariantError(f"slot {slot} is released while free")
        self._occupied.remove(slot)
        self.num_prompt_logprobs.pop(slot, None)
        self.prompt_lens.pop(slot, None)

    def flat_indices(self, slots: Int64Array, positions: Int64Array) -> Int64Array:
        """Return where (slot, position) pairs stand in the history, for `gather` and `write`; `[num]`."""
        return slots * self.width + positions

    def gather(self, indices: torch.Tensor) -> torch.Tensor:
        """Return tokens at `indices` `[num] int64`, as `[num] int32`."""
        return self.history.index_select(0, indices)

    def write(self, indices: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Store sampled `token_ids` `[num] int64` at `indices` `[num] int64`.

        What stands for none (`BAD_LOGITS`, `NO_TOKEN`) is stored as token 0: the step queued behind reads it,
        and its result is dropped.
        """
        self.history.index_copy_(0, indices, token_ids.clamp_min(0).to(torch.int32))

    def inherit(self, slots: torch.Tensor, parents: torch.Tensor, stop: int) -> None:
        """Give rows the tokens of others, all at once.

        Args:
            slots: `[num] int64`, the rows, distinct.
            parents: `[num] int64`, slot of the row whose tokens each takes.
            stop: Positions below this are taken.
        """
        rows = self.history[: self.num_slots * self.width].view(self.num_slots, self.width)[:, :stop]
        rows.index_copy_(0, slots, rows.index_select(0, parents))

    def tokens(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """Return a slot's tokens at positions `start … stop - 1`, `[stop - start] int32`, a view."""
        begin = slot * self.width
        return self.history[begin + start : begin + stop]
