"""Requests and connections of the HTTP server, as Prometheus reads them.

Told of the beginning and the end of each HTTP request; asks for the open connections when scraped. A handler
is named by its route, so that a path with an id in it makes no metric of its own. Knows no engine.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from asyncserve.metrics.catalogue import ENGINE, Source, counter_family, empty_families, gauge_family

OUTCOMES = ("2xx", "3xx", "4xx", "5xx", "client_left")
"""Values of the label `status`: classes of status codes, as instrumented web servers group them."""
CLIENT_LEFT_STATUS = 499
UNKNOWN_ROUTE = "none"


class _Key(NamedTuple):
    handler: str
    outcome: str


class HttpTraffic(Collector):
    """Counts requests; the caller registers it.

    Args:
        model_name: Value of the label `model_name`.
        handlers: Routes whose counters stand at 0 from the start: a rate over a series that appears late
            misses its first event.
        num_connections: Gives how many connections are open.
        num_refused: Gives how many were refused so far, since there were too many.
    """

    def __init__(
        self,
        model_name: str,
        handlers: Iterable[str] = (),
        num_connections: Callable[[], int] = lambda: 0,
        num_refused: Callable[[], int] = lambda: 0,
    ) -> None:
        self._common = (model_name, ENGINE)
        self._counts: Counter[_Key] = Counter()
        self._num_connections = num_connections
        self._num_refused = num_refused
        self._in_progress = 0
        for handler in handlers:
            self._add_handler(handler)

    def begin(self) -> None:
        """Note that a request has come."""
        self._in_progress += 1

    def end(self, handler: str, status_code: int) -> None:
        """Note that a request is answered, a stream to its end, or that its client has left (499)."""
        self._in_progress -= 1
        outcome = "client_left" if status_code == CLIENT_LEFT_STATUS else f"{status_code // 100}xx"
        key = _Key(handler, outcome)
        if key not in self._counts:
            self._add_handler(handler)
        self._counts[key] += 1

    def refuse(self, status_code: int) -> None:
        """Note that something was answered before it was a request with a route: bad HTTP, large headers."""
        self.begin()
        self.end(UNKNOWN_ROUTE, status_code)

    def describe(self) -> Iterable[Metric]:
        """Name the metrics that `collect` gives."""
        return empty_families(Source.HTTP)

    def collect(self) -> Iterable[Metric]:
        """Give Prometheus the numbers of this moment."""
        requests = counter_family("http_requests_total")
        for key, count in sorted(self._counts.items()):
            requests.add_metric((*self._common, *key), count)
        yield requests
        in_progress = gauge_family("http_requests_in_progress")
        in_progress.add_metric(self._common, self._in_progress)
        yield in_progress
        connections = gauge_family("http_connections")
        connections.add_metric(self._common, self._num_connections())
        yield connections
        refused = counter_family("http_connections_refused_total")
        refused.add_metric(self._common, self._num_refused())
        yield refused

    def _add_handler(self, handler: str) -> None:
        for outcome in OUTCOMES:
            self._counts.setdefault(_Key(handler, outcome), 0)
