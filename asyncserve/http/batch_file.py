"""Batch files, in OpenAI's format: requests in, one JSON object a line; answers out, one a line.

Reads input lines of bounded length from a file descriptor, checks them, and keeps an output file that can be
resumed: it says which requests it has answers to, repairs a last line that was cut off, and takes whole
lines. Runs nothing and knows no model; all calls block, but only on files.
"""

import codecs
import errno
import fcntl
import os
import stat
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson

from asyncserve.errors import ConfigError

READ_BYTES = 256 * 1024
"""So much of the input is read at once."""
STANDARD = "-"
"""Stands for standard input or output."""
MAX_SHOWN_LEN = 200
RESPONSES_URL = "/v1/responses"
URLS = ("/v1/completions", "/v1/chat/completions", RESPONSES_URL, "/v1/messages")
"""What a request may go to: the endpoints that generate."""
_ANSWER_BEGINS = b'{"id":"batch_req_'
"""What every output line begins with."""


class LineError(Exception):
    """An input line that is no request.

    Args:
        code: A word a program can compare.
        message: What is wrong.
        number: Of the line, from 1.
        custom_id: Its name, if it has one.
    """

    def __init__(self, code: str, message: str, *, number: int, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.number = number
        self.custom_id = custom_id

    def as_line(self) -> bytes:
        """Return the output line that reports it."""
        error = {"code": self.code, "message": self.message, "param": None, "line": self.number}
        return _output_line(self.custom_id, response=b"null", error=orjson.dumps(error))


class BatchRequest(msgspec.Struct, kw_only=True, frozen=True):
    """One input line: a request and the name by which its answer is found."""

    custom_id: str
    url: str
    method: str = "POST"
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Delivery(msgspec.Struct):
    """The fields of a body that say how its answer comes."""

    stream: Any = None
    background: Any = None


class _Named(msgspec.Struct):
    custom_id: str | None = None


def parse_line(line: bytes, number: int) -> BatchRequest:
    """Return the request that an input line holds.

    Raises:
        LineError: It is no JSON object, a field is missing or wrong, or its answer would not come whole.
    """
    try:
        request = msgspec.json.decode(line, type=BatchRequest)
    except msgspec.ValidationError as error:
        raise LineError("invalid_request", str(error), number=number, custom_id=_name_in(line)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("invalid_json_line", f"not valid JSON: {error}", number=number) from error
    message = None
    if not request.custom_id:
        message = "custom_id is empty"
    elif request.method.upper() != "POST":
        message = f"method is {request.method[:MAX_SHOWN_LEN]!r}; it must be POST"
    elif request.url not in URLS:
        message = f"url is {request.url[:MAX_SHOWN_LEN]!r}; it must be one of {', '.join(URLS)}"
    else:
        try:
            delivery = msgspec.json.decode(request.body, type=_Delivery)
            if delivery.stream:
                message = "body.stream is true; answers in a batch file come whole"
            elif delivery.background and request.url == RESPONSES_URL:
                message = "body.background is true; answers in a batch file come when they are complete"
        except (msgspec.DecodeError, RecursionError) as error:
            message = f"body: {error}"
    if message is not None:
        raise LineError("invalid_request", message, number=number, custom_id=request.custom_id or None)
    return request


def answer_line(request: BatchRequest, *, status: int, request_id: str, body: bytes) -> bytes:
    """Return the output line with an answer.

    Args:
        body: JSON in one line.
    """
    response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (status, orjson.dumps(request_id), body)
    return _output_line(request.custom_id, response=response, error=b"null")


def input_lines(path: str, *, max_line_bytes: int) -> Iterator[tuple[int, bytes | LineError]]:
    """Yield number and content of each input line that is not empty.

    Args:
        path: `-` for standard input.
        max_line_bytes: A line above it is skipped, and an error yielded in its place.

    Raises:
        OSError: The file cannot be read.
    """
    # Not through a buffered file: a thread that waits for standard input must not hold a lock at exit.
    descriptor = 0 if path == STANDARD else os.open(path, os.O_RDONLY)
    try:
        number = 1
        held = bytearray()
        is_too_long = False
        while True:
            data = os.read(descriptor, READ_BYTES)
            *ends, rest = data.split(b"\n") if data else (b"", b"")
            for end in ends:
                held += end
                if number == 1 and held.startswith(codecs.BOM_UTF8):
                    del held[: len(codecs.BOM_UTF8)]
                if is_too_long or len(held) > max_line_bytes:
                    yield number, _too_long(number, max_line_bytes)
                elif line := bytes(held).strip():
                    yield number, line
                held.clear()
                is_too_long = False
                number += 1
            if not data:
                return
            held += rest
            if len(held) > max_line_bytes:
                held.clear()
                is_too_long = True
    finally:
        if descriptor:
            os.close(descriptor)


def count_lines(path: str) -> int | None:
    """Return how many lines a file has; None for what can be read but once.

    Raises:
        OSError: It cannot be read.
    """
    if path == STANDARD:
        return None
    kind = os.stat(path).st_mode
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(kind):
        return None
    num_lines = 0
    last = b"\n"
    with open(path, "rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            num_lines += data.count(b"\n")
            last = data[-1:]
    return num_lines + (last != b"\n")


class BatchOutput:
    """The output file, which may hold answers of an earlier run.

    Args:
        path: `-` for standard output, which cannot be resumed.
        input_path: Of the file the requests are in, which must be another.

    Raises:
        ConfigError: It cannot be written, another run is writing it, or it is no output of a batch. What is
            in it is untouched then.
    """

    def __init__(self, path: str, *, input_path: str | None = None) -> None:
        self._ids: set[str] = set()
        self._bad_lines: set[int] = set()
        self.num_found = 0
        """Lines that were there at the start."""
        if path == STANDARD:
            self._descriptor = os.dup(sys.stdout.fileno())
        else:
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            except OSError as error:
                raise ConfigError(f"cannot write the output file {path}: {error.strerror}") from error
        try:
            is_file = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
            if is_file and input_path is not None and self._is(input_path):
                raise ConfigError("input_file and output_file are the same file; name another")
            if is_file and path != STANDARD:
                self._resume(path)
        except BaseException:
            os.close(self._descriptor)
            raise

    def has(self, custom_id: str) -> bool:
        """Return whether a request of that name was answered in an earlier run."""
        return custom_id in self._ids

    def has_line(self, number: int) -> bool:
        """Return whether an input line without a name was reported in an earlier run."""
        return number in self._bad_lines

    def write(self, line: bytes) -> None:
        """Add one line, at once and whole.

        Raises:
            OSError: It cannot be written.
        """
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _is(self, path: str) -> bool:
        """Return whether the output goes to a file that is there under another name."""
        try:
            other = os.fstat(0) if path == STANDARD else os.stat(path)
        except OSError:
            return False  # whoever reads it will say what is wrong
        return os.path.samestat(other, os.fstat(self._descriptor))

    def _resume(self, path: str) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another run is writing the output file {path}") from error
        end = 0
        with open(path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    self._repair(path, end, line)  # all lines before it are answers
                    break
                end += len(line)
                if line.strip() and not self._take(line):
                    raise _no_output(path)

    def _repair(self, path: str, end: int, line: bytes) -> None:
        """Complete a last line that ends without a line break, or remove it if an answer broke off there."""
        if self._take(line):
            self.write(b"\n")
        elif line[: len(_ANSWER_BEGINS)] == _ANSWER_BEGINS[: len(line)]:
            os.ftruncate(self._descriptor, end)
        else:
            raise _no_output(path)

    def _take(self, line: bytes) -> bool:
        try:
            answer = msgspec.json.decode(line, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        if answer.custom_id is not None:
            self._ids.add(answer.custom_id)
        elif answer.error is not None and answer.error.line is not None:
            self._bad_lines.add(answer.error.line)
        self.num_found += 1
        return True


class _AnswerError(msgspec.Struct):
    line: int | None = None


class _AnswerResponse(msgspec.Struct):
    """Whatever is in it."""


class _Answer(msgspec.Struct):
    """What every output line has, and no input line."""

    custom_id: str | None
    response: _AnswerResponse | None
    error: _AnswerError | None


def _no_output(path: str) -> ConfigError:
    return ConfigError(f"{path} is there and is no output of a batch; name another file")


def _output_line(custom_id: str | None, *, response: bytes, error: bytes) -> bytes:
    return _ANSWER_BEGINS + b'%b","custom_id":%b,"response":%b,"error":%b}\n' % (
        uuid.uuid4().hex.encode(),
        orjson.dumps(custom_id),
        response,
        error,
    )


def _name_in(line: bytes) -> str | None:
    try:
        return msgspec.json.decode(line, type=_Named).custom_id or None
    except (msgspec.DecodeError, RecursionError):
        return None


def _too_long(number: int, max_line_bytes: int) -> LineError:
    return LineError("line_too_long", f"the line has more than {max_line_bytes} bytes", number=number)
