"""asyncserve: an LLM inference server in one asyncio process.

`LLM` and `SamplingParams` are what a script needs, `Request` and the errors what an embedding program
needs besides. Importing this package imports neither torch nor asyncio: `LLM` is found on first use.
"""

from typing import TYPE_CHECKING

from asyncserve.errors import (
    AsyncserveError,
    CheckpointError,
    ConfigError,
    EngineError,
    EngineStopped,
    InvalidRequest,
    InvariantError,
    NotReady,
    OutOfDeviceMemory,
    Overloaded,
    PromptTooLong,
    RequestError,
    StartupError,
    StepFailed,
    UnknownModel,
    UnsupportedModel,
)
from asyncserve.request import Request, SamplingParams, StructuredOutput, StructureKind

if TYPE_CHECKING:
    from asyncserve.offline import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncserveError",
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "EngineStopped",
    "InvalidRequest",
    "InvariantError",
    "NotReady",
    "OutOfDeviceMemory",
    "Overloaded",
    "PromptTooLong",
    "Request",
    "RequestError",
    "SamplingParams",
    "StartupError",
    "StepFailed",
    "StructureKind",
    "StructuredOutput",
    "UnknownModel",
    "UnsupportedModel",
]


def __getattr__(name: str) -> object:
    """Import `LLM` when it is first asked for: it brings the engine and, with it, torch."""
    if name == "LLM":
        from asyncserve.offline import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
