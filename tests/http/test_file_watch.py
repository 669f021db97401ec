import asyncio
import os
from pathlib import Path

import pytest

from asyncserve.http.file_watch import FileWatch


def test_a_change_counts_when_it_has_settled(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("a")
    calls: list[str] = []
    watch = FileWatch([str(path)], lambda: calls.append(path.read_text()))
    watch.look()
    watch.look()
    assert calls == []
    path.write_text("half")
    watch.look()
    path.write_text("half of it")
    watch.look()
    assert calls == [], "it is still being written"
    watch.look()
    assert calls == ["half of it"]
    watch.look()
    assert calls == ["half of it"]


def test_a_file_swapped_behind_a_symbolic_link_has_changed(tmp_path: Path) -> None:
    """As Kubernetes does: same size, same time, another file."""
    for name in ("one", "two"):
        (tmp_path / name).write_text("same")
        os.utime(tmp_path / name, (1.0, 1.0))
    link = tmp_path / "link"
    link.symlink_to("one")
    calls: list[int] = []
    watch = FileWatch([str(link)], lambda: calls.append(1))
    link.unlink()
    link.symlink_to("two")
    watch.look()
    watch.look()
    assert calls == [1]


def test_a_file_that_goes_and_comes_back_has_changed_twice(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("a")
    calls: list[bool] = []
    watch = FileWatch([str(path)], lambda: calls.append(path.exists()))
    for exists in (False, True):
        path.write_text("b") if exists else path.unlink()
        watch.look()
        watch.look()
    assert calls == [False, True]


async def test_a_callback_that_fails_is_logged_and_the_watch_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "f"
    calls = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()

    def fail() -> None:
        loop.call_soon_threadsafe(calls.release)
        raise ZeroDivisionError

    watch = await asyncio.to_thread(FileWatch, [str(path)], fail)
    task = asyncio.create_task(watch.run(interval_s=0.0))
    for text in ("a", "bc"):
        path.write_text(text)
        await calls.acquire()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert caplog.text.count("taking up a change") >= 1
