"""Debian's Chromium, without a window, driven by playwright; installed where it is missing and may be."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
INSTALL = Path(__file__).parents[3] / "scripts" / "install_chromium.sh"
INSTALL_LIMIT_S = 900.0
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
"""As root Chromium has no sandbox, and in a container little shared memory."""


def chromium() -> str:
    """Return the program; skip where it is neither there nor can be installed."""
    # Tests run in several processes: one installs it, the others wait.
    with Path(tempfile.gettempdir(), "asyncserve-install-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _found()
        if found is None:
            if os.geteuid() != 0 or shutil.which("apt-get") is None:
                pytest.skip("there is no chromium, and only root on a Debian can install it")
            done = subprocess.run(
                [INSTALL],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=INSTALL_LIMIT_S,
                check=False,
            )
            found = _found()
            if found is None:
                pytest.skip(f"chromium cannot be installed: {done.stdout[-500:]}")
    return found


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Run the browser for the duration of the block."""
    program = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


def _found() -> str | None:
    return next((path for name in PROGRAMS if (path := shutil.which(name)) is not None), None)
