"""The option `--kv-events-config`: a JSON object with vLLM's names and defaults, checked.

Knows no socket.
"""

from typing import Annotated, Literal

import msgspec

from asyncserve.errors import ConfigError

_MOST = 1_000_000_000
"""ZeroMQ counts messages in 32 bits."""
_LAST_PORT = 65535
_Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]


class KVEventsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is published, and where.

    Args:
        enable_kv_cache_events: Whether anything is.
        publisher: How; null for not at all, None for zmq.
        endpoint: ZeroMQ address of the PUB socket. One with a `*` or `::`, and any ipc one, is bound; to any
            other the socket connects.
        replay_endpoint: Of the ROUTER socket at which batches are asked for again; None for none.
        buffer_steps: Batches that can be asked for again.
        hwm: Batches that wait for one slow subscriber before it misses some; 0 for any number.
        max_queue_size: Batches that wait to be sent before some are left to be asked for.
        topic: First frame of every message; subscribers filter by it.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: _Count = 10_000
    hwm: Annotated[int, msgspec.Meta(ge=0, le=_MOST)] = 100_000
    max_queue_size: _Count = 100_000
    topic: str = ""


def read_settings(text: str | None) -> KVEventsSettings | None:
    """Read the option's value; None if nothing is to be published.

    Raises:
        ConfigError: It is no such object.
    """
    if text is None:
        return None
    try:
        settings = msgspec.json.decode(text, type=KVEventsSettings)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"kv_events_config is {text!r}: {error}") from error
    for name, endpoint in (("endpoint", settings.endpoint), ("replay_endpoint", settings.replay_endpoint)):
        if endpoint is not None and endpoint.startswith("inproc://"):
            raise ConfigError(
                f"kv_events_config: {name} is {endpoint!r}, which links threads of one process: no router"
                " could ever connect; tcp:// and ipc:// reach others"
            )
        if endpoint is not None and _has_impossible_port(endpoint):
            raise ConfigError(f"kv_events_config: {name} is {endpoint!r}; a port lies in [0, {_LAST_PORT}]")
    return settings if settings.enable_kv_cache_events and settings.publisher != "null" else None


def _has_impossible_port(endpoint: str) -> bool:
    """Return whether there is no such TCP port: ZeroMQ takes its last 16 bits, or connects to nothing."""
    if not endpoint.startswith("tcp://"):
        return False
    try:
        return not 0 <= int(endpoint.rpartition(":")[2]) <= _LAST_PORT
    except ValueError:  # a wildcard, or what ZeroMQ refuses
        return False
