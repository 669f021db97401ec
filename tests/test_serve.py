import asyncio
import dataclasses
import os

import pytest

from asyncserve.config import ServerConfig
from asyncserve.errors import CheckpointError
from asyncserve.serve import CPU_LIBRARIES, build_executor, default_sampling
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
