import asyncio
import time
from array import array

import blockbuster
import pytest
import uvloop

from tests.fakes.engine import bench
from tests.fakes.tokenizer import FakeTokenizer


async def test_a_call_that_blocks_the_loop_is_caught(caplog: pytest.LogCaptureFixture) -> None:
    class BlockingTokenizer(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
            time.sleep(0.001)
            return super().encode(text, add_special_tokens=add_special_tokens)

    async with bench(tokenizer=BlockingTokenizer()) as b:
        on_the_loop = await b.send("x", "short").wait()
        assert on_the_loop.error is not None
        assert isinstance(on_the_loop.error.__cause__, blockbuster.BlockingError)
        in_a_thread = await b.send("x" * 1500, "long").wait()
        assert not isinstance(in_a_thread.error and in_a_thread.error.__cause__, blockbuster.BlockingError)
    assert len(caplog.records) == 1


async def test_async_tests_run_on_both_loops(request: pytest.FixtureRequest) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, uvloop.Loop) == ("uvloop" in request.node.name)
