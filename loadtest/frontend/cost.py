"""CPU and wall time of a span of this process, and per token."""

import resource
import time
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU and wall time of a span, and how many tokens (or chunks) it handled."""

    num_tokens: int
    user_s: float
    kernel_s: float
    wall_s: float

    @property
    def user_us(self) -> float:
        """User CPU, µs per token."""
        return 1e6 * self.user_s / self.num_tokens

    @property
    def kernel_us(self) -> float:
        """Kernel CPU, µs per token."""
        return 1e6 * self.kernel_s / self.num_tokens

    @property
    def all_us(self) -> float:
        """CPU, µs per token."""
        return self.user_us + self.kernel_us

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of wall time."""
        return self.num_tokens / self.wall_s

    def as_object(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)


class Stopwatch:
    """CPU and wall time of this process since it was made."""

    def __init__(self) -> None:
        self._usage = resource.getrusage(resource.RUSAGE_SELF)
        self._started_s = time.perf_counter()

    def cost(self, num_tokens: int) -> Cost:
        """Return what the time since then cost."""
        now = resource.getrusage(resource.RUSAGE_SELF)
        return Cost(
            num_tokens,
            now.ru_utime - self._usage.ru_utime,
            now.ru_stime - self._usage.ru_stime,
            time.perf_counter() - self._started_s,
        )
