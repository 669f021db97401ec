import pytest
from prometheus_client import CollectorRegistry

from asyncserve.metrics.http_traffic import OUTCOMES, HttpTraffic
from tests.http.live import live_server
from tests.metrics.exposition import samples_of, value_of


def registry_of(traffic: HttpTraffic) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(traffic)
    return registry


@pytest.mark.parametrize(
    ("status_code", "outcome"),
    [
        (200, "2xx"),
        (204, "2xx"),
        (307, "3xx"),
        (404, "4xx"),
        (429, "4xx"),
        (499, "client_left"),
        (503, "5xx"),
    ],
)
def test_requests_are_counted_by_class_of_status(status_code: int, outcome: str) -> None:
    traffic = HttpTraffic("m")
    registry = registry_of(traffic)
    traffic.begin()
    assert value_of(registry, "http_requests_in_progress") == 1
    traffic.end("/v1/completions", status_code)
    assert value_of(registry, "http_requests_in_progress") == 0
    counts = {sample.labels["status"]: sample.value for sample in samples_of(registry, "http_requests_total")}
    assert counts == dict.fromkeys(OUTCOMES, 0.0) | {outcome: 1.0}


def test_named_routes_stand_at_zero_from_the_start() -> None:
    registry = registry_of(HttpTraffic("m", ["/a", "/b"]))
    samples = samples_of(registry, "http_requests_total")
    assert {(sample.labels["handler"], sample.labels["status"]) for sample in samples} == {
        (handler, outcome) for handler in ("/a", "/b") for outcome in OUTCOMES
    }
    assert {sample.value for sample in samples} == {0.0}


def test_connections_are_asked_for_at_each_scrape() -> None:
    numbers = iter([3, 4])
    registry = registry_of(HttpTraffic("m", num_connections=lambda: next(numbers)))
    assert value_of(registry, "http_connections") == 3
    assert value_of(registry, "http_connections") == 4


async def test_a_server_counts_each_request_once_under_its_route() -> None:
    traffic = HttpTraffic("m")
    registry = registry_of(traffic)
    async with live_server(traffic=traffic) as live:
        await live.complete(max_tokens=2)
        await live.complete(max_tokens=2, stream=True)
        await live.complete(max_tokens=-1)
        await live.call("/v1/models/nobody")
        await live.call("/no/such/path")
    counts = {
        (sample.labels["handler"], sample.labels["status"]): sample.value
        for sample in samples_of(registry, "http_requests_total")
        if sample.value
    }
    assert counts == {
        ("/v1/completions", "2xx"): 2,
        ("/v1/completions", "4xx"): 1,
        ("/v1/models/{name}", "4xx"): 1,
        ("none", "4xx"): 1,
    }
    assert value_of(registry, "http_requests_in_progress") == 0
