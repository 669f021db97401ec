"""The Grafana dashboard, as code: what users feel at the top, what the machinery does below.

`python -m monitoring.dashboard` writes it to `grafana/dashboards/asyncserve.json`, which is committed, so
that Grafana needs none of this. Every expression is evaluated on real data by the tests.
"""

from collections.abc import Iterator
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as dashboard_models

from monitoring.panels import Limit, Panel, Query, choice, distribution, lines, number, quantiles

FILE = Path(__file__).parent / "grafana" / "dashboards" / "asyncserve.json"
UID = "asyncserve"
TOKENS_PER_SECOND = "suffix: tok/s"
RATE = "[$__rate_interval]"


def _rate(metric: str, legend: str, *, by: str = "") -> Query:
    """Return the query for how fast a counter grows, over all chosen servers."""
    grouped = f"sum by ({by})" if by else "sum"
    return Query(f"{grouped} (rate(asyncserve:{metric}{{$select}}{RATE}))", legend)


def _gauge(metric: str, legend: str, *, by: str = "", how: str = "sum") -> Query:
    grouped = f"{how} by ({by})" if by else how
    return Query(f"{grouped} (asyncserve:{metric}{{$select}})", legend)


def _overview() -> Iterator[Panel]:
    p99 = "histogram_quantile(0.99, sum by (le) (rate(asyncserve:{}_bucket{{$select}}[$__rate_interval])))"
    yield number(
        "Time to first token, p99",
        "From a request's arrival to its first token. High with a short queue: prompts are long. High with a"
        " long queue: there is more work than the device does.",
        Query(p99.format("time_to_first_token_seconds"), "p99"),
        unit="s",
        limits=[Limit(1, "orange"), Limit(5, "red")],
    )
    yield number(
        "Between tokens, p99",
        "How long a reader waits for the next token.",
        Query(p99.format("inter_token_latency_seconds"), "p99"),
        unit="s",
        limits=[Limit(0.1, "orange"), Limit(0.25, "red")],
    )
    yield number(
        "Output tokens",
        "Tokens generated per second, all chosen servers together.",
        _rate("generation_tokens_total", "tokens"),
        unit=TOKENS_PER_SECOND,
        decimals=0,
    )
    yield number(
        "Running",
        "Sequences on the devices now.",
        _gauge("num_requests_running", "running"),
        unit="short",
    )
    yield number(
        "KV cache in use",
        "Share of the KV blocks that running sequences hold, on the fullest server. Near 1, sequences are"
        " preempted.",
        _gauge("kv_cache_usage_perc", "use", how="max"),
        unit="percentunit",
        limits=[Limit(0.85, "orange"), Limit(0.95, "red")],
    )
    yield number(
        "Sequences that failed",
        "Share of the sequences that ended with an error.",
        Query(
            'sum (rate(asyncserve:request_success_total{$select,finished_reason="error"}[$__rate_interval]))'
            " / clamp_min(sum (rate(asyncserve:request_success_total{$select}[$__rate_interval])), 1e-9)",
            "failed",
        ),
        unit="percentunit",
        limits=[Limit(0.001, "orange"), Limit(0.01, "red")],
    )


def _latency() -> Iterator[Panel]:
    for title, text, metric, limits in (
        (
            "Time to first token",
            "From a request's arrival to a sequence's first token: queue and prefill.",
            "time_to_first_token_seconds",
            [Limit(5, "red")],
        ),
        (
            "Between tokens",
            "Gaps between consecutive tokens of a sequence. Steps with long prompts in them lengthen it.",
            "inter_token_latency_seconds",
            [Limit(0.25, "red")],
        ),
        (
            "End to end",
            "From a request's arrival to the end of a sequence, however it ended.",
            "e2e_request_latency_seconds",
            [],
        ),
        (
            "Queue time",
            "From a request's arrival until it is first scheduled: tokenizing and waiting for a place.",
            "request_queue_time_seconds",
            [],
        ),
        (
            "Prefill time",
            "From being scheduled to the first token.",
            "request_prefill_time_seconds",
            [],
        ),
        (
            "Decode time",
            "From the first token to the last.",
            "request_decode_time_seconds",
            [],
        ),
    ):
        yield lines(title, text, quantiles(f"asyncserve:{metric}"), unit="s", limits=limits)
    yield distribution(
        "Spread of the time to first token",
        "Requests per second by the time they took to their first token. Two bands are two kinds of"
        " requests: short and long prompts, cached and new ones.",
        "asyncserve:time_to_first_token_seconds",
        unit="s",
    )
    yield distribution(
        "Spread of the gaps between tokens",
        "Tokens per second by the time since the one before.",
        "asyncserve:inter_token_latency_seconds",
        unit="s",
    )
    yield lines(
        "Mean time per output token",
        "Each sequence's own mean, as its reader feels it.",
        quantiles("asyncserve:request_time_per_output_token_seconds"),
        unit="s",
    )


