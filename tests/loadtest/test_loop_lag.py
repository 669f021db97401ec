import asyncio
import time

from loadtest.loop_lag import INTERVAL_S, LoopLag


async def test_a_loop_that_was_held_up_is_seen_to_be_late() -> None:
    lag = LoopLag()
    lag.start()
    time.sleep(5 * INTERVAL_S)  # noqa: ASYNC251 - the loop is to be held up
    await asyncio.sleep(2 * INTERVAL_S)
    lag.stop()
    seen = len(lag.late_s)
    await asyncio.sleep(2 * INTERVAL_S)
    assert len(lag.late_s) == seen >= 1
    assert max(lag.late_s) >= 3.9 * INTERVAL_S
