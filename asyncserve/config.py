"""Every option of the server, once: name, meaning, unit, range, default.

`cli.py` turns this dataclass into flags, environment variables, YAML keys and `--help` and knows no option
by name. None means "choose": whoever needs the value chooses (`gpu/startup.py`, `serve.py`) and logs what it
chose. Objects elsewhere get the plain values they need, never the whole.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from asyncserve.errors import ConfigError

FAULTS_VARIABLE = "ASYNCSERVE_FAULTS"
"""Environment variable of `asyncserve.faults`: no option, because no server should be run with it."""
GROUPS: Mapping[str, str] = {
    "model": "Model",
    "max_num_seqs": "Engine",
    "host": "HTTP server",
    "metrics_compat": "Monitoring",
    "input_file": "Batch",
}
"""Headings of `--help`, each by the first option that stands under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of `asyncserve`, in the field's names."""

    model: str = field(metadata={"positional": True})
    """Model to serve: a Hugging Face folder, a hub id, or a .gguf file."""
    served_model_name: tuple[str, ...] = ()
    """Names clients may use for the model; the first is the one reported. Default: the value of --model."""
    tokenizer: str | None = None
    """Folder, hub id or .gguf file to take the tokenizer from. Default: the model's own."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub."""
    download_dir: str | None = None
    """Folder for files downloaded from the hub. Default: the hub library's cache."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto: what the checkpoint holds. dummy: random weights of the right shape, for benchmarks."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations; auto chooses by checkpoint and device."""
    device: str = "auto"
    """Where the model runs: auto (a GPU if there is one), cpu, cuda, or cuda:N for one of several GPUs."""
    max_model_len: int | None = None
    """Most tokens of one sequence, prompt and output together. Default: what the model was trained for."""
    chat_template: str | None = None
    """Jinja file (or template text) to use instead of the model's own chat template."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: sampling defaults from the model's generation_config.json. none: the API's own defaults."""
    seed: int = 0
    """Seed of dummy weights and of requests that give no seed (a different one for each request)."""

    max_num_seqs: int | None = None
    """Most sequences running at once. Default: 256 on a GPU, 64 on a CPU."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step. Default: 8192 on a GPU, 512 on a CPU, and without
    --enable-chunked-prefill at least the longest prompt."""
    block_size: int = 16
    """Tokens per KV block; a multiple of it in layers that differ from others in bytes per token."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Data type of the KV cache; auto takes that of the model. fp8 is fp8_e4m3: half the memory of
    bfloat16, with the checkpoint's scales if it has any."""
    gpu_memory_utilization: float = 0.92
    """Share of the GPU's memory the server may use, in (0, 1]."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of the KV cache, instead of measuring what is left. Default on a CPU: 768 MiB, if
    there is room."""
    num_gpu_blocks_override: int | None = None
    """Number of KV blocks, instead of computing it from memory."""
    swap_space_gib: float = field(default=0.0, metadata={"alias": "--swap-space"})
    """GiB of the host's memory for the KV blocks of preempted sequences, which come back from there where
    that takes less time than computing them again."""
    kv_offloading_size: float = 0.0
    """GiB of the host's memory for cached KV blocks that are evicted from the KV cache; they are found there,
    too."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of equal prompt beginnings."""
    prefix_caching_hash_seed: str | None = None
    """Seed of the hashes by which prefixes are known. Replicas, and routers that hash prompts, agree if
    theirs is the same. Default: the environment variable PYTHONHASHSEED, else 0."""
    enable_chunked_prefill: bool = True
    """Split long prompts over several steps."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in one step; 0 for no limit but the step's."""
    scheduling_policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    """fcfs: in order of arrival. priority: lower priority numbers first, then arrival. fair: the API key
    first whose requests were given the fewest tokens."""
    async_scheduling: bool = True
    """Plan one step ahead of the device."""
    max_num_queued_requests: int = 2048
    """Most sequences waiting for a slot, preempted ones included (a request with n = 3 counts three times). A
    call that would exceed it gets 429, one that alone is larger gets 400."""
    max_num_queued_tokens: int | None = None
    """Most tokens of these sequences, estimated (one for 4 characters) until a prompt is encoded. A call that
    would exceed it gets 429, unless nothing waits. Default: no bound."""
    grammar_compile_timeout: float = 10.0
    """Seconds that compiling one structured output (a JSON schema, a grammar) may take; above it that request
    gets 400."""
    step_timeout: float = 300.0
    """Seconds a step may take, compiling kernels included. One that takes longer counts as a lost device: a
    CPU is opened anew and running requests go on from where they were; with a GPU the process ends with
    status 70. 0 for no limit."""
    max_device_restarts: int = 5
    """Most times within an hour that a lost device is opened anew; then the process ends with status 70. It
    takes three to find out that one request loses it, four if it hangs; once that request has ended they do
    not count any more. The default leaves one for chance while a request is tried.
    Three times as many, one after the other with no token between them, end the process whoever is blamed."""
    attention_backend: Literal["auto", "cpu", "reference", "triton", "flash_attn", "flashinfer"] = "auto"
    """Attention implementation; auto: by device. flash_attn and flashinfer leave prefill on a Hopper GPU to a
    library that has to be installed; auto takes neither."""
    enforce_eager: bool = False
    """Launch every step anew instead of replaying CUDA graphs: slower, less memory. A CPU has none anyway."""
    cudagraph_capture_sizes: tuple[int, ...] = ()
    """Numbers of sequences for which a decode step is captured as a CUDA graph, separated by spaces; what
    exceeds --max-num-seqs is left out. Default: 1, 2, 4, every eighth up to 256, every sixteenth beyond."""
    num_threads: int | None = None
    """Threads of CPU kernels. Default: the cores this process may use."""

    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = 8000
    """TCP port to listen on; 0 takes a free one."""
    uds: str | None = None
    """Unix socket to listen on instead of host and port."""
    # repr=False marks a secret: it is shown neither by --print-config nor in logs.
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Keys clients must send as `Authorization: Bearer KEY` or `X-Api-Key: KEY`; none means open."""
    api_key_file: str | None = None
    """File of further keys, one a line, # for comments; it is read again when it changes."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins (https://chat.example.org, or * for any) whose pages may use the server (CORS)."""
    allowed_methods: tuple[str, ...] = ("*",)
    """HTTP methods pages of --allowed-origins may use; * for all."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Request headers pages of --allowed-origins may send; * for any."""
    allow_credentials: bool = False
    """Let pages of --allowed-origins send cookies and TLS client certificates; not together with *."""
    ssl_certfile: str | None = None
    """PEM file of the server's certificate and its chain; with it the server speaks TLS (1.2 or later)."""
    ssl_keyfile: str | None = None
    """PEM file of the certificate's private key, without a passphrase. Default: --ssl-certfile holds it."""
    ssl_ca_certs: str | None = None
    """PEM file of authorities; clients must show a certificate that one of them has signed."""
    ssl_cert_reqs: int | None = None
    """What --ssl-ca-certs asks of clients: 2 a certificate, 1 a valid one if any, 0 nothing. Default: 2."""
    ssl_ciphers: str | None = None
    """Ciphers for TLS 1.2, in OpenSSL's notation. Default: Python's choice."""
    enable_ssl_refresh: bool = False
    """Take up certificate, key and authorities anew when their files change; open connections go on."""
    root_path: str | None = None
    """Prefix under which a proxy shows the server; paths are answered with and without it."""
    max_header_bytes: int = 32 * 1024
    """Most bytes of a request line, and of a request's headers together; above it clients get 431."""
    max_header_count: int = 128
    """Most headers of a request; above it clients get 431."""
    max_connections: int | None = None
    """Most open connections; further ones get 503 and are closed. Default: what the limit of open files
    leaves, which is raised as far as it goes."""
    timeout_keep_alive: float = 75.0
    """Seconds that a connection without a request stays open."""
    request_timeout: float | None = None
    """Seconds that any answer may take, from the request to its last token; above it the request is ended
    with 504, or, in a stream, with an error event. Clients can ask for fewer by the header X-Request-Timeout.
    Default: no limit."""
    sse_keep_alive_interval: float = 15.0
    """Seconds without an event after which a stream gets a comment (a ping in Anthropic's API), so that
    nobody on the way takes it for dead; before the first event, too, and the status is then 200 whatever
    comes. 0 for never."""
    disable_access_log: bool = False
    """Log no line for each request."""
    disable_access_log_for_endpoints: tuple[str, ...] = ()
    """Paths, separated by commas or spaces, whose requests are not logged."""
    disable_live_page: bool = False
    """Serve no page at /, nor the state of the pipeline that it shows."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls: hermes, llama3_json, llama4_pythonic, mistral, mistral_args, pythonic,
    none, or auto to tell it by the chat template."""
    reasoning_parser: str = "auto"
    """How the model writes reasoning: deepseek_r1, mistral, qwen3, think, none, or auto to tell it by the
    chat template."""
    trust_request_chat_template: bool = False
    """Let requests bring chat templates of their own, and set any variable of them. A template can keep a
    thread busy for long: only for trusted clients."""
    max_logprobs: int = 20
    """Most log-probabilities a client may ask for with each token."""
    stream_interval: int | None = None
    """Tokens of a stream that go into one write, each in an event of its own; the first goes at once.
    Default: one, and under load those of 4 ms, or with more than 256 streams of longer."""
    max_body_bytes: int = 4 * 1024 * 1024
    """Largest request body; above it clients get 413."""
    response_store_size: int = 1000
    """Most responses of /v1/responses kept in memory, and most that run in the background; 0 for none."""
    response_store_bytes: int = 256 * 1024 * 1024
    """Most bytes of the responses that are kept or run in the background together; the longest unused go
    first, and if those that run take it all, further ones get 429."""
    shutdown_timeout: float = 120.0
    """Seconds a SIGTERM leaves running requests to finish; 0 aborts them at once."""
    health_timeout: float = 60.0
    """Seconds without a finished step, while there is work, after which /health turns 503."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages to log."""

    metrics_compat: Literal["none", "vllm"] = "none"
    """vllm: /metrics also has vLLM's names, for dashboards, autoscalers and routers made for it."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector that gets a trace of each request, such as
    http://localhost:4318/v1/traces or grpc://localhost:4317. Needs the extra otel."""
    kv_events_config: str | None = None
    """JSON that says where changes of the prefix cache are published for cache-aware routers, with vLLM's
    names: {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}.
    tcp and ipc addresses. Needs the extra kv-events."""
    trace_steps: str | None = None
    """File that gets a timeline of every step (loop, device thread, device, waiter), for ui.perfetto.dev."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may give for the model; the first stands in answers and metrics."""
        return self.served_model_name or (self.model,)

    @classmethod
    def engine_options(cls) -> tuple[str, ...]:
        """Return the names of the options that matter without a server."""
        names = [option.name for option in fields(cls)]
        return tuple(names[: names.index("host")])

    def validate(self) -> None:
        """Check every option's range and the combinations that cannot work.

        What depends on the model or the device is checked at start-up, when it is known.

        Raises:
            ConfigError: Names the option, its value and what would do.
        """
        hints = get_type_hints(type(self))
        for option in fields(self):
            value = getattr(self, option.name)
            if get_origin(hints[option.name]) is Literal and value not in get_args(hints[option.name]):
                choices = ", ".join(get_args(hints[option.name]))
                raise ConfigError(f"{option.name} is {value!r}; it must be one of {choices}")
            if value == "" or (isinstance(value, tuple) and "" in value):
                raise ConfigError(f"{option.name} may not be empty")
            if hints[option.name] is bool and not isinstance(value, bool):
                raise ConfigError(f"{option.name} is {value!r}; it must be true or false")
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(number, int) and number > _LARGEST for number in numbers):
                raise ConfigError(f"{option.name} is {value}; a number may be at most {_LARGEST}")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ConfigError(f"{name} is {value!r}; it must be a number")
            # NaN compares false with everything, so the test is written as "not inside".
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                upper = "" if high == math.inf else f" and at most {high}"
                raise ConfigError(f"{name} is {value}; it must be at least {low}{upper}")
        for name, least in _LEAST_UNLESS_OFF.items():
            if 0 < (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}, or 0 for off")
        sizes: object = self.cudagraph_capture_sizes  # `LLM` passes what it was given
        if not isinstance(sizes, tuple | list) or any(type(size) is not int or size < 1 for size in sizes):
            raise ConfigError(
                f"cudagraph_capture_sizes is {sizes!r}; it must be a list of whole numbers of at least 1"
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device is {self.device!r}; it must be auto, cpu, cuda or cuda:N")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must lie in (0, 1]"
            )
        self._validate_together()
        self._validate_http()

    def _validate_http(self) -> None:
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins has {origin!r}; an origin is *, null, or scheme://host[:port] without a"
                    " path; separate several by spaces"
                )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "allow_credentials and allowed_origins * would let any web page act as its visitor; name the"
                " origins"
            )
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"{name} is given without ssl_certfile, so there would be no TLS")
        if self.enable_ssl_refresh and self.ssl_certfile is None:
            raise ConfigError("enable_ssl_refresh is given without ssl_certfile, so there would be no TLS")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                "ssl_cert_reqs asks for client certificates; give ssl_ca_certs to check them by"
            )
        if self.ssl_certfile is not None and self.uds is not None:
            raise ConfigError("ssl_certfile and uds exclude each other: TLS is for network connections")
        if self.otlp_traces_endpoint is not None:
            _check_collector(self.otlp_traces_endpoint)
        if self.root_path is not None and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path is {self.root_path!r}; it must look like /prefix, with a slash before it and none"
                " behind"
            )

    def _validate_together(self) -> None:
        budget, num_seqs = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and num_seqs is not None and budget < num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {budget}, below max_num_seqs {num_seqs}: a step could not give "
                "every running sequence its token"
            )
        if not self.enable_chunked_prefill:
            if budget is not None and self.max_model_len is not None and budget < self.max_model_len:
                raise ConfigError(
                    f"max_num_batched_tokens is {budget}, below max_model_len {self.max_model_len}: without "
                    "enable_chunked_prefill a prompt must fit one step"
                )
            if self.long_prefill_token_threshold > 0:
                raise ConfigError(
                    "long_prefill_token_threshold splits prompts, which enable_chunked_prefill forbids"
                )
        if self.kv_cache_memory_bytes is not None and self.num_gpu_blocks_override is not None:
            raise ConfigError(
                "kv_cache_memory_bytes and num_gpu_blocks_override both fix the size of the KV cache; "
                "give one of them"
            )
        if self.kv_offloading_size > 0 and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_offloading_size keeps cached prefixes, of which there are none without "
                "enable_prefix_caching"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig(ServerConfig):
    """Options of `asyncserve run-batch`: the server's, though those of its socket do nothing, and these."""

    input_file: str = field(metadata={"alias": "-i"})
    """File of requests in OpenAI's batch format, one JSON object a line; - for standard input."""
    output_file: str = field(metadata={"alias": "-o"})
    """File that gets the answers, one JSON object a line; requests it has answers to are not run again. - for
    standard output."""
    max_concurrency: int | None = None
    """Most requests worked on at once. Default: twice the sequences that can run."""

    def validate(self) -> None:
        """Check every option's range and the combinations that cannot work.

        Raises:
            ConfigError: Names the option, its value and what would do.
        """
        ServerConfig.validate(self)  # a bare super() does not work in a dataclass with slots
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency is {self.max_concurrency}; it must be at least 1")


