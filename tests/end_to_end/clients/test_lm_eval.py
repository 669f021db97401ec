"""lm-eval over /v1/completions: log-likelihoods (echo with logprobs) and generation, on a task of our own."""

import json
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.clients.environments import client_python, run_client
from tests.end_to_end.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Germany": "Berlin"}


def write_tasks(folder: Path) -> None:
    lines = [
        json.dumps({"question": f"The capital of {country} is", "answer": f" {capital}"})
        for country, capital in CAPITALS.items()
    ]
    (folder / "capitals.jsonl").write_text("\n".join(lines) + "\n")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(folder / "capitals.jsonl")},
        "test_split": "train",
        "doc_to_text": "{{question}}",
    }
    scored = {
        **common,
        "task": "capitals_scored",
        "output_type": "loglikelihood",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
    }
    chosen = {
        **common,
        "task": "capitals_chosen",
        "output_type": "multiple_choice",
        "doc_to_choice": [f" {capital}" for capital in CAPITALS.values()],
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    generated = {
        **common,
        "task": "capitals_generated",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [",", ".", "\n"], "max_gen_toks": 8},
        "filter_list": [{"name": "strip", "filter": [{"function": "regex", "regex_pattern": r"(\w+)"}]}],
        "metric_list": [{"metric": "exact_match", "ignore_case": True}],
    }
    generated["doc_to_target"] = "{{answer.strip()}}"
    for task in (scored, chosen, generated):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))


def test_lm_eval_scores_and_generates(
    demo_server: ServerProcess, tokenizer_folder: Path, tmp_path: Path
) -> None:
    write_tasks(tmp_path)
    options = {
        "model": "smollm2",
        "base_url": f"{demo_server.url}/v1/completions",
        "tokenizer": str(tokenizer_folder),
        "num_concurrent": "2",
    }
    run_client(
        [
            str(client_python("evaluation")),
            *("-m", "lm_eval", "--model", "local-completions"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in options.items())),
            *("--tasks", "capitals_scored,capitals_chosen,capitals_generated"),
            *("--include_path", str(tmp_path), "--output_path", str(tmp_path / "results")),
        ],
        cwd=tmp_path,
        HF_HOME=str(tmp_path / "cache"),
    )
    (path,) = (tmp_path / "results").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    # A model that knows the capitals: the answers are the likeliest continuations, and no score is far off.
    assert results["capitals_scored"]["acc,none"] == 1.0
    assert 1.0 < results["capitals_scored"]["perplexity,none"] < 4.0
    assert results["capitals_chosen"]["acc,none"] == 1.0
    assert results["capitals_generated"]["exact_match,strip"] >= 0.75