def _throughput() -> Iterator[Panel]:
    yield lines(
        "Tokens",
        "Prompt tokens, those of them that the prefix cache had, and generated tokens, per second.",
        [
            _rate("prompt_tokens_total", "prompt"),
            _rate("prompt_tokens_cached_total", "prompt, from the cache"),
            _rate("generation_tokens_total", "generated"),
        ],
        unit=TOKENS_PER_SECOND,
    )
    yield lines(
        "Sequences that ended",
        "By reason: stop, length, abort (the client left, or its time is over), error, missing (beams).",
        [_rate("request_success_total", "{{finished_reason}}", by="finished_reason")],
        unit="reqps",
        stacked=True,
    )
    yield lines(
        "Tokens per step",
        "How full steps are; the p99 is near the token budget when there is enough work.",
        quantiles("asyncserve:iteration_tokens_total"),
        unit="short",
    )
    yield lines(
        "Prompt length",
        "Tokens of a prompt.",
        quantiles("asyncserve:request_prompt_tokens"),
        unit="short",
    )
    yield lines(
        "Output length",
        "Tokens generated for a sequence.",
        quantiles("asyncserve:request_generation_tokens"),
        unit="short",
    )
    yield lines(
        "Prompt tokens that had to be computed",
        "Of each prompt, what the prefix cache did not have.",
        quantiles("asyncserve:request_prefill_kv_computed_tokens"),
        unit="short",
    )


def _queues() -> Iterator[Panel]:
    yield lines(
        "Sequences",
        "Running ones hold a place on the device, waiting ones want one, paused ones have clients that do not"
        " read.",
        [
            _gauge("num_requests_running", "running"),
            _gauge("num_requests_waiting", "waiting"),
            _gauge("num_requests_paused", "paused"),
        ],
        unit="short",
    )
    yield lines(
        "Tokens that wait",
        "Tokens of the waiting sequences: the work that stands before the device.",
        [_gauge("num_waiting_tokens", "{{instance}}", by="instance")],
        unit="short",
    )
    yield lines(
        "Channels between stages",
        "Items that wait in each channel of the pipeline, on the server that has most. One that stays high"
        " names the stage behind it as the slow one.",
        [_gauge("channel_depth", "{{channel}}", by="channel", how="max")],
        unit="short",
    )


def _kv_cache() -> Iterator[Panel]:
    yield lines(
        "KV cache in use",
        "Share of the blocks that running sequences hold.",
        [_gauge("kv_cache_usage_perc", "{{instance}}", by="instance", how="max")],
        unit="percentunit",
        limits=[Limit(0.95, "red")],
        top=1,
    )
    yield lines(
        "KV blocks",
        "Used: held by sequences. Cached: free, but with content that a prompt may find again. Free: empty.",
        [_gauge("kv_blocks", "{{state}}", by="state")],
        unit="short",
        stacked=True,
    )
    yield lines(
        "KV blocks shared",
        "Saved: blocks that would be used beyond those that are, if sequences shared none. Copied: those that"
        " choices of one request had to have for themselves.",
        [
            _gauge("kv_blocks_saved", "saved"),
            _rate("copied_kv_blocks_total", "copied per second"),
        ],
        unit="short",
    )
    yield lines(
        "KV blocks by group",
        "Layers that keep everything, a window or a state are groups that share the pool.",
        [_gauge("kv_group_blocks", "{{group}} {{state}}", by="group, state")],
        unit="short",
        stacked=True,
    )
    yield lines(
        "Allocated KV slots",
        "Token slots of used blocks. Unused ones lie behind the last token of a sequence.",
        [_gauge("kv_allocated_slots", "{{state}}", by="state")],
        unit="short",
        stacked=True,
    )
    yield lines(
        "KV blocks passed by windows",
        "Given back by running sequences; none if no layer has a sliding window.",
        [_rate("kv_window_blocks_freed_total", "given back")],
        unit="short",
    )
    yield lines(
        "Prefix cache hits",
        "Of the prompt tokens looked up, the share that was found.",
        [
            Query(
                "sum (rate(asyncserve:prefix_cache_hits_total{$select}[$__rate_interval]))"
                " / sum (rate(asyncserve:prefix_cache_queries_total{$select}[$__rate_interval]))",
                "hits",
            )
        ],
        unit="percentunit",
        top=1,
    )
    yield lines(
        "Preemptions and pauses",
        "Preemptions: sequences that lost their place for lack of blocks. Pauses: sequences that gave it up"
        " as their client does not read. Of both, those kept on the host come back from there; the others"
        " are computed again.",
        [
            _rate("num_preemptions_total", "preemptions"),
            _rate("num_pauses_total", "pauses"),
            _rate("num_swaps_total", "of both, kept on the host"),
        ],
        unit="ops",
    )
    yield lines(
        "KV blocks on the host",
        "Used: of preempted sequences that will come back. Cached: evicted from the device, and found again."
        " Free: empty.",
        [
            _gauge("host_kv_blocks", "{{state}}", by="state"),
            _gauge("num_requests_swapped", "sequences that will come back"),
        ],
        unit="short",
    )
    yield lines(
        "To the host and back",
        "Bytes of KV blocks that are stored in the host's memory and loaded from there.",
        [
            _rate("kv_offload_store_bytes_total", "stored"),
            _rate("kv_offload_load_bytes_total", "loaded"),
        ],
        unit="Bps",
    )
    yield lines(
        "Prefixes on the host",
        "Tokens that were not cached on the device and were looked up on the host, and those found there.",
        [
            _rate("external_prefix_cache_queries_total", "looked up"),
            _rate("external_prefix_cache_hits_total", "found"),
        ],
        unit="short",
    )


