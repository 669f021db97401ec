"""What came of a run: definitions, percentiles, goodput; as a table, JSON and a picture.

Takes `Record`s, gives a `Report`. Definitions, per request that was answered in full:

* TTFT, time to first token: from sending to the first event with content.
* E2EL, end-to-end latency: from sending to the last event of the answer.
* TPOT, time per output token: (E2EL - TTFT) / (output tokens - 1), for outputs of two tokens and more.
* ITL, inter-token latency: the gaps between successive events with content, of all requests together. An
  event may carry several tokens and a read several events, hence TPOT is the figure to compare.
* Goodput: requests per second that keep every limit given; the share is of all requests, failed ones
  included.
* Tokens/s per user: 1000 / the median TPOT in ms, the pace at which one stream is written.

Token counts are the server's own (`usage`). Runs are comparable only where their tokens are equal: an answer
of another length than was asked for is counted, and so are prompt tokens that the server took from its prefix
cache, where it tells. Percentiles interpolate linearly.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from loadtest.client import Record

LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
"""Every latency by its short name."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """One latency over a run, in milliseconds; NaN where there is no value."""

    count: int
    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float

    @staticmethod
    def of(values_ms: Sequence[float]) -> "Distribution":
        """Summarise values in milliseconds."""
        if len(values_ms) == 0:
            none = math.nan
            return Distribution(0, none, none, none, none, none, none, none)
        median, p90, p95, p99, p999 = map(float, np.percentile(values_ms, [50, 90, 95, 99, 99.9]))
        mean, largest = float(np.mean(values_ms)), float(np.max(values_ms))
        return Distribution(len(values_ms), mean, median, p90, p95, p99, p999, largest)


@dataclass(frozen=True, slots=True)
class Report:
    """A run in figures.

    Args:
        num_requests: Sent.
        num_completed: Answered in full.
        failures: Message → how many requests ended with it.
        duration_s: From the first request sent to the last answer.
        num_prompt_tokens: Of the completed requests.
        num_output_tokens: Of the completed requests.
        num_cached_tokens: Prompt tokens that the server had in its prefix cache; None if it does not tell.
        prefix_cache_hit_rate: The same as a share of all prompt tokens.
        num_wrong_length: Completed requests whose output has another length than was asked for.
        num_without_usage: Completed requests whose output was counted in events, for want of `usage`.
        request_throughput: Completed requests per second.
        output_throughput: Output tokens per second.
        total_throughput: Prompt and output tokens per second.
        user_throughput: Output tokens per second of one stream; None where no output has two tokens.
        goodput: Requests per second that kept every limit; None without limits.
        num_good: Requests that kept every limit; None without limits.
        good_share: The same as a share of all requests; None without limits.
        latencies: By short name, see `LATENCIES`.
    """

    num_requests: int
    num_completed: int
    failures: Mapping[str, int]
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None
    prefix_cache_hit_rate: float | None
    num_wrong_length: int
    num_without_usage: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    user_throughput: float | None
    goodput: float | None
    num_good: int | None
    good_share: float | None
    latencies: Mapping[str, Distribution]

    @property
    def is_sound(self) -> bool:
        """Whether every request was answered in full, with as many tokens as were asked for."""
        return self.num_completed == self.num_requests and not self.num_wrong_length

    def to_json(self) -> dict[str, object]:
        """Return plain values for a JSON file; NaN becomes None."""
        plain = asdict(self)
        for values in plain["latencies"].values():
            for name, value in values.items():
                if value != value:
                    values[name] = None
        return plain


def latencies_ms(records: Sequence[Record]) -> dict[str, list[float]]:
    """Return every latency of the completed requests, by short name, in milliseconds."""
    values: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for record in records:
        if record.error is None:
            for name, value in _of_one(record).items():
                values[name].append(value)
            values["itl"] += [1000 * gap for gap in record.gaps_s]
    return values


def summarize(
    records: Sequence[Record], *, duration_s: float, limits_ms: Mapping[str, float] | None = None
) -> Report:
    """Put a run into figures.

    Args:
        records: One per request sent.
        duration_s: Of the whole run.
        limits_ms: For goodput: most milliseconds of ttft, tpot or e2el.
    """
    completed = [record for record in records if record.error is None]
    num_prompt = sum(record.num_prompt_tokens for record in completed)
    num_output = sum(record.num_output_tokens for record in completed)
    cached = [record.num_cached_tokens for record in completed if record.num_cached_tokens is not None]
    num_cached = sum(cached) if cached else None
    num_good = sum(keeps(record, limits_ms) for record in records) if limits_ms else None
    latencies = {name: Distribution.of(values) for name, values in latencies_ms(records).items()}
    tpot_ms = latencies["tpot"].median
    return Report(
        num_requests=len(records),
        num_completed=len(completed),
        failures=dict(Counter(record.error for record in records if record.error is not None)),
        duration_s=duration_s,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        num_cached_tokens=num_cached,
        prefix_cache_hit_rate=None if num_cached is None or not num_prompt else num_cached / num_prompt,
        num_wrong_length=sum(record.has_wrong_length for record in completed),
        num_without_usage=sum(not record.has_usage for record in completed),
        request_throughput=len(completed) / duration_s,
        output_throughput=num_output / duration_s,
        total_throughput=(num_prompt + num_output) / duration_s,
        user_throughput=1000 / tpot_ms if tpot_ms > 0 else None,
        goodput=None if num_good is None else num_good / duration_s,
        num_good=num_good,
        good_share=None if num_good is None or not records else num_good / len(records),
        latencies=latencies,
    )


def keeps(record: Record, limits_ms: Mapping[str, float], *, scale: float = 1.0) -> bool:
    """Say whether a request was answered in full and kept every limit, each multiplied by `scale`."""
    if record.error is not None:
        return False
    values = _of_one(record)
    # A single token has no TPOT, hence keeps any limit on it.
    return all(values.get(name, 0.0) <= limit * scale for name, limit in limits_ms.items())


def _of_one(record: Record) -> dict[str, float]:
    """Return ttft, e2el and, from two tokens on, tpot of one completed request, in milliseconds."""
    ttft_s = record.first_s - record.started_s
    e2el_s = record.last_s - record.started_s
    values = {"ttft": 1000 * ttft_s, "e2el": 1000 * e2el_s}
    if record.num_output_tokens > 1:
        values["tpot"] = 1000 * (e2el_s - ttft_s) / (record.num_output_tokens - 1)
    return values


def by_kind(failures: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Put messages together that differ only in their numbers; the most frequent first.

    Args:
        failures: Message → how many requests ended with it.

    Returns:
        The most frequent message of each kind, how many requests ended with any of it, how many messages.
    """
    kinds: dict[str, Counter[str]] = {}
    for message, count in failures.items():
        kinds.setdefault(without_numbers(message), Counter())[message] += count
    found = [(kind.most_common(1)[0][0], kind.total(), len(kind)) for kind in kinds.values()]
    return sorted(found, key=lambda each: each[1], reverse=True)


