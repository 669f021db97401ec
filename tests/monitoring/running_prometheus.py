"""A Prometheus process that scrapes a live server over the fake device, for tests to ask."""

import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asyncserve.http.app import GENERATING_ROUTES
from asyncserve.metrics.collector import EngineCollector
from asyncserve.metrics.exposition import new_registry, render
from asyncserve.metrics.http_traffic import HttpTraffic
from asyncserve.metrics.observer import PrometheusObserver
from asyncserve.metrics.vllm_names import VllmNames
from loadtest.server_process import free_port
from monitoring.prometheus import command, config_for
from tests.http.live_thread import LiveThread, live_thread

MODEL = "fake-model"
INTERVAL_S = 0.2
PATIENCE_S = 90.0


@dataclass(slots=True)
class RunningPrometheus:
    """A Prometheus that has seen a loaded server more than once."""

    url: str
    server: LiveThread

    def query(self, expression: str) -> list[float]:
        """Return the values an expression has now, one per series.

        Raises:
            ValueError: It is no valid expression.
            OSError: Prometheus does not answer yet.
        """
        data = urllib.parse.urlencode({"query": expression}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query", data, timeout=PATIENCE_S) as answer:
                result = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise  # it is starting
            raise ValueError(f"{expression}: {error.read().decode()}") from error
        return [float(series["value"][1]) for series in result]

    def numbers(self, expression: str) -> list[float]:
        """Return those values that are numbers; none if there are none for long.

        A scrape that took longer than the interval has every series end, until the next one.
        """
        ends_s = time.monotonic() + PATIENCE_S
        while not (found := self._numbers_now(expression)) and time.monotonic() < ends_s:
            time.sleep(INTERVAL_S)
        return found

    def has_moved(self) -> bool:
        """Whether rates can be computed, and rules have been evaluated."""
        return all(
            self._numbers_now(expression)
            for expression in (
                "rate(asyncserve:request_success_total[1m]) > 0",
                "model:asyncserve_sequences:rate5m > 0",
            )
        )

    def scraped(self) -> str:
        """Return the text that is scraped."""
        answer: Any = self.server.run(self.server.live.call("/metrics"))
        return str(answer.body.decode())

    def _numbers_now(self, expression: str) -> list[float]:
        return [value for value in self.query(expression) if math.isfinite(value)]


@contextmanager
def running_prometheus(program: Path, folder: Path) -> Iterator[RunningPrometheus]:
    """Serve, load the server and scrape it; the block begins when rates can be computed."""
    registry = new_registry()
    counted = PrometheusObserver(registry, MODEL)
    traffic = HttpTraffic(MODEL, GENERATING_ROUTES, lambda: 1)
    registry.register(traffic)
    with live_thread(
        engine_options={"observer": counted, "loop_lag_interval_s": 0.01},
        metrics_renderer=partial(render, registry),
        traffic=traffic,
    ) as server:
        state = EngineCollector(server.live.engine.statistics, MODEL, {"block_size": 16})
        registry.register(state)
        registry.register(VllmNames([counted, state]))
        listen = f"127.0.0.1:{free_port()}"
        text = config_for(server.live.url, interval_s=INTERVAL_S, evaluation_interval_s=INTERVAL_S)
        (folder / "prometheus.yml").write_text(text, encoding="utf-8")
        process = subprocess.Popen(command(program, folder, listen=listen), stderr=subprocess.PIPE, text=True)
        try:
            prometheus = RunningPrometheus(f"http://{listen}", server)
            _load_until_seen(prometheus, process)
            yield prometheus
        finally:
            process.kill()
            process.communicate()


def _load_until_seen(prometheus: RunningPrometheus, process: "subprocess.Popen[str]") -> None:
    """Send requests until all that they move has been seen moving, and rules have been evaluated."""
    ends_s = time.monotonic() + PATIENCE_S
    live = prometheus.server.live
    while time.monotonic() < ends_s and process.poll() is None:
        prometheus.server.run(live.complete(max_tokens=6, ignore_eos=True, stream=True))
        try:
            if prometheus.has_moved():
                return
        except OSError:
            pass  # it is starting
        time.sleep(0.02)
    process.kill()
    raise TimeoutError(f"Prometheus saw nothing: {process.communicate()[1]}")