def _device() -> Iterator[Panel]:
    yield lines(
        "Device time per step",
        "Time the device worked on a step, by its own clock on a GPU.",
        quantiles("asyncserve:step_time_seconds"),
        unit="s",
    )
    yield lines(
        "Launch time per step",
        "Time the device's thread took to prepare and launch a step. Above the device time, the device waits"
        " for it.",
        quantiles("asyncserve:step_launch_seconds"),
        unit="s",
    )
    yield lines(
        "Device, busy and idle",
        "Idle: it had nothing to do while sequences were running, so the host was late. The rest of the time"
        " there was no work.",
        [
            Query(
                f"sum by (instance) (rate(asyncserve:step_time_seconds_sum{{$select}}{RATE}))",
                "{{instance}} busy",
            ),
            Query(
                f"sum by (instance) (rate(asyncserve:gpu_idle_seconds_total{{$select}}{RATE}))",
                "{{instance}} idle",
            ),
        ],
        unit="percentunit",
        top=1,
    )
    yield lines(
        "Steps",
        "Steps per second.",
        [_rate("step_time_seconds_count", "{{instance}}", by="instance")],
        unit="ops",
    )
    yield lines(
        "Steps on their way",
        "Steps submitted whose results are not applied: 2 when the scheduler is one step ahead.",
        [_gauge("unapplied_steps", "{{instance}}", by="instance")],
        unit="short",
    )
    yield lines(
        "CUDA graphs to capture",
        "Captured when the device is idle after a start; steps of a size that has none are launched anew.",
        [_gauge("graphs_pending", "{{instance}}", by="instance")],
        unit="short",
    )


def _loop() -> Iterator[Panel]:
    yield lines(
        "Loop lag",
        "How late the event loop ran a timer: what every request waits for. High: something holds it up, or"
        " the machine has too few cores.",
        quantiles("asyncserve:loop_lag_seconds"),
        unit="s",
        limits=[Limit(0.05, "red")],
    )
    yield lines(
        "Loop time by stage",
        "Share of a core that the event loop spends on steps: apply and plan are the scheduler, detokenize"
        " includes writing to streams. Near 1 in all, the loop is the limit.",
        [
            Query(
                f"max by (stage) (rate(asyncserve:loop_stage_seconds_total{{$select}}{RATE}))",
                "{{stage}}",
            )
        ],
        unit="percentunit",
        stacked=True,
        top=1,
    )
    yield lines(
        "CPU",
        "Cores that the process uses, all its threads together.",
        [Query(f"sum by (instance) (rate(process_cpu_seconds_total{{$process}}{RATE}))", "{{instance}}")],
        unit="short",
    )
    yield lines(
        "Memory",
        "Resident memory of the process. It grows while caches fill and then stays.",
        [Query("sum by (instance) (process_resident_memory_bytes{$process})", "{{instance}}")],
        unit="bytes",
    )
    yield lines(
        "Open files",
        "Sockets among them; at the limit no more clients can connect.",
        [
            Query("sum by (instance) (process_open_fds{$process})", "{{instance}} open"),
            Query("sum by (instance) (process_max_fds{$process})", "{{instance}} limit"),
        ],
        unit="short",
    )
    yield lines(
        "Uptime",
        "Since the process started; a drop is a restart.",
        [Query("time() - max by (instance) (process_start_time_seconds{$process})", "{{instance}}")],
        unit="s",
    )


