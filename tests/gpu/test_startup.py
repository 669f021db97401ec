import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncserve.checkpoint import Checkpoint, CheckpointFormat
from asyncserve.errors import CheckpointError, ConfigError, OutOfDeviceMemory, UnsupportedModel
from asyncserve.gpu.completion import PendingOutput
from asyncserve.gpu.device import CpuDevice, MemoryInfo
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.gpu.models.registry import MODELS, load_model_class
from asyncserve.gpu.runner import ModelRunner
from asyncserve.gpu.startup import (
    ASKS_MOST,
    SEARCHES,
    choose_dtype,
    fit_model_len,
    group_layers,
    host_blocks_for,
    profile,
    run_dummy_rows,
    size_pool,
    start_runner,
)
from asyncserve.kv_spec import FullAttention, KVGroup, RecurrentState, SlidingWindow
from asyncserve.step import SlotAssignment, StepPlan
from tests.architecture.sources import ROOT
from tests.fakes.attention_model import AttentionModel, small_runner
from tests.fakes.device import FakeDevice
from tests.fakes.plan_driver import PlanDriver
from tests.fakes.tiny_model import tiny_llama_config, tiny_llama_folder
from tests.gpu.tiny_runners import Subject, expected, generate_alone, start_subject, subjects

MIB = 2**20
SPEC = FullAttention(block_len=16, num_kv_heads=2, head_dim=64, dtype="bfloat16")
GROUPS = (KVGroup(group_id=0, spec=SPEC, layer_ids=tuple(range(128))),)
PER_BLOCK = MIB  # 2 * 16 * 2 * 64 * 2 bytes * 128 layers


class _Cpu(CpuDevice):
    """A CPU with as much memory as the test says."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__(num_threads=1)
        self._memory = MemoryInfo(free_bytes, 2 * free_bytes)

    def memory(self) -> MemoryInfo:
        return self._memory


def size(device: CpuDevice | FakeDevice, **options: Any) -> tuple[int, str]:
    defaults: dict[str, Any] = {
        "wanted_len": None,
        "chunk_len": 64,
        "utilization": 0.9,
        "weights_bytes": 0,
        "activation_bytes": 0,
        "graph_bytes": 0,
        "kv_cache_memory_bytes": None,
        "num_blocks_override": None,
    }
    return size_pool(GROUPS, device, **{**defaults, **options})


def window(window_len: int = 1024, **changes: Any) -> SlidingWindow:
    fields: dict[str, Any] = {"block_len": 16, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    return SlidingWindow(window_len=window_len, **{**fields, **changes})


def cut(num_full: int, num_windows: int, *, max_model_len: int = 131072) -> list[tuple[str, int]]:
    """Return kind and number of layers of each group."""
    groups = group_layers([window()] * num_windows + [SPEC] * num_full, max_model_len=max_model_len)
    layer_ids = [layer_id for group in groups for layer_id in group.layer_ids]
    assert sorted(layer_ids) == list(range(num_full + num_windows))
    return [("full" if group.spec == SPEC else "window", len(group.layer_ids)) for group in groups]


OPENED_THRICE = """
import gc, os, pathlib, sys
from asyncserve.allocator import share_one_heap
from asyncserve.checkpoint import open_checkpoint
from asyncserve.gpu.startup import start_runner

