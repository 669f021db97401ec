"""A connection's socket, to send on past its transport: what a streamed token costs is mostly that call.

`send` costs the kernel a tenth less than the `write` of uvloop's transports, and may be called for many
connections at once. The socket stays the transport's, which closes it: the connection takes the handle's `fd`
away before. To be used while the transport has nothing unsent; what the socket does not take at once is the
transport's to send. Not for TLS.
"""

import asyncio

from asyncserve.token_path import SocketHandle


def borrow_socket(transport: asyncio.BaseTransport) -> SocketHandle | None:
    """Return the socket below a transport; None if what is written does not go out as it is, or not there."""
    owned = transport.get_extra_info("socket")
    if owned is None or transport.get_extra_info("sslcontext") is not None:
        return None
    return SocketHandle(owned.fileno())