def _http() -> Iterator[Panel]:
    yield lines(
        "Requests by status",
        "HTTP requests answered. client_left: the client was gone before the answer was complete.",
        [_rate("http_requests_total", "{{status}}", by="status")],
        unit="reqps",
        stacked=True,
    )
    yield lines(
        "Requests by route",
        "HTTP requests answered, probes and scrapes among them.",
        [_rate("http_requests_total", "{{handler}}", by="handler")],
        unit="reqps",
        stacked=True,
    )
    yield lines(
        "Refusals",
        "Generating requests that were refused, by reason. queued_requests, queued_tokens, tenant_share: a"
        " bound of the queue was reached, so there are too few servers; most others are clients' mistakes."
        " deadline: the time allowed was over before the request was taken; deadline missed: later, before"
        " the answer was complete.",
        [
            _rate("requests_rejected_total", "{{reason}}", by="reason"),
            _rate("deadlines_missed_total", "deadline missed"),
        ],
        unit="reqps",
        stacked=True,
    )
    yield lines(
        "Connections and open requests",
        "Connections include idle ones that are kept; open requests include streams.",
        [
            _gauge("http_connections", "connections"),
            _gauge("http_requests_in_progress", "open requests"),
        ],
        unit="short",
    )
    yield lines(
        "Connections refused",
        "Clients that were turned away, as there were as many connections as the server takes.",
        [_rate("http_connections_refused_total", "refused")],
        unit="cps",
    )
    yield lines(
        "Steps that failed",
        "Failed steps, and those that computed again, by halves, what they should have. Anything but 0 wants"
        " a look into the log.",
        [_rate("failed_steps_total", "failed"), _rate("retried_steps_total", "computed again")],
        unit="ops",
    )
    yield lines(
        "Sequences that faults touched",
        "Replayed: set back to their known tokens and continued, which their clients feel as a pause. Failed:"
        " ended with an error, as a step of theirs alone failed or lost the device.",
        [_rate("replayed_sequences_total", "replayed"), _rate("failed_sequences_total", "failed")],
        unit="ops",
    )
    yield lines(
        "Devices lost",
        "Restarts of devices over an hour; losses that were found to be one request's fault; how many devices"
        " are being opened anew now.",
        [
            Query("sum (increase(asyncserve:device_restarts_total{$select}[1h]))", "restarts per hour"),
            Query(
                "sum (increase(asyncserve:explained_device_losses_total{$select}[1h]))",
                "of which by requests",
            ),
            _gauge("device_is_lost", "lost now"),
        ],
        unit="short",
    )


ROWS = {
    "Overview": _overview,
    "Latency": _latency,
    "Throughput": _throughput,
    "Queues": _queues,
    "KV cache": _kv_cache,
    "Device": _device,
    "Event loop and process": _loop,
    "HTTP, refusals and faults": _http,
}


def build() -> dashboard_models.Dashboard:
    """Return the dashboard."""
    board = (
        dashboard.Dashboard("asyncserve")
        .uid(UID)
        .description("Latency, throughput and the machinery of asyncserve's servers.")
        .tags(["asyncserve", "llm"])
        .editable()
        .tooltip(dashboard_models.DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(choice("job", "Job", "label_values(asyncserve:num_requests_running, job)"))
        .with_variable(
            choice(
                "model_name",
                "Model",
                'label_values(asyncserve:num_requests_running{job=~"$job"}, model_name)',
            )
        )
        .with_variable(
            choice(
                "instance",
                "Server",
                "label_values(asyncserve:num_requests_running"
                '{job=~"$job",model_name=~"$model_name"}, instance)',
            )
        )
    )
    number_of_panel = 0
    for title, panels in ROWS.items():
        number_of_panel += 1
        board.with_row(dashboard.Row(title).id(number_of_panel))
        for panel in panels():
            number_of_panel += 1
            board.with_panel(panel.id(number_of_panel))
    return board.build()


def to_json(board: dashboard_models.Dashboard) -> str:
    """Return the file's content."""
    return JSONEncoder(sort_keys=True, indent=1).encode(board) + "\n"


if __name__ == "__main__":
    FILE.write_text(to_json(build()), encoding="utf-8")
