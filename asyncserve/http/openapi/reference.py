"""docs/api.md: every endpoint and every field, as a page for people; made from the OpenAPI document.

`python -m asyncserve.http.openapi.reference docs/api.md` writes it, and a test holds the committed file
against it. Says nothing that `/openapi.json` does not say.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from asyncserve.http.openapi.document import SCHEMAS, document
from asyncserve.http.openapi.operations import EVENTS, JSON
from asyncserve.http.refusals import REFUSED
from asyncserve.http.schema import HARMLESS, UNSUPPORTED

SHOWN_LIMIT = 2**31 - 1
"""Bounds at or beyond this are those of an integer, and not shown."""
INTRODUCTION = """# The API

Made from `/openapi.json` by `python -m asyncserve.http.openapi.reference docs/api.md`; do not edit. A running
server shows the same at `/docs`, where it can be tried.

{description}

*Default* is what holds where a field is left out or null; empty means that nothing does. The model's own
`generation_config.json` may set other defaults for temperature, top_p, top_k, min_p and repetition_penalty.
"""


def api_reference() -> str:
    """Return the page."""
    api = document()
    lines = [INTRODUCTION.format(description=api["info"]["description"])]
    operations = [
        (method.upper(), path, operation)
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    ]
    lines += ["| operation | |", "|---|---|"]
    for method, path, operation in operations:
        lines.append(f"| [`{method} {path}`](#{_anchor(f'{method} {path}')}) | {operation['summary']} |")
    for tag in api["tags"]:
        lines += ["", f"## {tag['name']}"]
        for method, path, operation in operations:
            if tag["name"] in operation["tags"]:
                lines += _operation(method, path, operation, api["components"]["schemas"])
    lines += ["", "## Structures", "", "What bodies are made of.", ""]
    for name in _structures(operations, api["components"]["schemas"]):
        lines += _structure(name, api["components"]["schemas"])
    lines += _other_fields()
    lines += _refused_paths()
    return "\n".join(lines) + "\n"


def _operation(
    method: str, path: str, operation: Mapping[str, Any], components: Mapping[str, Any]
) -> Iterator[str]:
    yield from ("", f"### `{method} {path}`", "", _sentence(operation["summary"]))
    if "description" in operation:
        yield operation["description"]
    parameters = [each for each in operation["parameters"] if "in" in each]
    if parameters:
        yield from ("", "| parameter | in | type | meaning |", "|---|---|---|---|")
        for each in parameters:
            shown_type = _type(each["schema"])
            yield f"| `{each['name']}` | {each['in']} | {shown_type} | {each['description']} |"
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"][JSON]["schema"]
        yield from _fields(components[_name(schema)])
    yield from ("", f"Answers {_contents(operation['responses'])}; errors {_errors(operation['responses'])}.")


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "| field | type | default | meaning |", "|---|---|---|---|")
    required = schema.get("required", ())
    fields = schema["properties"].items()
    for name, field in sorted(fields, key=lambda each: each[0] not in required):
        default = f"`{_json(field['default'])}`" if "default" in field else ""
        shown_default = "required" if name in required else default
        yield f"| `{name}` | {_type(field)} | {shown_default} | {_cell(field.get('description', ''))} |"


def _structures(operations: Sequence[Any], components: Mapping[str, Any]) -> list[str]:
    """Return the names of all structures that bodies are made of, in the order in which they are met."""
    bodies = [
        _name(operation["requestBody"]["content"][JSON]["schema"])
        for _, _, operation in operations
        if "requestBody" in operation
    ]
    found = dict.fromkeys(bodies)
    waiting = list(bodies)
    while waiting:
        for name in _references(components[waiting.pop(0)]):
            if name not in found:
                found[name] = None
                waiting.append(name)
    return [name for name in found if name not in bodies]


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for each in schema:
            yield from _references(each)
    elif isinstance(schema, dict):
        if "$ref" in schema:
            yield _name(schema)
        for key, each in schema.items():
            if key != "discriminator":
                yield from _references(each)


def _structure(name: str, components: Mapping[str, Any]) -> Iterator[str]:
    schema = components[name]
    yield from ("", f"### {name}", "", schema.get("description", ""))
    if schema.get("properties"):
        yield from _fields(schema)


def _other_fields() -> Iterator[str]:
    yield from ("", "## Other fields", "")
    yield "In bodies that do not list them. Taken and not used:"
    yield ", ".join(f"`{name}`" for name in sorted(HARMLESS)) + "."
    yield from ("", "Refused, because they would change the answer and are not implemented:", "")
    yield from ("| field | taken if it is |", "|---|---|")
    for name, values in sorted(UNSUPPORTED.items()):
        yield f"| `{name}` | {' or '.join(f'`{_json(value)}`' for value in values)} |"
    yield from ("", "All others are ignored, with a warning in the server's log.")


def _refused_paths() -> Iterator[str]:
    yield from ("", "## Refused endpoints", "")
    yield "Known from other servers; a request to one is answered with 400 and the reason:"
    yield ", ".join(f"`{path}`" for path in REFUSED) + "."


def _contents(responses: Mapping[str, Any]) -> str:
    content = responses["200"].get("content", {})
    kinds = [kind for kind in content if kind != EVENTS]
    shown = " or ".join(f"`{kind}`" for kind in kinds)
    return f"{shown}, or `{EVENTS}` if a stream is asked for" if EVENTS in content else shown


def _errors(responses: Mapping[str, Any]) -> str:
    return ", ".join(status for status in responses if int(status) >= 400)


def _type(schema: Mapping[str, Any]) -> str:
    """Return a field's type in words; that it may be null goes without saying."""
    if "$ref" in schema:
        name = _name(schema)
        return f"[{name}](#{_anchor(name)})"
    if "anyOf" in schema:
        shown = [_type(branch) for branch in schema["anyOf"] if branch != {"type": "null"}]
        return " or ".join(dict.fromkeys(shown))
    if "enum" in schema:
        return " or ".join(f"`{_json(value)}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}{_bounds(schema, 'minItems', 'maxItems')}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    if kind == "string":
        return f"{kind}{_bounds(schema, 'minLength', 'maxLength')}"
    return str(kind) + _bounds(schema, "minimum", "maximum")


def _bounds(schema: Mapping[str, Any], low_name: str, high_name: str) -> str:
    low, high = schema.get(low_name), schema.get(high_name)
    above = schema.get("exclusiveMinimum") if low_name == "minimum" else None
    low = None if low is not None and low <= -SHOWN_LIMIT else low
    high = None if high is not None and high >= SHOWN_LIMIT else high
    if low_name != "minimum":
        # Lengths: only a largest one is worth its place.
        return "" if high is None else f" (at most {high})"
    if above is not None:
        return f" > {above}" if high is None else f" in ({above}, {high}]"
    if low is not None and high is not None:
        return f" in [{low}, {high}]"
    return f" ≥ {low}" if low is not None else f" ≤ {high}" if high is not None else ""


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).removeprefix(SCHEMAS)


def _anchor(heading: str) -> str:
    """Return the link to a heading, as renderers of Markdown make it."""
    kept = "".join(each for each in heading.lower() if each.isalnum() or each in " -_")
    return kept.replace(" ", "-")


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _cell(text: str) -> str:
    return _sentence(" ".join(text.split()).replace("|", "\\|")) if text else ""


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?")) else f"{text}."


def main(argv: Sequence[str]) -> int:
    """Write the page to the file that is named, or print it."""
    if len(argv) > 1:
        Path(argv[1]).write_text(api_reference(), encoding="utf-8")
    else:
        sys.stdout.write(api_reference())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
