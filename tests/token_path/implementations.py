"""Both ways in which the token path is written, and objects of either for tests."""

import importlib
import shutil
import socket
import sysconfig
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncserve.token_path import lanes, prefix_hash, rows

NAMES = (
    *("SequenceRow", "SocketHandle", "TextLane", "TextRow"),
    *("apply_rows", "deliver", "extend_digests", "plan_rows", "write"),
)
"""What there is twice."""


@dataclass(frozen=True)
class Implementation:
    """One of the two."""

    name: str
    SequenceRow: Any
    SocketHandle: Any
    TextLane: Any
    TextRow: Any
    apply_rows: Callable[..., Any]
    deliver: Callable[..., Any]
    extend_digests: Callable[..., Any]
    plan_rows: Callable[..., Any]
    write: Callable[..., Any]

    def __str__(self) -> str:
        return self.name

    def lane(self, **attributes: Any) -> Any:
        """Return a lane with an empty outbox."""
        lane = self.TextLane()
        lane.outbox = []
        for name, value in attributes.items():
            setattr(lane, name, value)
        return lane

    def row(self, **attributes: Any) -> Any:
        """Return a row of texts."""
        row = self.TextRow()
        for name, value in attributes.items():
            setattr(row, name, value)
        return row

    def sequence(self, **attributes: Any) -> Any:
        """Return a sequence of three tokens in slot 7, of which the last is to be computed."""
        row = self.SequenceRow()
        defaults = {
            "token_ids": array("i", [1, 2, 3]),
            "stop_token_ids": frozenset({99}),
            "slot": 7,
            "max_len": 100,
            "plain_until": 16,
            "num_computed_tokens": 2,
            "num_unseen_tokens": 0,
            "last_step_id": -1,
            "accepts_output": True,
        }
        for name, value in {**defaults, **attributes}.items():
            setattr(row, name, value)
        return row


def _of(name: str, *modules: ModuleType) -> Implementation:
    found = {each: getattr(module, each) for module in modules for each in NAMES if hasattr(module, each)}
    return Implementation(name, **found)


PYTHON = _of("python", lanes, rows, prefix_hash)
try:
    NATIVE = _of("native", importlib.import_module("asyncserve.token_path.native"))
except ImportError:
    NATIVE = None


def can_compile() -> bool:
    """Return whether an extension could be built here: there are a compiler and Python's headers."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    return has_headers and any(shutil.which(name) for name in (compiler, "cc", "gcc", "clang"))


@dataclass(frozen=True, slots=True)
class State:
    """What a token of a step is for."""

    sequence_id: int


class Pair:
    """A connected pair of sockets that do not block."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.far.setblocking(False)

    def read(self) -> bytes:
        """Return what the far end has been sent; nothing, too, if the near one is closed."""
        data = b""
        while True:
            try:
                more = self.far.recv(1 << 20)
            except BlockingIOError:
                return data
            if not more:
                return data
            data += more

    def fill(self) -> int:
        """Send until the socket takes nothing more; return how many bytes."""
        num_bytes = 0
        for piece in (b"." * 4096, b"."):
            try:
                while True:
                    num_bytes += self.near.send(piece)
            except BlockingIOError:
                pass
        return num_bytes

    def close(self) -> None:
        self.near.close()
        self.far.close()


def state_of(item: Any) -> dict[str, Any]:
    """Return the public attributes of an object, for comparison; missing ones are left out."""
    names: Iterable[str] = (name for name in dir(item) if not name.startswith("_"))
    return {name: getattr(item, name) for name in names if hasattr(item, name)}
