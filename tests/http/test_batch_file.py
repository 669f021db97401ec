import codecs
import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from asyncserve.errors import ConfigError
from asyncserve.http import batch_file
from asyncserve.http.batch_file import (
    BatchOutput,
    BatchRequest,
    LineError,
    answer_line,
    count_lines,
    input_lines,
    parse_line,
)

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def line(**changes: Any) -> bytes:
    return json.dumps(
        {name: value for name, value in {**GOOD, **changes}.items() if value is not ...}
    ).encode()


def test_a_line_is_a_request() -> None:
    request = parse_line(line(), 1)
    assert (request.custom_id, request.url) == ("a", "/v1/completions")
    assert json.loads(bytes(request.body)) == {"prompt": "x"}
    assert parse_line(line(method=...), 1).method == "POST"
    assert parse_line(line(further="field"), 1).custom_id == "a"
    assert parse_line(line(url="/v1/responses", body={"background": False}), 1).custom_id == "a"


@pytest.mark.parametrize(
    ("data", "code", "word", "custom_id"),
    [
        (b"{", "invalid_json_line", "JSON", None),
        (b"\xff", "invalid_json_line", "", None),
        (b"[" * 100_000, "invalid_request", "object", None),
        (b'{"x":' + b"[" * 100_000, "invalid_json_line", "", None),
        (b"[]", "invalid_request", "object", None),
        (b'"text"', "invalid_request", "object", None),
        (line(custom_id=...), "invalid_request", "custom_id", None),
        (line(custom_id=5), "invalid_request", "custom_id", None),
        (line(custom_id=""), "invalid_request", "custom_id", None),
        (line(url=...), "invalid_request", "url", "a"),
        (line(url="https://api.example/v1/completions"), "invalid_request", "url", "a"),
        (line(url="/metrics"), "invalid_request", "url", "a"),
        (line(url="/v1/../ping"), "invalid_request", "url", "a"),
        (line(url="/v1/%2e%2e/tokenize"), "invalid_request", "url", "a"),
        (line(url="/v1/completions/render"), "invalid_request", "url", "a"),
        (line(url="/v1/completions?x"), "invalid_request", "url", "a"),
        (line(url="/v1/embeddings"), "invalid_request", "url", "a"),
        (line(method="GET"), "invalid_request", "method", "a"),
        (line(body=...), "invalid_request", "body", "a"),
        (line(body="text"), "invalid_request", "body", "a"),
        (line(body={"stream": True}), "invalid_request", "stream", "a"),
        (line(url="/v1/responses", body={"background": True}), "invalid_request", "background", "a"),
    ],
)
def test_what_is_no_request_is_reported_with_its_number_and_its_name_if_it_has_one(
    data: bytes, code: str, word: str, custom_id: str | None
) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(data, 7)
    report = json.loads(caught.value.as_line())
    assert report["custom_id"] == custom_id
    assert report["response"] is None
    assert (report["error"]["code"], report["error"]["line"]) == (code, 7)
    assert word in report["error"]["message"]


def test_an_answer_is_one_line_in_openais_form() -> None:
    request = BatchRequest(custom_id='odd "name"\n', url="/v1/completions")
    data = answer_line(request, status=200, request_id="r-1", body=b'{"a":1}')
    assert data.count(b"\n") == 1
    assert data.endswith(b"\n")
    answer = json.loads(data)
    assert answer["id"].startswith("batch_req_")
    assert answer["custom_id"] == 'odd "name"\n'
    assert answer["response"] == {"status_code": 200, "request_id": "r-1", "body": {"a": 1}}
    assert answer["error"] is None


@pytest.mark.parametrize("read_bytes", [1, 2, 5, 1000])
@pytest.mark.parametrize("ending", ["", "\n", "\n\n", "\r\n"])
def test_lines_are_numbered_as_an_editor_does_however_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int, ending: str
) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"one\n\n  \nfour\r\n" + b"x" * 21 + b"\nsix" + ending.encode())
    monkeypatch.setattr(batch_file, "READ_BYTES", read_bytes)
    found = [
        (number, each.code if isinstance(each, LineError) else each)
        for number, each in input_lines(str(path), max_line_bytes=20)
    ]
    assert found == [(1, b"one"), (4, b"four"), (5, "line_too_long"), (6, b"six")]


@pytest.mark.parametrize("read_bytes", [1, 2, 1000])
def test_the_mark_that_editors_put_before_the_first_line_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    path = tmp_path / "in"
    path.write_bytes(codecs.BOM_UTF8 + b"one\n" + codecs.BOM_UTF8 + b"two")
    monkeypatch.setattr(batch_file, "READ_BYTES", read_bytes)
    lines = list(input_lines(str(path), max_line_bytes=20))
    assert lines == [(1, b"one"), (2, codecs.BOM_UTF8 + b"two")]


