"""The most tokens of a step: the device's budget, or fewer for a while after a step that lacked memory.

Takes note of steps that lacked memory and of those that went well. Pure; plans nothing.
"""

STEPS_KEPT_SMALL = 32
"""Steps that must go well before they may be twice as large again, after one that lacked memory."""
SMALLEST_LIMIT = 16
"""Tokens that later steps may have in any case after one that lacked memory."""


class StepLimit:
    """How many tokens the next step may have.

    Args:
        budget: Most tokens that a step may ever have.

    Attributes:
        num_tokens: Most tokens of the next one.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._num_good = 0
        self.num_tokens = budget

    def lower(self, num_tokens: int) -> None:
        """Keep the next steps as small as this, but for `SMALLEST_LIMIT`: a larger one lacked memory."""
        self.num_tokens = min(self.num_tokens, max(num_tokens, SMALLEST_LIMIT))
        self._num_good = 0

    def note_good(self) -> None:
        """Note that a step went well."""
        if self.num_tokens == self._budget:
            return
        self._num_good += 1
        if self._num_good == STEPS_KEPT_SMALL:
            self._num_good = 0
            self.num_tokens = min(self._budget, 2 * self.num_tokens)
