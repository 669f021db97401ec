import asyncio

from asyncserve.config import ServerConfig
from asyncserve.serve import build_executor
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
