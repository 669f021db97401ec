import asyncio
import logging
from typing import Any

import pytest

import asyncserve
from asyncserve.step import StepPlan
from tests.http.live import MODEL, live_server, spell


async def test_models_are_listed_with_their_context() -> None:
    async with live_server() as live:
        listed = (await live.call("/v1/models")).json
        single = await live.call("/v1/models/alias/of-it")
        encoded = await live.call("/v1/models/alias%2Fof-it")
        missing = await live.call("/v1/models/other")
    assert listed["object"] == "list"
    assert [each["id"] for each in listed["data"]] == [MODEL, "alias/of-it"]
    assert listed["data"][0]["max_model_len"] == 128
    assert listed["data"][0]["object"] == "model"
    assert single.json == listed["data"][1]
    assert encoded.json == single.json
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


async def test_version_and_metrics() -> None:
    async def up() -> bytes:
        return b"up 1\n"

    async with live_server(metrics_renderer=up) as live:
        assert (await live.call("/version")).json == {"version": asyncserve.__version__}
        metrics = await live.call("/metrics")
    assert metrics.body == b"up 1\n"
    assert metrics.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


async def test_loading_server_is_live_but_neither_healthy_nor_ready() -> None:
    async with live_server(is_started=False) as live:
        assert (await live.call("/live")).status == 200
        for path in ("/health", "/ping", "/ready"):
            answer = await live.call(path)
            assert (answer.status, answer.error["code"]) == (503, "not_ready")


async def test_draining_server_is_healthy_but_not_ready() -> None:
    async with live_server(next_token=spell("x" * 50)) as live:
        live.executor.hold()
        running = asyncio.create_task(live.complete())
        await live.until_running(1)
        draining = asyncio.create_task(live.engine.drain(30.0))
        await asyncio.sleep(0)
        statuses = [(await live.call(path)).status for path in ("/health", "/live", "/ready")]
        refused = await live.complete()
        live.executor.resume()
        assert (await running).status == 200
        await draining
    assert statuses == [200, 200, 503]
    assert refused.status == 503


async def test_health_turns_bad_when_work_waits_and_no_step_ends() -> None:
    now_s = [100.0]
    clock = lambda: now_s[0]  # noqa: E731
    async with live_server(
        next_token=spell("x"), engine_options={"clock": clock}, clock=clock, health_timeout_s=5.0
    ) as live:
        now_s[0] += 1000.0  # idle, however long, is healthy
        assert (await live.call("/health")).status == 200
        live.executor.hold()
        running = asyncio.create_task(live.complete())
        await live.until_running(1)
        now_s[0] += 4.0
        assert (await live.call("/health")).status == 200
        now_s[0] += 2.0
        bad = await live.call("/health")
        assert bad.status == 503
        assert "1 sequences run" in bad.error["message"]
        assert (await live.call("/live")).status == 200
        live.executor.resume()
        assert (await running).status == 200
        assert (await live.call("/health")).status == 200


async def test_dead_engine_is_neither_healthy_nor_live_and_says_so_to_clients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with live_server() as live:

        def burn(plan: StepPlan) -> Any:
            raise ValueError("the device thread is gone")

        live.executor.submit = burn  # type: ignore[method-assign]
        answer = await live.complete()
        assert answer.status == 503
        assert answer.error["code"] == "engine_stopped"
        for path in ("/health", "/live", "/ready"):
            assert (await live.call(path)).status == 503
        assert (await live.complete()).status == 503
    assert "the engine died" in caplog.text


async def test_access_log_has_one_line_per_request_and_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="asyncserve.http.access"):
        async with live_server(next_token=spell("x")) as live:
            await live.complete(prompt="the secret", stream=True)
            await live.call("/nowhere?key=secret%0A")
            await live.call("/health")
    lines = [record.getMessage() for record in caplog.records if record.name == "asyncserve.http.access"]
    assert len(lines) == 2
    assert lines[0].startswith("POST /v1/completions 200 ")
    assert lines[1].startswith("GET /nowhere 404 ")
    assert "secret" not in "".join(lines)


async def test_access_log_can_be_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="asyncserve.http.access"):
        async with live_server(access_log=False) as live:
            await live.call("/version")
    assert not [record for record in caplog.records if record.name == "asyncserve.http.access"]


async def test_paths_can_be_left_out_of_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="asyncserve.http.access"):
        async with live_server(unlogged_paths=("/version", "/metrics")) as live:
            for path in ("/version", "/v1/models", "/metrics?a=b"):
                await live.call(path)
    lines = [record.getMessage() for record in caplog.records if record.name == "asyncserve.http.access"]
    assert [line.split()[1] for line in lines] == ["/v1/models"]


async def test_access_log_has_no_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with live_server(api_keys=("the-key",)) as live:
            for headers in ({"Authorization": "Bearer the-key"}, {"X-Api-Key": "wrong-key"}):
                await live.call("/version?api_key=query-key", headers=headers)
    assert "GET /version 200" in caplog.text
    assert "GET /version 401" in caplog.text
    assert "-key" not in caplog.text


async def test_load_counts_what_runs_and_what_waits() -> None:
    async with live_server(next_token=spell("x" * 50), info={"num_slots": 2}) as live:
        idle = (await live.call("/load")).json
        live.executor.hold()
        running = asyncio.create_task(live.complete(n=3))
        await live.until_running(3)
        await live.until_step_waits()
        busy = (await live.call("/load")).json
        live.executor.resume()
        await running
    assert idle == {
        "server_load": 0,
        "num_running": 0,
        "num_waiting": 0,
        "max_num_seqs": 2,
        "kv_cache_usage": 0.0,
    }
    assert (busy["server_load"], busy["num_running"], busy["num_waiting"]) == (3, 2, 1)
    assert 0 < busy["kv_cache_usage"] <= 1


async def test_server_info_tells_options_versions_and_sizes() -> None:
    shown = {"config": {"model": "m"}, "versions": {"python": "3"}}
    async with live_server(server_info=shown, default_sampling={"temperature": 0.5}) as live:
        info = (await live.call("/server_info")).json
    assert info["config"] == {"model": "m"}
    assert info["versions"] == {"python": "3"}
    assert info["version"] == asyncserve.__version__
    assert info["model_names"] == [MODEL, "alias/of-it"]
    assert info["default_sampling"] == {"temperature": 0.5}
    assert info["max_model_len"] == 128
    [group] = info["kv_cache"]
    assert group["num_bytes"] == group["num_blocks"] * live.engine.info.kv_groups[0].bytes_per_block


async def test_tokenizer_info_tells_special_tokens_and_template() -> None:
    async with live_server() as live:
        info = (await live.call("/tokenizer_info")).json
    assert info == {
        "tokenizer_class": "FakeTokenizer",
        "vocab_size": 512,
        "model_max_length": 128,
        "eos_token_ids": [257],
        "special_tokens": ["<bos>", "<end>", "<eos>", "<turn>"],
        "chat_template": "{{ messages }}",
    }


async def test_what_needs_the_model_is_not_told_while_it_loads() -> None:
    async with live_server(is_started=False) as live:
        for path in ("/load", "/server_info", "/tokenizer_info"):
            assert (await live.call(path)).status == 503, path
