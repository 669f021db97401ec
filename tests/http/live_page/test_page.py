"""GET / and the page's files: what they tell browsers, who may have them, that nothing is from elsewhere."""

import html.parser
import importlib.resources
import re
import tomllib
from pathlib import Path

import pytest
from yarl import URL

from asyncserve.http.live_page.page import NAMES, PAGE_PATHS, page_files
from tests.http.live import live_server
from tests.http.live_page.page_server import page_options

ROOT = Path(__file__).parents[3]


async def test_every_file_of_the_page_is_served_and_needs_no_key() -> None:
    async with live_server(**page_options(api_keys=("secret",))) as live:
        answers = {path: await live.call(path) for path in PAGE_PATHS}
        assert (await live.call("/page/other.js")).status == 401
    for path, answer in answers.items():
        assert answer.status == 200, path
        assert answer.body == page_files()[PAGE_PATHS[path]].content
        assert b"secret" not in answer.body
    assert answers["/"].headers["Content-Type"] == "text/html; charset=utf-8"
    assert answers["/page/main.js"].headers["Content-Type"] == "text/javascript; charset=utf-8"
    assert answers["/page/page.css"].headers["Content-Type"] == "text/css; charset=utf-8"


async def test_no_file_is_sent_twice() -> None:
    async with live_server(**page_options()) as live:
        for path in PAGE_PATHS:
            first = await live.call(path)
            assert first.headers["Cache-Control"] == "no-cache"
            again = await live.call(path, headers={"If-None-Match": f'"other", {first.headers["ETag"]}'})
            assert (again.status, again.body) == (304, b"")
            assert again.headers["ETag"] == first.headers["ETag"]
            assert (await live.call(path, headers={"If-None-Match": '"other"'})).status == 200


async def test_head_gives_the_headers_alone_and_other_methods_nothing() -> None:
    async with live_server(**page_options()) as live:
        whole, head = await live.call("/"), await live.call("/", method="HEAD")
        assert (head.status, head.body) == (200, b"")
        for name in ("ETag", "Content-Type", "Content-Length", "Content-Security-Policy"):
            assert head.headers[name] == whole.headers[name]
        assert (await live.call("/", {})).status == 405


async def test_the_policy_lets_only_the_pages_own_files_run() -> None:
    async with live_server(**page_options()) as live:
        for path in PAGE_PATHS:
            answer = await live.call(path)
            policy = dict(
                part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";")
            )
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
            assert policy["require-trusted-types-for"] == "'script'"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Referrer-Policy"] == "no-referrer"


async def test_without_a_recorder_there_is_no_page_and_no_feed() -> None:
    async with live_server() as live:
        for path in (*PAGE_PATHS, "/pipeline/events"):
            assert (await live.call(path)).status == 404, path


async def test_behind_a_proxys_prefix_the_page_finds_its_files() -> None:
    async with live_server(**page_options(root_path="/llm")) as live:
        page = await live.call("/llm/")
        assert page.status == 200
        for name in re.findall(rb'(?:src|href)="(page/[^"]+)"', page.body):
            assert (await live.call(f"/llm/{name.decode()}")).status == 200


@pytest.mark.parametrize("root_path", ["/llm", "/a/llm"])
async def test_the_prefix_without_its_slash_leads_to_the_page_and_keeps_the_query(root_path: str) -> None:
    async with live_server(**page_options(root_path=root_path, api_keys=("secret",))) as live:
        for query in ("", "?a=%26&b"):
            address = URL(live.url + root_path + query, encoded=True)
            async with live.session.get(address, allow_redirects=False) as moved:
                assert moved.status == 308
                assert moved.headers["Location"] == f"llm/{query}"
            async with live.session.get(address) as page:
                assert page.status == 200
                assert page.url == URL(f"{live.url}{root_path}/{query}", encoded=True)
                assert await page.read() == page_files()["index.html"].content
        # A proxy may have taken the prefix off, with its slash.
        assert (await live.call("/")).status == (await live.call("/?a=b")).status == 200
    async with live_server(**page_options()) as live:
        assert (await live.call("/?a=b")).status == 200


class _Elements(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_names_only_its_own_files_and_has_no_script_or_style_inside() -> None:
    elements = _Elements()
    elements.feed(page_files()["index.html"].content.decode())
    for tag, attributes in elements.found:
        for name in ("src", "href", "action"):
            value = attributes.get(name)
            if value is None or value.startswith("#") or value == "data:,":
                continue
            assert value == "docs" or f"/{value}" in PAGE_PATHS, (tag, value)
        # The policy would not let them run.
        assert not [name for name in attributes if name.startswith("on") or name == "style"], attributes
        assert tag != "style"
        assert tag != "script" or attributes.get("src")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_loads_nothing_from_elsewhere_and_makes_no_html_of_text(name: str) -> None:
    text = page_files()[name].content.decode()
    addresses = set(re.findall(r"https?://[^\s\"'`)]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert not re.search(r"@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    for imported in re.findall(r'from "([^"]+)"', text):
        assert imported.removeprefix("./") in NAMES


def test_the_page_is_part_of_the_package_and_small() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["asyncserve.http.live_page"]
    folder = ROOT / "asyncserve" / "http" / "live_page"
    packaged = {path.name for pattern in patterns for path in folder.glob(pattern)}
    with importlib.resources.as_file(importlib.resources.files("asyncserve.http.live_page")) as there:
        present = {path.name for path in (there / "files").iterdir()}
    assert present == packaged == set(NAMES)
    assert sum(len(file.content) for file in page_files().values()) < 100_000
