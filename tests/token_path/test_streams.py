"""A live server sends the same with the C and without."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.token_path.implementations import NATIVE

WITHOUT_C = "import sys; sys.modules['asyncserve.token_path.native'] = None"
STREAM = "import runpy; runpy.run_module('tests.token_path.streaming', run_name='__main__')"


def streamed(*statements: str) -> Any:
    command = [sys.executable, "-c", "; ".join(statements)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(NATIVE is None, reason="not compiled")
def test_streams_are_the_same_to_the_byte_with_the_c_and_without() -> None:
    native, python = streamed(STREAM), streamed(WITHOUT_C, STREAM)
    assert (native["is_native"], python["is_native"]) == (True, False)
    assert native["bodies"].keys() == python["bodies"].keys()
    for name, bodies in native["bodies"].items():
        assert bodies == python["bodies"][name], name
        assert all(body.endswith("data: [DONE]\n\n") for body in bodies)
