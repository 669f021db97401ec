"""Cores, and the programs in C beside the server: compiled when they are needed."""

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.frontend.cost import Cost

SOURCE = Path(__file__).with_name("sockets.c")


def pin(core: int) -> None:
    """Keep this process on one core, where there are several."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        with contextlib.suppress(OSError):  # a sandbox may not let it
            os.sched_setaffinity(0, {cores[core % len(cores)]})


def raise_open_files() -> None:
    """Let this process open as many files as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _prepare(core: int) -> None:
    pin(core)
    raise_open_files()


@dataclass(frozen=True, slots=True)
class Round:
    """What a reader saw of one round.

    Args:
        num_events: Server-sent events, those without a token among them.
        gap_us: Of the times between two reads of a stream, while all stream: the median, the 99th
            percentile, the longest.
    """

    num_events: int
    num_bytes: int
    gap_us: tuple[int, int, int]


class Sockets:
    """The program of `sockets.c`.

    Args:
        folder: Where it is compiled to.

    Raises:
        RuntimeError: There is no C compiler, or it refuses the source.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise RuntimeError("a C compiler is needed: install gcc")
        self._program = folder / "sockets"
        done = subprocess.run(
            [compiler, "-O2", "-o", str(self._program), str(SOURCE)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{SOURCE} could not be compiled: {done.stderr}")

    def send(self, num_streams: int, chunk_bytes: int, num_chunks: int, *, gap_us: int = 0) -> Cost:
        """Return what sending so many chunks to each of so many streams costs a C program.

        Args:
            gap_us: Rest between two turns through the streams.
        """
        command = [self._program, "send", num_streams, chunk_bytes, num_chunks, gap_us]
        with self._started(command, core=0) as sender:
            assert sender.stdout is not None
            port = int(sender.stdout.readline())
            with self._started([self._program, "read", port, num_streams, 1, ""], core=1) as reader:
                reader.communicate()
            words = sender.stdout.readline().split()
        return Cost(int(words[0]), *map(float, words[1:]))

    @contextmanager
    def reading(
        self, port: int, num_streams: int, num_rounds: int, request: bytes, mark: str
    ) -> Iterator["subprocess.Popen[str]"]:
        """Run the reader for the duration of the block; `next_round` gives what it saw."""
        command = [self._program, "read", port, num_streams, num_rounds, mark]
        with self._started(command, core=1) as reader:
            assert reader.stdin is not None
            reader.stdin.write(request.decode())
            reader.stdin.close()
            reader.stdin = None
            yield reader

    @contextmanager
    def _started(self, command: list[object], *, core: int) -> Iterator["subprocess.Popen[str]"]:
        with subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: _prepare(core),
        ) as process:
            try:
                yield process
            except BaseException:
                process.kill()
                raise


def next_round(reader: "subprocess.Popen[str]") -> Round:
    """Return what a reader saw of its next round.

    Raises:
        ConnectionError: It has ended instead: a stream broke off.
    """
    assert reader.stdout is not None
    words = reader.stdout.readline().split()
    if not words:
        raise ConnectionError("a stream broke off")
    num_events, num_bytes, *gaps = map(int, words)
    return Round(num_events, num_bytes, (gaps[0], gaps[1], gaps[2]))
