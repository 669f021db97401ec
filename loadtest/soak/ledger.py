"""What became of every request of a soak, and whether the server's metrics account for each of them once.

Takes `Visit`s and two readings of /metrics. A request whose client stayed has one end, which the server must
have counted; of one whose client left, the server may have counted any end, but one only, or none if nothing
of it was read. So each comparison is an equation between counts, exact but for those who left.
"""

import enum
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from loadtest.metrics_page import samples

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


UNREAD = (401, 413)
"""Statuses of requests whose body was not read: the engine's metrics know nothing of them."""


class End(enum.Enum):
    """How a request ended, as its client saw it."""

    ANSWERED = "answered"
    FAILED_BY_DESIGN = "failed by design"
    REFUSED = "refused"
    ABORTED = "aborted"
    LEFT = "left by the client"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request to a generating endpoint.

    Args:
        kind: What the client did, in a word or two.
        end: What came of it.
        status: Of the answer; 0 if none came.
        num_sequences: That the engine got to see: as many as were asked for, or none.
    """

    kind: str
    end: End
    status: int = 0
    num_sequences: int = 1


@dataclass(slots=True)
class Ledger:
    """All visits, added up.

    Args:
        visits: How many were alike.
        num_wrong: Answers that were others than those of an undisturbed server.
        complaints: What else was not as it should be.
        request_ids: Those that came with answers.
    """

    visits: Counter[Visit] = field(default_factory=Counter)
    request_ids: list[str] = field(default_factory=list)
    num_wrong: int = 0
    complaints: Counter[str] = field(default_factory=Counter)

    def take(self, visit: Visit) -> None:
        """Enter one visit."""
        self.visits[visit] += 1

    def complain(self, message: str) -> None:
        """Note what is wrong."""
        self.complaints[message] += 1

    @property
    def num_sent(self) -> int:
        """Requests sent."""
        return self.visits.total()

    def ends(self) -> dict[str, int]:
        """Return how many requests ended how."""
        return {end.value: self._count(end) for end in End}

    def kinds(self) -> dict[str, dict[str, int]]:
        """Return of each kind of visit how many ended how."""
        found: dict[str, Counter[str]] = {}
        for visit, count in self.visits.items():
            found.setdefault(visit.kind, Counter())[visit.end.value] += count
        return {kind: dict(sorted(counts.items())) for kind, counts in sorted(found.items())}

    def _count(self, *ends: End) -> int:
        return sum(count for visit, count in self.visits.items() if visit.end in ends)

    def _sequences(self, *ends: End) -> int:
        return sum(count * visit.num_sequences for visit, count in self.visits.items() if visit.end in ends)

    def _answers(self, status_class: int) -> int:
        """Return how many clients that stayed got an answer of this class."""
        return sum(
            count
            for visit, count in self.visits.items()
            if visit.status // 100 == status_class and visit.end is not End.LEFT
        )

    def equations(self, before: "Counts", after: "Counts") -> "Iterator[Equation]":
        """Give each count of the server beside what the clients say it must be.

        Args:
            before: /metrics, read before the first visit.
            after: The same after the last, when the server was at rest.
        """
        http = after.http - before.http
        num_left = self._count(End.LEFT)
        for status_class in (2, 4, 5):
            seen = self._answers(status_class)
            yield Equation(f"answers {status_class}xx", http[f"{status_class}xx"], seen, seen + num_left)
        yield Equation("requests whose client left", http["client_left"], 0, num_left)
        num_unanswered = sum(
            count for visit, count in self.visits.items() if visit.end is End.LEFT and not visit.status
        )
        yield Equation("all HTTP requests", http.total(), self.num_sent - num_unanswered, self.num_sent)
        ended = after.ended - before.ended
        rejected = after.rejected - before.rejected
        left = self._sequences(End.LEFT)
        answered = self._sequences(End.ANSWERED)
        failed = self._sequences(End.FAILED_BY_DESIGN)
        aborted = self._sequences(End.ABORTED)
        yield Equation("sequences answered", ended["stop"] + ended["length"], answered, answered + left)
        yield Equation("sequences failed", ended["error"], failed, failed + left)
        yield Equation("sequences aborted", ended["abort"], aborted, aborted + left)
        yield Equation(
            "all sequences", ended.total(), answered + failed + aborted, answered + failed + aborted + left
        )
        refused = self._rejected()
        yield Equation("requests refused", rejected.total(), refused, refused + num_left)

    def unlogged(self, log: str) -> list[str]:
        """Return the ids of answers that the server's access log does not have exactly once.

        Args:
            log: All of it, the warm-up's requests included.
        """
        logged = Counter(_LOGGED.findall(log))
        twice = [request_id for request_id, count in logged.items() if count > 1]
        return twice + [request_id for request_id in self.request_ids if not logged[request_id]]

    def _rejected(self) -> int:
        """Return how many requests with the right key and a body became no sequence."""
        return sum(
            count
            for visit, count in self.visits.items()
            if (visit.end is End.REFUSED and visit.status not in UNREAD)
            or (visit.end is End.FAILED_BY_DESIGN and not visit.num_sequences)
        )


@dataclass(frozen=True, slots=True)
class Equation:
    """One count of the server, and between which numbers the clients say it must lie."""

    name: str
    counted: int
    least: int
    most: int

    @property
    def holds(self) -> bool:
        """Whether it does."""
        return self.least <= self.counted <= self.most


@dataclass(frozen=True, slots=True)
class Counts:
    """What /metrics had counted when it was read.

    Args:
        http: Requests to generating endpoints, by class of status.
        ended: Sequences, by reason.
        rejected: Requests refused before they became a sequence, by reason.
        values: All counters and gauges of the server, labels added up, by name without prefix.
    """

    http: Counter[str]
    ended: Counter[str]
    rejected: Counter[str]
    values: Mapping[str, float]


_LOGGED = re.compile(r"asyncserve\.http\.access: .* (\S{2,})$", re.MULTILINE)
_PREFIX = "asyncserve:"


def read_counts(page: str) -> Counts:
    """Read a page of /metrics."""
    counts = Counts(Counter(), Counter(), Counter(), Counter())
    values: Counter[str] = Counter()
    for full_name, labels, number in samples(page):
        if not full_name.startswith(_PREFIX):
            continue
        name = full_name.removeprefix(_PREFIX)
        if name == "http_requests_total" and labels["handler"] in GENERATING:
            counts.http[labels["status"]] += int(number)
        elif name == "request_success_total":
            counts.ended[labels["finished_reason"]] += int(number)
        elif name == "requests_rejected_total":
            counts.rejected[labels["reason"]] += int(number)
        if not name.endswith("_bucket"):
            values[name] += number  # type: ignore[assignment]
    return Counts(counts.http, counts.ended, counts.rejected, values)
