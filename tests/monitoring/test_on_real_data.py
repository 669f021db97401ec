"""Every expression of dashboard and rules, evaluated by a real Prometheus that has scraped a real server."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncserve.metrics.catalogue import FIRST_TOKEN_BUCKETS, REQUEST_BUCKETS
from monitoring.dashboard import FILE
from monitoring.prometheus import FOLDER
from tests.monitoring.running_prometheus import MODEL, PATIENCE_S, RunningPrometheus, running_prometheus

pytestmark = pytest.mark.slow

TARGETS = [
    (panel["title"], target["expr"])
    for panel in json.loads(FILE.read_bytes())["panels"]
    for target in panel.get("targets", ())
]
RULES: list[dict[str, Any]] = [
    rule
    for path in sorted((FOLDER / "rules").glob("*.yml"))
    for group in yaml.safe_load(path.read_bytes())["groups"]
    for rule in group["rules"]
]
LINTS = {
    "metric names should not contain ':'",
    'non-counter metrics should not have "_total" suffix',
    'counters should have "_total" suffix',
}

MADE_FOR_VLLM = [
    "vllm:num_requests_running",
    "sum(vllm:num_requests_waiting)",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "rate(vllm:prompt_tokens_total[1m])",
    "rate(vllm:generation_tokens_total[1m])",
    "sum by (finished_reason) (increase(vllm:request_success_total[1m]))",
    "histogram_quantile(0.99, sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket[1m])))",
    "histogram_quantile(0.5, sum by (le) (rate(vllm:inter_token_latency_seconds_bucket[1m])))",
    "histogram_quantile(0.5, sum by (le) (rate(vllm:time_per_output_token_seconds_bucket[1m])))",
    "histogram_quantile(0.95, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[1m])))",
    "rate(vllm:e2e_request_latency_seconds_sum[1m]) / rate(vllm:e2e_request_latency_seconds_count[1m])",
    "rate(vllm:request_queue_time_seconds_sum[1m])",
    "rate(vllm:request_prefill_time_seconds_sum[1m])",
    "rate(vllm:request_decode_time_seconds_sum[1m])",
    "sum by (le) (increase(vllm:request_prompt_tokens_bucket[1m]))",
    "sum by (le) (increase(vllm:request_generation_tokens_bucket[1m]))",
    "rate(vllm:request_max_num_generation_tokens_sum[1m])",
    "rate(vllm:prefix_cache_hits_total[1m]) / rate(vllm:prefix_cache_queries_total[1m])",
    "vllm:cache_config_info",
]
"""What autoscalers, endpoint pickers and vLLM's own dashboard ask."""


@pytest.fixture(scope="module")
def prometheus(
    programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningPrometheus]:
    with running_prometheus(programs["prometheus"], tmp_path_factory.mktemp("prometheus")) as running:
        yield running


def _filled_in(expression: str) -> str:
    """Return a panel's expression with values for its variables."""
    for name, value in (("job", "asyncserve"), ("model_name", MODEL), ("instance", ".*")):
        expression = expression.replace(f"${name}", value)
    return expression.replace("$__rate_interval", "1m")


def test_every_panel_shows_something(prometheus: RunningPrometheus) -> None:
    empty = []
    for title, expression in TARGETS:
        expression = _filled_in(expression)
        if not prometheus.numbers(expression):
            empty.append(f"{title}: {expression}")
    assert empty == []


def test_what_panels_show_of_a_server_that_works_can_be_true(prometheus: RunningPrometheus) -> None:
    def shown(title: str) -> list[float]:
        expressions = [_filled_in(expression) for panel, expression in TARGETS if panel == title]
        return [value for expression in expressions for value in prometheus.numbers(expression)]

    for title in ("KV cache in use", "Sequences that failed"):
        assert all(0.0 <= share <= 1.0 for share in shown(title)), title
    assert shown("Sequences that failed") == [0.0]
    (tokens_per_s,) = shown("Output tokens")
    (sequences_per_s,) = prometheus.numbers("sum(rate(asyncserve:request_success_total[1m]))")
    assert 0 < sequences_per_s < tokens_per_s
    # Medians: of few requests the far quantiles tell the buckets' bounds.
    (first_s, *_), (whole_s, *_) = shown("Time to first token"), shown("End to end")
    # Each is somewhere in its bucket, and those of the two differ.
    earliest_s = max((each for each in FIRST_TOKEN_BUCKETS if each < first_s), default=0.0)
    latest_s = min(each for each in REQUEST_BUCKETS if each >= whole_s)
    assert 0 <= earliest_s < latest_s < PATIENCE_S


def test_every_recording_rule_records_something(prometheus: RunningPrometheus) -> None:
    names = [rule["record"] for rule in RULES if "record" in rule]
    assert names
    assert [name for name in names if not prometheus.numbers(name)] == []


def test_no_alert_fires_on_a_healthy_server(prometheus: RunningPrometheus) -> None:
    for rule in RULES:
        if "alert" in rule:
            prometheus.query(rule["expr"])
    assert prometheus.query('ALERTS{alertstate="firing"}') == []


def test_what_was_made_for_vllm_finds_its_names(prometheus: RunningPrometheus) -> None:
    assert [each for each in MADE_FOR_VLLM if not prometheus.numbers(each)] == []


def test_promtool_has_nothing_against_the_text_but_names_of_the_field(
    promtool: Path, prometheus: RunningPrometheus
) -> None:
    text = prometheus.scraped()
    outcome = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    complaints = {line.partition(" ")[2] for line in outcome.stderr.splitlines()}
    assert complaints <= LINTS, complaints - LINTS
