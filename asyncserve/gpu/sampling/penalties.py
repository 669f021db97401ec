"""Repetition, frequency and presence penalties, from token counts kept on the device.

A slot that has penalties owns a *line* here: how often each token was generated, and a list of the tokens
that occur in it (prompt tokens once each if the repetition penalty looks at them, then every output). A
step changes the logits of listed tokens only, so it costs by the length of a sequence and not by the
vocabulary. Lines are allocated when first needed. Outputs are recorded by tensor, so the host never waits.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncserve.gpu.sampling.upload import upload, upload_ids
from asyncserve.step import SlotAssignment

_FIRST_WIDTH = 256


class Penalties:
    """Token counts and penalty values of the slots that have penalties.

    Args:
        num_slots: Most slots at once.
        vocab_size: Tokens counted per line.
        max_model_len: Most tokens of one sequence.
        device: Where the logits are.
    """

    def __init__(self, num_slots: int, vocab_size: int, max_model_len: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._max_width = max(max_model_len, 1)
        self._device = device
        self._line_of_slot: dict[int, int] = {}
        self._free_lines: list[int] = []
        self._lens: list[int] = []  # listed tokens per line
        # Frequency, presence and repetition penalty per line.
        self._values = np.zeros((0, 3), np.float32)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        # `[num_lines, width]`: what stands beyond a line's length is a token of the line, for which the
        # penalised value is the same however often it is computed, or token 0 in a line that began empty:
        # such a line has no repetition penalty, and a token that was not generated keeps its logit.
        self._listed = torch.zeros((0, min(_FIRST_WIDTH, self._max_width)), dtype=torch.int64, device=device)

    def admit(self, assignment: SlotAssignment) -> None:
        """Give a slot a line that counts the outputs it already has."""
        sampling = assignment.sampling
        tokens = np.frombuffer(assignment.token_ids, np.int32)
        outputs = tokens[assignment.prompt_len :]
        seen = np.unique(tokens if sampling.repetition_penalty != 1.0 else outputs).astype(np.int64)
        if not self._free_lines:
            self._add_lines()
        line = self._free_lines.pop()
        self._line_of_slot[assignment.slot] = line
        self._values[line] = (
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.repetition_penalty,
        )
        self._widen(len(seen))
        self._lens[line] = len(seen)
        self._listed[line].fill_(int(seen[0]) if len(seen) else 0)
        self._listed[line, : len(seen)] = upload(seen, self._device)
        self._counts[line].zero_()
        if len(outputs):
            ids, counts = np.unique(outputs, return_counts=True)
            self._counts[line, upload(ids.astype(np.int64), self._device)] = upload(
                counts.astype(np.int32), self._device
            )

    def release(self, slot: int) -> None:
        """Free a slot's line; nothing happens if it has none."""
        line = self._line_of_slot.pop(slot, None)
        if line is not None:
            self._free_lines.append(line)

    def record(self, rows: Sequence[int], slots: Sequence[int], token_ids: Tensor) -> None:
        """Count one more output of each of these slots.

        Args:
            rows: Indexes into `num_samples`.
            slots: The slot of each of these rows; each has a line.
            token_ids: `[num_samples] int64`; a negative one (the sequence ends with an error) counts as 0.
        """
        lines = [self._line_of_slot[slot] for slot in slots]
        self._widen(max(self._lens[line] for line in lines) + 1)
        on_device = self._tensor(lines)
        new = token_ids.index_select(0, self._tensor(rows)).clamp_(min=0)
        self._counts.view(-1).index_add_(
            0, on_device * self._vocab_size + new, torch.ones_like(new, dtype=torch.int32)
        )
        self._listed[on_device, self._tensor([self._lens[line] for line in lines])] = new
        for line in lines:
            self._lens[line] += 1

    def apply(self, logits: Tensor, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Penalise the listed tokens of each of these slots, in place.

        Args:
            logits: `[num_samples, vocab] float32`, contiguous.
            rows: Indexes into `num_samples`.
            slots: The slot of each of these rows; each has a line.
        """
        lines = [self._line_of_slot[slot] for slot in slots]
        width = max(1, max(self._lens[line] for line in lines))
        values = self._values[lines]
        on_device = self._tensor(lines)
        listed = self._listed[:, :width].index_select(0, on_device)
        counts = self._counts.view(-1).take(listed + (on_device * self._vocab_size).unsqueeze(1))
        index = listed + (self._tensor(rows) * logits.shape[1]).unsqueeze(1)
        flat = logits.view(-1)
        penalised = flat.take(index)
        if (values[:, 2] != 1.0).any():
            repetition = self._column(values[:, 2])
            penalised = torch.where(penalised > 0, penalised / repetition, penalised * repetition)
        penalised -= self._column(values[:, 0]) * counts + self._column(values[:, 1]) * (counts > 0)
        flat.scatter_(0, index.view(-1), penalised.view(-1))

    def _add_lines(self) -> None:
        num_lines = len(self._lens)
        num_new = min(max(4, num_lines), self._num_slots - num_lines)
        self._free_lines.extend(reversed(range(num_lines, num_lines + num_new)))
        self._lens.extend([0] * num_new)
        self._values = np.concatenate((self._values, np.zeros((num_new, 3), np.float32)))
        self._counts = torch.cat((self._counts, self._counts.new_zeros((num_new, self._vocab_size))))
        self._listed = torch.cat((self._listed, self._listed.new_zeros((num_new, self._listed.shape[1]))))

    def _widen(self, width: int) -> None:
        if width > self._listed.shape[1]:
            num_new = max(width, min(2 * self._listed.shape[1], self._max_width)) - self._listed.shape[1]
            self._listed = torch.cat((self._listed, self._listed[:, :1].expand(-1, num_new)), dim=1)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return upload_ids(values, self._device)

    def _column(self, values: npt.NDArray[np.float32]) -> Tensor:
        return upload(np.ascontiguousarray(values), self._device).unsqueeze(1)
