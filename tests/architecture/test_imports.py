"""Who may import whom. The layers below are the rule; a new file must be given its place in them."""

import ast
import graphlib
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.architecture.sources import imports, module_name, parse, relative, source_files

# A row may import every row below it; names in one row are strangers to each other.
TOP = [
    ["__main__"],
    ["offline", "run_batch"],
    ["serve", "cli"],
    ["faults"],
    ["http"],
    ["loop", "gpu", "metrics", "tracing", "kv_events"],
    ["observer"],
    ["step"],
    ["request", "kv_spec", "cache_events", "config", "checkpoint"],
    ["grammar"],
    ["gguf_config"],
    ["gguf_file"],
    ["errors", "garbage", "allocator", "futures", "token_path"],
]
LOOP = [
    ["engine"],
    ["pipeline", "grammar"],
    ["intake"],
    ["active_request"],
    ["scheduler"],
    ["step_planner", "step_outputs", "step_failures", "scheduler_invariants"],
    ["search_planner"],
    ["plan_draft"],
    ["live_sequences"],
    ["restart_budget", "admission", "detokenizer", "channel", "grammar_cache", "grammar_worker"],
    ["deadlines", "best_of", "start_rate", "step_limit", "sequence_limits", "beams"],
    ["tokenizer", "suspects", "waiting", "kv_groups", "stop_strings", "json_schema", "beam_search"],
    ["host_tier", "prefix_cache"],
    ["kv_managers"],
    ["chat_template", "gguf_tokenizer", "sequence", "kv_pool", "queue_bounds", "swap_cost"],
    ["cache_log"],
]
GPU = [
    ["executor"],
    ["startup"],
    ["runner", "weights"],
    ["graphs"],
    ["sampling"],
    ["models"],
    ["layers"],
    ["attention"],
    ["step_inputs"],
    ["batch"],
    ["host_blocks"],
    ["kernels", "slots", "block_tables", "kv_cache"],
    ["kv_scales"],
    ["staging", "completion"],
    ["device", "device_errors"],
]
TOKEN_PATH = [["lanes", "rows", "prefix_hash"]]
LAYERS: dict[str, list[list[str]]] = {"": TOP, "loop": LOOP, "gpu": GPU, "token_path": TOKEN_PATH}

THIRD_PARTIES: dict[str, set[str]] = {
    "torch": {"gpu"},
    "triton": {"gpu.kernels"},
    "flash_attn": {"gpu.attention.flash_attn"},
    "flashinfer": {"gpu.attention.flashinfer"},
    "safetensors": {"gpu"},
    "numpy": {"gpu", "loop.grammar", "loop.grammar_worker"},
    "xgrammar": {"loop.grammar", "loop.grammar_worker"},
    "gguf": {"gpu"},
    "aiohttp": {"http", "serve", "run_batch"},
    "yarl": {"http"},
    "orjson": {"http"},
    "msgspec": {"http", "kv_events"},
    "cbor2": {"token_path.prefix_hash"},
    "zmq": {"kv_events.publisher"},
    "prometheus_client": {"metrics", "serve"},
    "opentelemetry": {"tracing.otlp"},
    "tokenizers": {"loop.tokenizer", "loop.gguf_tokenizer"},
    "transformers": {"loop.tokenizer"},
    "jinja2": {"loop.chat_template"},
    "huggingface_hub": {"checkpoint"},
    "uvloop": {"__main__"},
    "yaml": {"cli"},
    "tqdm": {"gpu", "offline", "run_batch"},
    "asyncio": {
        "loop.engine",
        "loop.pipeline",
        "loop.intake",
        "loop.channel",
        "loop.grammar_cache",
        "loop.deadlines",
        "metrics.exposition",
        "gpu.executor",
        "gpu.completion",
        "http",
        "faults",
        "futures",
        "serve",
        "__main__",
        "offline",
        "run_batch",
    },
}
"""Third parties (and asyncio) → the modules and packages that may import them."""

ONLY_INSIDE_FUNCTIONS = {
    *("transformers", "huggingface_hub", "uvloop", "xgrammar"),
    *("opentelemetry", "zmq", "flash_attn", "flashinfer"),
}
"""Importing these costs seconds or brings torch; those of the second line need not be there."""

EXEMPT = {("", "offline")}
"""The package's `__getattr__` finds `LLM` when it is first asked for."""


def row_of(rows: Sequence[Sequence[str]], name: str) -> int:
    return next((number for number, row in enumerate(rows) if name in row), -1)


@pytest.mark.parametrize("path", source_files(), ids=relative)
def test_a_file_imports_only_what_lies_below_it(path: Path) -> None:
    module = module_name(path)
    for found in imports(path):
        assert not found.module.startswith("."), f"{relative(path)}:{found.line}: imports are absolute"
        target = found.module.removeprefix("asyncserve").removeprefix(".")
        if not found.module.startswith("asyncserve") or not target or (module, target) in EXEMPT:
            continue
        for package, rows in LAYERS.items():
            prefix = f"{package}." if package else ""
            if not (module.startswith(prefix) and target.startswith(prefix)) or not module:
                continue
            importer, imported = (name.removeprefix(prefix).split(".")[0] for name in (module, target))
            if importer == imported:
                continue
            for name in (importer, imported):
                assert row_of(rows, name) >= 0, f"{prefix}{name} has no place in the layers"
            place = f"{relative(path)}:{found.line}"
            assert row_of(rows, importer) < row_of(rows, imported), (
                f"{prefix}{importer} may not import {prefix}{imported} ({place})"
            )


@pytest.mark.parametrize("path", source_files(), ids=relative)
def test_third_parties_are_imported_where_they_belong(path: Path) -> None:
    module = module_name(path)
    for found in imports(path):
        name = found.module.split(".")[0]
        if name == "asyncserve" or (name in sys.stdlib_module_names and name not in THIRD_PARTIES):
            continue
        place = f"{relative(path)}:{found.line}"
        assert name in THIRD_PARTIES, f"nothing says who may import {name} ({place})"
        allowed = any(module == home or module.startswith(f"{home}.") for home in THIRD_PARTIES[name])
        assert allowed, f"{module or 'asyncserve'} may not import {name} ({place})"
        if name in ONLY_INSIDE_FUNCTIONS:
            assert not found.is_at_top, f"{name} is imported inside functions only ({place})"


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {module_name(path) for path in source_files()}
    graph = {}
    for path in source_files():
        targets = {found.module.removeprefix("asyncserve.") for found in imports(path)}
        graph[module_name(path)] = (targets & names) - {module_name(path)} if module_name(path) else set()
    graphlib.TopologicalSorter(graph).prepare()


def test_every_file_has_a_place_in_the_layers() -> None:
    for package, rows in LAYERS.items():
        prefix = f"{package}." if package else ""
        present = {
            name.removeprefix(prefix).split(".")[0]
            for name in map(module_name, source_files())
            if name.startswith(prefix) and name != package
        }
        assert {name for row in rows for name in row} >= present


@pytest.mark.parametrize("path", source_files(), ids=relative)
def test_no_function_rebinds_a_module_global(path: Path) -> None:
    for node in ast.walk(parse(path)):
        assert not isinstance(node, ast.Global), f"{relative(path)}:{node.lineno}: global statement"
