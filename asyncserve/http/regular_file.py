"""Reading files that operators name, without ever waiting for somebody to write them.

Takes paths and gives a file's bytes, or says that it is none: opening or reading a named pipe or a terminal
can block for good, and a thread that is blocked there keeps the server from ending. Does not know what is in
the files.
"""

import errno
import os
import stat


def read_regular(path: str) -> bytes:
    """Return what a file holds.

    Raises:
        OSError: It cannot be read, or is something else than a regular file; `strerror` says what.
    """
    with open(_open_regular(path), "rb") as file:
        return file.read()


def check_regular(path: str) -> None:
    """Refuse what must not be handed to code that would wait for it.

    Raises:
        OSError: As `read_regular`.
    """
    os.close(_open_regular(path))


def _open_regular(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return descriptor
