"""`vllm bench serve`, vLLM's load generator, over both endpoints that it is used with."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.clients.environments import client_python, run_client
from tests.end_to_end.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

START = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What the command `vllm bench serve` does; the build for CPUs does not find its own version and refuses."""


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_bench_serve_gets_every_token_it_asks_for(
    demo_server: ServerProcess, tokenizer_folder: Path, tmp_path: Path, backend: str, endpoint: str
) -> None:
    run_client(
        [
            *(str(client_python("vllm-bench")), "-c", START),
            *("--backend", backend, "--endpoint", endpoint, "--base-url", demo_server.url),
            *("--model", "smollm2", "--tokenizer", str(tokenizer_folder), "--ignore-eos"),
            *("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "16"),
            *("--num-prompts", "8", "--max-concurrency", "4"),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
        ],
        cwd=tmp_path,
        HF_HOME=str(tmp_path / "cache"),
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (8, 0)
    assert result["total_output_tokens"] == 8 * 16