share_one_heap()
checkpoint = open_checkpoint(sys.argv[1])
for _ in range(3):
    runner, _ = start_runner(checkpoint, device="cpu", num_threads=1, kv_cache_memory_bytes=192 << 20)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    print(pages * os.sysconf("SC_PAGE_SIZE"))
    del runner
    gc.collect()
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_device_that_is_opened_anew_takes_no_more_memory_than_before(tmp_path: Path) -> None:
    """The cache lay in what the last one had freed, so that all its pages were zeroed, hence resident."""
    folder = tiny_llama_folder(tmp_path)
    command = [sys.executable, "-c", OPENED_THRICE, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    first, *later = map(int, done.stdout.split())
    assert max(later) - first < 48 * MIB


def test_layers_that_keep_the_same_share_a_group() -> None:
    groups = group_layers([SPEC, window(), SPEC, window(), SPEC, window()])
    assert [(group.group_id, group.spec, group.layer_ids) for group in groups] == [
        (0, SPEC, (0, 2, 4)),
        (1, window(), (1, 3, 5)),
    ]


def test_layers_are_cut_into_groups_of_equally_many_where_that_takes_the_least_memory() -> None:
    assert cut(12, 12) == [("window", 12), ("full", 12)]
    assert cut(3, 15) == [("window", 3)] * 5 + [("full", 3)]
    # A layer more, and some group has fewer: a padded window costs less than a padded full group.
    assert cut(5, 29) == [("window", 5)] * 5 + [("window", 4), ("full", 5)]
    # 31 groups of two would pad nothing.
    assert cut(10, 52) == [("window", 10)] * 5 + [("window", 2), ("full", 10)]
    assert cut(0, 32) == [("window", 32)]


def test_how_layers_were_cut_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="asyncserve.gpu.startup"):
        cut(5, 29)
    assert caplog.messages == [
        "KV groups: 16 tokens in 5 layers with a window of 1024 (5 groups) or 16 tokens in 4 layers with a"
        " window of 1024 or 16 tokens in 5 layers; a block is 5 pages of 8192 bytes, 1 of 35 layers of groups"
        " are padding"
    ]


def test_blocks_of_unequal_layers_are_as_many_tokens_as_make_equal_bytes() -> None:
    wide = FullAttention(block_len=16, num_kv_heads=6, head_dim=64, dtype="bfloat16")
    narrow = window(num_kv_heads=4, block_len=16)
    groups = group_layers([wide, narrow])
    assert [group.spec.block_len for group in groups] == [32, 48]
    assert len({group.spec.bytes_per_block for group in groups}) == 1
    KVCache([replace(group, num_blocks=3) for group in groups], device=torch.device("cpu"))


