"""The fuzzing itself: a sound server gets through it, and a server with something wrong does not."""

import asyncio
from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncserve.http.openapi.document import document
from asyncserve.http.openapi.operations import OPERATIONS
from asyncserve.step import BAD_LOGITS
from loadtest.answers import Answers
from loadtest.fuzz import SERVER, Fuzz, fuzz
from loadtest.fuzz_bodies import Bodies, damaged
from loadtest.fuzz_bytes import RawCase, raw_cases
from loadtest.http_reader import Response
from tests.http.live_thread import live_thread

pytestmark = pytest.mark.timeout(600)
NUM_BODIES, NUM_RAW = 1_000, 500
"""`python -m loadtest.fuzz --cases 20000` is the same with more."""


@pytest.mark.slow
def test_a_sound_server_answers_everything_as_documented_and_comes_to_rest() -> None:
    counts = fuzz(num_bodies=NUM_BODIES, num_raw=NUM_RAW, seed=0).answers.counts
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert counts[f"POST {path} 200"] >= NUM_BODIES / 200, f"hardly any body for {path} is good: {counts}"
        assert counts[f"POST {path} 400"] >= NUM_BODIES / 200, f"hardly any body for {path} is bad: {counts}"
    assert counts["raw 200"] and counts["raw 400"], counts  # noqa: PT018


@pytest.mark.slow
def test_a_server_error_is_complained_of_with_a_small_batch() -> None:
    def no_third_token(token_ids: "array[int]", prompt_len: int) -> int:
        return BAD_LOGITS if len(token_ids) - prompt_len == 2 else 65

    with (
        live_thread(**SERVER, next_token=no_third_token) as server,
        pytest.raises(AssertionError, match="a server error: POST"),
    ):
        Fuzz(server, seed=0).bodies(600)


@pytest.mark.slow
def test_a_task_that_is_left_is_complained_of() -> None:
    with live_thread(**SERVER) as server:
        fuzzing = Fuzz(server, seed=0, settle_s=0.1)

        async def leave_one() -> "asyncio.Task[None]":
            return asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]

        task = server.run(leave_one())
        with pytest.raises(AssertionError, match="tasks"):
            fuzzing.bodies(12)
        server.loop.call_soon_threadsafe(task.cancel)


VERSION = b'{"version":"1"}'
JSON = {"content-type": "application/json"}
STREAM = {"content-type": "text/event-stream; charset=utf-8"}
CHUNK = (
    b'{"id":"1","object":"text_completion","created":1,"model":"m","system_fingerprint":"f","choices":'
    b'[{"index":0,"text":"a","logprobs":null,"finish_reason":null,"stop_reason":null}]}'
)
EVENT = b"data: " + CHUNK + b"\n\n"
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("path", "response"),
    [
        ("/version", Response(200, JSON, VERSION, is_whole=True)),
        ("/v1/completions", Response(200, STREAM, EVENT + b": alive\n\n" + EVENT + DONE, is_whole=True)),
        (
            "/v1/completions",
            Response(
                200,
                STREAM,
                EVENT + b'data: {"error":{"message":"x","type":"server_error","param":null,"code":null}}\n\n',
                is_whole=True,
            ),
        ),
    ],
)
def test_answers_as_documented_are_taken(path: str, response: Response) -> None:
    answers = Answers(document())
    answers.check("GET" if path == "/version" else "POST", path, response, sent="")
    assert answers.counts.total() == 1


@pytest.mark.parametrize(
    ("path", "response", "complaint"),
    [
        ("/version", Response(200, JSON, VERSION, is_whole=False), "breaks off"),
        ("/version", Response(500, JSON, VERSION, is_whole=True), "a server error"),
        ("/version", Response(418, JSON, VERSION, is_whole=True), "a status that is not documented"),
        ("/version", Response(200, {"content-type": "text/plain"}, VERSION, is_whole=True), "content type"),
        ("/version", Response(200, JSON, b'{"version":1}', is_whole=True), "not as documented"),
        ("/version", Response(200, JSON, b'{"version":"1","more":1}', is_whole=True), "not as documented"),
        ("/v1/completions", Response(200, STREAM, EVENT[:-1], is_whole=True), "breaks off within an event"),
        ("/v1/completions", Response(200, STREAM, b"", is_whole=True), "without events|within an event"),
        ("/v1/completions", Response(200, STREAM, b"text\n\n", is_whole=True), "none of a stream"),
        ("/v1/completions", Response(200, STREAM, b"id: 3\n\n", is_whole=True), "none of a stream"),
        (
            "/v1/completions",
            Response(200, STREAM, DONE + EVENT, is_whole=True),
            "unexpected|Expecting|character",
        ),
        (
            "/v1/completions",
            Response(200, STREAM, EVENT.replace(b'"a"', b"1"), is_whole=True),
            "not as documented",
        ),
    ],
)
def test_answers_that_are_not_as_documented_are_complained_of(
    path: str, response: Response, complaint: str
) -> None:
    with pytest.raises((AssertionError, ValueError), match=complaint):
        Answers(document()).check("GET" if path == "/version" else "POST", path, response, sent="")


@pytest.mark.parametrize(
    "response",
    [
        Response(500, JSON, b'{"error":{"message":"x","type":"y"}}', is_whole=True),
        Response(400, {"content-type": "text/plain"}, b"x", is_whole=True),
        Response(400, JSON, b'{"error":{"message":"","type":"y"}}', is_whole=True),
        Response(400, JSON, b'{"error":{"message":"x","type":null}}', is_whole=True),
    ],
)
def test_errors_of_another_shape_are_complained_of(response: Response) -> None:
    with pytest.raises(AssertionError):
        Answers(document()).check_any(response)


BODIES = Bodies(document(), ("a-model",))
NO_HEALTH_CHECKS = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


@NO_HEALTH_CHECKS
@given(st.data())
def test_bodies_and_their_damaged_forms_are_drawn_for_every_operation(data: st.DataObject) -> None:
    for operation in OPERATIONS:
        if operation.body is not None:
            reference = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
            body = data.draw(BODIES.of(reference))
            assert set(body) >= set(operation.required) & set(body)
            assert isinstance(body, dict)
            assert isinstance(data.draw(damaged(body)), bytes)


@NO_HEALTH_CHECKS
@given(raw_cases())
def test_what_a_connection_sends_is_drawn_in_pieces_that_are_not_empty(case: RawCase) -> None:
    assert all(case.pieces)
