"""The npm package `openai`: models, chat whole and streamed, completions, tools, responses, an error."""

import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.clients.environments import HERE, node_client, run_client
from tests.end_to_end.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_npm_package_gets_what_it_expects(demo_server: ServerProcess, tmp_path: Path) -> None:
    packages = node_client()
    # A module finds packages beside itself.
    (tmp_path / "node_modules").symlink_to(packages / "node_modules")
    shutil.copy(HERE / "node" / "chat.mjs", tmp_path)
    printed = run_client(["node", "chat.mjs", f"{demo_server.url}/v1", "smollm2"], cwd=tmp_path)
    got = json.loads(printed.splitlines()[-1])
    assert got["models"] == ["smollm2"]
    assert "Paris" in got["whole"]
    assert got["whole"] == got["streamed"] == got["final"] == got["response"]
    assert got["usage"]["completion_tokens"] > 1
    assert got["completion"].startswith(" Paris")
    (call,) = got["calls"]
    assert call["function"]["name"] == "get_weather"
    assert set(json.loads(call["function"]["arguments"])) == {"city"}
    assert got["refusal"] == {"status": 400, "param": "temperature", "kind": "BadRequestError"}
