"""Whose request it is, and how long its answer may take, as a running server sees it."""

import asyncio
import hashlib
from typing import Any

import pytest

from tests.fakes.scripted_engine import ScriptedEngine
from tests.http.live import MODEL, live_server, spell

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/chat/completions": {"model": MODEL, "messages": HI},
    "/v1/responses": {"model": MODEL, "input": "hi"},
    "/v1/messages": {"model": MODEL, "messages": HI, "max_tokens": 9},
}
each_api = pytest.mark.parametrize("path", BODIES)


@each_api
async def test_requests_of_one_key_are_of_one_tenant_which_is_not_the_key(path: str) -> None:
    engine = ScriptedEngine(["a"])
    async with live_server(engine=engine, api_keys=("first", "second")) as live:
        for key in ("first", "second", "first"):
            answer = await live.call(path, BODIES[path], headers={"X-Api-Key": key})
            assert answer.status == 200
    tenants = [request.tenant for request in engine.requests]
    assert tenants[0] == tenants[2] != tenants[1]
    assert tenants[0] == hashlib.sha256(b"first").hexdigest()[:16]


@each_api
async def test_without_keys_all_are_one_tenant_and_without_a_limit_nothing_has_a_deadline(path: str) -> None:
    engine = ScriptedEngine(["a"])
    async with live_server(engine=engine) as live:
        await live.call(path, BODIES[path])
    [request] = engine.requests
    assert (request.tenant, request.deadline_s) == ("", None)


@pytest.mark.parametrize(
    ("header", "limit_s", "expected"),
    [("2.5", None, 2.5), (None, 9.0, 9.0), ("2.5", 9.0, 2.5), ("20", 9.0, 9.0), ("1e-3", None, 0.001)],
)
async def test_the_shorter_of_what_the_client_and_the_server_say_counts(
    header: str | None, limit_s: float | None, expected: float
) -> None:
    engine = ScriptedEngine(["a"])
    async with live_server(engine=engine, request_timeout_s=limit_s, clock=lambda: 100.0) as live:
        headers = {} if header is None else {"X-Request-Timeout": header}
        await live.call("/v1/completions", BODIES["/v1/completions"], headers=headers)
    [request] = engine.requests
    assert request.deadline_s == pytest.approx(100.0 + expected)


@each_api
@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf", "nan", "", "1_0", "5, 3"])
async def test_a_header_that_says_no_time_is_a_400(path: str, value: str) -> None:
    rejected: list[Exception] = []
    async with live_server(on_rejected=rejected.append) as live:
        answer = await live.call(path, BODIES[path], headers={"X-Request-Timeout": value})
    assert answer.status == 400
    assert "X-Request-Timeout" in answer.json["error"]["message"]
    assert len(rejected) == 1


@each_api
async def test_a_request_that_takes_too_long_is_a_504_in_the_apis_own_shape(path: str) -> None:
    async with live_server(next_token=spell("x" * 50), clock=lambda: 0.0) as live:
        live.executor.hold()
        answering = asyncio.create_task(live.call(path, BODIES[path], headers={"X-Request-Timeout": "0.001"}))
        # The engine's clock goes on, so its time is over at once.
        answer = await answering
        live.executor.resume()
        await live.until_running(0)
    assert answer.status == 504
    error = answer.json["error"]
    assert error["type"] == ("timeout_error" if path == "/v1/messages" else "server_error")
    if path != "/v1/messages":
        assert error["code"] == "deadline_exceeded"


@each_api
async def test_a_stream_whose_time_is_over_ends_with_an_error_event(path: str) -> None:
    now_s = 0.0

    def clock() -> float:
        return now_s

    async with live_server(next_token=spell("x" * 50), clock=clock, engine_options={"clock": clock}) as live:
        live.executor.hold()
        body = {**BODIES[path], "stream": True}
        headers = {"X-Request-Timeout": "0.1"}
        async with live.session.post(live.url + path, json=body, headers=headers) as response:
            await live.until_step_waits()
            live.executor.complete()
            await response.content.readany()
            now_s = 1.0
            rest = await response.content.read()
        live.executor.resume()
        await live.until_running(0)
    assert response.status == 200
    last = [part for part in rest.decode().split("\n\n") if part][-1]
    if path == "/v1/responses":
        assert '"response.failed"' in last
        assert '"server_error"' in last
    else:
        assert '"error"' in last
        assert "1.0 s after the request" in last
