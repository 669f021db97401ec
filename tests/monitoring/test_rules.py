"""Recording and alert rules: valid, explained, silent on a healthy server, and heard on a sick one."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring.prometheus import FOLDER

RULES = sorted((FOLDER / "rules").glob("*.yml"))
ALERTS: list[dict[str, Any]] = [
    rule
    for path in RULES
    for group in yaml.safe_load(path.read_bytes())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]
PROCESS = 'job="asyncserve",instance="NAME"'
SERVER = f'{PROCESS},model_name="NAME",engine="0"'
LENGTH = 60
"""Minutes of data; rules are looked at in the last one."""
GROWING = f"0+60x{LENGTH}"
STILL = f"5+0x{LENGTH}"

HEALTHY = {
    f"up{{{PROCESS}}}": f"1+0x{LENGTH}",
    f"process_start_time_seconds{{{PROCESS}}}": f"1000+0x{LENGTH}",
    f"process_open_fds{{{PROCESS}}}": f"100+0x{LENGTH}",
    f"process_max_fds{{{PROCESS}}}": f"1000+0x{LENGTH}",
    f"asyncserve:num_requests_running{{{SERVER}}}": f"8+0x{LENGTH}",
    f"asyncserve:num_requests_waiting{{{SERVER}}}": f"0+0x{LENGTH}",
    f"asyncserve:kv_cache_usage_perc{{{SERVER}}}": f"0.5+0x{LENGTH}",
    f"asyncserve:num_preemptions_total{{{SERVER}}}": STILL,
    f"asyncserve:step_time_seconds_count{{{SERVER}}}": GROWING,
    f"asyncserve:gpu_idle_seconds_total{{{SERVER}}}": f"0+1x{LENGTH}",
    f'asyncserve:request_success_total{{{SERVER},finished_reason="stop"}}': GROWING,
    f'asyncserve:request_success_total{{{SERVER},finished_reason="error"}}': STILL,
    f'asyncserve:http_requests_total{{{SERVER},handler="/v1/completions",status="2xx"}}': GROWING,
    f'asyncserve:http_requests_total{{{SERVER},handler="/v1/completions",status="5xx"}}': STILL,
    # Probes and scrapes would hide the errors of a server that has little to do.
    f'asyncserve:http_requests_total{{{SERVER},handler="/metrics",status="2xx"}}': f"0+6000x{LENGTH}",
    f'asyncserve:http_requests_total{{{SERVER},handler="/health",status="2xx"}}': f"0+6000x{LENGTH}",
    f"asyncserve:http_connections_refused_total{{{SERVER}}}": STILL,
    f'asyncserve:requests_rejected_total{{{SERVER},reason="queued_tokens"}}': STILL,
    f'asyncserve:requests_rejected_total{{{SERVER},reason="invalid"}}': GROWING,
    f'asyncserve:traced_requests_total{{{SERVER},outcome="dropped"}}': STILL,
    f"asyncserve:device_restarts_total{{{SERVER}}}": STILL,
    f"asyncserve:explained_device_losses_total{{{SERVER}}}": STILL,
    f"asyncserve:device_is_lost{{{SERVER}}}": f"0+0x{LENGTH}",
    f"asyncserve:failed_steps_total{{{SERVER}}}": STILL,
} | {
    f'asyncserve:{metric}_bucket{{{SERVER},le="{bound}"}}': GROWING
    for metric, bounds in (
        ("time_to_first_token_seconds", ("0.5", "10.0", "+Inf")),
        ("inter_token_latency_seconds", ("0.05", "1.0", "+Inf")),
        ("loop_lag_seconds", ("0.001", "0.5", "+Inf")),
    )
    for bound in bounds
}
"""Series of a server at work, as promtool writes them: each value a minute after the one before."""


def slow(metric: str, bound: str) -> dict[str, str]:
    """Return the bucket below which everything was before, now empty."""
    return {f'asyncserve:{metric}_bucket{{{SERVER},le="{bound}"}}': STILL}


SICK: dict[str, dict[str, str]] = {
    "AsyncserveDown": {f"up{{{PROCESS}}}": f"1+0x40 0+0x{LENGTH - 40}"},
    "AsyncserveNoProgress": {f"asyncserve:step_time_seconds_count{{{SERVER}}}": f"0+60x40 2400+0x{LENGTH}"},
    "AsyncserveRestarts": {
        f"process_start_time_seconds{{{PROCESS}}}": "1000+0x10 2000+0x10 3000+0x10 4000+0x30"
    },
    "AsyncserveSequencesFail": {
        f'asyncserve:request_success_total{{{SERVER},finished_reason="error"}}': f"0+2x{LENGTH}"
    },
    "AsyncserveHttpErrors": {
        f'asyncserve:http_requests_total{{{SERVER},handler="/v1/completions",status="5xx"}}': f"0+2x{LENGTH}"
    },
    "AsyncserveSlowFirstToken": slow("time_to_first_token_seconds", "0.5"),
    "AsyncserveSlowTokens": slow("inter_token_latency_seconds", "0.05"),
    "AsyncserveRefuses": {
        f'asyncserve:requests_rejected_total{{{SERVER},reason="queued_tokens"}}': f"0+3x{LENGTH}"
    },
    "AsyncserveQueueStays": {f"asyncserve:num_requests_waiting{{{SERVER}}}": f"1+0x{LENGTH}"},
    "AsyncserveKVCacheFull": {
        f"asyncserve:kv_cache_usage_perc{{{SERVER}}}": f"0.99+0x{LENGTH}",
        f"asyncserve:num_preemptions_total{{{SERVER}}}": f"0+30x{LENGTH}",
    },
    "AsyncserveDeviceIdle": {f"asyncserve:gpu_idle_seconds_total{{{SERVER}}}": f"0+20x{LENGTH}"},
    "AsyncserveLoopLags": slow("loop_lag_seconds", "0.001"),
    "AsyncserveFilesRunOut": {f"process_open_fds{{{PROCESS}}}": f"950+0x{LENGTH}"},
    "AsyncserveRefusesConnections": {
        f"asyncserve:http_connections_refused_total{{{SERVER}}}": f"0+3x{LENGTH}"
    },
    "AsyncserveTracesDropped": {
        f'asyncserve:traced_requests_total{{{SERVER},outcome="dropped"}}': f"0+3x{LENGTH}"
    },
    "AsyncserveDeviceLost": {f"asyncserve:device_is_lost{{{SERVER}}}": f"0+0x40 1+0x{LENGTH - 40}"},
    "AsyncserveStepsFail": {f"asyncserve:failed_steps_total{{{SERVER}}}": f"0+3x{LENGTH}"},
}
"""What differs on a server that an alert is for. It may set off other alerts too."""


def series_of(name: str, differing: dict[str, str]) -> list[dict[str, str]]:
    """Return the series of one server, which is called so."""
    return [
        {"series": series.replace("NAME", name), "values": values}
        for series, values in (HEALTHY | differing).items()
    ]


def firing(name: str, alert: str) -> str:
    """Return how many alerts that match a server sets off; some tell it by its model alone."""
    matchers = f'alertname=~"{alert}",alertstate="firing"'
    return f'count(ALERTS{{{matchers},instance="{name}"}} or ALERTS{{{matchers},model_name="{name}"}})'


def test_rules_are_valid(promtool: Path) -> None:
    assert len(RULES) == 2
    subprocess.run([promtool, "check", "rules", *RULES], check=True, capture_output=True)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_an_alert_says_what_is_the_matter_and_what_to_do(alert: dict[str, Any]) -> None:
    annotations = alert["annotations"]
    assert set(annotations) == {"summary", "description", "runbook"}
    assert len(annotations["runbook"]) > 100
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}


def test_every_alert_has_a_server_that_sets_it_off() -> None:
    assert {alert["alert"] for alert in ALERTS} == set(SICK)
    assert all(set(differing) <= set(HEALTHY) for differing in SICK.values())


def test_alerts_fire_on_sick_servers_and_not_on_healthy_ones(promtool: Path, tmp_path: Path) -> None:
    series = series_of("healthy", {})
    expressions = [{"expr": firing("healthy", ".*"), "eval_time": f"{LENGTH}m", "exp_samples": []}]
    for name, differing in SICK.items():
        series += series_of(name, differing)
        heard = [{"labels": "{}", "value": 1}]
        expressions.append({"expr": firing(name, name), "eval_time": f"{LENGTH}m", "exp_samples": heard})
    case = {"interval": "1m", "input_series": series, "promql_expr_test": expressions}
    tests = {"rule_files": [str(path) for path in RULES], "evaluation_interval": "1m", "tests": [case]}
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump(tests), encoding="utf-8")
    outcome = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
