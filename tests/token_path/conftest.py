"""Each test of the contract is run for both implementations."""

from collections.abc import Iterator

import pytest

from tests.token_path.implementations import NATIVE, PYTHON, Implementation, Pair


@pytest.fixture(params=["python", "native"])
def path(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "python":
        return PYTHON
    if NATIVE is None:
        pytest.skip("not compiled; test_presence says whether it could be")
    return NATIVE


@pytest.fixture
def native() -> Implementation:
    if NATIVE is None:
        pytest.skip("not compiled; test_presence says whether it could be")
    return NATIVE


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()
