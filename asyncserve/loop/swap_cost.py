"""Whether tokens come back cheaper from the host's memory or by being computed again.

Compares two measured times: what its blocks take to the host and back, as the device found at its start, and
what its tokens take, as the steps that computed prompts have shown. Pure; no clock.
"""

_KEPT = 0.98
"""What a step leaves of the weight of those before it: the last fifty or so count."""


class SwapCost:
    """The two rates, and the choice they make.

    Args:
        block_s: Seconds that a block takes to the host and back.
    """

    def __init__(self, block_s: float) -> None:
        self._block_s = block_s
        self._num_tokens = 0.0
        self._took_s = 0.0

    @property
    def transfer_s(self) -> float:
        """Seconds that a block takes one way."""
        return self._block_s / 2

    def note_step(self, num_tokens: int, num_decodes: int, device_s: float) -> None:
        """Note what a step took, if most of it was prompts; large steps count for more.

        Args:
            num_tokens: Of the step.
            num_decodes: Of them, those that were not a prompt's.
            device_s: Seconds the device worked on it; 0 if that is not known.
        """
        if num_decodes * 2 > num_tokens or device_s <= 0.0:
            return
        self._num_tokens = _KEPT * self._num_tokens + num_tokens
        self._took_s = _KEPT * self._took_s + device_s

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether moving so many blocks both ways takes less than computing so many tokens.

        Before a step has told what a token takes: yes.
        """
        return self._is_cheaper(num_blocks * self._block_s, num_tokens)

    def prefers_load(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether loading so many blocks, which are there, takes less than computing so many tokens.

        Before a step has told what a token takes: yes.
        """
        return self._is_cheaper(num_blocks * self.transfer_s, num_tokens)

    def _is_cheaper(self, moving_s: float, num_tokens: int) -> bool:
        return not self._num_tokens or moving_s * self._num_tokens < num_tokens * self._took_s
