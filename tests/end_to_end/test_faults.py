"""Faults in a real server: answers go on over them, and a device that is lost for good ends the process."""

import concurrent.futures
from pathlib import Path

import pytest
from transformers import Gemma3TextConfig

from tests.end_to_end.server_process import TINY, running_server
from tests.fakes.tiny_model import tiny_folder, tiny_llama_config, tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

OPTIONS = (*TINY, "--served-model-name", "tiny", "--kv-cache-memory-bytes", "32MiB", "--dtype", "float32")
PROMPTS = [f"request {number}" for number in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("tiny"))
    write_tiny_tokenizer(folder, vocab_size=320)
    return folder


def ask(prompt: str, num_tokens: int = 40) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }


def test_answers_over_every_kind_of_fault_are_those_of_an_undisturbed_server(model: Path) -> None:
    faults = "fail-step=300,oom-step=320,lose-device=340,hang-step=360:60s,tokenizer=poison"
    environ = {"ASYNCSERVE_FAULTS": faults}
    with (
        running_server(model, *OPTIONS, "--step-timeout", "3", environ=environ) as server,
        concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as clients,
    ):
        undisturbed = [server.post("/v1/completions", ask(prompt)).json() for prompt in PROMPTS]
        poisoned = server.post("/v1/completions", ask("a poisoned prompt"))
        for _ in range(3):
            answers = clients.map(lambda prompt: server.post("/v1/completions", ask(prompt)), PROMPTS)
            for answer, expected in zip(answers, undisturbed, strict=True):
                assert answer.json()["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        assert poisoned.status_code == 500
        assert server.metric("asyncserve:failed_steps_total") == 2
        # More of them if the machine stands still for seconds.
        num_restarts = server.metric("asyncserve:device_restarts_total")
        assert num_restarts >= 2
        assert server.metric("asyncserve:failed_sequences_total") == 0
        # Of each lost device one at least: how many run at once is the clients' pace.
        assert server.metric("asyncserve:replayed_sequences_total") >= 2
        assert server.get("/health").json()["num_device_restarts"] == num_restarts
        assert "FAULTS ARE INJECTED ON PURPOSE" in server.log
        server.wait_idle()


def test_answers_of_layers_with_windows_from_a_cache_of_8_bits_are_the_same_over_faults(
    tmp_path: Path,
) -> None:
    sizes = tiny_llama_config(num_hidden_layers=3, sliding_window=18)
    config = Gemma3TextConfig(**sizes, pad_token_id=0, sliding_window_pattern=3, query_pre_attn_scalar=16)
    model = tiny_folder(tmp_path, config)
    write_tiny_tokenizer(model, vocab_size=sizes["vocab_size"])
    environ = {"ASYNCSERVE_FAULTS": "fail-step=520,lose-device=560"}
    with (
        running_server(model, *OPTIONS, "--kv-cache-dtype", "fp8_e4m3", environ=environ) as server,
        concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as clients,
    ):
        undisturbed = [server.post("/v1/completions", ask(prompt, 80)).json() for prompt in PROMPTS]
        assert server.metric("asyncserve:failed_steps_total") == 0
        for _ in range(3):
            answers = clients.map(lambda prompt: server.post("/v1/completions", ask(prompt, 80)), PROMPTS)
            for answer, expected in zip(answers, undisturbed, strict=True):
                assert answer.json()["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        assert server.metric("asyncserve:failed_steps_total") == 1
        assert server.metric("asyncserve:device_restarts_total") == 1
        assert server.metric("asyncserve:failed_sequences_total") == 0
        assert server.metric("asyncserve:kv_window_blocks_freed_total") > 0
        server.wait_idle()


def test_a_device_that_is_lost_for_good_ends_the_process_with_status_70(model: Path) -> None:
    environ = {"ASYNCSERVE_FAULTS": "lose-device=8"}
    with running_server(model, *OPTIONS, "--max-device-restarts", "0", environ=environ) as server:
        answer = server.post("/v1/completions", ask("x"))
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_stopped"
        assert server.wait() == 70
        assert "start the server anew" in server.log


def test_requests_that_lose_the_device_end_alone_and_never_the_process(model: Path) -> None:
    culprit = {**ask("x"), "prompt": [5, 300, 5]}
    environ = {"ASYNCSERVE_FAULTS": "lose-device=token:300"}
    with (
        running_server(model, *OPTIONS, environ=environ) as server,
        concurrent.futures.ThreadPoolExecutor(len(PROMPTS) + 1) as clients,
    ):
        undisturbed = [server.post("/v1/completions", ask(prompt)).json() for prompt in PROMPTS]
        for num_culprits in range(1, 5):
            answers = clients.map(lambda prompt: server.post("/v1/completions", ask(prompt)), PROMPTS)
            # A client with nobody else beside it that tries again, too.
            refused = [server.post("/v1/completions", {**culprit, "n": num_culprits}) for _ in range(2)]
            for answer in refused:
                assert (answer.status_code, answer.json()["error"]["code"]) == (500, "step_failed")
            for answer, expected in zip(answers, undisturbed, strict=True):
                assert answer.json()["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        health = server.get("/health").json()
        assert health["status"] == "ok"
        assert health["num_device_restarts"] == health["num_explained_losses"] >= 2 * 2 * 4
        assert server.get("/ready").status_code == 200
        for metric, in_health in (
            ("device_restarts", "device_restarts"),
            ("explained_device_losses", "explained_losses"),
        ):
            assert server.metric(f"asyncserve:{metric}_total") == health[f"num_{in_health}"]
        assert server.metric("asyncserve:failed_sequences_total") == 2 * (1 + 2 + 3 + 4)
        assert server.metric("asyncserve:device_is_lost") == 0
        assert server.log.count("so that request ends") == 2 * 4
        server.wait_idle()


def test_a_device_that_loses_itself_with_every_step_ends_the_process_with_status_70(model: Path) -> None:
    with (
        running_server(model, *OPTIONS, environ={"ASYNCSERVE_FAULTS": "lose-device=every:1"}) as server,
        concurrent.futures.ThreadPoolExecutor(8) as clients,
    ):
        answers = list(
            clients.map(lambda number: server.post("/v1/completions", ask(f"x{number}")), range(8))
        )
        assert {answer.status_code for answer in answers} <= {500, 503}
        assert server.wait() == 70
        assert "no step went well in between" in server.log
