import dataclasses
from typing import Any

import pytest

from asyncserve.config import ServerConfig
from asyncserve.errors import ConfigError


def test_the_defaults_are_valid() -> None:
    ServerConfig(model="m").validate()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": ""}, ["model", "empty"]),
        ({"served_model_name": ("a", "")}, ["served_model_name", "empty"]),
        ({"api_key": ("",)}, ["api_key", "empty"]),
        ({"host": ""}, ["host"]),
        ({"dtype": "int8"}, ["dtype", "int8", "bfloat16"]),
        ({"device": "tpu"}, ["device", "tpu", "cuda:N"]),
        ({"device": "cuda:"}, ["device", "cuda:N"]),
        ({"device": "cpu:0"}, ["device", "cuda:N"]),
        ({"scheduling_policy": "lifo"}, ["scheduling_policy", "priority"]),
        ({"max_model_len": 1}, ["max_model_len", "1", "2"]),
        ({"max_model_len": "8k"}, ["max_model_len", "8k", "number"]),
        ({"max_num_seqs": -1}, ["max_num_seqs"]),
        ({"max_num_batched_tokens": 0}, ["max_num_batched_tokens"]),
        ({"block_size": 0}, ["block_size"]),
        ({"gpu_memory_utilization": 0.0}, ["gpu_memory_utilization", "(0, 1]"]),
        ({"gpu_memory_utilization": 1.01}, ["gpu_memory_utilization", "1.01"]),
        ({"gpu_memory_utilization": float("nan")}, ["gpu_memory_utilization"]),
        ({"kv_cache_memory_bytes": 0}, ["kv_cache_memory_bytes"]),
        ({"num_gpu_blocks_override": 1}, ["num_gpu_blocks_override", "2"]),
        ({"swap_space_gib": -1}, ["swap_space_gib", "at least 0"]),
        ({"kv_offloading_size": float("inf")}, ["kv_offloading_size"]),
        (
            {"kv_offloading_size": 1.0, "enable_prefix_caching": False},
            ["kv_offloading_size", "enable_prefix_caching"],
        ),
        ({"long_prefill_token_threshold": -1}, ["long_prefill_token_threshold"]),
        ({"max_num_queued_requests": 0}, ["max_num_queued_requests"]),
        ({"stream_interval": 0}, ["stream_interval", "at least 1"]),
        ({"max_num_queued_requests": 2**70}, ["max_num_queued_requests", "at most"]),
        ({"cudagraph_capture_sizes": (4, 0)}, ["cudagraph_capture_sizes", "at least 1"]),
        ({"cudagraph_capture_sizes": (True,)}, ["cudagraph_capture_sizes", "whole numbers"]),
        ({"cudagraph_capture_sizes": 8}, ["cudagraph_capture_sizes", "list"]),
        ({"cudagraph_capture_sizes": (10**20,)}, ["cudagraph_capture_sizes", "at most"]),
        ({"enforce_eager": "no"}, ["enforce_eager", "true or false"]),
        ({"num_threads": 0}, ["num_threads"]),
        ({"port": -1}, ["port"]),
        ({"port": 65536}, ["port", "65535"]),
        ({"max_logprobs": -1}, ["max_logprobs"]),
        ({"max_body_bytes": 0}, ["max_body_bytes"]),
        ({"max_header_bytes": 100}, ["max_header_bytes", "1024"]),
        ({"max_header_count": 1}, ["max_header_count", "16"]),
        ({"ssl_cert_reqs": 3}, ["ssl_cert_reqs", "3"]),
        ({"root_path": "llm"}, ["root_path", "/prefix"]),
        ({"root_path": "/llm/"}, ["root_path", "/prefix"]),
        ({"root_path": "/a b"}, ["root_path"]),
        ({"allowed_origins": ("example.org",)}, ["allowed_origins", "example.org", "scheme"]),
        ({"allowed_origins": ("https://example.org/",)}, ["allowed_origins", "path"]),
        ({"allowed_origins": ('["*"]',)}, ["allowed_origins", "spaces"]),
        ({"allowed_origins": ("https://a.example,https://b.example",)}, ["allowed_origins", "spaces"]),
        ({"shutdown_timeout": -0.1}, ["shutdown_timeout"]),
        ({"shutdown_timeout": float("inf")}, ["shutdown_timeout"]),
        ({"health_timeout": 0.0}, ["health_timeout"]),
        ({"sse_keep_alive_interval": 1e-6}, ["sse_keep_alive_interval", "0 for off"]),
        ({"step_timeout": 1e-9}, ["step_timeout", "0 for off"]),
        ({"otlp_traces_endpoint": "collector:4318"}, ["otlp_traces_endpoint", "grpc"]),
        ({"otlp_traces_endpoint": "ftp://collector"}, ["otlp_traces_endpoint", "grpc"]),
        ({"otlp_traces_endpoint": "http://"}, ["otlp_traces_endpoint", "grpc"]),
        ({"seed": -1}, ["seed"]),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(ServerConfig(model="m"), **options).validate()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("endpoint", ["http://me:secret@collector:4318", "grpc://secret@collector"])
