"""Putting the server together: the only file that knows every package.

Takes a `ServerConfig`, builds executor, engine, observer and HTTP application, listens once the model's files
and tokenizer are there and before its weights are loaded (so that probes are answered while they are), tells
readiness, and drains on SIGTERM. Decides nothing about requests, steps or bytes.
"""

import asyncio
import contextlib
import errno
import logging
import os
import platform
import signal
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from asyncserve.allocator import share_one_heap
from asyncserve.cache_events import CacheEvent
from asyncserve.checkpoint import Checkpoint, open_checkpoint
from asyncserve.config import FAULTS_VARIABLE, ServerConfig
from asyncserve.errors import CheckpointError, ConfigError, DeviceLost, InvalidRequest, StartupError
from asyncserve.faults import Faults, parse_faults
from asyncserve.garbage import IdleCollector, settle_collector
from asyncserve.http.app import GENERATING_ROUTES, build_app, make_runner
from asyncserve.http.auth import KeyFile
from asyncserve.http.connection import ConnectionBound, HeaderLimits
from asyncserve.http.cross_origin import CrossOrigin
from asyncserve.http.file_watch import FileWatch
from asyncserve.http.live_page.recorder import PipelineRecorder
from asyncserve.http.open_files import max_connections, raise_limit
from asyncserve.http.tls import Tls, TlsFiles
from asyncserve.kv_events.publisher import KVEventPublisher
from asyncserve.kv_events.settings import read_settings
from asyncserve.loop.engine import Engine
from asyncserve.loop.grammar import import_library
from asyncserve.loop.tokenizer import load_tokenizer
from asyncserve.metrics.collector import EngineCollector, OutcomeCollector
from asyncserve.metrics.exposition import new_registry, render
from asyncserve.metrics.http_traffic import HttpTraffic
from asyncserve.metrics.observer import PrometheusObserver
from asyncserve.metrics.vllm_names import VllmNames
from asyncserve.observer import Observer, ObserverGroup
from asyncserve.request import SamplingParams
from asyncserve.step import Executor, ExecutorInfo
from asyncserve.token_path import IS_NATIVE
from asyncserve.tracing.otlp import TraceExporter
from asyncserve.tracing.requests import RequestTracer
from asyncserve.tracing.steps import StepTrace

logger = logging.getLogger(__name__)

