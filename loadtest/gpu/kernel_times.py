"""Where the time of a decode step goes: kernels by their share of it, taken by torch's profiler.

Takes a driven engine (`steps`), gives the kernels that ran while it decoded, per step. The profiler sees the
kernels inside CUDA graphs, too, and slows the host down: intervals between steps are not to be read off here.
Kernels may overlap (programmatic dependent launch), so that their times add up to more than the device was
busy, which is given beside. Needs a CUDA device for anything but `table`.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.figures import Row
from loadtest.gpu.extent import Extent
from loadtest.gpu.steps import DecodingBatch, one_by_one, running_driver
from loadtest.model_shapes import Shape

MAX_NAME_LEN = 90


class Span(NamedTuple):
    """One run of a kernel (or a copy) on the device, in µs of one clock."""

    name: str
    begin_us: float
    end_us: float


def table(spans: Sequence[Span], num_steps: int) -> Row:
    """Put the spans of several steps into figures per step.

    Returns:
        `device_us` (from the first begin to the last end), `busy_us` (at least one kernel ran), `sum_us` (all
        kernels' times added) and `kernels`: name, calls, µs in all and share of the sum, the longest first.
    """
    by_name: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        by_name[span.name[:MAX_NAME_LEN]].append(span.end_us - span.begin_us)
    total_us = sum(map(sum, by_name.values()))
    kernels = [
        {
            "name": name,
            "calls": len(times) / num_steps,
            "us": sum(times) / num_steps,
            "share": sum(times) / total_us if total_us else 0.0,
        }
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))
    ]
    span_us = max((s.end_us for s in spans), default=0.0) - min((s.begin_us for s in spans), default=0.0)
    return {
        "num_steps": num_steps,
        "device_us": span_us / num_steps,
        "busy_us": _busy_us(spans) / num_steps,
        "sum_us": total_us / num_steps,
        "kernels": kernels,
    }


def _busy_us(spans: Iterable[Span]) -> float:
    busy_us = reached_us = 0.0
    for span in sorted(spans, key=lambda each: each.begin_us):
        begin_us = max(span.begin_us, reached_us)
        if span.end_us > begin_us:
            busy_us += span.end_us - begin_us
            reached_us = span.end_us
    return busy_us


def measure(
    shape: Shape,
    tokenizer: str,
    extent: Extent,
    *,
    further: Mapping[str, Any],
    batches: Sequence[int],
    num_steps: int,
    trace: Path | None = None,
) -> Iterator[Row]:
    """Give one row per batch size: the kernels of about `num_steps` decode steps.

    Args:
        shape: What is served.
        tokenizer: Folder of a tokenizer for it.
        extent: Lengths.
        further: Options of the engine that go before the usual ones.
        batches: Rows that decode together.
        num_steps: Steps to watch.
        trace: Folder for one file per batch size for a trace viewer; None for none.
    """
    _start_tracing()

    async def rows() -> AsyncIterator[Row]:
        async with running_driver(shape, tokenizer, extent, further) as driver:
            for batch in batches:
                async with driver.decoding(batch, extent.decode_input_len) as running:
                    profiler, num_seen = await _profiled(running, num_steps)
                yield {"kind": "kernels-of-step", "batch": batch, **table(_spans(profiler), num_seen)}
                if trace is not None:
                    name = f"{shape.name}-{batch}.json.gz"
                    await asyncio.to_thread(profiler.export_chrome_trace, str(trace / name))

    yield from one_by_one(rows())


def _start_tracing() -> None:
    """Start up the tracing library: it takes seconds, and should be there before graphs are captured."""
    # Imported here, as below: it is not needed by those who only read figures.
    import torch

    # Taking it down between profiles is known to upset CUDA graphs.
    os.environ.update(TEARDOWN_CUPTI="0", DISABLE_CUPTI_LAZY_REINIT="1")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        torch.ones(1, device="cuda")
        torch.cuda.synchronize()


async def _profiled(running: DecodingBatch, num_steps: int) -> tuple[Any, int]:
    """Return a profile of at least so many steps, and how many there were."""
    import torch

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.start()
    first = len(running.steps)
    last = len(await running.wait(first + num_steps))
    profiler.stop()
    return profiler, last - first


def _spans(profiler: Any) -> list[Span]:
    from torch.profiler import DeviceType

    return [
        Span(str(event.name), float(event.time_range.start), float(event.time_range.end))
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