def test_a_password_has_no_place_in_an_address_that_is_shown(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_HEADERS") as caught:
        ServerConfig(model="m", otlp_traces_endpoint=endpoint).validate()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seqs": 64, "max_num_batched_tokens": 63}, ["max_num_batched_tokens", "max_num_seqs"]),
        (
            {"enable_chunked_prefill": False, "max_model_len": 512, "max_num_batched_tokens": 511},
            ["max_model_len", "enable_chunked_prefill"],
        ),
        (
            {"enable_chunked_prefill": False, "long_prefill_token_threshold": 64},
            ["long_prefill_token_threshold", "enable_chunked_prefill"],
        ),
        (
            {"kv_cache_memory_bytes": 1 << 30, "num_gpu_blocks_override": 100},
            ["kv_cache_memory_bytes", "num_gpu_blocks_override"],
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], words: list[str]) -> None:
    for name, value in options.items():
        dataclasses.replace(ServerConfig(model="m"), **{name: value}).validate()
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(ServerConfig(model="m"), **options).validate()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:11"])
def test_every_device_that_can_be_opened_is_allowed(device: str) -> None:
    ServerConfig(model="m", device=device).validate()


def test_the_limits_themselves_are_allowed() -> None:
    ServerConfig(
        model="m",
        max_model_len=512,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        enable_chunked_prefill=False,
        gpu_memory_utilization=1.0,
        port=0,
        max_logprobs=0,
        shutdown_timeout=0.0,
        num_gpu_blocks_override=2,
    ).validate()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"allow_credentials": True, "allowed_origins": ("*",)}, ["allow_credentials", "allowed_origins"]),
        ({"ssl_keyfile": "key"}, ["ssl_keyfile", "ssl_certfile"]),
        ({"ssl_ca_certs": "ca"}, ["ssl_ca_certs", "ssl_certfile"]),
        ({"ssl_ciphers": "c"}, ["ssl_ciphers", "ssl_certfile"]),
        ({"enable_ssl_refresh": True}, ["enable_ssl_refresh", "ssl_certfile"]),
        ({"ssl_certfile": "cert", "ssl_cert_reqs": 1}, ["ssl_cert_reqs", "ssl_ca_certs"]),
        ({"ssl_certfile": "cert", "uds": "/tmp/s"}, ["ssl_certfile", "uds"]),
    ],
)
def test_options_of_the_socket_that_do_not_go_together_are_refused(
    options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(model="m", **options).validate()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "https://a.example", "http://localhost:3000", "http://[::1]:8080", "tauri://localhost"],
)
def test_origins_as_browsers_send_them_are_taken(origin: str) -> None:
    ServerConfig(model="m", allowed_origins=(origin,)).validate()


def test_socket_options_that_go_together_are_taken() -> None:
    ServerConfig(
        model="m",
        allow_credentials=True,
        allowed_origins=("https://a.example",),
        ssl_certfile="cert",
        ssl_keyfile="key",
        ssl_ca_certs="ca",
        ssl_cert_reqs=0,
        enable_ssl_refresh=True,
        root_path="/llm/v1",
    ).validate()
