"""/docs: one file from the package, which needs no network and no key and runs nothing but itself."""

import base64
import hashlib
import html.parser
import re
import tomllib
from pathlib import Path

from asyncserve.http.openapi import docs_page
from tests.http.live import live_server

ROOT = Path(__file__).parents[3]
NO_CONTENT = {"meta", "link", "input", "br"}


class Page(html.parser.HTMLParser):
    """Elements and their attributes; elements that are closed as they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in NO_CONTENT:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed() -> Page:
    page = Page()
    page.feed(docs_page.page()[0].decode())
    assert not page.open
    return page


async def test_the_page_needs_no_key_while_the_description_does() -> None:
    async with live_server(api_keys=("secret",)) as live:
        page = await live.call("/docs")
        description = await live.call("/openapi.json")
    assert (page.status, description.status) == (200, 401)
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert b"secret" not in page.body


async def test_the_page_is_not_sent_twice() -> None:
    async with live_server() as live:
        first = await live.call("/docs")
        again = await live.call("/docs", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status, again.body) == (304, b"")


async def test_the_policy_lets_run_what_is_in_the_page_and_nothing_else() -> None:
    async with live_server() as live:
        answer = await live.call("/docs")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), answer.body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_page_loads_nothing_from_elsewhere() -> None:
    text = docs_page.page()[0].decode()
    assert not re.search(r"https?://|//cdn|@import|url\(", text)
    for tag, attributes in parsed().elements:
        for name in ("src", "href", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:", "openapi.json")), (tag, value)
        # The policy would not let them run.
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (
            tag,
            attributes,
        )


def test_controls_have_labels_and_the_page_has_a_language_and_landmarks() -> None:
    elements = parsed().elements
    labelled = {attributes.get("for") for tag, attributes in elements if tag == "label"}
    for tag, attributes in elements:
        if tag in ("input", "textarea", "select"):
            assert attributes["id"] in labelled
    assert ("html", {"lang": "en"}) in elements
    tags = [tag for tag, _ in elements]
    assert tags.count("h1") == tags.count("main") == tags.count("nav") == 1
    assert ("div", {"id": "operations", "tabindex": "-1"}) in elements


def test_the_page_is_part_of_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["asyncserve.http.openapi"]
    folder = ROOT / "asyncserve" / "http" / "openapi"
    packaged = {path for pattern in patterns for path in folder.glob(pattern)}
    others = {path for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    assert others == packaged == {folder / "docs_page.html"}
