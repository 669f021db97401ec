"""The errors a caller of asyncserve can meet, as one tree.

A `RequestError` is the caller's to fix, an `EngineError` is ours or the machine's, a `StartupError`
keeps the server from starting. `status_hint` is the HTTP status a client would see; `http/failures.py`
turns the tree into OpenAI's error shape, and adds the one only HTTP knows (a wrong API key). What never
leaves a package (a closed channel) is defined where it is raised.
`InvariantError` is a bug here, never bad input.
"""

from collections.abc import Sequence
from typing import ClassVar


class AsyncserveError(Exception):
    """Root of every error raised on purpose."""

    status_hint: ClassVar[int] = 500


class RequestError(AsyncserveError):
    """The caller can fix it.

    Args:
        message: What is wrong, with the numbers that matter, addressed to the caller.
        param: Name of the request field at fault, if there is one.
    """

    status_hint: ClassVar[int] = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(RequestError):
    """A field has a value that can never be served."""


class PromptTooLong(RequestError):
    """The prompt, or prompt plus requested output, exceeds the context or the KV pool."""


class UnknownModel(RequestError):
    """The request names a model this server does not serve."""

    status_hint: ClassVar[int] = 404


class Overloaded(RequestError):
    """What the server lets wait is full: retry after `retry_after_s` seconds.

    Args:
        retry_after_s: Seconds after which there may be room.
        reason: What is full, in a word that metrics use.
    """

    status_hint: ClassVar[int] = 429

    def __init__(self, message: str, *, retry_after_s: float, reason: str = "overloaded") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class DeadlineExceeded(RequestError):
    """The time that the request, or the server, allows for its answer is over."""

    status_hint: ClassVar[int] = 504


class EngineError(AsyncserveError):
    """The engine or the machine failed; the request itself may be fine."""


class NotReady(EngineError):
    """The server is loading or draining and takes no new work."""

    status_hint: ClassVar[int] = 503


class EngineStopped(EngineError):
    """The engine stopped while the request was in it."""

    status_hint: ClassVar[int] = 503


class StepFailed(EngineError):
    """One GPU step raised; `__cause__` holds the original exception.

    Args:
        step_id: The step that failed.
        message: What the device said.
    """

    def __init__(self, message: str, *, step_id: int) -> None:
        super().__init__(f"step {step_id} failed: {message}")
        self.step_id = step_id


class StepOutOfMemory(StepFailed):
    """The device had too little memory for one step; a smaller one may do."""


class DeviceLost(EngineError):
    """The device does not work any more, or does not answer: what it held is gone."""

    status_hint: ClassVar[int] = 503


class DeviceHung(DeviceLost):
    """A step did not end within the time it may take."""


class StartupError(EngineError):
    """The server cannot start; the message says what to change."""


class ConfigError(StartupError):
    """An option has a value that cannot work, alone or together with another."""


class UnsupportedModel(StartupError):
    """The checkpoint's architecture is not implemented; `known` lists those that are."""

    def __init__(self, architecture: str, *, known: Sequence[str]) -> None:
        super().__init__(
            f"architecture {architecture!r} is not supported; supported: {', '.join(sorted(known))}"
        )
        self.architecture = architecture
        self.known = tuple(sorted(known))


class CheckpointError(StartupError):
    """The model's files are missing, unreachable, damaged or inconsistent."""


class OutOfDeviceMemory(StartupError):
    """The device has too little memory for weights, activations and a useful KV pool."""

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class InvariantError(AssertionError):
    """A bug in asyncserve: one of its own invariants does not hold. Please report it."""
