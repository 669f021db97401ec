"""The limit of open files: in processes of their own, for it cannot be raised again."""

import contextlib
import socket
import subprocess
import sys

import pytest

from asyncserve.http.open_files import RESERVED, max_connections


def limits_after(soft: int, hard: int) -> tuple[int, int, int]:
    """Return what `raise_limit` gives under limits, and the limits after it."""
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from asyncserve.http.open_files import raise_limit\n"
        "print(raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    given, soft, hard = map(int, done.stdout.split())
    return given, soft, hard


@pytest.mark.slow
def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    assert limits_after(256, 4096) == (4096, 4096, 4096)
    assert limits_after(512, 512) == (512, 512, 512)


@pytest.mark.parametrize(
    ("limit", "asked", "expected"),
    [
        (20_000, None, 20_000 - RESERVED),
        (20_000, 100, 100),
        (1024, 5000, 1024 - RESERVED),
        (256, None, 128),
    ],
)
def test_connections_leave_files_for_everything_else(limit: int, asked: int | None, expected: int) -> None:
    assert max_connections(limit, asked) == expected


SERVER = """
import asyncio, resource, uvloop
from aiohttp import web
from asyncserve.http.app import make_runner

async def serve():
    runner = make_runner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

uvloop.run(serve())
"""


def answer(client: socket.socket) -> bytes:
    """Ask for something and return the beginning of the answer; nothing if the connection is closed."""
    try:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return client.recv(12)
    except ConnectionError:
        return b""


@pytest.mark.slow
def test_a_server_that_is_out_of_files_all_the_same_goes_on_and_takes_clients_when_there_are_some_again() -> (
    None
):
    """The event loop's own way with the kernel's refusal, on which the bound of connections is built."""
    with (
        subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server,
        contextlib.ExitStack() as clients,
    ):
        assert server.stdout is not None
        address = ("127.0.0.1", int(server.stdout.readline()))
        try:
            connected = [clients.enter_context(socket.create_connection(address, 60)) for _ in range(60)]
            answers = [answer(client) for client in connected]
            assert answers.count(b"HTTP/1.1 404") + answers.count(b"") == 60
            assert 5 < answers.count(b"HTTP/1.1 404") < 40
            clients.close()
            while True:
                with socket.create_connection(address, 60) as late:
                    if answer(late):
                        break
        finally:
            server.kill()
