"""The dashboard as a file: made by the code, complete, and about metrics that exist."""

import json
import re
from typing import Any

import pytest

from asyncserve.metrics.catalogue import METRICS, MetricKind
from monitoring import metric_list
from monitoring.dashboard import FILE, build, to_json

BOARD: dict[str, Any] = json.loads(FILE.read_bytes())
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
PROCESS = {
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_open_fds",
    "process_max_fds",
    "process_start_time_seconds",
}
SUFFIXES = ("_bucket", "_count", "_sum")
UNSEEN = {"cache_config_info", "channel_peak", "request_inference_time_seconds", "request_params_max_tokens"}
"""Metrics without a panel: facts, and what others imply. Traces are counted only if they are sent."""


def title(panel: dict[str, Any]) -> str:
    return str(panel["title"])


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:asyncserve:|process_)\w+", expression))


def test_the_file_is_what_the_code_makes() -> None:
    made = to_json(build())
    assert made == FILE.read_text(encoding="utf-8"), "run: python -m monitoring.dashboard"


def test_ids_and_places_are_unique() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells


@pytest.mark.parametrize("panel", PANELS, ids=title)
def test_a_panel_says_what_it_shows_and_in_which_unit(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    unit = panel["options"]["yAxis"] if panel["type"] == "heatmap" else panel["fieldConfig"]["defaults"]
    assert unit["unit"]
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert all(legends)
    assert len(set(legends)) == len(legends)


@pytest.mark.parametrize("panel", PANELS, ids=title)
def test_a_panel_follows_the_choice_of_job_model_and_server(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for name, selector in re.findall(r"(\basyncserve:\w+|\bprocess_\w+)(\{[^}]*\})?", target["expr"]):
            wanted = ["job", "instance"] if name.startswith("process") else ["job", "model_name", "instance"]
            assert [f'{each}=~"${each}"' in selector for each in wanted] == [True] * len(wanted), name


def test_every_metric_that_is_shown_exists_and_every_one_that_exists_is_shown() -> None:
    exposed = {
        metric.exposed_name + suffix
        for metric in METRICS
        for suffix in (SUFFIXES if metric.kind is MetricKind.HISTOGRAM else ("",))
    }
    shown = {name for panel in PANELS for target in panel["targets"] for name in names_in(target["expr"])}
    assert shown <= exposed | PROCESS
    unseen = {
        metric.name for metric in METRICS if not any(name.startswith(metric.exposed_name) for name in shown)
    }
    assert unseen == UNSEEN | {"traced_requests_total", "kv_event_batches_total"}


def test_the_document_lists_every_metric() -> None:
    text = metric_list.FILE.read_text(encoding="utf-8")
    assert metric_list.inserted(text) == text, "run: python -m monitoring.metric_list"
