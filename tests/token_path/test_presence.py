"""The C is there wherever it can be compiled, and the Python takes its place where it is not."""

import importlib.util
import sys
from pathlib import Path

import pytest

from asyncserve import token_path
from tests.token_path.implementations import NAMES, NATIVE, PYTHON, can_compile


def test_the_extension_is_there_wherever_it_could_be_compiled() -> None:
    if not can_compile():
        pytest.skip("no C compiler, or no Python.h")
    assert NATIVE is not None, "install the package again: `pip install --no-deps -e .`"
    assert token_path.IS_NATIVE


@pytest.mark.parametrize("name", NAMES)
def test_what_the_package_exports_is_that_of_the_extension_if_there_is_one(name: str) -> None:
    wanted = PYTHON if NATIVE is None else NATIVE
    assert getattr(token_path, name) is getattr(wanted, name)


def test_without_the_extension_the_package_exports_the_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncserve.token_path.native", None)
    assert token_path.__file__ is not None
    spec = importlib.util.spec_from_file_location("another_token_path", Path(token_path.__file__))
    assert spec is not None
    assert spec.loader is not None
    another = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(another)
    assert not another.IS_NATIVE
    for name in NAMES:
        assert getattr(another, name) is getattr(PYTHON, name), name
    assert another.__all__ == token_path.__all__
    assert all(hasattr(another, name) for name in another.__all__)