def without_numbers(message: str) -> str:
    """Return what two messages have in common that say the same of different numbers."""
    return re.sub(r"\d[\d.,]*", "", message)


def to_table(report: Report) -> str:
    """Return the run as text for people."""
    lines = [
        f"requests      {report.num_completed} of {report.num_requests} completed "
        f"in {report.duration_s:.2f} s",
        f"tokens        {report.num_prompt_tokens} prompt, {report.num_output_tokens} output",
        f"prefix cache  {_cache_hits(report)}",
        f"throughput    {report.request_throughput:.2f} requests/s, "
        f"{report.output_throughput:.1f} output tok/s, {report.total_throughput:.1f} total tok/s",
    ]
    if report.user_throughput is not None:
        lines.append(f"per user      {report.user_throughput:.1f} output tok/s")
    if report.goodput is not None:
        kept = f"{report.num_good} of {report.num_requests} requests kept every limit"
        lines.append(f"goodput       {report.goodput:.2f} requests/s: {kept} ({report.good_share or 0:.1%})")
    if report.num_wrong_length:
        lines.append(f"wrong length  {report.num_wrong_length} answers: not as many tokens as were asked for")
    if report.num_without_usage:
        lines.append(
            f"no usage      {report.num_without_usage} answers: tokens counted in events, lengths not checked"
        )
    for message, count, num_alike in by_kind(report.failures):
        alike = f" (and the like: {num_alike} messages)" if num_alike > 1 else ""
        lines.append(f"failed        {count} x {message}{alike}")
    lines += ["", f"{'ms':12}{'mean':>10}{'median':>10}{'p90':>10}{'p95':>10}{'p99':>10}{'max':>10}"]
    for name, values in report.latencies.items():
        figures = (values.mean, values.median, values.p90, values.p95, values.p99, values.max)
        cells = ("-" if math.isnan(figure) else f"{figure:.2f}" for figure in figures)
        lines.append(f"{name.upper():12}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def _cache_hits(report: Report) -> str:
    if report.prefix_cache_hit_rate is None:
        return "hits unknown: the server does not tell"
    return f"{report.num_cached_tokens} prompt tokens were in it ({report.prefix_cache_hit_rate:.1%})"


def plot(runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Draw the distribution of each latency, one line a run, as a PNG file.

    Args:
        runs: Name of a run → its records.
        path: The file to write.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    for panel, (short, title) in zip(panels.flat, LATENCIES.items(), strict=True):
        for name, records in runs.items():
            values = np.sort(np.asarray(latencies_ms(records)[short]))
            if len(values):
                panel.plot(
                    values, np.arange(1, len(values) + 1) / len(values), label=name, drawstyle="steps-post"
                )
        panel.set(
            title=f"{title} ({short.upper()})", xlabel="ms", ylabel="share of values below", ylim=(0, 1.01)
        )
        panel.axhline(0.99, color="0.8", linewidth=0.8, zorder=0)
        panel.grid(visible=True, alpha=0.3)
        if panel.lines[:-1]:
            panel.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
