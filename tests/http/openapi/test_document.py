"""/openapi.json: it is valid, it describes every route and nothing else, its ranges are those enforced."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from asyncserve.errors import InvalidRequest
from asyncserve.http.openapi.document import document, routes_of
from asyncserve.http.openapi.fields import DEFAULTS, OWN_DEFAULTS, OWN_RANGES, RANGES, TYPES
from asyncserve.http.openapi.operations import OPERATIONS
from asyncserve.http.openapi.reference import api_reference
from asyncserve.http.schema import HARMLESS, UNSUPPORTED, ChatBody, CompletionBody
from asyncserve.request import SamplingParams
from tests.http.live import live_server

API = document()
BODIES = [each for each in OPERATIONS if each.body is not None]


def component(name: str) -> dict[str, Any]:
    found: dict[str, Any] = API["components"]["schemas"][name]
    return found


def branch_of(field: dict[str, Any], kind: str) -> dict[str, Any]:
    branches = [each for each in field.get("anyOf", [field]) if each.get("type") == kind]
    assert len(branches) == 1, field
    return branches[0]


async def test_every_route_is_described_and_nothing_else() -> None:
    async with live_server() as live:
        # Any method of a path that is refused gets the same answer.
        served = {(method, path) for method, path in routes_of(live.runner.app) if method != "*"}
        answered = json.loads((await live.call("/openapi.json")).body)
    described = {(each.method, each.path) for each in OPERATIONS}
    assert served == described
    assert described == {
        (method.upper(), path) for path, methods in answered["paths"].items() for method in methods
    }


def test_every_reference_leads_somewhere_and_every_component_is_referred_to() -> None:
    references: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                references.add(value["$ref"])
            for each in value.values():
                walk(each)
        elif isinstance(value, list):
            for each in value:
                walk(each)

    walk(API)
    there = {
        f"#/components/{kind}/{name}"
        for kind in ("schemas", "parameters", "headers")
        for name in API["components"][kind]
    }
    assert references == there


def test_every_schema_is_a_json_schema() -> None:
    for name, schema in API["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert name == schema.get("title", name)


def test_every_field_of_a_body_says_what_it_means() -> None:
    names = {each.body.__name__ for each in BODIES if each.body is not None}
    waiting, seen = list(names), set(names)
    while waiting:
        schema = component(waiting.pop())
        for field, facts in schema.get("properties", {}).items():
            # A tag says what its structure says.
            assert facts.get("description") or set(facts) == {"enum"}, (
                f"{schema['title']}.{field} is not described"
            )
        for part in json.dumps(schema).split('"#/components/schemas/')[1:]:
            name = part.partition('"')[0]
            if name not in seen:
                seen.add(name)
                waiting.append(name)


def test_names_of_operations_are_unique() -> None:
    names = [each.name for each in OPERATIONS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("operation", BODIES, ids=lambda each: each.path)
def test_examples_are_valid(operation: Any) -> None:
    schema = API["paths"][operation.path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": API["components"]}
    body = dict(operation.example)
    if "model" in component(operation.body.__name__)["required"]:
        body["model"] = "m"
    jsonschema.Draft202012Validator(whole).validate(body)


@pytest.mark.parametrize(
    "name",
    [
        *("n", "temperature", "top_p", "top_k", "min_p", "min_tokens", "presence_penalty", "seed"),
        *("frequency_penalty", "repetition_penalty", "max_tokens"),
    ],
)
def test_a_range_is_the_one_that_is_enforced(name: str) -> None:
    def is_taken(value: float) -> bool:
        try:
            SamplingParams(**{"max_tokens": None, name: value})  # type: ignore[arg-type]
        except InvalidRequest:
            return False
        return True

    field = component("ChatBody")["properties"][name]
    [branch] = [each for each in field["anyOf"] if each["type"] != "null"]
    step = 1 if branch["type"] == "integer" else 1e-3
    low, high = branch.get("minimum"), branch["maximum"]
    if low is None:
        assert not is_taken(branch["exclusiveMinimum"])
        assert is_taken(branch["exclusiveMinimum"] + step)
    else:
        assert is_taken(low)
        assert not is_taken(low - step)
    assert is_taken(high)
    if name not in ("max_tokens", "min_tokens", "n", "top_k"):  # their upper bounds are not those of sampling
        assert not is_taken(high + step)


def test_tables_name_fields_that_are_there() -> None:
    fields = {
        field for schema in API["components"]["schemas"].values() for field in schema.get("properties", {})
    }
    assert fields >= RANGES.keys()
    sampling = {"structured", "num_logprobs", "num_prompt_logprobs"}
    assert fields | sampling >= DEFAULTS.keys()
    for struct, field in (*TYPES, *OWN_DEFAULTS, *OWN_RANGES):
        assert field in component(struct)["properties"], f"{struct} has no {field}"


def test_defaults_are_those_of_sampling() -> None:
    fields = component("CompletionBody")["properties"]
    assert fields["temperature"]["default"] == SamplingParams().temperature
    assert fields["max_tokens"]["default"] == 16
    assert "default" not in component("ChatBody")["properties"]["max_tokens"]
    assert "default" not in fields["seed"]


def test_required_fields_may_not_be_null() -> None:
    assert "prompt" in component("CompletionBody")["required"]
    assert "messages" in component("ChatBody")["required"]
    assert branch_of(component("ChatBody")["properties"]["messages"], "array")["minItems"] == 1
    for schema in (
        component("CompletionBody")["properties"]["prompt"],
        component("ChatBody")["properties"]["messages"],
    ):
        assert {"type": "null"} not in schema.get("anyOf", [])


def test_ignored_and_refused_fields_are_listed_with_each_body_that_does_not_have_them() -> None:
    for body in (ChatBody, CompletionBody):
        schema = component(body.__name__)
        listed = set(body.__struct_fields__)
        assert set(schema["x-ignored-fields"]) == HARMLESS - listed
        assert set(schema["x-refused-fields"]) == UNSUPPORTED.keys() - listed
        assert listed == schema["properties"].keys()


async def test_it_has_a_tag_and_is_not_sent_twice() -> None:
    async with live_server() as live:
        first = await live.call("/openapi.json")
        tag = first.headers["ETag"]
        again = await live.call("/openapi.json", headers={"If-None-Match": tag})
        other = await live.call("/openapi.json", headers={"If-None-Match": '"other"'})
    assert (first.status, again.status, other.status) == (200, 304, 200)
    assert again.body == b""
    assert again.headers["ETag"] == tag
    assert first.body == other.body
    assert first.json["openapi"] == "3.1.0"


@pytest.mark.parametrize("keys", [(), ("secret",)])
async def test_keys_are_asked_for_where_the_server_asks_for_them(keys: tuple[str, ...]) -> None:
    async with live_server(api_keys=keys) as live:
        live.headers = {"Authorization": "Bearer secret"}
        api = (await live.call("/openapi.json")).json
        live.headers = {}
        for path, methods in api["paths"].items():
            for method, operation in methods.items():
                answer = await live.call(path.replace("{", "").replace("}", ""), method=method.upper())
                needs_key = bool(operation["security"])
                assert (answer.status == 401) is needs_key, f"{method} {path}: {answer.status}"
                assert ("401" in operation["responses"]) is needs_key, f"{method} {path}"


def test_the_page_in_docs_is_the_one_that_the_document_gives() -> None:
    """`python -m asyncserve.http.openapi.reference docs/api.md` writes it."""
    committed = Path(__file__).parents[3] / "docs" / "api.md"
    assert committed.read_text(encoding="utf-8") == api_reference()
