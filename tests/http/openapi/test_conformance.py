"""schemathesis against a live server: what `/openapi.json` promises is what every answer keeps.

For each operation, requests that the document allows and requests that it does not are drawn from it, always
the same ones. No answer may be a 5xx or of a status, a content type or a shape that is not documented. A
second round draws small requests that a small fake model can answer, so that answers themselves are held
against their shapes, events of streams included. The whole engine runs over the fake device.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from asyncserve.http.openapi.document import document
from asyncserve.http.openapi.operations import OPERATIONS, Operation
from loadtest.answers import Answers
from loadtest.http_reader import Response
from tests.http.live import MODEL
from tests.http.live_thread import LiveThread, live_thread

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)
NUM_VALID, NUM_INVALID, NUM_SMALL, NUM_BODILESS = 85, 55, 65, 10
"""Cases of an operation: with bodies as the document has them, with others, with small ones, without body."""
PATIENCE_S = 60
WITH_BODY = [each for each in OPERATIONS if each.body is not None]
BODILESS = [each for each in OPERATIONS if each.body is None]
assert len(WITH_BODY) * (NUM_VALID + NUM_INVALID + NUM_SMALL) + len(BODILESS) * NUM_BODILESS >= 2_000

TEXT = {"type": "string", "maxLength": 20}
TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": 255}
SOME = {"type": "integer", "minimum": 1, "maximum": 12}
MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": TEXT},
    "required": ["role", "content"],
    "additionalProperties": False,
}
SMALL: dict[str, Any] = {
    "model": {"enum": [MODEL]},
    "prompt": TEXT,
    "input": TEXT,
    "instructions": TEXT,
    "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 2},
    "tokens": {"type": "array", "items": TOKEN_ID, "maxItems": 9},
    "max_tokens": SOME,
    "max_completion_tokens": SOME,
    "max_output_tokens": SOME,
    "n": {"type": "integer", "minimum": 1, "maximum": 3},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0.1, "maximum": 1},
    "seed": TOKEN_ID,
    "stop": {"type": "array", "items": {**TEXT, "minLength": 1}, "maxItems": 2},
    "stop_token_ids": {"type": "array", "items": TOKEN_ID, "maxItems": 2},
    "user": TEXT,
}
"""Fields with values that a small model can serve."""
ALONE = {
    "add_special_tokens",
    "background",
    "continue_final_message",
    "disable_any_whitespace",
    "return_token_strs",
    "store",
}
"""Switches that do not go with every other field."""


def small(api: dict[str, Any]) -> dict[str, Any]:
    """Return the document with bodies narrowed to fields of `SMALL` and switches."""
    for operation in WITH_BODY:
        assert operation.body is not None
        schema = api["components"]["schemas"][operation.body.__name__]
        schema["properties"] = {
            name: SMALL.get(name, {"type": "boolean"})
            for name, field in schema["properties"].items()
            if name in SMALL or ({"type": "boolean"} in field.get("anyOf", ()) and name not in ALONE)
        }
        schema["additionalProperties"] = False
        if operation.path == "/tokenize":
            del schema["properties"]["messages"]
            schema["required"] = ["prompt"]
    return api


@pytest.fixture(scope="module")
def server() -> Iterator[LiveThread]:
    info = {"max_model_len": 1024, "num_blocks": 512, "max_num_batched_tokens": 128}
    with live_thread(info=info, access_log=False) as running:
        yield running


def run(
    server: LiveThread, api: dict[str, Any], operation: Operation, mode: GenerationMode, num_cases: int
) -> Counter[int]:
    """Draw cases of an operation and check their answers; return how many had which status."""
    api = copy.deepcopy(api)  # its parts are the package's own, which other tests read
    for parameter in api["paths"][operation.path][operation.method.lower()].get("parameters", ()):
        if parameter.get("name") == "X-Request-Timeout":
            # Whether an answer is complete within a second depends on the machine; without time it is a 504.
            parameter["schema"]["minimum"] = PATIENCE_S
    schema = schemathesis.openapi.from_dict(api)
    drawn = schema[operation.path][operation.method]
    answers = Answers(api)
    statuses: Counter[int] = Counter()

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(drawn.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        response = case.call(base_url=server.live.url, timeout=PATIENCE_S)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=list(CHECKS))
        headers = {name: values[0] for name, values in response.headers.items()}
        answers.check(
            operation.method,
            operation.path,
            Response(response.status_code, headers, response.content, is_whole=True),
            sent=f"{operation.path} {case.body!r:.2000}",
        )

    check()
    server.run(_comes_to_rest(server))
    assert statuses.total() >= num_cases
    return statuses


async def _comes_to_rest(server: LiveThread) -> None:
    engine = server.live.engine
    assert engine.failure is None, f"the engine died of {engine.failure!r}"
    await server.live.until_running(0)
    engine.check()


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda each: f"{each.method} {each.path}")
def test_requests_that_are_documented_get_documented_answers(
    server: LiveThread, operation: Operation
) -> None:
    run(server, document(has_keys=False), operation, GenerationMode.POSITIVE, NUM_VALID)


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda each: f"{each.method} {each.path}")
def test_requests_that_are_not_documented_are_refused_as_documented(
    server: LiveThread, operation: Operation
) -> None:
    statuses = run(server, document(has_keys=False), operation, GenerationMode.NEGATIVE, NUM_INVALID)
    assert not statuses[200], f"{statuses[200]} requests that break the schema of {operation.path} were taken"


@pytest.mark.parametrize("operation", BODILESS, ids=lambda each: f"{each.method} {each.path}")
def test_requests_without_a_body_get_documented_answers(server: LiveThread, operation: Operation) -> None:
    run(server, document(has_keys=False), operation, GenerationMode.POSITIVE, NUM_BODILESS)


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda each: f"{each.method} {each.path}")
def test_small_requests_are_answered_as_documented(server: LiveThread, operation: Operation) -> None:
    statuses = run(server, small(document(has_keys=False)), operation, GenerationMode.POSITIVE, NUM_SMALL)
    # JSON Schema has 2.0 for an integer, too; here that is refused.
    assert statuses[200] > NUM_SMALL / 4, f"of small requests to {operation.path} few are taken: {statuses}"
