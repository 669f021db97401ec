import asyncio
import contextlib

import pytest
from aiohttp import web

from asyncserve import errors
from asyncserve.http.app import make_runner
from asyncserve.http.failures import Unauthorized, answer_failures, failure_of, response_to


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (errors.InvalidRequest("m", param="p"), 400, "invalid_request_error", None, "p"),
        (errors.PromptTooLong("m", param="p"), 400, "invalid_request_error", "context_length_exceeded", "p"),
        (errors.UnknownModel("m", param="model"), 404, "invalid_request_error", "model_not_found", "model"),
        (errors.Overloaded("m", retry_after_s=1), 429, "rate_limit_error", "overloaded", None),
        (errors.DeadlineExceeded("m"), 504, "server_error", "deadline_exceeded", None),
        (errors.NotReady("m"), 503, "server_error", "not_ready", None),
        (errors.EngineStopped("m"), 503, "server_error", "engine_stopped", None),
        (errors.StepFailed("m", step_id=3), 500, "server_error", "step_failed", None),
        (errors.EngineError("m"), 500, "server_error", None, None),
        (errors.ConfigError("m"), 500, "server_error", None, None),
        (Unauthorized("m"), 401, "invalid_request_error", "invalid_api_key", None),
        (web.HTTPNotFound(text="m"), 404, "invalid_request_error", "not_found", None),
        (web.HTTPExpectationFailed(text="m"), 417, "invalid_request_error", None, None),
    ],
)
def test_error_has_its_row(
    error: Exception, status: int, kind: str, code: str | None, param: str | None
) -> None:
    failure = failure_of(error)
    assert (failure.status, failure.kind, failure.code, failure.param) == (status, kind, code, param)
    assert "m" in failure.message


def test_bug_shows_no_details() -> None:
    failure = failure_of(KeyError("password"))
    assert (failure.status, failure.kind) == (500, "server_error")
    assert "password" not in failure.message


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (2.1, "3"), (60.0, "60")])
def test_retry_after_is_whole_seconds_and_at_least_one(seconds: float, header: str) -> None:
    assert response_to(errors.Overloaded("m", retry_after_s=seconds)).headers["Retry-After"] == header


@pytest.mark.parametrize("error", [errors.NotReady("m"), errors.EngineStopped("m"), errors.DeviceLost("m")])
def test_who_is_told_that_the_server_is_not_there_is_told_when_to_come_back(error: Exception) -> None:
    response = response_to(error)
    assert (response.status, response.headers["Retry-After"]) == (503, "5")
    assert "Retry-After" not in response_to(errors.StepFailed("m", step_id=3)).headers


def test_allow_header_is_kept() -> None:
    response = response_to(web.HTTPMethodNotAllowed("GET", ["POST"]))
    assert response.headers["Allow"] == "POST"
    assert response.content_type == "application/json"


async def test_bug_after_a_response_has_begun_breaks_the_connection_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def burn(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"beginning")
        raise ZeroDivisionError

    app = web.Application(middlewares=[answer_failures])
    app.router.add_get("/", burn)
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        reader, writer = await asyncio.open_connection(*runner.addresses[0])
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(1000):
                received += data
        writer.close()
    finally:
        await runner.cleanup()
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert received.count(b"HTTP/1.1") == 1
    assert not received.endswith(b"0\r\n\r\n")
    assert "ZeroDivisionError" in caplog.text
