import asyncio
import codecs
import os
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from asyncserve.errors import ConfigError
from asyncserve.http.auth import KeyFile, owner_of, require_key
from tests.http.live import MODEL, live_server, spell

GENERATE = {"model": MODEL, "prompt": "a"}


async def test_every_path_but_health_needs_a_key() -> None:
    async with live_server(next_token=spell("x"), api_keys=("one", "two")) as live:
        for path in ("/health", "/live", "/ready", "/ping"):
            assert (await live.call(path)).status == 200
        for path in ("/v1/models", "/metrics", "/version", "/nowhere", "/v1/models/x", "/health/"):
            answer = await live.call(path)
            assert answer.status == 401, path
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.error["code"] == "invalid_api_key"
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert (await live.call(path, GENERATE)).status == 401
        assert live.num_sequences == 0


async def test_each_key_opens_and_nothing_else_does() -> None:
    async with live_server(
        next_token=spell("x"), api_keys=("one", "zwei-\N{LATIN SMALL LETTER U WITH DIAERESIS}")
    ) as live:
        for header in ("Bearer one", "bearer one", "Bearer  one", "Bearer zwei-ü"):
            assert (
                await live.call("/v1/completions", GENERATE, headers={"Authorization": header})
            ).status == 200
        for header in (
            "",
            "one",
            "Bearer",
            "Bearer ",
            "Bearer on",
            "Bearer onee",
            "Basic one",
            "Bearer one two",
        ):
            answer = await live.call("/v1/completions", GENERATE, headers={"Authorization": header})
            assert answer.status == 401, header


async def test_without_keys_the_server_is_open() -> None:
    async with live_server(next_token=spell("x")) as live:
        assert (await live.call("/v1/completions", GENERATE)).status == 200


async def test_options_needs_no_key() -> None:
    async with live_server(api_keys=("one",)) as live:
        assert (await live.call("/v1/completions", method="OPTIONS")).status == 405


async def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    async with live_server(api_keys=("one", "two")) as live:
        for headers, status in (
            ({"X-Api-Key": "two"}, 200),
            ({"x-api-key": "three"}, 401),
            ({"X-Api-Key": "two", "Authorization": "Bearer three"}, 401),
            ({"X-Api-Key": "two", "Authorization": "Basic three"}, 200),
        ):
            assert (await live.call("/version", headers=headers)).status == status, headers


def key_file(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


async def test_keys_in_a_file_open_and_are_replaced_when_it_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = key_file(tmp_path, "# of the team\none\n\n  two  \n#three\n")
    keys = await asyncio.to_thread(KeyFile, str(path))
    async with live_server(api_keys=("zero",), api_key_file=keys) as live:

        async def known(*names: str) -> list[str]:
            return [
                name
                for name in names
                if (await live.call("/version", headers={"Authorization": f"Bearer {name}"})).status == 200
            ]

        everything = ("zero", "one", "two", "three", "#three", "# of the team")
        assert await known(*everything) == ["zero", "one", "two"]
        path.write_text("three\n")
        assert await known(*everything) == ["zero", "one", "two"]
        await asyncio.to_thread(keys.reload)
        assert await known(*everything) == ["zero", "three"]
        path.unlink()
        await asyncio.to_thread(keys.reload)
        assert await known(*everything) == ["zero", "three"]
        assert "keeping the API keys" in caplog.text
        path.write_text("# all taken back\n")
        await asyncio.to_thread(keys.reload)
        assert await known(*everything) == ["zero"]


async def test_a_key_file_that_has_lost_all_its_keys_opens_to_nobody(tmp_path: Path) -> None:
    path = key_file(tmp_path, "one")
    keys = await asyncio.to_thread(KeyFile, str(path))
    async with live_server(api_key_file=keys) as live:
        path.write_text("")
        await asyncio.to_thread(keys.reload)
        assert (await live.call("/version")).status == 401
        assert (await live.call("/version", headers={"Authorization": "Bearer one"})).status == 401


@pytest.mark.parametrize(
    ("text", "message"), [("", "holds no key"), ("#a\n\n", "holds no key"), (None, "No such")]
)
def test_a_key_file_without_keys_stops_the_start(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "keys" if text is None else key_file(tmp_path, text)
    with pytest.raises(ConfigError, match=message):
        KeyFile(str(path))


def test_the_mark_that_editors_put_before_the_first_line_is_no_part_of_a_key(tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain", tmp_path / "marked"
    plain.write_text("one\ntwo\n")
    marked.write_bytes(codecs.BOM_UTF8 + plain.read_bytes())
    assert KeyFile(str(marked)).digests == KeyFile(str(plain)).digests


def test_a_pipe_in_the_place_of_the_key_file_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = key_file(tmp_path, "one")
    keys = KeyFile(str(path))
    known = keys.digests
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"cannot read api_key_file .*: it is not a regular file"):
        KeyFile(str(path))
    keys.reload()
    assert keys.digests == known
    assert "keeping the API keys as they are" in caplog.text


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_key_file_that_others_may_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    KeyFile(str(key_file(tmp_path, "one", mode)))
    assert ("chmod 600" in caplog.text) is warns


async def test_handlers_can_tell_owners_of_keys_apart_and_do_not_see_the_keys() -> None:
    owners = []

    async def note(request: web.Request) -> web.Response:
        owners.append(owner_of(request))
        return web.Response()

    for keys in (("one", "two"), ()):
        app = web.Application(middlewares=[require_key(keys)] if keys else [])
        app.router.add_get("/whose", note)
        async with TestClient(TestServer(app)) as client:
            for key in ("one", "two", "one"):
                await client.get("/whose", headers={"Authorization": f"Bearer {key}"})
    assert owners[0] == owners[2] != owners[1]
    assert b"one" not in owners[0]
    assert owners[3:] == [b"", b"", b""]
