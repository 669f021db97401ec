import pytest
from prometheus_client import CollectorRegistry

from asyncserve.http.connection import HeaderLimits
from asyncserve.metrics.http_traffic import OUTCOMES, HttpTraffic
from tests.http.live import live_server, until
from tests.http.live_page.page_server import page_options
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


async def test_what_never_reached_a_route_is_counted_too() -> None:
    traffic = HttpTraffic("m")
    registry = registry_of(traffic)
    async with live_server(traffic=traffic, limits=HeaderLimits(num_bytes=4096, count=30)) as live:
        for head in (
            "hello there",
            "GET / HTTP/1.1\r\nHost: x\r\nbad header",
            "GET /" + "a" * 5000 + " HTTP/1.1\r\nHost: x",
            "GET /version HTTP/1.1\r\nHost: x" + "".join(f"\r\nA{n}: {'a' * 200}" for n in range(25)),
            "GET /version HTTP/1.1\r\nHost: x\r\nExpect: a miracle",
        ):
            reader, writer = await live.raw(head.encode() + b"\r\n\r\n")
            assert (await reader.readline()).split()[1][:1] == b"4"
            writer.close()
        await live.call("/version")
    counts = {
        (sample.labels["handler"], sample.labels["status"]): sample.value
        for sample in samples_of(registry, "http_requests_total")
        if sample.value
    }
    assert counts == {("none", "4xx"): 5, ("/version", "2xx"): 1}
    assert value_of(registry, "http_requests_in_progress") == 0


async def test_a_viewer_that_leaves_the_feed_has_ended_it_as_one_should() -> None:
    traffic = HttpTraffic("m")
    registry = registry_of(traffic)
    async with live_server(traffic=traffic, **page_options()) as live:
        async with live.session.get(f"{live.url}/pipeline/events") as feed:
            await feed.content.readuntil(b"\n\n")
            feed.close()
        await until(lambda: value_of(registry, "http_requests_in_progress") == 0)
    counts = {
        sample.labels["status"]: sample.value
        for sample in samples_of(registry, "http_requests_total")
        if sample.labels["handler"] == "/pipeline/events"
    }
    assert counts == dict.fromkeys(OUTCOMES, 0.0) | {"2xx": 1.0}


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
