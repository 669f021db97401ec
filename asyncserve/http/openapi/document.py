"""GET /openapi.json: the API's description (OpenAPI 3.1), made from the types of bodies and answers.

`document` puts it together: operations from `operations`, bodies from their msgspec structs, what
those do not say from `fields`. `ApiDocument` makes it once, in a thread, when it is first asked
for, and keeps the bytes. Knows no engine.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import orjson
from aiohttp import web

import asyncserve
from asyncserve.http.caller import TIMEOUT_HEADER
from asyncserve.http.openapi.fields import DEFAULTS, OWN_DEFAULTS, OWN_RANGES, RANGES, TYPES
from asyncserve.http.openapi.operations import ERRORS, EVENTS, JSON, OF_ENGINE, OPERATIONS, Operation
from asyncserve.http.schema import HARMLESS, UNSUPPORTED
from asyncserve.http.serving import REQUEST_ID_HEADER

SCHEMAS = "#/components/schemas/"
KEYWORDS: Mapping[str, Sequence[str]] = {
    "number": ("minimum", "maximum", "exclusiveMinimum"),
    "integer": ("minimum", "maximum", "exclusiveMinimum"),
    "string": ("minLength", "maxLength", "pattern"),
    "array": ("items", "minItems", "maxItems"),
    "object": ("additionalProperties", "propertyNames", "maxProperties"),
}
"""Which keywords are about values of which type."""
DESCRIPTION = (
    "An OpenAI-compatible server of one model. Sampling fields that are left out take the values that the"
    " model's authors recommend (`generation_config.json`), else the defaults given here. Fields that a body"
    " does not list are ignored; those that would change the answer and are not implemented are refused."
)


def document(operations: Sequence[Operation] = OPERATIONS, *, has_keys: bool = True) -> dict[str, Any]:
    """Return the description of `operations`.

    Args:
        has_keys: Whether the server has keys, one of which clients must send.
    """
    bodies = {each.body: None for each in operations if each.body is not None}
    answers: dict[Any, None] = {}
    for each in operations:
        answers |= dict.fromkeys((*each.answers, each.error, *([each.events] if each.events else [])))
    kinds = [*bodies, *answers]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=SCHEMAS + "{name}")
    schema_of = dict(zip(kinds, schemas, strict=True))
    for name in set(_reached([schema_of[body] for body in bodies], components)):
        _complete(components[name])
    for each in operations:
        if each.body is not None:
            component = components[schema_of[each.body]["$ref"].removeprefix(SCHEMAS)]
            _require(component, each.required)
            _list_other_fields(component, each.body)
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, schema_of, has_keys=has_keys)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "asyncserve",
            "version": asyncserve.__version__,
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(each.tag for each in operations)],
        "paths": paths,
        "components": {
            "schemas": components,
            "parameters": {"RequestId": _REQUEST_ID},
            "headers": {"RequestId": {"description": "The call's id.", "schema": {"type": "string"}}},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


_REQUEST_ID = {
    "name": REQUEST_ID_HEADER,
    "in": "header",
    "description": "An id for the call, 1 to 256 printable ASCII characters; another one is not used.",
    "schema": {"type": "string"},
}


_REQUEST_TIMEOUT = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "description": "Seconds that the answer may take, from the request to its last token. After them it is a"
    " 504, or a stream ends with an error. The server may allow fewer.",
    "schema": {"type": "number", "minimum": 1},
}


def _operation(each: Operation, schema_of: Mapping[Any, Any], *, has_keys: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": each.name,
        "summary": each.summary,
        "tags": [each.tag],
        "parameters": [
            *(
                {
                    "name": name,
                    "in": "path",
                    "required": True,
                    "description": meaning,
                    "schema": {"type": "string", "minLength": 1},
                }
                for name, meaning in each.path_parameters.items()
            ),
            *(
                {"name": name, "in": "query", "description": meaning, "schema": schema}
                for name, meaning, schema in each.query
            ),
            *([_REQUEST_TIMEOUT] if set(OF_ENGINE) <= set(each.errors) else []),
            {"$ref": "#/components/parameters/RequestId"},
        ],
    }
    if each.description:
        described["description"] = each.description
    if each.body is not None:
        content = {"schema": schema_of[each.body], "example": each.example}
        described["requestBody"] = {"required": True, "content": {JSON: content}}
    described["responses"] = _responses(each, schema_of, has_keys=has_keys)
    described["security"] = [{"bearer": []}, {"header": []}] if has_keys and each.needs_key else []
    return described


def _responses(each: Operation, schema_of: Mapping[Any, Any], *, has_keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if each.answers:
        schemas = [schema_of[answer] for answer in each.answers]
        content[JSON] = {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
    if each.events is not None:
        content[EVENTS] = {"schema": _event_schema(schema_of[each.events], each.end_mark)}
    if each.media is not None:
        content[each.media] = {"schema": {"type": "string"}}
    headers = {REQUEST_ID_HEADER: {"$ref": "#/components/headers/RequestId"}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "headers": headers, "content": content}}
    statuses = sorted({*each.statuses, 401}) if has_keys and each.needs_key else each.statuses
    for status in statuses:
        responses[str(status)] = {
            "description": ERRORS[status],
            "content": {JSON: {"schema": schema_of[each.error]}},
        }
    return responses


def _event_schema(content: Mapping[str, Any], end_mark: str | None) -> dict[str, Any]:
    """Return the schema of one event of a stream."""
    data: dict[str, Any] = {"type": "string", "contentMediaType": JSON, "contentSchema": content}
    if end_mark is not None:
        data = {"anyOf": [data, {"const": end_mark}]}
    return {
        "type": "object",
        "description": "One event of the stream.",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }


def _reached(schemas: Iterable[Mapping[str, Any]], components: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the components that schemas refer to, directly or not; some more than once."""
    waiting: list[Any] = list(schemas)
    seen: set[str] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(value)
        elif isinstance(value, dict):
            name = str(value.get("$ref", "")).removeprefix(SCHEMAS)
            if name and name not in seen:
                seen.add(name)
                yield name
                waiting.append(components[name])
            waiting.extend(value.values())


