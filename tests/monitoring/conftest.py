"""Prometheus' own programs, fetched once if they are not there."""

from pathlib import Path

import pytest

from monitoring.prometheus import NotThere, find_programs


@pytest.fixture(scope="session")
def programs() -> dict[str, Path]:
    try:
        return find_programs()
    except NotThere as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def promtool(programs: dict[str, Path]) -> Path:
    return programs["promtool"]