def test_a_state_takes_a_run_of_blocks_that_attention_layers_can_have() -> None:
    state = RecurrentState(state_bytes=SPEC.bytes_per_block * 5 // 2)
    full, recurrent = group_layers([SPEC, state])
    assert full.spec == SPEC
    assert recurrent.spec.blocks_for(1) == recurrent.spec.blocks_for(99999) == 3
    (alone,) = group_layers([state, state])
    assert alone.spec.blocks_for(99999) == 1


def test_a_window_as_long_as_the_longest_sequence_is_none() -> None:
    assert [group.spec for group in group_layers([SPEC, window(4096)], max_model_len=4096)] == [SPEC]
    assert len(group_layers([SPEC, window(4095)], max_model_len=4096)) == 2


def test_a_window_needs_but_the_blocks_of_window_and_chunk() -> None:
    groups = group_layers([SPEC, window(100)], max_model_len=10**6)
    # 99 + 60 positions touch at most 11 blocks of 16, wherever they begin.
    assert fit_model_len(10**6, 1 + 11 + 50, groups, chunk_len=60, is_fixed=False) == 50 * 16
    assert fit_model_len(10**6, 1 + 6, groups, chunk_len=60, is_fixed=False) == 3 * 16
    with pytest.raises(OutOfDeviceMemory, match="holds 800 tokens") as caught:
        fit_model_len(801, 1 + 11 + 50, groups, chunk_len=60, is_fixed=True)
    assert caught.value.needed_bytes == (51 + 11 + 1) * SPEC.bytes_per_block
    with pytest.raises(OutOfDeviceMemory, match="holds 0 tokens"):
        fit_model_len(801, 2, groups, chunk_len=60, is_fixed=False)


def test_asked_number_of_blocks_is_taken() -> None:
    assert size(_Cpu(10 * MIB), num_blocks_override=7)[0] == 7
    with pytest.raises(ConfigError, match="at least 2"):
        size(_Cpu(10 * MIB), num_blocks_override=1)


def test_asked_bytes_are_taken_if_they_are_there_and_hold_a_block() -> None:
    assert size(_Cpu(100 * MIB), kv_cache_memory_bytes=10 * PER_BLOCK + 5)[0] == 10
    with pytest.raises(OutOfDeviceMemory, match="kv_cache_memory_bytes"):
        size(_Cpu(100 * MIB), kv_cache_memory_bytes=200 * MIB)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        size(_Cpu(100 * MIB), kv_cache_memory_bytes=PER_BLOCK)


def test_cpu_takes_a_fixed_size_but_at_most_a_quarter_of_what_is_free() -> None:
    assert size(_Cpu(64 * 1024 * MIB))[0] == 768
    assert size(_Cpu(400 * MIB))[0] == 100


def test_cpu_makes_room_for_one_sequence_of_the_asked_length_where_it_can() -> None:
    assert size(_Cpu(400 * MIB), wanted_len=150 * 16)[0] == 151
    with pytest.raises(OutOfDeviceMemory, match="--max-model-len") as caught:
        size(_Cpu(400 * MIB), wanted_len=250 * 16)
    assert caught.value.needed_bytes == 251 * PER_BLOCK
    assert caught.value.free_bytes == 400 * MIB


def test_gpu_takes_its_share_less_weights_and_activations() -> None:
    gpu = FakeDevice(memory=MemoryInfo(free_bytes=800 * MIB, total_bytes=1000 * MIB))
    assert size(gpu, weights_bytes=200 * MIB, activation_bytes=100 * MIB)[0] == 600
    assert size(gpu, weights_bytes=200 * MIB, activation_bytes=60 * MIB, graph_bytes=40 * MIB)[0] == 600


def test_gpu_takes_no_more_than_other_processes_left() -> None:
    gpu = FakeDevice(memory=MemoryInfo(free_bytes=300 * MIB, total_bytes=1000 * MIB))
    assert size(gpu, weights_bytes=200 * MIB, activation_bytes=100 * MIB)[0] == 200


def test_gpu_without_room_says_what_to_change() -> None:
    gpu = FakeDevice(memory=MemoryInfo(free_bytes=800 * MIB, total_bytes=1000 * MIB))
    with pytest.raises(OutOfDeviceMemory, match="--gpu-memory-utilization"):
        size(gpu, weights_bytes=950 * MIB)
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        size(gpu, utilization=0.0)


def test_default_context_is_cut_to_the_pool_and_an_asked_one_is_not() -> None:
    assert fit_model_len(100, 8, GROUPS, chunk_len=64, is_fixed=False) == 100
    assert fit_model_len(200, 8, GROUPS, chunk_len=64, is_fixed=False) == 7 * 16
    with pytest.raises(OutOfDeviceMemory, match="holds 112 tokens"):
        fit_model_len(200, 8, GROUPS, chunk_len=64, is_fixed=True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": 8192, "rope_scaling": None, "rope_theta": 1e4}, 8192),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                    "rope_theta": 1e6,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        ({}, 2048),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            131072,
        ),
        ({"model_type": "gemma3_text"}, 131072),
    ],
)
def test_context_length_is_what_the_configuration_means(config: dict[str, Any], expected: int) -> None:
    architecture = "Gemma3ForCausalLM" if "model_type" in config else "LlamaForCausalLM"
    assert load_model_class(architecture).context_len(config) == expected


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("stated", [-5, 0, 1, "long", 2.5])
def test_an_impossible_context_length_is_named(stated: object, architecture: str) -> None:
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        load_model_class(architecture).context_len({"max_position_embeddings": stated})


def test_dtype_is_the_checkpoints_on_a_gpu_and_what_the_processor_does_well_on_a_cpu() -> None:
    class Gpu(FakeDevice):
        def __init__(self, *, has_fast_bfloat16: bool = True) -> None:
            super().__init__(has_fast_bfloat16=has_fast_bfloat16)
            self.torch_device = torch.device("cuda")

    assert choose_dtype("auto", {"dtype": "float32"}, Gpu()) == "bfloat16"
    assert choose_dtype("auto", {"torch_dtype": "float16"}, Gpu()) == "float16"
    assert choose_dtype("auto", {"torch_dtype": "bfloat16"}, Gpu()) == "bfloat16"
    old = Gpu(has_fast_bfloat16=False)
    assert choose_dtype("auto", {"torch_dtype": "bfloat16"}, old) == "float16"
    assert choose_dtype("bfloat16", {}, old) == "bfloat16"
    cpu = CpuDevice(num_threads=1)
    assert choose_dtype("auto", {"torch_dtype": "float16"}, cpu) in ("bfloat16", "float32")
    assert choose_dtype("float32", {}, cpu) == "float32"
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        choose_dtype("int8", {}, cpu)