def _complete(schema: dict[str, Any]) -> None:
    """Add to a body's schema what the struct does not say: ranges, types left open, real defaults."""
    struct = schema.get("title", "")
    for name, field in schema.get("properties", {}).items():
        is_optional = "default" in field
        field.pop("default", None)
        branches = field.get("anyOf", [field])
        own_type = TYPES.get((struct, name))
        if own_type is not None:
            _replace_type(field, own_type, is_nullable={"type": "null"} in branches)
        else:
            keywords = OWN_RANGES.get((struct, name), RANGES.get(name, {}))
            for branch in branches:
                for keyword in KEYWORDS.get(branch.get("type"), ()):
                    if keyword in keywords:
                        branch[keyword] = keywords[keyword]
        default = OWN_DEFAULTS.get((struct, name), DEFAULTS.get(name))
        if is_optional and default is not None:
            field["default"] = default


def _replace_type(field: dict[str, Any], own_type: Mapping[str, Any], *, is_nullable: bool) -> None:
    for keyword in ("anyOf", "type", "enum", "const", "$ref", "items"):
        field.pop(keyword, None)
    field.update(
        {"anyOf": [*own_type.get("anyOf", [own_type]), {"type": "null"}]} if is_nullable else own_type
    )


def _require(schema: dict[str, Any], names: Iterable[str]) -> None:
    """Make fields required whose struct has a default for them, and let them not be null."""
    for name in names:
        field = schema["properties"][name]
        field["anyOf"] = [branch for branch in field.get("anyOf", ()) if branch != {"type": "null"}]
        if len(field["anyOf"]) <= 1:
            for branch in field.pop("anyOf"):
                field.update(branch)
        if name not in schema["required"]:
            schema["required"].append(name)


def _list_other_fields(schema: dict[str, Any], body: type) -> None:
    listed = set(body.__struct_fields__)  # type: ignore[attr-defined]
    schema["x-ignored-fields"] = sorted(HARMLESS - listed)
    schema["x-refused-fields"] = {
        name: list(values) for name, values in sorted(UNSUPPORTED.items()) if name not in listed
    }


class ApiDocument:
    """The bytes of `/openapi.json`, made when they are first asked for.

    Args:
        routes: Method and path of every route; operations without one are not described.
        has_keys: As in `document`.
        root_path: Prefix under which a proxy shows the server.
    """

    def __init__(self, routes: Iterable[tuple[str, str]], *, has_keys: bool, root_path: str = "") -> None:
        self._routes = frozenset(routes)
        self._root_path = root_path
        self._has_keys = has_keys
        self._made: asyncio.Future[tuple[bytes, str]] | None = None

    async def get(self) -> tuple[bytes, str]:
        """Return the document and its entity tag."""
        if self._made is None:
            # Some ten milliseconds of work. Whoever asks while it is done waits for the same.
            self._made = asyncio.ensure_future(asyncio.to_thread(self._make))
        return await asyncio.shield(self._made)

    def _make(self) -> tuple[bytes, str]:
        served = [each for each in OPERATIONS if (each.method, each.path) in self._routes]
        described = document(served, has_keys=self._has_keys)
        if self._root_path:
            described["servers"] = [{"url": self._root_path}]
        text = orjson.dumps(described)
        return text, f'"{hashlib.sha256(text).hexdigest()[:32]}"'


API_DOCUMENT = web.AppKey("API_DOCUMENT", ApiDocument)


def routes_of(app: web.Application) -> list[tuple[str, str]]:
    """Return method and path of every route, paths as OpenAPI writes them; HEAD goes without saying."""
    return [
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    ]


async def openapi(request: web.Request) -> web.Response:
    """Answer /openapi.json; 304 if the client has it already."""
    text, tag = await request.app[API_DOCUMENT].get()
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if tag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    return web.Response(body=text, content_type="application/json", headers=headers)
