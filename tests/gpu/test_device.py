import threading
from pathlib import Path

import pytest
import torch

from asyncserve.errors import ConfigError
from asyncserve.gpu.device import CpuDevice, container_memory, open_device, usable_cores


def test_number_of_threads_is_set_on_the_thread_that_activates() -> None:
    seen = []

    def run() -> None:
        open_device("cpu", num_threads=1).activate()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [1]


@pytest.mark.parametrize("kind", ["tpu", "cuda:x", "cpu:0", ""])
def test_unknown_device_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="auto, cpu, cuda"):
        open_device(kind)


def test_zero_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_threads"):
        open_device("cpu", num_threads=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        open_device("cuda")
    assert open_device("auto").torch_device.type == "cpu"


def test_memory_figures_are_plausible() -> None:
    memory = CpuDevice(num_threads=1).memory()
    assert 0 < memory.free_bytes <= memory.total_bytes


def write_cgroup(folder: Path, *, limit: str, used: int, stat: str = "") -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)
    return folder


def test_page_cache_of_a_container_is_free_memory(tmp_path: Path) -> None:
    stat = "anon 300\nfile 600\nactive_file 200\ninactive_file 350\nslab 50\n"
    memory = container_memory(write_cgroup(tmp_path, limit="1000", used=900, stat=stat))
    assert memory == (650, 1000)


def test_container_has_no_more_free_memory_than_its_limit(tmp_path: Path) -> None:
    assert container_memory(write_cgroup(tmp_path, limit="1000", used=10, stat="active_file 20")) == (
        1000,
        1000,
    )
    assert container_memory(write_cgroup(tmp_path, limit="1000", used=1100)) == (0, 1000)
    assert container_memory(write_cgroup(tmp_path, limit="max", used=10)) is None
    assert container_memory(tmp_path / "none") is None


def test_at_least_one_core_is_usable() -> None:
    assert usable_cores() >= 1
    assert CpuDevice(num_threads=1).has_fast_bfloat16 in (True, False)


def test_cpu_events_measure_wall_time() -> None:
    device = CpuDevice(num_threads=1)
    first, second = device.record_event(), device.record_event()
    first.wait()
    assert second.seconds_since(first) >= 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_results_copied_out_are_those_queued_before_the_copy() -> None:
    device = open_device("cuda")
    device.activate()
    source = torch.full((4,), 7, device=device.torch_device)
    start = device.record_event()
    copies, event = device.copy_out([source])
    event.wait()
    assert copies[0].tolist() == [7, 7, 7, 7]
    assert copies[0].is_pinned()
    assert event.seconds_since(start) >= 0
    assert device.memory().free_bytes > 0