EXIT_FAILURE = 1
EXIT_DEVICE_LOST = 70
"""The device was lost and could not be opened again: a supervisor should start the server anew."""
NVIDIA_DRIVER = Path("/dev/nvidiactl")
"""There where an NVIDIA GPU can be used."""
IDLE_LOOK_S = 10.0
"""How often it is looked whether garbage may be collected."""
STOP_LIMIT_S = 10.0
"""How long the device may take for the step it is in when everything is to stop."""
CPU_LIBRARIES = {
    # Turns a CPU thread waits for its team before it sleeps. libgomp's own number, some 300,000, keeps a core
    # spinning for milliseconds while the thread it waits for has none: docs/decisions/0004.
    "GOMP_SPINCOUNT": "4000",
    # Kernels that oneDNN, and torch's layer over it, keep for the shapes they have met: about 1 MB each, and
    # 1,024 of each by default, which a server that meets every batch size fills.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}
"""Environment variables that torch's CPU libraries read when they are loaded; what is set already stays."""
LAST_WORDS_S = 2.0
"""How long clients have to read what is already written when everything stops."""


def open_model(config: ServerConfig) -> Checkpoint:
    """Find the model's files as the options say.

    Raises:
        CheckpointError: They are missing, unreachable or damaged.
    """
    return open_checkpoint(
        config.model,
        revision=config.revision,
        download_dir=config.download_dir,
        needs_weights=config.load_format != "dummy",
    )


def build_executor(config: ServerConfig, checkpoint: Checkpoint) -> Executor:
    """Make the device side; nothing is loaded before its `start`."""
    for name, value in CPU_LIBRARIES.items():
        os.environ.setdefault(name, value)
    # Imported here: it brings torch, which takes seconds and which a bad option should not have to wait for.
    from asyncserve.gpu.executor import ThreadExecutor
    from asyncserve.gpu.runner import ModelRunner
    from asyncserve.gpu.startup import start_runner

    offered: list[ExecutorInfo] = []

    def open_runner() -> tuple[ModelRunner, ExecutorInfo]:
        # Opened anew, it must offer what requests were admitted for, whatever memory is free by then.
        max_model_len, num_blocks = config.max_model_len, config.num_gpu_blocks_override
        if offered:
            max_model_len, num_blocks = offered[0].max_model_len, offered[0].kv_groups[0].num_blocks
        runner, info = start_runner(
            checkpoint,
            device=config.device,
            dtype=config.dtype,
            load_format=config.load_format,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_len=config.block_size,
            kv_cache_dtype=config.kv_cache_dtype,
            gpu_memory_utilization=config.gpu_memory_utilization,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            num_gpu_blocks_override=num_blocks,
            swap_space_gib=config.swap_space_gib,
            kv_offloading_gib=config.kv_offloading_size,
            attention_backend=config.attention_backend,
            enforce_eager=config.enforce_eager,
            graph_sizes=config.cudagraph_capture_sizes,
            num_threads=config.num_threads,
            seed=config.seed,
            async_scheduling=config.async_scheduling,
            enable_chunked_prefill=config.enable_chunked_prefill,
        )
        offered[:] = [info]
        return runner, info

    return ThreadExecutor(open_runner)


def build_engine(
    config: ServerConfig,
    checkpoint: Checkpoint,
    observer: Observer | None,
    faults: Faults | None = None,
    cache_listener: Callable[[Sequence[CacheEvent]], None] | None = None,
) -> Engine:
    """Make the engine with its tokenizer and device side; `Engine.start` loads the model."""
    tokenizer_source = checkpoint
    if config.tokenizer is not None:
        tokenizer_source = open_checkpoint(
            config.tokenizer,
            revision=config.revision,
            download_dir=config.download_dir,
            needs_weights=False,
        )
    tokenizer = load_tokenizer(tokenizer_source, chat_template=config.chat_template, model=checkpoint)
    executor = build_executor(config, checkpoint)
    if faults is not None:
        executor, tokenizer = faults.around_executor(executor), faults.around_tokenizer(tokenizer)
    hash_seed = config.prefix_caching_hash_seed
    if hash_seed is None:
        hash_seed = os.environ.get("PYTHONHASHSEED", "0")
    return Engine(
        executor=executor,
        tokenizer=tokenizer,
        observer=observer,
        max_num_queued_requests=config.max_num_queued_requests,
        max_num_queued_tokens=config.max_num_queued_tokens,
        policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        async_scheduling=config.async_scheduling,
        step_timeout_s=config.step_timeout,
        max_device_restarts=config.max_device_restarts,
        grammar_compile_timeout_s=config.grammar_compile_timeout,
        hash_seed=hash_seed,
        cache_listener=cache_listener,
        seed=config.seed,
    )


def default_sampling(config: ServerConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the sampling values the model's authors recommend, for fields a request leaves out.

    Raises:
        CheckpointError: One of them is no value that a request could have.
    """
    if config.generation_config == "none":
        return {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    recommended = checkpoint.generation_config
    values = {name: recommended[name] for name in names if recommended.get(name) is not None}
    try:
        SamplingParams(**values)
    except (InvalidRequest, TypeError, ValueError) as error:
        raise CheckpointError(
            f"generation_config.json of {checkpoint.name}: {error}; mend it or pass --generation-config none"
        ) from error
    return values


def build_http(
    config: ServerConfig,
    engine: Engine,
    checkpoint: Checkpoint,
    *,
    api_keys: Sequence[str],
    api_key_file: KeyFile | None,
    metrics_renderer: Callable[[], Awaitable[bytes]],
    on_rejected: Callable[[Exception], None],
    traffic: HttpTraffic | None = None,
    pipeline_recorder: PipelineRecorder | None = None,
) -> web.Application:
    """Make the HTTP application over an engine, as the options say."""
    return build_app(
        engine,
        model_names=config.model_names,
        default_sampling=default_sampling(config, checkpoint),
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        trusts_request_templates=config.trust_request_chat_template,
        api_keys=api_keys,
        api_key_file=api_key_file,
        cross_origin=CrossOrigin(
            origins=config.allowed_origins,
            methods=config.allowed_methods,
            headers=config.allowed_headers,
            allows_credentials=config.allow_credentials,
        ),
        root_path=config.root_path or "",
        access_log=not config.disable_access_log,
        unlogged_paths=[
            path for paths in config.disable_access_log_for_endpoints for path in paths.split(",")
        ],
        server_info=describe(config),
        max_logprobs=config.max_logprobs,
        stream_interval=config.stream_interval,
        max_body_bytes=config.max_body_bytes,
        response_store_size=config.response_store_size,
        response_store_bytes=config.response_store_bytes,
        health_timeout_s=config.health_timeout,
        request_timeout_s=config.request_timeout,
        keep_alive_s=config.sse_keep_alive_interval,
        metrics_renderer=metrics_renderer,
        on_rejected=on_rejected,
        traffic=traffic,
        pipeline_recorder=pipeline_recorder,
    )


def describe(config: ServerConfig) -> dict[str, Any]:
    """Return the options, without secrets, the versions of what matters, and the form of the token path."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "aiohttp", "uvloop"):
        versions[name] = metadata.version(name)
    options = {option.name: getattr(config, option.name) for option in fields(config) if option.repr}
    return {"config": options, "versions": versions, "token_path": "native" if IS_NATIVE else "python"}


def build_tls(config: ServerConfig) -> Tls | None:
    """Make what the socket needs to speak TLS, if it is to.

    Raises:
        ConfigError: The files cannot be used.
    """
    if config.ssl_certfile is None:
        return None
    return Tls(
        TlsFiles(
            certfile=config.ssl_certfile,
            keyfile=config.ssl_keyfile,
            ca_certs=config.ssl_ca_certs,
            cert_reqs=2 if config.ssl_cert_reqs is None else config.ssl_cert_reqs,
            ciphers=config.ssl_ciphers,
        )
    )


def will_compute_on_cpu(config: ServerConfig) -> bool:
    """Return whether steps will run on a CPU, as far as can be told before torch is loaded."""
    return config.device == "cpu" or (config.device == "auto" and not NVIDIA_DRIVER.exists())


async def serve(config: ServerConfig, *, on_ready: Callable[[str], None] | None = None) -> int:
    """Run the server until a signal or a failure ends it.

    Args:
        config: The options, validated.
        on_ready: Called once with the base URL when requests are answered.

    Returns:
        Exit status: 0 after a drain, 1 if the engine failed, `EXIT_DEVICE_LOST` if it did because the device
        was lost for good (then by ending the process: what a lost device's thread does cannot be waited for).

    Raises:
        StartupError: The server cannot start.
    """
    configure_logging(config.log_level)
    started_s = time.monotonic()
    if will_compute_on_cpu(config):
        share_one_heap()  # no other thread has begun yet
    faults = injected_faults(os.environ)
    tls = await asyncio.to_thread(build_tls, config)
    key_file = None
    if config.api_key_file is not None:
        key_file = await asyncio.to_thread(KeyFile, config.api_key_file)
    checkpoint = await asyncio.to_thread(open_model, config)
    registry = new_registry()
    counted = PrometheusObserver(registry, model_name=config.model_names[0])
    observer = ObserverGroup([counted])
    recorder = None if config.disable_live_page else PipelineRecorder(time.monotonic)
    if recorder is not None:
        observer.add(recorder)
    publisher = await asyncio.to_thread(start_kv_events, config, registry)
    cache_listener = None if publisher is None else publisher.tell
    engine = await asyncio.to_thread(build_engine, config, checkpoint, observer, faults, cache_listener)
    cache_config = {
        "block_size": config.block_size,
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
    }
    state = EngineCollector(engine.statistics, config.model_names[0], cache_config)
    registry.register(state)
    if config.metrics_compat == "vllm":
        registry.register(VllmNames([counted, state]))
    bound = ConnectionBound(max_connections(raise_limit(), config.max_connections))
    if config.max_connections is not None and bound.max_connections != config.max_connections:
        logger.warning("max_connections: the limit of open files leaves only %d", bound.max_connections)
    traffic = HttpTraffic(
        config.model_names[0], GENERATING_ROUTES, lambda: num_connections(runner), lambda: bound.num_refused
    )
    registry.register(traffic)
    closers = await asyncio.to_thread(start_tracing, config, observer, registry)
    if publisher is not None:
        closers.append(publisher.close)

    app = build_http(
        config,
        engine,
        checkpoint,
        api_keys=config.api_key,
        api_key_file=key_file,
        metrics_renderer=partial(render, registry),
        on_rejected=observer.request_rejected,
        traffic=traffic,
        pipeline_recorder=recorder,
    )
    runner = make_runner(
        app,
        shutdown_timeout_s=config.shutdown_timeout,
        limits=HeaderLimits(num_bytes=config.max_header_bytes, count=config.max_header_count),
        bound=bound,
        keepalive_timeout_s=config.timeout_keep_alive,
    )
    await runner.setup()
    watches = []
    if tls is not None and config.enable_ssl_refresh:
        watches.append(await asyncio.to_thread(FileWatch, tls.files.paths, faults.around_read(tls.refresh)))
    if key_file is not None:
        reload_keys = faults.around_read(key_file.reload)
        watches.append(await asyncio.to_thread(FileWatch, [key_file.path], reload_keys))
    watching = [asyncio.create_task(watch.run(), name="file-watch") for watch in watches]
    stop_requests = StopRequests()
    stop_requests.install()
    try:
        url = await _listen(runner, config, None if tls is None else tls.context)
        # While the weights load: with the first structured output it would hold up every stream.
        importing = asyncio.create_task(asyncio.to_thread(import_library), name="import-grammars")
        starting = asyncio.create_task(engine.start(), name="engine-start")
        await first_of(starting, stop_requests.first)
        if not starting.done():
            logger.warning("stopped while loading")
            # The device thread is inside a load that cannot be interrupted; the process is the unit to end.
            os._exit(EXIT_FAILURE)
        await starting
        await importing
        settle_collector()
        watching.append(asyncio.create_task(_collect_when_idle(engine), name="collect-garbage"))
        if not IS_NATIVE:
            logger.warning("installed without its part in C: streamed tokens take more of the CPU (README)")
        logger.info("ready on %s after %.1f s", url, time.monotonic() - started_s)
        if on_ready is not None:
            on_ready(url)
        stopped = asyncio.create_task(engine.wait_stopped(), name="engine-stopped")
        await first_of(stopped, stop_requests.first)
        if not stopped.done():
            await _drain(engine, runner, stop_requests, config.shutdown_timeout)
        if engine.failure is not None:
            logger.error("the engine failed: %s", engine.failure, exc_info=engine.failure)
        return EXIT_FAILURE if engine.failure is not None else 0
    finally:
        for task in watching:
            task.cancel()
        now = stop_requests.second.is_set()
        await stop_serving(engine, runner, now=now)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S if now else None):
                await asyncio.gather(*(asyncio.to_thread(close) for close in closers))
        stop_requests.uninstall()
        if now:
            # A thread may still encode a huge prompt: an orderly exit would wait for it. Clients were told.
            logger.info("stopped")
            logging.shutdown()
            os._exit(0)
        if isinstance(engine.failure, DeviceLost):
            logger.critical("ending with status %d: start the server anew", EXIT_DEVICE_LOST)
            logging.shutdown()
            os._exit(EXIT_DEVICE_LOST)
        logger.info("stopped")


def injected_faults(environ: Mapping[str, str]) -> Faults:
    """Read which faults are to be injected: none, unless the environment asks for it.

    Raises:
        ConfigError: They are not written as they should be.
    """
    text = environ.get(FAULTS_VARIABLE, "")
    faults = parse_faults(text)
    if faults != Faults():
        logger.warning("FAULTS ARE INJECTED ON PURPOSE (%s): %s", FAULTS_VARIABLE, text)
    return faults


def start_tracing(
    config: ServerConfig, observer: ObserverGroup, registry: CollectorRegistry
) -> list[Callable[[], None]]:
    """Start what writes down single requests and steps, as the options say, and return what ends it.

    Raises:
        ConfigError: Where they are to be written to cannot be used.
    """
    closers: list[Callable[[], None]] = []
    model_name = config.model_names[0]
    if config.otlp_traces_endpoint is not None:
        exporter = TraceExporter(config.otlp_traces_endpoint, model_name=model_name)
        observer.add(RequestTracer(exporter.take))
        outcomes = {"exported": lambda: exporter.num_exported, "dropped": lambda: exporter.num_dropped}
        registry.register(OutcomeCollector("traced_requests_total", outcomes, model_name))
        closers.append(exporter.close)
    if config.trace_steps is not None:
        try:
            trace = StepTrace(config.trace_steps)
        except OSError as error:
            raise ConfigError(f"trace_steps: cannot write {config.trace_steps}: {error.strerror}") from error
        observer.add(trace)
        closers.append(trace.close)
    return closers


def start_kv_events(config: ServerConfig, registry: CollectorRegistry) -> KVEventPublisher | None:
    """Start what publishes changes of the prefix cache, if the options ask for it.

    Raises:
        ConfigError: They are wrong, or an address cannot be used.
    """
    settings = read_settings(config.kv_events_config)
    if settings is None:
        return None
    if not config.enable_prefix_caching:
        raise ConfigError("kv_events_config tells of the prefix cache, which enable_prefix_caching turns off")
    publisher = KVEventPublisher(settings)
    model_name = config.model_names[0]
    outcomes = {"sent": lambda: publisher.num_sent, "left_out": lambda: publisher.num_left_out}
    registry.register(OutcomeCollector("kv_event_batches_total", outcomes, model_name))
    logger.info("KV events: published on %s, told again on %s", *publisher.endpoints)
    return publisher


async def _collect_when_idle(engine: Engine) -> None:
    """Collect garbage now and then, while nothing waits or runs."""
    collector = IdleCollector()
    while True:
        await asyncio.sleep(IDLE_LOOK_S)
        statistics = engine.statistics()
        if statistics.num_running == 0 and statistics.num_waiting == 0:
            collector.look()


def num_connections(runner: web.AppRunner) -> int:
    """Return how many clients are connected."""
    return 0 if runner.server is None else len(runner.server.connections)


async def _drain(
    engine: Engine, runner: web.AppRunner, stop_requests: "StopRequests", timeout_s: float
) -> None:
    """Let running requests finish and their clients read the answers, until time or a second signal."""
    logger.info("draining: no new requests, running ones have %.0f s", timeout_s)
    deadline_s = time.monotonic() + timeout_s
    # The sockets stay open for a while: probes and refused clients get an answer.
    for stage in (partial(engine.drain, timeout_s), runner.cleanup):
        task = asyncio.create_task(stage(), name="draining")
        await first_of(task, stop_requests.second, timeout_s=deadline_s - time.monotonic())
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if stop_requests.second.is_set():
            logger.warning("second signal: stopping now")
            return


async def stop_serving(engine: Engine, runner: web.AppRunner, *, now: bool) -> None:
    """Stop the engine, tell its clients, close every connection; threads that do not end are left behind."""
    try:
        async with asyncio.timeout(LAST_WORDS_S if now else STOP_LIMIT_S):
            await engine.stop()
    except TimeoutError:
        if not now:
            logger.critical("the device does not answer: ending the process with work in it")
            os._exit(EXIT_FAILURE)
    # What is written to a client that reads is gone by then; one that does not read is not waited for.
    closing = asyncio.create_task(runner.cleanup(), name="close-connections")
    await asyncio.wait([closing], timeout=LAST_WORDS_S)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)