def test_a_long_line_is_skipped_without_being_held(tmp_path: Path) -> None:
    path = tmp_path / "in"
    with path.open("wb") as file:
        file.truncate(1 << 30)  # a gigabyte that takes no room on disk
        file.seek(0, os.SEEK_END)
        file.write(b"\nnext")
    tracemalloc.start()
    try:
        [(_, first), second] = input_lines(str(path), max_line_bytes=1000)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(first, LineError)
    assert second == (2, b"next")
    assert peak_bytes < 8 << 20


@pytest.mark.parametrize(("content", "count"), [("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2), ("\n\n", 2)])
def test_lines_are_counted(tmp_path: Path, content: str, count: int) -> None:
    path = tmp_path / "in"
    path.write_text(content)
    assert count_lines(str(path)) == count
    assert count_lines("-") is None
    with pytest.raises(IsADirectoryError):
        count_lines(str(tmp_path))


def output_with(path: Path, content: bytes) -> BatchOutput:
    path.write_bytes(content)
    return BatchOutput(str(path))


ANSWERS = (
    b'{"id":"batch_req_1","custom_id":"a","response":{"status_code":200},"error":null}\n'
    b'{"custom_id":"b","response":null,"error":{"line":2}}\n'
)
REPORT = b'{"custom_id":null,"response":null,"error":{"code":"x","line":3}}\n'


def test_answers_of_an_earlier_run_are_known(tmp_path: Path) -> None:
    output = output_with(tmp_path / "out", ANSWERS + REPORT)
    assert [name for name in "abc" if output.has(name)] == ["a", "b"]
    assert [number for number in (2, 3, 4) if output.has_line(number)] == [3]
    assert output.num_found == 3
    output.write(b"more\n")
    output.close()
    assert (tmp_path / "out").read_bytes() == ANSWERS + REPORT + b"more\n"


@pytest.mark.parametrize("cut", range(1, 80))
def test_a_last_line_that_was_cut_off_is_removed_or_completed(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "out"
    first, second = ANSWERS.splitlines(keepends=True)
    output = output_with(path, second + first[:-cut])
    assert output.has("b")
    assert output.has("a") is (cut == 1), "only the line break was missing"
    output.write(b'{"custom_id":"c","response":{},"error":null}\n')
    output.close()
    names = [json.loads(each)["custom_id"] for each in path.read_text().splitlines()]
    assert names == (["b", "a", "c"] if cut == 1 else ["b", "c"])


@pytest.mark.parametrize(
    "content",
    [
        b"precious notes\n",
        b"precious notes",
        b'{"custom_id": 5}\n',
        b"[]\n",
        b"{}\n" + ANSWERS,
        ANSWERS + b"precious notes",
        line(),
        line() + b"\n",
        line() + b"\n" + line()[:-20],
        line()[:-20],
        ANSWERS + line()[:-20],
        ANSWERS + line(),
        b'{"custom_id":"a","response":{}}\n',
        b'{"custom_id":"a","error":null}\n',
        b'{"custom_id":"a","response":"text","error":null}\n',
    ],
)
def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out"
    with pytest.raises(ConfigError, match="no output of a batch"):
        output_with(path, content)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"", ANSWERS, line() + b"\n", line()])
def test_the_input_is_never_taken_for_the_output(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in"
    path.write_bytes(content)
    (tmp_path / "symbolic").symlink_to(path)
    (tmp_path / "hard").hardlink_to(path)
    for name in ("in", "symbolic", "hard"):
        with pytest.raises(ConfigError, match="same file"):
            BatchOutput(str(tmp_path / name), input_path=str(path))
    assert path.read_bytes() == content
    BatchOutput(str(tmp_path / "out"), input_path=str(path)).close()


def test_nor_when_the_output_is_appended_to_it_by_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in"
    path.write_bytes(line())
    with path.open("a") as appended:
        monkeypatch.setattr(sys, "stdout", appended)
        with pytest.raises(ConfigError, match="same file"):
            BatchOutput("-", input_path=str(path))
        BatchOutput("-", input_path="/nowhere").close()


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = str(tmp_path / "out")
    output = BatchOutput(path)
    with pytest.raises(ConfigError, match="another run"):
        BatchOutput(path)
    output.close()
    BatchOutput(path).close()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write the output file .*/missing/out"):
        BatchOutput(str(tmp_path / "missing" / "out"))
