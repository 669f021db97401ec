"""The application over TLS, with certificates made here, on asyncio's loop and uvloop's."""

import asyncio
import contextlib
import json
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme

from asyncserve.errors import ConfigError
from asyncserve.http.tls import Tls, TlsFiles
from asyncserve.request import FinishReason
from tests.fakes.observer import RecordingObserver
from tests.http.live import MODEL, Live, live_server, spell, until


class Authority:
    """A certificate authority with a server's certificate of its own, in files."""

    def __init__(self, folder: Path, name: str = "one") -> None:
        self.ca = trustme.CA()
        self.certificate = self.ca.issue_cert("127.0.0.1", common_name=name)
        self.certfile = folder / f"{name}.pem"
        self.keyfile = folder / f"{name}.key"
        self.ca_certs = folder / f"{name}.ca"
        self.ca.cert_pem.write_to_path(self.ca_certs)
        self.write(self.certfile, self.keyfile)

    def write(self, certfile: Path, keyfile: Path) -> None:
        certfile.write_bytes(b"".join(blob.bytes() for blob in self.certificate.cert_chain_pems))
        keyfile.write_bytes(self.certificate.private_key_pem.bytes())

    def files(self, **more: Any) -> TlsFiles:
        return TlsFiles(certfile=str(self.certfile), keyfile=str(self.keyfile), **more)

    def client(self, *, shows: "Authority | None" = None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        if shows is not None:
            shows.ca.issue_cert("client@example.org").configure_cert(context)
        return context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "two")


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Close a connection, and wait for it: a loop that ends before leaves its socket open."""
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def common_name(live: Live, client: ssl.SSLContext) -> str:
    """Return whose certificate a new connection is shown."""
    _, writer = await asyncio.open_connection(live.host, live.port, ssl=client)
    certificate = writer.get_extra_info("peercert")
    await hang_up(writer)
    return str(dict(pair for names in certificate["subject"] for pair in names)["commonName"])


async def test_answers_and_streams_are_the_same_as_without_tls(authority: Authority) -> None:
    text = "x" * 60 + "ü\n" + '"'
    answers = []
    for tls, client in ((None, None), (Tls(authority.files()).context, authority.client())):
        async with live_server(next_token=spell(text), tls=tls, client_tls=client) as live:
            whole = await live.complete(max_tokens=100)
            streamed = await live.complete(max_tokens=100, stream=True, n=2)
            pieces = ["", ""]
            for event in streamed.events[:-1]:
                for choice in event["choices"]:
                    pieces[choice["index"]] += choice["text"]
            assert streamed.events[-1] == "[DONE]"
            answers.append((whole.json["choices"], pieces))
    assert answers[0] == answers[1]
    assert answers[1][1] == [text, text]


async def test_plain_http_gets_no_answer_from_a_tls_port(authority: Authority) -> None:
    async with live_server(tls=Tls(authority.files()).context, client_tls=authority.client()) as live:
        reader, writer = await live.raw(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        await hang_up(writer)
        assert (await live.call("/version")).status == 200


async def test_client_that_leaves_amid_its_stream_ends_its_sequence(authority: Authority) -> None:
    observer = RecordingObserver()
    tls = Tls(authority.files()).context
    async with live_server(
        next_token=spell("x" * 200),
        engine_options={"observer": observer},
        tls=tls,
        client_tls=authority.client(),
    ) as live:
        live.executor.hold()
        async with live.session.post(
            live.url + "/v1/completions",
            json={"model": MODEL, "prompt": "ab", "stream": True, "max_tokens": 100},
        ) as response:
            # The headers come with the first token's prompt, before any step is done.
            await live.until_step_waits()
            live.executor.complete()
            await response.content.readuntil(b"\n\n")
        await until(lambda: observer.reasons[FinishReason.ABORT] == 1)
        live.executor.resume()
        await until(lambda: not live.num_sequences)


@asynccontextmanager
async def unread(live: Live, client: ssl.SSLContext, num_tokens: int) -> AsyncIterator[asyncio.StreamReader]:
    """A client that has asked for a long stream and does not read it."""
    body = {"model": MODEL, "prompt": "ab", "stream": True, "max_tokens": num_tokens, "logprobs": 20}
    data = json.dumps(body).encode()
    with socket.socket() as raw:
        # What the kernel takes on the client's behalf is little, and does not grow.
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, (live.host, live.port))
        # asyncio's own reader stops reading at twice its limit.
        reader, writer = await asyncio.open_connection(
            sock=raw, ssl=client, server_hostname="127.0.0.1", limit=4096
        )
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
        writer.write(head + data)
        try:
            yield reader
        finally:
            await hang_up(writer)


@pytest.mark.slow
async def test_client_that_reads_nothing_piles_up_little_and_gets_everything_when_it_reads(
    authority: Authority,
) -> None:
    length = 5_000
    async with (
        live_server(
            next_token=spell("x" * length),
            info={"max_model_len": 20_000, "num_blocks": 6_000},
            check_plans=False,
            tls=Tls(authority.files()).context,
            client_tls=authority.client(),
        ) as live,
        unread(live, authority.client(), length) as reader,
    ):
        await live.until_running(1)
        assert live.runner.server is not None
        [connection] = live.runner.server.connections
        transport = connection.transport
        assert transport is not None
        most = 0
        while live.num_sequences:
            most = max(most, transport.get_write_buffer_size())
            await asyncio.sleep(0)
        assert 64 * 1024 < most < 256 * 1024, "outputs are merged, not kept as bytes"
        data = b""
        while b"[DONE]" not in data[-100:]:
            data += await reader.read(1 << 20)
    text = ""
    for line in data.replace(b"\r\n", b"").split(b"data: ")[1:-1]:
        event, _ = json.JSONDecoder().raw_decode(line.decode())
        text += event["choices"][0]["text"]
    assert text == "x" * length


@pytest.mark.slow
async def test_client_that_never_reads_is_given_up(authority: Authority) -> None:
    observer = RecordingObserver()
    later_s = [0.0]
    async with (
        live_server(
            next_token=spell("x" * 20_000),
            info={"max_model_len": 20_000, "num_blocks": 6_000},
            check_plans=False,
            engine_options={"observer": observer},
            clock=lambda: time.monotonic() + later_s[0],
            tls=Tls(authority.files()).context,
            client_tls=authority.client(),
        ) as live,
        unread(live, authority.client(), 15_000),
    ):
        await live.until_running(1)
        assert live.runner.server is not None
        [connection] = live.runner.server.connections
        transport = connection.transport
        assert transport is not None
        await until(lambda: transport.get_write_buffer_size() > 64 * 1024)
        await until(lambda: live.engine.statistics().num_paused == 1)
        assert live.engine.statistics().num_running <= 1
        later_s[0] = 61.0
        await until(lambda: observer.reasons[FinishReason.ABORT] == 1)
        await until(lambda: connection.transport is None)


async def test_a_new_certificate_is_shown_to_new_connections_while_open_ones_go_on(
    tmp_path: Path, other: Authority
) -> None:
    authority = Authority(tmp_path)
    both = authority.client()
    other.ca.configure_trust(both)
    tls = Tls(authority.files())
    async with live_server(next_token=spell("xyz"), tls=tls.context, client_tls=both) as live:
        assert await common_name(live, both) == "one"
        live.executor.hold()
        running = asyncio.create_task(live.complete(stream=True))
        await live.until_running(1)
        other.write(authority.certfile, authority.keyfile)
        await asyncio.to_thread(tls.refresh)
        assert await common_name(live, both) == "two"
        live.executor.resume()
        assert (await running).events[-1] == "[DONE]"
        # The client's connection is kept and used again.
        assert (await live.complete()).status == 200


@pytest.mark.parametrize("fault", ["missing", "garbage", "half", "another key"])
async def test_a_certificate_that_cannot_be_used_leaves_the_one_in_use(
    tmp_path: Path, other: Authority, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    authority = Authority(tmp_path)
    tls = Tls(authority.files())
    async with live_server(tls=tls.context, client_tls=authority.client()) as live:
        match fault:
            case "missing":
                authority.certfile.unlink()
            case "garbage":
                authority.certfile.write_text("no certificate")
            case "half":
                authority.certfile.write_bytes(authority.certfile.read_bytes()[:300])
            case _:
                other.write(authority.certfile, tmp_path / "elsewhere")
        await asyncio.to_thread(tls.refresh)
        assert await common_name(live, authority.client()) == "one"
        assert "keeping the TLS certificate in use" in caplog.text
        authority.write(authority.certfile, authority.keyfile)
        await asyncio.to_thread(tls.refresh)
        assert await common_name(live, authority.client()) == "one"


async def status_or_refusal(live: Live, client: ssl.SSLContext) -> int | str:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client)) as session:
        try:
            async with session.get(live.url + "/version") as response:
                return response.status
        except (aiohttp.ClientError, ssl.SSLError, ConnectionError):
            # In TLS 1.3 a client learns of the refusal when it reads.
            return "refused"


async def test_clients_must_show_a_certificate_of_an_authority_given(
    authority: Authority, other: Authority
) -> None:
    tls = Tls(authority.files(ca_certs=str(other.ca_certs)))
    async with live_server(tls=tls.context) as live:
        assert await status_or_refusal(live, authority.client(shows=other)) == 200
        assert await status_or_refusal(live, authority.client(shows=authority)) == "refused"
        assert await status_or_refusal(live, authority.client()) == "refused"


@pytest.mark.parametrize(("cert_reqs", "without", "wrong"), [(1, 200, "refused"), (0, 200, 200)])
async def test_how_much_is_asked_of_clients_can_be_less(
    authority: Authority, other: Authority, cert_reqs: int, without: int | str, wrong: int | str
) -> None:
    tls = Tls(authority.files(ca_certs=str(other.ca_certs), cert_reqs=cert_reqs))
    async with live_server(tls=tls.context) as live:
        assert await status_or_refusal(live, authority.client()) == without
        assert await status_or_refusal(live, authority.client(shows=authority)) == wrong


async def test_authorities_for_clients_are_renewed_too(
    tmp_path: Path, authority: Authority, other: Authority
) -> None:
    ca_certs = tmp_path / "ca"
    ca_certs.write_bytes(other.ca_certs.read_bytes())
    tls = Tls(authority.files(ca_certs=str(ca_certs)))
    trusted, later = authority.client(shows=other), authority.client(shows=authority)
    async with live_server(tls=tls.context) as live:
        assert await status_or_refusal(live, trusted) == 200
        assert await status_or_refusal(live, later) == "refused"
        ca_certs.write_bytes(authority.ca_certs.read_bytes())
        await asyncio.to_thread(tls.refresh)
        assert await status_or_refusal(live, later) == 200
        assert await status_or_refusal(live, trusted) == "refused"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_whose_certificate_is_trusted_no_more_cannot_be_resumed(
    tmp_path: Path, authority: Authority, other: Authority, version: ssl.TLSVersion
) -> None:
    ca_certs = tmp_path / "ca"
    ca_certs.write_bytes(other.ca_certs.read_bytes())
    tls = Tls(authority.files(ca_certs=str(ca_certs)))
    client = authority.client(shows=other)
    client.minimum_version = client.maximum_version = version
    async with live_server(tls=tls.context) as live:

        def ask(session: ssl.SSLSession | None) -> ssl.SSLSession | None:
            """Return a session, if there was an answer."""
            with (
                socket.create_connection((live.host, live.port)) as raw,
                client.wrap_socket(raw, server_hostname="127.0.0.1", session=session) as connection,
            ):
                connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
                return connection.session if connection.recv(1000) else None

        session = await asyncio.to_thread(ask, None)
        assert session is not None
        ca_certs.write_bytes(authority.ca_certs.read_bytes())
        await asyncio.to_thread(tls.refresh)
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert await asyncio.to_thread(ask, session) is None


def test_old_tls_is_not_spoken(authority: Authority) -> None:
    context = authority.files().context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


async def test_ciphers_can_be_chosen(authority: Authority) -> None:
    name = "ECDHE-ECDSA-AES256-GCM-SHA384"
    tls = Tls(authority.files(ciphers=name))
    client = authority.client()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    async with live_server(tls=tls.context) as live:
        _, writer = await asyncio.open_connection(live.host, live.port, ssl=client)
        assert writer.get_extra_info("cipher")[0] == name
        await hang_up(writer)


def test_files_that_cannot_be_used_stop_the_start_with_a_message(
    tmp_path: Path, authority: Authority, other: Authority
) -> None:
    good = {"certfile": str(authority.certfile), "keyfile": str(authority.keyfile)}
    garbage = tmp_path / "garbage"
    garbage.write_text("garbage")
    for files, message in (
        ({**good, "certfile": "/nowhere"}, "ssl_certfile /nowhere.*No such file"),
        ({**good, "keyfile": "/nowhere"}, "ssl_keyfile /nowhere.*No such file"),
        ({**good, "certfile": str(garbage)}, "cannot use ssl_certfile"),
        ({**good, "keyfile": str(other.keyfile)}, "key values mismatch"),
        ({**good, "ca_certs": "/nowhere"}, "ssl_ca_certs /nowhere.*No such file"),
        ({**good, "ca_certs": str(garbage)}, "cannot use ssl_ca_certs"),
        ({**good, "ciphers": "ROT13"}, "ssl_ciphers 'ROT13'"),
    ):
        with pytest.raises(ConfigError, match=message):
            TlsFiles(**files).context()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["certfile", "keyfile", "ca_certs"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, authority: Authority, name: str
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    files = {"certfile": str(authority.certfile), "keyfile": str(authority.keyfile), name: str(pipe)}
    with pytest.raises(ConfigError, match=f"ssl_{name} {pipe}.*: it is not a regular file"):
        TlsFiles(**files).context()  # type: ignore[arg-type]


def test_one_file_may_hold_certificate_and_key(tmp_path: Path, authority: Authority) -> None:
    path = tmp_path / "both.pem"
    path.write_bytes(authority.keyfile.read_bytes() + authority.certfile.read_bytes())
    TlsFiles(certfile=str(path)).context()


def test_a_key_with_a_passphrase_is_refused_instead_of_asked_for(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    authority = Authority(tmp_path)
    key = serialization.load_pem_private_key(authority.keyfile.read_bytes(), None)
    authority.keyfile.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="passphrase"):
        authority.files().context()
