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
