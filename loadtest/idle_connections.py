"""What connections cost that say nothing: `python -m loadtest.idle_connections --url URL --pid PID`.

Opens N keep-alive connections, each with one answered request behind it, and leaves them alone. Reports the
server's memory per connection, its CPU time while it comes to rest, its share of a core when it has, and how
long a request on one of them takes; then closes them and reports what the memory fell back to. With --limit,
exit status 1 if a connection costs more bytes than that, or the idle server more than 1 % of a core.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil
import uvloop

from loadtest.chaos import measured_idle_share
from loadtest.client import Client, Connection, ConnectionLost
from loadtest.sender import allow_many_connections

AT_ONCE = 64
"""Connections opened at the same time: the kernel's queue of those not accepted is short."""
SETTLE_S = 35.0
"""So long a server has to come to rest: its garbage collector looks at what is new, and when nothing new has
come for twenty seconds, once at everything."""
MAX_IDLE_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What was measured.

    Args:
        bytes_each: Resident memory of the server, per connection; the kernel's own is not in it.
        settling_cpu_s: CPU seconds while it came to rest after the last connection.
        idle_share: Of one core, while nothing is sent.
        request_ms: Of one request on an idle connection, the median of several.
        left_bytes: Resident memory above the beginning when all are closed.
    """

    num_connections: int
    bytes_each: float
    settling_cpu_s: float
    idle_share: float
    request_ms: float
    left_bytes: int


class IdleConnections:
    """Connections to one server, and what they cost it.

    Args:
        url: Of the server.
        pid: Of its process.
        path: Asked once on each connection.
        settle_s: Seconds that the server has to come to rest before its memory is read, above 0.
    """

    def __init__(self, url: str, pid: int, *, path: str = "/live", settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self._client = Client(url)
        self._request = self._client.head("GET", path)
        self._process = psutil.Process(pid)

    async def measure(self, num_connections: int, idle_s: float) -> Cost:
        """Open connections, leave them alone for so long, and close them.

        Raises:
            ConnectionLost: The server refuses one, or answers with anything but 200.
        """
        # What the first ones cost is the server's own warming up.
        self._close(await self._open(min(AT_ONCE, num_connections)))
        await asyncio.sleep(self._settle_s)
        before = self._process.memory_info().rss
        connections = await self._open(num_connections)
        settling_share = await measured_idle_share(self._process.pid, self._settle_s) / 100
        opened = self._process.memory_info().rss
        share = await measured_idle_share(self._process.pid, idle_s) / 100
        step = max(1, num_connections // 32)
        times_ms = sorted([await self._ask_ms(each) for each in connections[::step]])
        self._close(connections)
        await asyncio.sleep(self._settle_s)
        return Cost(
            num_connections=num_connections,
            bytes_each=(opened - before) / num_connections,
            settling_cpu_s=settling_share * self._settle_s,
            idle_share=share,
            request_ms=times_ms[len(times_ms) // 2],
            left_bytes=self._process.memory_info().rss - before,
        )

    async def _open(self, num_connections: int) -> list[Connection]:
        places = asyncio.Semaphore(AT_ONCE)

        async def open_one() -> Connection:
            async with places:
                connection = await self._client.open()
                try:
                    await self._ask_ms(connection)
                except BaseException:
                    connection.close()
                    raise
                return connection

        return list(await asyncio.gather(*(open_one() for _ in range(num_connections))))

    async def _ask_ms(self, connection: Connection) -> float:
        started_s = time.perf_counter()
        answer = await connection.exchange(self._request)
        if answer.status != 200:
            raise ConnectionLost(f"the server answers HTTP {answer.status}")
        return (time.perf_counter() - started_s) * 1e3

    def _close(self, connections: Sequence[Connection]) -> None:
        for connection in connections:
            connection.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the command line says; 0 if nothing is too dear, 1 if something is, 2 for an error."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.idle_connections", description="Measure what idle connections cost a server."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="Base URL of the server.")
    parser.add_argument("--pid", type=int, required=True, help="Its process.")
    parser.add_argument("--connections", type=int, default=10_000, help="Default: 10000.")
    parser.add_argument("--idle-s", type=float, default=10.0, help="Seconds to leave them. Default: 10.")
    parser.add_argument("--limit", type=int, default=None, help="Most bytes that one may cost.")
    arguments = parser.parse_args(argv)
    allow_many_connections()
    try:
        cost = uvloop.run(
            IdleConnections(arguments.url, arguments.pid).measure(arguments.connections, arguments.idle_s)
        )
    except (ConnectionLost, psutil.Error) as error:
        print(f"idle_connections: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({name: round(value, 4) for name, value in asdict(cost).items()}))
    return 1 if arguments.limit is not None and is_dear(cost, arguments.limit) else 0


def is_dear(cost: Cost, limit: int) -> bool:
    """Whether a connection costs more bytes than the limit, or all of them together any CPU to speak of."""
    return cost.bytes_each > limit or cost.idle_share > MAX_IDLE_SHARE


if __name__ == "__main__":
    sys.exit(main())
