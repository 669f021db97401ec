import logging

import pytest

from tests.http.live import MODEL, live_server, spell


@pytest.mark.parametrize("prefix", ["", "/llm/v2"])
async def test_paths_are_answered_with_the_prefix_and_without(prefix: str) -> None:
    async with live_server(next_token=spell("xy"), root_path="/llm/v2", api_keys=("k",)) as live:
        live.headers["Authorization"] = "Bearer k"
        body = {"model": MODEL, "prompt": "a"}
        assert (await live.call(f"{prefix}/v1/completions", body)).json["choices"][0]["text"] == "xy"
        streamed = await live.call(f"{prefix}/v1/completions", {**body, "stream": True})
        assert streamed.events[-1] == "[DONE]"
        model = await live.call(f"{prefix}/v1/models/alias%2Fof-it?x=%2F#part")
        assert model.json["id"] == "alias/of-it"
        missing = await live.call(f"{prefix}/nowhere")
        assert missing.status == 404
        assert "there is no /nowhere here" in missing.error["message"]
        live.headers.clear()
        assert (await live.call(f"{prefix}/health")).status == 200
        assert (await live.call(f"{prefix}/version")).status == 401


async def test_the_prefix_counts_only_as_whole_segments_and_once() -> None:
    async with live_server(root_path="/llm") as live:
        for path, status in (
            ("/llm", 404),
            ("/llm/", 404),
            ("/llmversion", 404),
            ("/llm/version?a=b", 200),
            ("/llm/llm/version", 404),
            ("/version/llm", 404),
        ):
            assert (await live.call(path)).status == status, path


async def test_an_open_path_behind_the_prefix_does_not_open_others() -> None:
    async with live_server(root_path="/health", api_keys=("k",)) as live:
        assert (await live.call("/health/version")).status == 401
        assert (await live.call("/health/health")).status == 200


async def test_probes_behind_the_prefix_are_logged_quietly_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="asyncserve.http.access"):
        async with live_server(root_path="/llm") as live:
            await live.call("/llm/health")
            await live.call("/llm/version")
    lines = [record.getMessage() for record in caplog.records if record.name == "asyncserve.http.access"]
    assert [line.split()[1] for line in lines] == ["/version"]


async def test_the_description_of_the_api_names_the_prefix() -> None:
    async with live_server(root_path="/llm") as live:
        assert (await live.call("/llm/openapi.json")).json["servers"] == [{"url": "/llm"}]
    async with live_server() as live:
        assert "servers" not in (await live.call("/openapi.json")).json