def dummy_checkpoint(**overrides: Any) -> Checkpoint:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "rope_theta": 1e4,
        **tiny_llama_config(),
        **overrides,
    }
    return Checkpoint(
        name="dummy",
        path=Path("nowhere"),
        format=CheckpointFormat.SAFETENSORS,
        config=config,
        generation_config={},
    )


def test_dummy_weights_need_no_file_and_the_info_tells_what_was_chosen() -> None:
    runner, info = start_runner(
        dummy_checkpoint(),
        device="cpu",
        dtype="float32",
        load_format="dummy",
        num_gpu_blocks_override=20,
        max_num_seqs=3,
        num_threads=1,
        async_scheduling=False,
    )
    assert (info.num_slots, info.max_model_len, info.vocab_size) == (3, 256, 320)
    assert (info.max_num_batched_tokens, info.max_unapplied) == (512, 1)
    assert [(group.num_blocks, group.layer_ids) for group in info.kv_groups] == [(20, (0, 1))]
    # The warm-up left nothing behind.
    fresh = PlanDriver(runner, info)
    assert len(fresh.generate([fresh.admit([1, 2, 3])], 4)[0]) == 4


@pytest.mark.parametrize(
    ("asked", "dtype", "factor"),
    [
        ("auto", "float32", 1),
        ("bfloat16", "bfloat16", 2),
        ("fp8", "float8_e4m3fn", 4),
        ("fp8_e4m3", "float8_e4m3fn", 4),
        ("fp8_e5m2", "float8_e5m2", 4),
    ],
)
def test_a_pool_of_the_same_bytes_has_more_blocks_of_fewer_bits(
    asked: str, dtype: str, factor: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        _, info = start_runner(
            dummy_checkpoint(),
            device="cpu",
            dtype="float32",
            load_format="dummy",
            kv_cache_dtype=asked,
            # 2 layers of K and V of 2 heads of 16 in float32, 16 positions a block.
            kv_cache_memory_bytes=10 * 2 * 2 * 2 * 16 * 4 * 16,
            max_num_seqs=2,
            num_threads=1,
        )
    (kv_group,) = info.kv_groups
    assert (kv_group.spec.dtype, kv_group.num_blocks) == (dtype, 10 * factor)
    assert f"(as asked) of {dtype} = {10 * factor - 1} blocks" in caplog.text


def test_default_token_budget_holds_a_token_of_every_sequence() -> None:
    _, info = start_runner(
        dummy_checkpoint(),
        device="cpu",
        load_format="dummy",
        num_gpu_blocks_override=20,
        max_num_seqs=600,
        num_threads=1,
    )
    assert info.max_num_batched_tokens == 600


def test_without_chunked_prefill_a_step_takes_the_longest_prompt() -> None:
    options: dict[str, Any] = {
        "device": "cpu",
        "load_format": "dummy",
        "num_gpu_blocks_override": 80,
        "num_threads": 1,
        "enable_chunked_prefill": False,
    }
    long = dummy_checkpoint(max_position_embeddings=1000)
    assert start_runner(long, **options)[1].max_num_batched_tokens == 1000
    assert start_runner(long, max_model_len=700, **options)[1].max_num_batched_tokens == 700
    assert start_runner(long, max_model_len=100, **options)[1].max_num_batched_tokens == 512
    with pytest.raises(ConfigError, match="512, below max_model_len 1000: without enable_chunked_prefill"):
        start_runner(long, max_num_batched_tokens=512, **options)


class _RecordingRunner(ModelRunner):
    """Remembers (tokens of the sequence, tokens computed) of each row of every step, and how rows sample."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.steps: list[list[tuple[int, int]]] = []
        self.sampled: list[list[SlotAssignment]] = []
        self._assignments: dict[int, SlotAssignment] = {}

    def run(self, plan: StepPlan) -> PendingOutput:
        self.steps.append([(row.start + row.num_tokens, row.num_tokens) for row in plan.sequences])
        self._assignments |= {each.slot: each for each in plan.admitted}
        self.sampled.append([self._assignments[row.slot] for row in plan.sequences if row.samples])
        return super().run(plan)


@pytest.mark.parametrize(("room", "num_long"), [(2.5, 2), (100, 4), (0.1, 1)])
def test_profile_runs_the_largest_prefill_the_latest_chunk_and_the_longest_decode_steps(
    room: float, num_long: int
) -> None:
    runners: list[_RecordingRunner] = []

    def make_runner(groups: tuple[KVGroup, ...], model_len: int) -> ModelRunner:
        runner, _ = small_runner(
            max_model_len=model_len,
            num_blocks=groups[0].num_blocks,
            runner_class=_RecordingRunner,
            device=device,
        )
        assert isinstance(runner, _RecordingRunner)
        runners.append(runner)
        return runner

    groups = group_layers(AttentionModel({}).kv_specs(block_len=4, dtype="float32"))
    longest_bytes = 25 * groups[0].bytes_per_block
    device = FakeDevice(memory=MemoryInfo(free_bytes=int(room * longest_bytes), total_bytes=2**40))
    profile(make_runner, groups, device, num_slots=4, token_budget=40, model_len=101)
    steps = [step for step in runners[0].steps if step]
    assert [(40, 40)] in steps
    assert [(10, 10)] * 4 in steps
    assert [(100, 40)] in steps
    assert [(100, 1)] * num_long + [(1, 1)] * (4 - num_long) in steps
    # Sampling that takes several times the logits: of rows that ask for everything, and of beams.
    most, searches = [each for each in runners[0].sampled if each][-2:]
    assert len(most) == len(searches) == 4
    assert all(each.sampling.num_logprobs and each.sampling.frequency_penalty for each in most)
    widths = [each.beam.width for each in searches if each.beam is not None]
    assert widths == [num_long] * num_long + [4 - num_long] * (4 - num_long)
    assert steps[-1] == [(100, 1)] * num_long + [(1, 1)] * (4 - num_long)
    # Nothing is longer than a sequence may be, and none is left.
    assert max(seq_len for step in steps for seq_len, _ in step) == 100
    assert len(runners[0].steps) == 6 * 2 + sum(len(step) for step in steps)


@pytest.mark.parametrize("subject", subjects())
def test_dummy_rows_of_every_kind_run_and_leave_nothing(subject: Subject) -> None:
    runner, info, _ = start_subject(subject)
    rows = [(9, 1)] * 2 + [(0, 1)] * (info.num_slots - 2)
    run_dummy_rows(runner, rows, sampling=ASKS_MOST)
    run_dummy_rows(runner, rows, sampling=SEARCHES, widths=(2, info.num_slots - 2))
    assert runner.num_occupied == 0
    prompt = [5, 6, 7, 8, 9]
    assert generate_alone(PlanDriver(runner, info), prompt, 3) == expected(subject, prompt, 3)


def test_default_context_is_what_a_small_pool_holds() -> None:
    _, info = start_runner(
        dummy_checkpoint(), device="cpu", load_format="dummy", num_gpu_blocks_override=5, num_threads=1
    )
    assert (info.max_model_len, info.len_is_of) == (64, "kv_cache")
    assert (info.num_slots, info.max_unapplied) == (64, 2)


def test_what_sets_the_length_of_a_sequence_is_told() -> None:
    checkpoint = dummy_checkpoint()
    longest = load_model_class(checkpoint.architecture).context_len(checkpoint.config)
    for asked, len_is_of in ((None, "model"), (longest, "model"), (longest - 1, "option")):
        _, info = start_runner(
            checkpoint,
            device="cpu",
            load_format="dummy",
            num_gpu_blocks_override=longest // 16 + 8,
            max_model_len=asked,
            num_threads=1,
        )
        assert (info.max_model_len, info.len_is_of) == (asked or longest, len_is_of)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_model_len": 257}, ConfigError, r"\[1, 256\]"),
        ({"max_model_len": 0}, ConfigError, "max_model_len is 0"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs is 0"),
        ({"block_len": 0}, ConfigError, "block_size is 0"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, ConfigError, "below max_num_seqs"),
        ({"kv_cache_dtype": "int8"}, ConfigError, "kv_cache_dtype is 'int8'; .* fp8, fp8_e4m3, fp8_e5m2"),
        ({"dtype": "float8_e5m2"}, ConfigError, "dtype is 'float8_e5m2'; it must be auto, float32, bfloat16"),
        ({"load_format": "pickle"}, ConfigError, "load_format is 'pickle'"),
        ({"attention_backend": "flash"}, ConfigError, "attention_backend is 'flash'"),
        ({"max_model_len": 256, "num_gpu_blocks_override": 5}, OutOfDeviceMemory, "holds 64 tokens"),
    ],
)
def test_option_that_cannot_work_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    defaults: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "num_threads": 1}
    with pytest.raises(error, match=message):
        start_runner(dummy_checkpoint(), **{**defaults, **options})


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM"):
        start_runner(dummy_checkpoint(architectures=["MambaForCausalLM"]), device="cpu", num_threads=1)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start(tiny_folder: Path) -> Callable[..., PlanDriver]:
    checkpoint = Checkpoint(
        name="tiny",
        path=tiny_folder,
        format=CheckpointFormat.SAFETENSORS,
        config=json.loads((tiny_folder / "config.json").read_text()),
        generation_config={},
    )

    def driver(**options: Any) -> PlanDriver:
        defaults: dict[str, Any] = {
            "device": "cpu",
            "dtype": "float32",
            "num_gpu_blocks_override": 64,
            "max_num_seqs": 4,
            "num_threads": 1,
        }
        return PlanDriver(*start_runner(checkpoint, **{**defaults, **options}))

    return driver


PROMPTS = [[5, 6, 7, 8, 9], [100] * 40, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [319]]


@pytest.mark.slow
def test_tiny_llama_continues_as_transformers_does(
    start: Callable[..., PlanDriver], tiny_folder: Path
) -> None:
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        output = reference.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        expected.append(output[0, len(prompt) :].tolist())
    together = start()
    assert together.generate([together.admit(prompt) for prompt in PROMPTS], 24) == expected
    chunked = start(block_len=5)
    assert chunked.generate([chunked.admit(prompt) for prompt in PROMPTS], 24, chunk=7) == expected
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        alone = start()
        assert alone.generate([alone.admit(prompt)], 24)[0] == tokens


@pytest.mark.slow
def test_every_dtype_runs(start: Callable[..., PlanDriver]) -> None:
    for dtype in ("bfloat16", "float16"):
        driver = start(dtype=dtype)
        assert all(0 <= token_id < 320 for token_id in driver.generate([driver.admit(PROMPTS[0])], 4)[0])
    for kv_cache_dtype in ("bfloat16", "fp8"):
        mixed = start(dtype="float32", kv_cache_dtype=kv_cache_dtype)
        assert len(mixed.generate([mixed.admit(PROMPTS[2])], 4, chunk=5)[0]) == 4


def test_the_host_holds_what_was_asked_for_and_block_0() -> None:
    asked = {"swap_space_gib": 64 / 1024, "kv_offloading_gib": 0.0}
    assert host_blocks_for(MIB, **asked) == (65, 64)
    assert host_blocks_for(MIB, **{**asked, "kv_offloading_gib": 16.5 / 1024}) == (81, 64)
    assert host_blocks_for(MIB, swap_space_gib=0.0, kv_offloading_gib=16 / 1024) == (17, 0)
    assert host_blocks_for(MIB, swap_space_gib=0.0, kv_offloading_gib=0.0) == (0, 0)


@pytest.mark.parametrize(
    ("swap_gib", "offloading_gib", "words"),
    [
        (2.0**19, 2.0**19, ["swap_space_gib", "kv_offloading_size", "free", "lower"]),
        (1e-6, 0.0, ["swap_space_gib", "one block", "raise"]),
        (1.0, 1e-6, ["kv_offloading_size", "one block", "raise"]),
    ],
)
def test_what_the_host_cannot_hold_is_refused(
    swap_gib: float, offloading_gib: float, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        host_blocks_for(MIB, swap_space_gib=swap_gib, kv_offloading_gib=offloading_gib)
    for word in words:
        assert word in str(caught.value)
