import pytest

from asyncserve.http.cross_origin import CrossOrigin
from tests.http.live import MODEL, live_server, spell

HERE = "https://chat.example.org"
PREFLIGHT = {"Origin": HERE, "Access-Control-Request-Method": "POST"}
ALLOWED = "Access-Control-Allow-Origin"


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/models/alias/of-it", "/health", "/v1/embeddings", "/nowhere"]
)
async def test_preflight_is_answered_for_every_path_without_a_key(path: str) -> None:
    async with live_server(cross_origin=CrossOrigin(origins=(HERE,)), api_keys=("k",)) as live:
        answer = await live.call(
            path,
            method="OPTIONS",
            headers={**PREFLIGHT, "Access-Control-Request-Headers": "authorization,x-stainless-os"},
        )
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers[ALLOWED] == HERE
    assert answer.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE"
    assert answer.headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
    assert answer.headers["Access-Control-Max-Age"] == "600"
    assert "Access-Control-Allow-Credentials" not in answer.headers
    assert "Origin" in ", ".join(answer.headers.getall("Vary"))  # type: ignore[attr-defined]


async def test_preflight_says_what_was_configured() -> None:
    policy = CrossOrigin(
        origins=(HERE,), methods=("get", "POST"), headers=("Authorization",), allows_credentials=True
    )
    async with live_server(cross_origin=policy) as live:
        answer = await live.call(
            "/v1/completions",
            method="OPTIONS",
            headers={**PREFLIGHT, "Access-Control-Request-Headers": "x-evil"},
        )
    assert answer.headers["Access-Control-Allow-Methods"] == "GET, POST"
    assert answer.headers["Access-Control-Allow-Headers"] == "Authorization"
    assert answer.headers["Access-Control-Allow-Credentials"] == "true"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://chat.example.org", HERE + ".evil", "null"]
)
async def test_preflight_of_another_origin_is_refused(origin: str) -> None:
    async with live_server(cross_origin=CrossOrigin(origins=(HERE,))) as live:
        answer = await live.call("/v1/completions", method="OPTIONS", headers={**PREFLIGHT, "Origin": origin})
    assert answer.status == 403
    assert answer.error["type"] == "invalid_request_error"
    assert ALLOWED not in answer.headers


async def test_answers_errors_and_streams_carry_the_origin() -> None:
    async with live_server(
        next_token=spell("xy"),
        cross_origin=CrossOrigin(origins=("https://other.example", HERE)),
        api_keys=("k",),
    ) as live:
        for key, path, body, status in (
            ("k", "/v1/completions", {"model": MODEL, "prompt": "a"}, 200),
            ("k", "/v1/completions", {"model": MODEL, "prompt": "a", "stream": True}, 200),
            ("k", "/v1/completions", {"model": MODEL}, 400),
            ("k", "/v1/nowhere", {}, 404),
            ("wrong", "/v1/completions", {}, 401),
        ):
            headers = {"Origin": HERE.upper(), "Authorization": f"Bearer {key}"}
            answer = await live.call(path, body, headers=headers)
            assert answer.status == status, path
            assert answer.headers[ALLOWED] == HERE.upper()
            assert answer.headers["Vary"] == "Origin"
            exposed = answer.headers["Access-Control-Expose-Headers"].split(", ")
            assert exposed == ["X-Request-Id", "Request-Id", "Retry-After"]
            assert "X-Request-Id" in answer.headers


async def test_a_bug_in_a_handler_is_shown_to_pages_too(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> bytes:
        raise ZeroDivisionError

    async with live_server(cross_origin=CrossOrigin(origins=("*",)), metrics_renderer=broken) as live:
        answer = await live.call("/metrics", headers={"Origin": HERE})
    assert (answer.status, answer.headers[ALLOWED]) == (500, "*")


async def test_any_origin_is_a_star_that_does_not_vary() -> None:
    async with live_server(cross_origin=CrossOrigin(origins=("*",))) as live:
        answer = await live.call("/version", headers={"Origin": "https://anything.example"})
        without = await live.call("/version")
    assert answer.headers[ALLOWED] == "*"
    assert "Vary" not in answer.headers
    assert ALLOWED not in without.headers


async def test_an_answer_without_origin_still_varies() -> None:
    """Else a cache would give it to a page, without the header."""
    async with live_server(cross_origin=CrossOrigin(origins=(HERE,))) as live:
        answer = await live.call("/version")
        other = await live.call("/version", headers={"Origin": "https://evil.example"})
    assert answer.headers["Vary"] == other.headers["Vary"] == "Origin"
    assert ALLOWED not in answer.headers
    assert ALLOWED not in other.headers


async def test_without_allowed_origins_pages_get_nothing() -> None:
    async with live_server() as live:
        preflight = await live.call("/v1/completions", method="OPTIONS", headers=PREFLIGHT)
        answer = await live.call("/version", headers={"Origin": HERE})
    assert preflight.status == 405
    assert ALLOWED not in answer.headers
    assert "Vary" not in answer.headers


async def test_plain_options_is_no_preflight() -> None:
    async with live_server(cross_origin=CrossOrigin(origins=("*",))) as live:
        assert (await live.call("/v1/completions", method="OPTIONS")).status == 405


async def test_no_answer_is_to_be_taken_for_a_page() -> None:
    async with live_server(next_token=spell("x")) as live:
        for answer in (
            await live.complete(),
            await live.complete(stream=True),
            await live.call("/nowhere"),
            await live.call("/metrics"),
        ):
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
