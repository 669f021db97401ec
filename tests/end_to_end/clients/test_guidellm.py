"""guidellm against the demo model: a closed loop of streaming requests with prompts of its own."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.clients.environments import client_python, run_client
from tests.end_to_end.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_guidellm_measures_a_closed_loop(
    demo_server: ServerProcess, tokenizer_folder: Path, tmp_path: Path
) -> None:
    run_client(
        [
            str(client_python("evaluation")),
            *("-m", "guidellm", "run"),
            *("--backend", f"kind=openai_http,target={demo_server.url},model=smollm2"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
            *("--tokenizer", f"kind=hf_auto,model={tokenizer_folder}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
            "--disable-console-interactive",
        ],
        cwd=tmp_path,
        HF_HOME=str(tmp_path / "cache"),
    )
    (benchmark,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (6, 0)
    assert [each["output_metrics"]["text_tokens"] for each in requests["successful"]] == [16] * 6
