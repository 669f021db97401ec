"""TLS for the server's socket: certificate, key, authorities for client certificates; all renewable.

Takes the paths of PEM files; gives the `ssl.SSLContext` to listen with. A context cannot be changed without
a moment in which certificate and key do not belong together, so each refresh builds a new one, and every
handshake begins by choosing the newest: connections that are open go on as they began.
"""

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from asyncserve.errors import ConfigError
from asyncserve.http.regular_file import check_regular

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """What TLS is made of.

    Args:
        certfile: The certificate and its chain.
        keyfile: Its private key; None if `certfile` holds it too.
        ca_certs: Authorities that sign clients' certificates; None asks clients for none.
        cert_reqs: 2 asks clients for a certificate, 1 checks one that is shown, 0 ignores it.
        ciphers: For TLS 1.2, in OpenSSL's notation; None for Python's choice.
    """

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = 2
    ciphers: str | None = None

    @property
    def paths(self) -> Sequence[str]:
        """All files."""
        return [path for path in (self.certfile, self.keyfile, self.ca_certs) if path is not None]

    def context(self) -> ssl.SSLContext:
        """Read the files and return a context for the server's side.

        Raises:
            ConfigError: One cannot be read or is no regular file, or they do not belong together.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        if self.ciphers is not None:
            try:
                context.set_ciphers(self.ciphers)
            except ssl.SSLError as error:
                raise ConfigError(f"ssl_ciphers {self.ciphers!r} names no cipher OpenSSL knows") from error
        try:
            check_regular(self.certfile)
            if self.keyfile is not None:
                check_regular(self.keyfile)
            context.load_cert_chain(self.certfile, self.keyfile, password=_no_passphrase)
        except (OSError, ValueError) as error:
            key = "" if self.keyfile is None else f" with ssl_keyfile {self.keyfile}"
            raise ConfigError(f"cannot use ssl_certfile {self.certfile}{key}: {_reason(error)}") from error
        if self.ca_certs is not None:
            try:
                check_regular(self.ca_certs)
                context.load_verify_locations(self.ca_certs)
            except OSError as error:
                raise ConfigError(f"cannot use ssl_ca_certs {self.ca_certs}: {_reason(error)}") from error
            context.verify_mode = ssl.VerifyMode(self.cert_reqs)
            # A resumed session is not checked again, even if its authority is trusted no more.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        return context


class Tls:
    """The server's side of TLS, renewable while it listens.

    Args:
        files: What it is made of.

    Raises:
        ConfigError: The files cannot be used.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self.context = files.context()
        """To listen with."""
        self._newest = self.context
        self.context.sni_callback = self._choose

    def refresh(self) -> None:
        """Read the files again; if they cannot be used, what is in use stays. May run in any thread."""
        try:
            self._newest = self.files.context()
        except ConfigError as error:
            logger.error("keeping the TLS certificate in use: %s", error)
        else:
            logger.info("new connections get the TLS certificate now in %s", self.files.certfile)

    def _choose(
        self, connection: ssl.SSLObject | ssl.SSLSocket, server_name: str | None, context: ssl.SSLContext
    ) -> None:
        # Called in every handshake, whether or not the client names a server.
        connection.context = self._newest


def _no_passphrase() -> str:
    # Without this OpenSSL would ask the terminal, and the server would hang.
    raise ValueError("the private key has a passphrase, which a server cannot be asked for")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
