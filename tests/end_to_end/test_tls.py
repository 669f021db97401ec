"""TLS, keys in a file and their renewal, on a real server in a process of its own."""

import json
import ssl
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.end_to_end.server_process import TINY, running_server
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.slow


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_with_tls_takes_up_a_new_certificate_and_new_keys(tmp_path: Path) -> None:
    model = tiny_llama_folder(tmp_path / "tiny", max_position_embeddings=256)
    write_tiny_tokenizer(model, vocab_size=320)
    certfile, keyfile, keys = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "keys"
    authorities = [trustme.CA(), trustme.CA()]
    clients = []
    for authority in authorities:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        clients.append(context)

    def issue(authority: trustme.CA) -> None:
        certificate = authority.issue_cert("127.0.0.1")
        keyfile.write_bytes(certificate.private_key_pem.bytes())
        certfile.write_bytes(certificate.cert_chain_pems[0].bytes())

    issue(authorities[0])
    keys.write_text("first-key\n")
    keys.chmod(0o600)
    options = (
        "--ssl-certfile",
        str(certfile),
        "--ssl-keyfile",
        str(keyfile),
        "--enable-ssl-refresh",
        "--api-key-file",
        str(keys),
        "--root-path",
        "/llm",
        "--served-model-name",
        "tiny",
    )
    with running_server(model, *TINY, "--kv-cache-memory-bytes", "4MiB", *options) as server:
        assert server.url.startswith("https://127.0.0.1:")

        def ask(path: str, client: ssl.SSLContext, key: str, body: Any = None) -> tuple[int, bytes]:
            request = urllib.request.Request(
                server.url + path,
                data=None if body is None else json.dumps(body).encode(),
                headers={"Authorization": f"Bearer {key}"},
            )
            try:
                with urllib.request.urlopen(request, context=client, timeout=60) as response:
                    return response.status, response.read()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read()

        def trusts(client: ssl.SSLContext) -> bool:
            try:
                return ask("/health", client, "")[0] == 200
            except (ssl.SSLError, urllib.error.URLError):
                return False

        body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True, "stream": True}
        status, streamed = ask("/llm/v1/completions", clients[0], "first-key", body)
        assert status == 200
        assert streamed.endswith(b"data: [DONE]\n\n")
        status, info = ask("/server_info", clients[0], "first-key")
        assert json.loads(info)["config"]["ssl_certfile"] == str(certfile)
        assert b"first-key" not in info
        assert not trusts(clients[1])
        issue(authorities[1])
        until(lambda: trusts(clients[1]))
        assert not trusts(clients[0])
        keys.write_text("second-key\n")
        until(lambda: ask("/version", clients[1], "second-key")[0] == 200)
        assert ask("/version", clients[1], "first-key")[0] == 401
        assert "-key" not in server.log.replace("ssl-key", "").replace("api-key", "")
