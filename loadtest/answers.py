"""Answers of a server, held against its `/openapi.json`: status, content type, JSON, events of streams.

Takes the document and answers, raises AssertionError with what was sent and what came; counts what it saw.
Knows no endpoint: what an answer must be like stands in the document.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jsonschema
import orjson

from loadtest.http_reader import Response

JSON = "application/json"
EVENTS = "text/event-stream"
HTTP_VERSION_NOT_SUPPORTED = 505
MAX_VALIDATED = 100
"""So many events at the beginning and the end of a stream are held against their schema; others are alike."""


class Answers:
    """Checks of one server's answers.

    Args:
        document: What `/openapi.json` says.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._validators: dict[bytes, Any] = {}
        self.counts: Counter[str] = Counter()

    def check(self, method: str, path: str, response: Response, *, sent: str) -> None:
        """Raise AssertionError if the answer is not one the document allows.

        Args:
            path: As the document spells it.
            sent: Shown with what is wrong.
        """
        self.counts[f"{method} {path} {response.status}"] += 1
        shown = f"{method} {sent}: {response.status} {response.body[:2000]!r}"
        assert response.is_whole, f"the answer breaks off: {shown}"
        assert response.status < 500, f"a server error: {shown}"
        responses = self._document["paths"][path][method.lower()]["responses"]
        assert str(response.status) in responses, f"a status that is not documented: {shown}"
        content = responses[str(response.status)].get("content", {})
        media_type = response.headers.get("content-type", "").partition(";")[0]
        assert media_type in content, f"content type {media_type!r} is not documented: {shown}"
        media = content[media_type]
        if media_type == JSON:
            self._validate(media["schema"], orjson.loads(response.body), shown)
        elif media_type == EVENTS:
            data = media["schema"]["properties"]["data"]
            branches = data.get("anyOf", [data])
            end_marks = {branch["const"] for branch in branches if "const" in branch}
            [schema] = [branch["contentSchema"] for branch in branches if "const" not in branch]
            self._check_events(schema, end_marks, response.body, shown)

    def check_any(self, response: Response) -> None:
        """Raise AssertionError if the answer to unknown bytes is not as every answer is."""
        self.counts[f"raw {response.status}"] += 1
        shown = f"{response.status} {response.headers} {response.body[:500]!r}"
        assert response.status < 500 or response.status == HTTP_VERSION_NOT_SUPPORTED, (
            f"a server error: {shown}"
        )
        if response.status < 400 or not response.is_whole:
            return
        assert response.headers.get("content-type", "").startswith(JSON), f"an error that is no JSON: {shown}"
        error = orjson.loads(response.body)["error"]
        for name in ("message", "type"):
            assert isinstance(error[name], str), f"an error without {name}: {shown}"
            assert error[name], f"an error without {name}: {shown}"

    def _check_events(self, schema: Mapping[str, Any], end_marks: set[str], body: bytes, shown: str) -> None:
        parts = body.decode().split("\n\n")
        assert parts.pop() == "", f"the stream breaks off within an event: {shown}"
        assert parts, f"a stream without events: {shown}"
        for index, part in enumerate(parts):
            name, data = _event(part, shown)
            if data is None or (data in end_marks and part is parts[-1]):
                continue
            event = orjson.loads(data)
            if set(event) == {"error"}:
                self._validate({"$ref": "#/components/schemas/ErrorBody"}, event, shown)
                continue
            if MAX_VALIDATED <= index < len(parts) - MAX_VALIDATED:
                continue
            self._validate(schema, event, f"event {data[:500]} of {shown}")
            assert name in (None, event.get("type")), f"event {name!r} of type {event.get('type')!r}: {shown}"

    def _validate(self, schema: Mapping[str, Any], value: Any, shown: str) -> None:
        key = orjson.dumps(schema)
        validator = self._validators.get(key)
        if validator is None:
            whole = {**schema, "components": self._document["components"]}
            validator = self._validators[key] = jsonschema.Draft202012Validator(whole)
        for error in validator.iter_errors(value):
            raise AssertionError(f"not as documented: {error.json_path}: {error.message[:500]}: {shown}")


def _event(part: str, shown: str) -> tuple[str | None, str | None]:
    """Return name and data of an event; comments have neither."""
    name, data = None, None
    for line in part.split("\n"):
        if line.startswith(":"):
            continue
        field, colon, value = line.partition(": ")
        assert colon, f"a line that is none of a stream: {line!r}: {shown}"
        assert field in ("data", "event"), f"a field that is none of a stream: {line!r}: {shown}"
        name, data = (value, data) if field == "event" else (name, value)
    return name, data
