"""The mistreatment itself, of a whole server over the fake device, which checks every plan."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from asyncserve.http.app import build_app, make_runner
from asyncserve.loop.engine import Engine
from asyncserve.metrics.collector import EngineCollector
from asyncserve.metrics.exposition import render
from asyncserve.metrics.observer import PrometheusObserver
from loadtest.chaos import Chaos, gauges, late_health, main
from loadtest.client import Client
from tests.fakes.executor import FakeExecutor, fake_info
from tests.fakes.tokenizer import FakeTokenizer


@asynccontextmanager
async def running_server(
    damage: Callable[[web.Application], None] = lambda app: None,
) -> AsyncIterator[tuple[str, Engine]]:
    registry = CollectorRegistry()
    info = fake_info(num_slots=8, num_blocks=256, block_len=8, max_model_len=2048, max_num_batched_tokens=64)
    engine = Engine(
        executor=FakeExecutor(info),
        tokenizer=FakeTokenizer(),
        observer=PrometheusObserver(registry, model_name="fake"),
    )
    registry.register(EngineCollector(engine.statistics, "fake"))
    app = build_app(
        engine, model_names=["fake"], metrics_renderer=partial(render, registry), access_log=False
    )
    damage(app)
    runner = make_runner(app, shutdown_timeout_s=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await engine.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", engine
    finally:
        await engine.stop()
        await runner.cleanup()


def chaos_on(client: Client, *, disconnects: float = 0.4, malformed: float = 0.2) -> Chaos:
    return Chaos(
        client,
        num_streams=12,
        input_len=20,
        output_len=20,
        disconnects=disconnects,
        malformed=malformed,
        vocab_size=256,
        seed=0,
    )


@pytest.mark.slow
async def test_a_sound_server_answers_everything_and_comes_to_rest() -> None:
    async with running_server() as (url, engine):
        client = Client(url, model="fake", timeout_s=60)
        chaos = chaos_on(client)
        tally = chaos.tally
        kinds = {"malformed, refused", "stream, left", "stream, complete", "plain, complete"}
        while not kinds <= set(tally.outcomes):  # how much one run gets done depends on the machine
            await chaos.run(0.2)
        assert not tally.complaints
        assert tally.num_sent == tally.outcomes.total()
        assert tally.health_ms
        # What clients sent that left at once may be read only now.
        while any((await gauges(client)).values()):
            pass
        assert engine.statistics().num_unapplied_steps == 0
        client.close()


@pytest.mark.slow
async def test_a_server_that_answers_what_it_should_refuse_is_complained_of() -> None:
    @web.middleware
    async def too_kind(request: web.Request, handler: Callable[[web.Request], object]) -> web.StreamResponse:
        if request.path == "/v1/completions":
            await request.read()
            return web.json_response({"choices": []})
        response = await handler(request)  # type: ignore[misc]
        assert isinstance(response, web.StreamResponse)
        return response

    async with running_server(lambda app: app.middlewares.append(too_kind)) as (url, _):
        client = Client(url, model="fake", timeout_s=60)
        only_malformed = chaos_on(client, malformed=1.0)
        while "max_tokens 0: HTTP 200" not in only_malformed.tally.complaints:
            await only_malformed.run(0.1)
        only_sound = chaos_on(client, disconnects=0.0, malformed=0.0)
        while not any(message.startswith("stream: ") for message in only_sound.tally.complaints):
            await only_sound.run(0.1)
        client.close()


@pytest.mark.slow
async def test_an_answer_of_health_that_comes_after_the_end_is_waited_for_and_timed() -> None:
    """It was cancelled, so that the longest answer of all did not count."""
    asked: list[web.Request] = []

    @web.middleware
    async def first_late(
        request: web.Request, handler: Callable[[web.Request], object]
    ) -> web.StreamResponse:
        if request.path == "/health":
            asked.append(request)
            if len(asked) == 1:
                await asyncio.sleep(0.6)
        response = await handler(request)  # type: ignore[misc]
        assert isinstance(response, web.StreamResponse)
        return response

    async with running_server(lambda app: app.middlewares.append(first_late)) as (url, _):
        client = Client(url, model="fake", timeout_s=60)
        chaos = chaos_on(client, disconnects=0.0)
        await chaos.run(0.1)
        client.close()
    assert len(chaos.tally.health_ms) == len(asked)
    assert chaos.tally.health_ms[0] > 550


def test_health_is_late_by_its_maximum() -> None:
    times_ms = [1.0] * 999 + [60.0]
    assert late_health(times_ms, 50.0) == "/health took over 50 ms in 1 of 1000 requests, 60.0 ms at most"
    assert late_health(times_ms, 60.0) is None
    assert late_health([], 50.0) == "/health was never answered"


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:1", "--model", "m", "--seconds", "0.1"]) == 2
    assert "cannot connect" in capsys.readouterr().err
