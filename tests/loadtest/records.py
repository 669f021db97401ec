"""Records and rows made up for tests: every figure of them can be worked out by hand."""

from array import array
from typing import Any

from loadtest import report, results, series
from loadtest.client import Record
from loadtest.load import Load


def record(
    *,
    started_s: float = 0.0,
    ttft_s: float = 0.1,
    e2el_s: float = 1.1,
    tokens: int = 11,
    asked: int | None = None,
    cached: int | None = None,
    error: str | None = None,
    turn: int = 0,
) -> Record:
    """Return a request whose tokens came evenly."""
    return Record(
        started_s=started_s,
        first_s=started_s + ttft_s,
        last_s=started_s + e2el_s,
        ended_s=started_s + e2el_s,
        gaps_s=array("d", [(e2el_s - ttft_s) / (tokens - 1)] * (tokens - 1)),
        num_prompt_tokens=20,
        num_output_tokens=tokens,
        num_asked_tokens=tokens if asked is None else asked,
        num_cached_tokens=cached,
        has_usage=True,
        status=200,
        error=error,
        turn=turn,
    )


def row(
    records: list[Record],
    *,
    duration_s: float = 2.0,
    repeat: int = 1,
    limits_ms: dict[str, float] | None = None,
    client: dict[str, Any] | None = None,
    command: str = "run",
    **load: Any,
) -> dict[str, Any]:
    """Return the row of a results file for these records."""
    limits = limits_ms or {}
    plan = Load(**({"seed": 1} | load))
    return {
        "schema_version": results.SCHEMA_VERSION,
        "command": command,
        "argv": "python -m loadtest --made-up",
        "date": "2030-01-01T00:00:00+00:00",
        "label": "",
        "scenario": "",
        "url": "http://127.0.0.1:8000",
        "model": "made-up",
        "server": {"version": "1", "max_model_len": 4096},
        "commit": "0123456789ab",
        "machine": {"processor": "none", "cores": 2, "memory_mib": 1, "system": "none"},
        "versions": {"python": "3"},
        "limits_ms": limits,
        "name": f"{plan.name} #{repeat}",
        "point": plan.name,
        "load": plan.plain(),
        "repeat": repeat,
        **report.summarize(records, duration_s=duration_s, limits_ms=limits).to_json(),
        "client": client,
        "percentiles": series.percentiles_of(report.latencies_ms(records)),
        "over_time": series.over_time(records),
        "goodput_by_scale": series.goodput(records, limits, duration_s=duration_s),
        "turns": series.turns(records),
    }


def paced(tpot_ms: float, *, num_requests: int = 4, **row_options: Any) -> dict[str, Any]:
    """Return a row of requests of 11 tokens, 100 ms to the first and then `tpot_ms` for each."""
    e2el_s = 0.1 + 0.01 * tpot_ms
    return row([record(e2el_s=e2el_s)] * num_requests, duration_s=e2el_s, **row_options)
