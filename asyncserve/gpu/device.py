"""The device: streams, events, graphs, pinned memory and memory figures, for cuda and for cpu.

The only file that spells torch.cuda's stream API. A CPU has no streams: work is done when the call returns,
so its events are just moments. Knows no model, cache or plan.
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from asyncserve.allocator import give_back_memory, keep_freed_memory, large_blocks_mapped
from asyncserve.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")


class MemoryInfo(NamedTuple):
    """Bytes of the device's memory (on a CPU: of the machine, or of the container's limit)."""

    free_bytes: int
    total_bytes: int


class Event(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Block the calling thread, without the GIL, until the device got there."""

    def seconds_since(self, earlier: "Event") -> float:
        """Return device time from `earlier` to this one; both must have been reached."""


class HostCopy(NamedTuple):
    """A copy between the host and the device, of as many bytes on both sides."""

    host: torch.Tensor
    device: torch.Tensor


class Device(Protocol):
    """Where tensors live and kernels run. Called on the device thread alone; its events on any.

    Attributes:
        torch_device: What tensors are created on.
        name: For people.
        is_async: Whether kernels run after the call that launches them returned.
        has_fast_bfloat16: Whether it multiplies bfloat16 matrices in hardware.
    """

    torch_device: torch.device
    name: str
    is_async: bool
    has_fast_bfloat16: bool

    def activate(self) -> None:
        """Make the calling thread the device thread: its device, stream and number of threads."""

    def lasting_memory(self) -> contextlib.AbstractContextManager[None]:
        """Allocate what lasts as long as the device, for the duration of the block."""

    def memory(self) -> MemoryInfo:
        """Return free and total memory now."""

    def reset_peak(self) -> None:
        """Start a new peak for `peak_bytes`."""

    def peak_bytes(self) -> int:
        """Return the most bytes torch had allocated since `reset_peak`; 0 on a CPU."""

    def allocated_bytes(self) -> int:
        """Return the bytes torch has allocated now; 0 on a CPU."""

    def empty_cache(self) -> None:
        """Hand unused memory back to the driver."""

    def record_event(self) -> Event:
        """Mark the present end of the main stream's work."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return `[num_bytes] uint8` host memory the device can copy from and to without a stop."""

    def copy_out(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Event]:
        """Queue copies to the host behind the work queued so far, beside the work queued later.

        The caller keeps `sources` alive until the event was waited for.

        Returns:
            Host tensors, valid once the event was waited for, and the event.
        """

    def copy_to_host(self, copies: Sequence[HostCopy], after: Sequence[Event]) -> Event:
        """Queue copies to memory of `host_buffer`, beside the main stream's work.

        The caller keeps all tensors alive, and does not change them, until the event was reached.

        Args:
            copies: The host tensor and the device tensor of each, both contiguous.
            after: Events that must have been reached before; the main stream's work counts only by these.

        Returns:
            The event that ends the copies. They are done in the order of the calls.
        """

    def copy_from_host(self, copies: Sequence[HostCopy], after: Sequence[Event]) -> Event:
        """Queue copies from memory of `host_buffer`, as `copy_to_host` does; neither waits for the other."""

    def wait_for(self, event: Event) -> None:
        """Let what is queued on the main stream from now on wait for an event; returns at once."""

    def graph_pool(self) -> object:
        """Return memory for graphs that never run at the same time, so that they may share it."""

    def capture(
        self, launch: Callable[[], Sequence[torch.Tensor]], pool: object
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        """Record what a function launches; what it was called for once before needs no compiler now.

        Args:
            launch: Returns tensors that each replay fills anew.
            pool: Of `graph_pool`; what the function allocates comes from there.

        Returns:
            What replays it behind the work queued so far, and the tensors.

        Raises:
            RuntimeError: It does something that cannot be recorded, or the device has no graphs.
        """

    def synchronize(self) -> None:
        """Wait for all work."""


class CpuEvent:
    """A moment: on a CPU everything before it is done."""

    __slots__ = ("_at_s",)

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        """Return at once."""

    def seconds_since(self, earlier: Event) -> float:
        """Return wall time between the two."""
        assert isinstance(earlier, CpuEvent)
        return self._at_s - earlier._at_s


class CpuDevice:
    """The processor and the machine's memory.

    Args:
        num_threads: Threads of torch's kernels; None for the cores this process may use.
    """

    is_async = False

    def __init__(self, *, num_threads: int | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.num_threads = num_threads if num_threads is not None else usable_cores()
        self.name = f"cpu ({_processor_name()}, {self.num_threads} threads)"
        # These are private in torch 2.11 to 2.13 and absent before; without them float32 is the safe choice.
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        self.has_fast_bfloat16 = any(bool(getattr(torch.cpu, probe, bool)()) for probe in probes)

    def activate(self) -> None:
        """Set the number of kernel threads, and let the process keep the memory that a step frees."""
        torch.set_num_threads(self.num_threads)
        keep_freed_memory()

    def lasting_memory(self) -> contextlib.AbstractContextManager[None]:
        """Give large blocks pages of their own; before and afterwards the kernel gets back what is free."""
        return large_blocks_mapped()

    def memory(self) -> MemoryInfo:
        """Return what the machine, or the container's limit if lower, has left."""
        return host_memory()

    def reset_peak(self) -> None:
        """Do nothing: the kernel's own figures are not per phase."""

    def peak_bytes(self) -> int:
        """Return 0: not measured."""
        return 0

    def allocated_bytes(self) -> int:
        """Return 0: not measured."""
        return 0

    def empty_cache(self) -> None:
        """Give back to the kernel what is free."""
        give_back_memory()

    def record_event(self) -> Event:
        """Return the present moment."""
        return CpuEvent()

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return ordinary memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy_out(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Event]:
        """Return the sources themselves: they are on the host and complete."""
        return list(sources), CpuEvent()

    def copy_to_host(self, copies: Sequence[HostCopy], after: Sequence[Event]) -> Event:
        """Copy now."""
        for copy in copies:
            copy.host.copy_(copy.device)
        return CpuEvent()

    def copy_from_host(self, copies: Sequence[HostCopy], after: Sequence[Event]) -> Event:
        """Copy now."""
        for copy in copies:
            copy.device.copy_(copy.host)
        return CpuEvent()

    def wait_for(self, event: Event) -> None:
        """Do nothing: all is done."""

    def graph_pool(self) -> object:
        """Return nothing: there are no graphs."""
        return None

    def capture(
        self, launch: Callable[[], Sequence[torch.Tensor]], pool: object
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        """Refuse: there is nothing to gain."""
        raise RuntimeError("a CPU has no graphs")

    def synchronize(self) -> None:
        """Return at once."""


class CudaEvent:
    """A CUDA event whose `wait` sleeps instead of spinning."""

    __slots__ = ("_event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # torch.Event(blocking=True) drops the flag on CUDA; torch.cuda.Event keeps it. A spinning wait would
        # take a core and the driver's lock from the thread that launches.
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        """Block without the GIL until the stream got there."""
        self._event.synchronize()

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """Let what is queued on another stream from now on wait for this point."""
        stream.wait_event(self._event)

    def seconds_since(self, earlier: Event) -> float:
        """Return device time between the two."""
        assert isinstance(earlier, CudaEvent)
        return float(earlier._event.elapsed_time(self._event)) * 1e-3


class CudaDevice:
    """One NVIDIA GPU: a main stream for work, a copy stream for results, and one each way for larger things.

    Args:
        index: Which GPU.

    Raises:
        ConfigError: There is no such GPU.
    """

    is_async = True

    def __init__(self, *, index: int = 0) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise ConfigError(f"device is cuda, but there is no CUDA device {index}; use --device cpu")
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        with torch.cuda.device(self.torch_device):
            self.has_fast_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        self._main = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._copy = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        # Results must not queue behind megabytes; and the bus carries both ways at once.
        self._to_host = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._from_host = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def activate(self) -> None:
        """Make this GPU and its main stream current on the calling thread."""
        torch.cuda.set_device(self.torch_device)
        torch.cuda.set_stream(self._main)

    def lasting_memory(self) -> contextlib.AbstractContextManager[None]:
        """Change nothing: torch's allocator does not part the two."""
        return contextlib.nullcontext()

    def memory(self) -> MemoryInfo:
        """Return the driver's figures, other processes included."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        return MemoryInfo(free_bytes, total_bytes)

    def reset_peak(self) -> None:
        """Start a new peak."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int:
        """Return the allocator's peak since `reset_peak`."""
        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def allocated_bytes(self) -> int:
        """Return the allocator's figure."""
        return int(torch.cuda.memory_allocated(self.torch_device))

    def empty_cache(self) -> None:
        """Hand unused blocks back to the driver."""
        torch.cuda.empty_cache()

    def record_event(self) -> Event:
        """Record an event on the main stream."""
        return CudaEvent(self._main)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return pinned memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy_out(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Event]:
        """Copy on the copy stream, so that the next step does not queue behind it."""
        self._copy.wait_stream(self._main)
        copies = []
        with torch.cuda.stream(self._copy):
            for source in sources:
                copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                copy.copy_(source, non_blocking=True)
                copies.append(copy)
        return copies, CudaEvent(self._copy)

    def copy_to_host(self, copies: Sequence[HostCopy], after: Sequence[Event]) -> Event:
        """Copy on the stream for what leaves the device."""
        _wait_on(self._to_host, after)
        with torch.cuda.stream(self._to_host):
            for copy in copies:
                copy.host.copy_(copy.device, non_blocking=True)
        return CudaEvent(self._to_host)

    def copy_from_host(self, copies: Sequence[HostCopy], after: Sequence[Event]) -> Event:
        """Copy on the stream for what comes to the device."""
        _wait_on(self._from_host, after)
        with torch.cuda.stream(self._from_host):
            for copy in copies:
                copy.device.copy_(copy.host, non_blocking=True)
        return CudaEvent(self._from_host)

    def wait_for(self, event: Event) -> None:
        """Let the main stream wait."""
        _wait_on(self._main, (event,))

    def graph_pool(self) -> object:
        """Return a handle of the allocator's."""
        return torch.cuda.graph_pool_handle()

    def capture(
        self, launch: Callable[[], Sequence[torch.Tensor]], pool: object
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        """Capture on the main stream; other threads may wait for events meanwhile."""
        graph = torch.cuda.CUDAGraph()
        # A kernel's module that the collector unloads in between would end the capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
            try:
                outputs = launch()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture is void, the first error is what counts
                    graph.capture_end()
                raise
            graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph.replay, outputs

    def synchronize(self) -> None:
        """Wait for all streams of the GPU."""
        torch.cuda.synchronize(self.torch_device)


def _wait_on(stream: torch.cuda.Stream, events: Iterable[Event]) -> None:
    for event in events:
        assert isinstance(event, CudaEvent)
        event.hold_up(stream)


def open_device(kind: str, *, num_threads: int | None = None) -> Device:
    """Open the device a user asked for.

    Args:
        kind: auto (cuda if there is one), cuda, cuda:N or cpu.
        num_threads: For the CPU's kernels; None for the cores this process may use.

    Raises:
        ConfigError: No such device.
    """
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        if num_threads is not None and num_threads < 1:
            raise ConfigError(f"num_threads is {num_threads}; it must be at least 1")
        return CpuDevice(num_threads=num_threads)
    name, _, index = kind.partition(":")
    if name != "cuda" or not (index == "" or index.isdecimal()):
        raise ConfigError(f"device is {kind!r}; it must be auto, cpu, cuda or cuda:N")
    return CudaDevice(index=int(index or 0))


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity, cut to the container's quota."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read_words(_CGROUP / "cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        num_cores = min(num_cores, max(1, int(quota[0]) // int(quota[1])))
    return num_cores


def host_memory() -> MemoryInfo:
    """Return what the machine, or the container's limit if lower, has left."""
    machine = _machine_memory()
    container = container_memory()
    return machine if container is None else min(machine, container)


def _machine_memory() -> MemoryInfo:
    figures = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            figures[key] = int(value.split()[0]) * 1024
        return MemoryInfo(figures["MemAvailable"], figures["MemTotal"])
    except (OSError, KeyError, ValueError, IndexError):
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MemoryInfo(total_bytes // 2, total_bytes)


def container_memory(cgroup: Path = _CGROUP) -> MemoryInfo | None:
    """Return what a control group's limit leaves; None if it has none.

    Args:
        cgroup: Its folder (version 2).
    """
    limit = _read_words(cgroup / "memory.max")
    used = _read_words(cgroup / "memory.current")
    if not limit or not used or limit[0] == "max":
        return None
    stat = _read_words(cgroup / "memory.stat")
    figures = dict(zip(stat[::2], map(int, stat[1::2]), strict=True))
    # The page cache counts as used, but the kernel drops it when memory is asked for.
    cached_bytes = figures.get("inactive_file", 0) + figures.get("active_file", 0)
    free_bytes = int(limit[0]) - int(used[0]) + cached_bytes
    return MemoryInfo(min(max(0, free_bytes), int(limit[0])), int(limit[0]))


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return torch.backends.cpu.get_cpu_capability()