def _check_collector(endpoint: str) -> None:
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https", "grpc", "grpcs") or not url.hostname:
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint!r}; it must be a URL with http, https, grpc or grpcs"
        )
    if url.username is not None:
        raise ConfigError(
            "otlp_traces_endpoint has a user or password in it, which would show in the log and in"
            " /server_info; headers of OTEL_EXPORTER_OTLP_TRACES_HEADERS do not"
        )


_ORIGIN = re.compile(r"""\*|null|[A-Za-z][A-Za-z0-9+.-]*://(\[[0-9A-Fa-f:.]+\]|[^/\s"'\[\],:]+)(:\d+)?""")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+")
_LARGEST = 2**63 - 1
"""What JSON and the device count with."""

_RANGES: Mapping[str, tuple[float, float]] = {
    # One token of prompt and one of output.
    "max_model_len": (2, math.inf),
    "seed": (0, 2**63 - 1),
    "max_num_seqs": (1, math.inf),
    "max_num_batched_tokens": (1, math.inf),
    "block_size": (1, 1024),
    "kv_cache_memory_bytes": (1, math.inf),
    # Block 0 is never given out, so one block would be none.
    "num_gpu_blocks_override": (2, math.inf),
    "swap_space_gib": (0, 2**20),
    "kv_offloading_size": (0, 2**20),
    "long_prefill_token_threshold": (0, math.inf),
    "max_num_queued_requests": (1, math.inf),
    "max_num_queued_tokens": (1, math.inf),
    "max_connections": (1, math.inf),
    "timeout_keep_alive": (0.001, math.inf),
    "request_timeout": (0.001, math.inf),
    "sse_keep_alive_interval": (0, math.inf),
    "grammar_compile_timeout": (0.001, 3600),
    "step_timeout": (0, math.inf),
    "max_device_restarts": (0, math.inf),
    "num_threads": (1, math.inf),
    "port": (0, 65535),
    "max_logprobs": (0, math.inf),
    "stream_interval": (1, math.inf),
    "max_body_bytes": (1, math.inf),
    "response_store_size": (0, math.inf),
    "response_store_bytes": (0, math.inf),
    "ssl_cert_reqs": (0, 2),
    # A client's own headers, and what proxies add, must fit.
    "max_header_bytes": (1024, 2**24),
    "max_header_count": (16, 10_000),
    "shutdown_timeout": (0, math.inf),
    "health_timeout": (0.001, math.inf),
}
"""Least and greatest value of every number but the shares, both included; None is always allowed."""

_LEAST_UNLESS_OFF: Mapping[str, float] = {
    # Each stream that waits sends a comment so often.
    "sse_keep_alive_interval": 0.1,
    # A step of a large model takes tens of milliseconds.
    "step_timeout": 0.1,
}
"""Of numbers that 0 switches off, the least other value."""
