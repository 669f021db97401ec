"""A model hub on this machine: as much of the hub's protocol as downloading a snapshot needs."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "1234567890123456789012345678901234567890"


class HubServer(ThreadingHTTPServer):
    """Serves one repository; every other one is unknown, or gated if its name says so."""

    daemon_threads = True

    def __init__(self, repository: str, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repository = repository
        self.files = dict(files)
        self.downloaded: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.split("?", maxsplit=1)[0]
        api = f"/api/models/{self.server.repository}"
        resolve = f"/{self.server.repository}/resolve/{COMMIT}/"
        if path in (api, f"{api}/revision/main"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self._send_json({"id": self.server.repository, "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"{api}/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.server.files.items()
            ]
            self._send_json(entries)
        elif path.startswith(f"{api}/revision/"):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(resolve) and path.removeprefix(resolve) in self.server.files:
            name = path.removeprefix(resolve)
            if self.command == "GET":
                self.server.downloaded.append(name)
            content = self.server.files[name]
            self._send(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'})
        elif "gated" in path:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        else:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Say nothing."""


@contextmanager
def serve_hub(repository: str, files: Mapping[str, bytes]) -> Iterator[HubServer]:
    """Serve until the block ends."""
    server = HubServer(repository, files)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
