import asyncio
import dataclasses
import json
import os
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from asyncserve.config import ServerConfig
from asyncserve.errors import CheckpointError, ConfigError
from asyncserve.kv_events.publisher import KVEventPublisher
from asyncserve.metrics.exposition import new_registry
from asyncserve.observer import ObserverGroup
from asyncserve.serve import (
    CPU_LIBRARIES,
    build_executor,
    default_sampling,
    start_kv_events,
    start_tracing,
)
from asyncserve.tracing.otlp import TraceExporter
from tests.gpu.test_startup import dummy_checkpoint


def test_whether_prefill_is_chunked_reaches_the_device_side() -> None:
    config = ServerConfig(
        model="dummy",
        device="cpu",
        load_format="dummy",
        num_gpu_blocks_override=80,
        num_threads=1,
        enable_chunked_prefill=False,
    )
    executor = build_executor(config, dummy_checkpoint(max_position_embeddings=1000))

    async def start() -> int:
        info = await executor.start()
        await executor.stop()
        return info.max_num_batched_tokens

    assert asyncio.run(start()) == 1000


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -5}, "temperature is -5"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": [1]}, "top_k"),
    ],
)
def test_sampling_defaults_that_no_request_could_have_stop_the_start(
    stated: dict[str, object], message: str
) -> None:
    """They once surfaced as an error of every request that left the field out."""
    checkpoint = dataclasses.replace(dummy_checkpoint(), generation_config=stated)
    with pytest.raises(CheckpointError, match=f"generation_config.json.*{message}.*--generation-config none"):
        default_sampling(ServerConfig(model="dummy"), checkpoint)
    assert default_sampling(ServerConfig(model="dummy", generation_config="none"), checkpoint) == {}


def test_sampling_defaults_are_the_models() -> None:
    stated = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": 2, "top_k": None}
    checkpoint = dataclasses.replace(dummy_checkpoint(), generation_config=stated)
    assert default_sampling(ServerConfig(model="dummy"), checkpoint) == {"temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize("name", sorted(CPU_LIBRARIES))
def test_cpu_libraries_are_told_what_suits_a_server_unless_somebody_has_said_otherwise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig(model="dummy", device="cpu", load_format="dummy")
    monkeypatch.setenv(name, "7")
    build_executor(config, dummy_checkpoint())
    assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    build_executor(config, dummy_checkpoint())
    assert os.environ[name] == CPU_LIBRARIES[name]


def test_traces_and_timeline_are_written_where_the_options_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TraceExporter, "num_exported", 5)
    monkeypatch.setattr(TraceExporter, "num_dropped", 2)
    path = tmp_path / "steps.json"
    config = ServerConfig(
        model="m", trace_steps=str(path), otlp_traces_endpoint="http://127.0.0.1:1/v1/traces"
    )
    observer, registry = ObserverGroup(), new_registry()
    closers = start_tracing(config, observer, registry)
    observer.stage_ran("plan", 3, 1.0, 2.0)
    for close in closers:
        close()
    assert json.loads(path.read_bytes())[-1]["args"] == {"step": 3}
    metrics = generate_latest(registry).decode()
    for outcome, count in (("exported", 5.0), ("dropped", 2.0)):
        labels = f'{{engine="0",model_name="m",outcome="{outcome}"}}'
        assert f"asyncserve:traced_requests_total{labels} {count}" in metrics


def test_nothing_is_traced_unless_it_is_asked_for() -> None:
    registry = new_registry()
    assert start_tracing(ServerConfig(model="m"), ObserverGroup(), registry) == []
    assert generate_latest(registry) == b""


def test_a_timeline_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    config = ServerConfig(model="m", trace_steps=str(tmp_path / "nowhere" / "steps.json"))
    with pytest.raises(ConfigError, match=r"trace_steps: cannot write .*No such file"):
        start_tracing(config, ObserverGroup(), new_registry())


def test_kv_events_are_published_where_the_option_says_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVEventPublisher, "num_sent", 5)
    monkeypatch.setattr(KVEventPublisher, "num_left_out", 2)
    registry = new_registry()
    assert start_kv_events(ServerConfig(model="m"), registry) is None
    assert generate_latest(registry) == b""
    text = json.dumps({"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"})
    publisher = start_kv_events(ServerConfig(model="m", kv_events_config=text), registry)
    assert publisher is not None
    assert publisher.endpoints == (f"ipc://{tmp_path}/events", None)
    metrics = generate_latest(registry).decode()
    for outcome, count in (("sent", 5.0), ("left_out", 2.0)):
        assert f'kv_event_batches_total{{engine="0",model_name="m",outcome="{outcome}"}} {count}' in metrics
    publisher.close()
    with pytest.raises(ConfigError, match="enable_prefix_caching turns off"):
        start_kv_events(ServerConfig(model="m", kv_events_config=text, enable_prefix_caching=False), registry)
