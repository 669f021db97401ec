"""GET /docs: a page that shows `/openapi.json` and lets people try the API.

One HTML file in the package, `docs_page.html`, with its style and script inside: no network, no build. The
page needs no key, as a browser cannot send one with its first request, and says nothing of this server; it
asks for the key and sends it with what it fetches. A content security policy lets nothing else run.
"""

import asyncio
import base64
import functools
import hashlib
import importlib.resources
import re

from aiohttp import web


@functools.cache
def page() -> tuple[bytes, str, str]:
    """Return the page, its entity tag and its content security policy."""
    text = importlib.resources.files("asyncserve.http.openapi").joinpath("docs_page.html").read_bytes()
    sources = {}
    for tag in ("script", "style"):
        found = re.search(rf"<{tag}>(.*?)</{tag}>".encode(), text, re.DOTALL)
        assert found is not None, "the page has one style and one script"
        digest = base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
        sources[tag] = f"'sha256-{digest}'"
    policy = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; img-src data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, f'"{hashlib.sha256(text).hexdigest()[:32]}"', policy


async def docs_page(request: web.Request) -> web.Response:
    """Answer /docs; 304 if the browser has the page already."""
    text, tag, policy = await asyncio.to_thread(page)
    headers = {
        "ETag": tag,
        "Cache-Control": "no-cache",
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
    }
    if tag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    return web.Response(body=text, content_type="text/html", charset="utf-8", headers=headers)
