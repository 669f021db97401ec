"""GET / and the files below /page/: the live page itself.

Plain HTML, CSS and ES modules out of the package's `files`, as they are: no build, no network. The page needs
no key, as a browser cannot send one with its first request, and says nothing of this server; it asks for the
key and sends it with what it fetches. A content security policy lets only these files run, and keeps the
page's own scripts from making HTML of text.
"""

import asyncio
import functools
import hashlib
import importlib.resources
from collections.abc import Mapping
from typing import NamedTuple

from aiohttp import web

from asyncserve.http.connection import SLASHED_PREFIX

CONTENT_TYPES: Mapping[str, str] = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
NAMES = (
    "index.html",
    "page.css",
    "theme.js",
    "main.js",
    "chat.js",
    "markdown.js",
    "server.js",
    "pipeline.js",
    "charts.js",
    "dom.js",
)
PAGE_PATHS: Mapping[str, str] = {
    "/": "index.html",
    **{f"/page/{name}": name for name in NAMES if name != "index.html"},
}
"""Path to name of a file."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script';"
    " trusted-types 'none'"
)


class PageFile(NamedTuple):
    """One file, with its entity tag."""

    content: bytes
    content_type: str
    tag: str


@functools.cache
def page_files() -> Mapping[str, PageFile]:
    """Return the page's files by name."""
    folder = importlib.resources.files("asyncserve.http.live_page").joinpath("files")
    files = {}
    for name in NAMES:
        content = folder.joinpath(name).read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        files[name] = PageFile(content, CONTENT_TYPES[name.rpartition(".")[2]], tag)
    return files


async def page_file(request: web.Request) -> web.Response:
    """Answer / and the files of the page; 304 if the browser has the file already.

    A proxy's prefix without its final slash is answered with 308: the page names its files relatively.
    """
    if SLASHED_PREFIX in request:
        # Relative, as the server knows neither the host nor the scheme that the browser has asked.
        address, query = request[SLASHED_PREFIX], request.rel_url.raw_query_string
        return web.Response(status=308, headers={"Location": f"{address}?{query}" if query else address})
    files = await asyncio.to_thread(page_files)
    content, content_type, tag = files[PAGE_PATHS[request.path]]
    headers = {
        "ETag": tag,
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
    }
    if tag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    return web.Response(body=content, content_type=content_type, charset="utf-8", headers=headers)