async def first_of(
    task: "asyncio.Task[None]", event: asyncio.Event, *, timeout_s: float | None = None
) -> None:
    """Return when the task is done, the event set or the time over; the task goes on."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


class StopRequests:
    """SIGTERM and SIGINT as two events: the first asks for a drain, the second for an end."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.exit_status = 0
        """What a process that the first signal ended says, as shells write it."""

    def install(self) -> None:
        """Take both signals from now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note, number)

    def uninstall(self) -> None:
        """Leave the signals to Python again."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def _note(self, number: int) -> None:
        self.exit_status = self.exit_status or 128 + number
        (self.second if self.first.is_set() else self.first).set()


async def _listen(runner: web.AppRunner, config: ServerConfig, tls: ssl.SSLContext | None) -> str:
    """Open the listening socket and return the base URL.

    Raises:
        ConfigError: The address cannot be used.
        StartupError: It is taken.
    """
    try:
        if config.uds is not None:
            _remove_stale_socket(config.uds)
            await web.UnixSite(runner, config.uds).start()
            return f"unix:{config.uds}"
        await web.TCPSite(runner, config.host, config.port, ssl_context=tls).start()
    except OSError as error:
        place = config.uds or f"{config.host}:{config.port}"
        # One that is taken now may be free later: the option is not wrong.
        is_taken = error.errno == errno.EADDRINUSE
        message = f"cannot listen on {place}: {error.strerror or error}"
        raise (StartupError(message) if is_taken else ConfigError(message)) from error
    host, port = runner.addresses[0][:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{'http' if tls is None else 'https'}://{shown}:{port}"


def _remove_stale_socket(path: str) -> None:
    """Remove the socket that a server left behind when it was killed.

    Raises:
        OSError: Somebody listens on it, or it is no socket.
    """
    if not Path(path).is_socket():
        if Path(path).exists():
            raise OSError(errno.ENOTSOCK, "it is there and is no socket")
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def configure_logging(level: str) -> None:
    """Send messages of at least this severity to stderr."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    if level != "debug":
        # The libraries' own chatter at INFO is not about this server.
        for name in ("asyncio", "urllib3", "httpx", "huggingface_hub", "transformers"):
            logging.getLogger(name).setLevel(logging.WARNING)
        # Some lines for every try while a collector of traces is down; `tracing` says it once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
