"""How much may wait: a bound on sequences, one on tokens, and room that no tenant may take from the others.

Pure: takes what waits and what is asked for, gives nothing or the error. Under the `fair` policy a tenant
may have as much waiting as `TENANT_FACTOR` times the room that is free, so that a single one stops at four
fifths of the queue, two stop at four ninths each, and whoever comes finds room. Does not know what is
waited for.
"""

from dataclasses import dataclass
from typing import NamedTuple

from asyncserve.errors import InvalidRequest, Overloaded

TENANT_FACTOR = 4
"""A tenant may have so many times as much waiting as there is room left."""


class Load(NamedTuple):
    """What waits, or wants to."""

    num_sequences: int
    num_tokens: int

    def plus(self, other: "Load") -> "Load":
        """Return both together."""
        return Load(self.num_sequences + other.num_sequences, self.num_tokens + other.num_tokens)

    def minus(self, other: "Load") -> "Load":
        """Return this without the other, which is part of it."""
        return Load(self.num_sequences - other.num_sequences, self.num_tokens - other.num_tokens)


NOTHING = Load(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """Why there is no room.

    Args:
        message: For the client.
        reason: In a word, for metrics.
        load: So much must be started before there is room.
    """

    message: str
    reason: str
    load: Load

    def error(self, retry_after_s: float) -> Overloaded:
        """Return it as an error."""
        return Overloaded(self.message, retry_after_s=retry_after_s, reason=self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    """The bounds of one engine.

    Args:
        max_sequences: Most sequences that wait.
        max_tokens: Most tokens that wait; None for no bound. A call that finds none waiting is taken
            whatever it has, for it could never be served otherwise.
        shares: Whether a tenant must leave room for others.
    """

    max_sequences: int
    max_tokens: int | None = None
    shares: bool = False

    def excess(self, asked: Load, *, queued: Load, of_tenant: Load) -> Excess | None:
        """Return why a call finds no room, or None if it finds some.

        Args:
            asked: What the call has.
            queued: What waits.
            of_tenant: Of that, the caller's.

        Raises:
            InvalidRequest: It can never find room.
        """
        bound = self.max_sequences
        if asked.num_sequences > bound:
            raise InvalidRequest(
                f"{asked.num_sequences} sequences are asked for at once; this server lets at most {bound}"
                " wait"
            )
        over = queued.num_sequences + asked.num_sequences - bound
        if over > 0:
            return Excess(
                message=f"{queued.num_sequences} sequences are waiting, {asked.num_sequences} more are asked"
                f" for, and this server lets at most {bound} wait; try again later.",
                reason="queued_requests",
                load=Load(over, 0),
            )
        over = self._tenant_over(queued.num_sequences, of_tenant.num_sequences, bound)
        if over > 0:
            return Excess(
                message=f"{of_tenant.num_sequences} sequences of this API key are waiting, and the rest of"
                " the queue is for others; try again later.",
                reason="tenant_share",
                load=Load(over, 0),
            )
        if self.max_tokens is None or queued.num_tokens == 0:
            return None
        over = queued.num_tokens + asked.num_tokens - self.max_tokens
        if over > 0:
            return Excess(
                message=f"{queued.num_tokens} tokens are waiting to be started, about {asked.num_tokens} more"
                f" are asked for, and this server lets at most {self.max_tokens} wait; try again later.",
                reason="queued_tokens",
                load=Load(0, min(over, queued.num_tokens)),
            )
        over = self._tenant_over(queued.num_tokens, of_tenant.num_tokens, self.max_tokens)
        if over > 0:
            return Excess(
                message=f"{of_tenant.num_tokens} tokens of this API key are waiting to be started, and the"
                " rest of the queue is for others; try again later.",
                reason="tenant_share",
                load=Load(0, over),
            )
        return None

    def _tenant_over(self, queued: int, of_tenant: int, bound: int) -> int:
        """Return how much of a tenant's must be started before it may add to it; 0 if it may now."""
        num_free = bound - queued
        if not self.shares or of_tenant < TENANT_FACTOR * num_free or of_tenant == 0:
            return 0
        # Each one that is started takes 1 from the tenant and adds 1 to the room.
        return (of_tenant - TENANT_FACTOR * num_free) // (TENANT_FACTOR + 1) + 1


class LoadByTenant:
    """What waits before the scheduler has it, in all and of each tenant."""

    def __init__(self) -> None:
        self.total = NOTHING
        self._of: dict[str, Load] = {}

    def of(self, tenant: str) -> Load:
        """Return what waits of one tenant."""
        return self._of.get(tenant, NOTHING)

    def add(self, tenant: str, load: Load) -> None:
        """Count something more."""
        self.total = self.total.plus(load)
        self._of[tenant] = self.of(tenant).plus(load)

    def remove(self, tenant: str, load: Load) -> None:
        """Count something no longer."""
        self.total = self.total.minus(load)
        rest = self.of(tenant).minus(load)
        if rest.num_sequences:
            self._of[tenant] = rest
        else:
            del self._of[tenant]
