"""Bring the device side up: device, dtype → model on meta → weights → memory → KV cache → warm-up.

Takes a checkpoint and plain option values, gives a `ModelRunner` and the `ExecutorInfo` that tells the
scheduler what it may plan. Every choice made here is logged with its reason. Runs once, on the device thread.
Knows no request and no asyncio.
"""

import contextlib
import logging
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from asyncserve.checkpoint import Checkpoint
from asyncserve.errors import ConfigError, OutOfDeviceMemory
from asyncserve.gpu.attention.registry import load_attention
from asyncserve.gpu.device import Device, host_memory, open_device
from asyncserve.gpu.graphs import decode_sizes, mixed_sizes
from asyncserve.gpu.host_blocks import staging_bytes
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.gpu.kv_scales import KVScales
from asyncserve.gpu.layers.loading import kv_scales
from asyncserve.gpu.models.interface import Model
from asyncserve.gpu.models.registry import load_model_class
from asyncserve.gpu.runner import ModelRunner
from asyncserve.gpu.sampling.sampler import Sampler
from asyncserve.gpu.staging import RESULT_ROWS
from asyncserve.gpu.weights import initialize_dummy, read_weights
from asyncserve.kv_spec import (
    DTYPE_BYTES,
    FP8_DTYPES,
    FullAttention,
    KVGroup,
    KVSpec,
    RecurrentState,
    SlidingWindow,
    longest_held,
    most_blocks_held,
    pool_bytes_per_block,
)
from asyncserve.request import SamplingParams
from asyncserve.step import (
    BeamAssignment,
    BlockAppend,
    ExecutorInfo,
    ScheduledSequence,
    SlotAssignment,
    StepPlan,
)

logger = logging.getLogger(__name__)

_MIB = 1024 * 1024
_GIB = 1024 * _MIB
_CPU_KV_BYTES = 768 * _MIB

_NODES_BYTES = 2 * _MIB
"""What the driver keeps of a captured step beside its tensors."""

ASKS_MOST = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logit_bias={0: 1.0},
    num_logprobs=20,
)
"""Of a row whose sampling takes the most memory; what beams take is something else."""
SEARCHES = SamplingParams(temperature=0.0, use_beam_search=True, logit_bias={0: 1.0})
"""Of a beam."""

_TYPICAL_LEN = 8192
"""Tokens of a sequence for which layers are put into groups, if the most is not known."""
_MOST_GROUPS = 8
"""KV groups that a model's layers are cut into: the host sees to the block tables of each at every step."""


def start_runner(
    checkpoint: Checkpoint,
    *,
    device: str = "auto",
    dtype: str = "auto",
    load_format: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    block_len: int = 16,
    kv_cache_dtype: str = "auto",
    gpu_memory_utilization: float = 0.92,
    kv_cache_memory_bytes: int | None = None,
    num_gpu_blocks_override: int | None = None,
    swap_space_gib: float = 0.0,
    kv_offloading_gib: float = 0.0,
    attention_backend: str = "auto",
    enforce_eager: bool = False,
    graph_sizes: Sequence[int] = (),
    num_threads: int | None = None,
    seed: int = 0,
    async_scheduling: bool = True,
    enable_chunked_prefill: bool = True,
) -> tuple[ModelRunner, ExecutorInfo]:
    """Load a model and return what runs it and what it offers.

    Args:
        checkpoint: The model.
        device: auto, cuda, cuda:N or cpu.
        dtype: Of weights and activations: auto or a key of `DTYPE_BYTES` of at least 16 bits.
        load_format: auto (what the checkpoint holds) or dummy (random weights).
        max_model_len: Most tokens of a sequence; None for what the model was trained for, cut to what the
            KV cache holds.
        max_num_seqs: Most sequences at once; None for 256 on a GPU, 64 on a CPU.
        max_num_batched_tokens: Most tokens of a step, at least `max_num_seqs`; None for 8192 on a GPU, 512 on
            a CPU, or what the other options need if that is more.
        block_len: Tokens per KV block.
        kv_cache_dtype: auto (that of the model), as `dtype`, or a key of `FP8_DTYPES`.
        gpu_memory_utilization: Share of a GPU's memory to use, in (0, 1].
        kv_cache_memory_bytes: Size of the KV cache instead of measuring what is left.
        num_gpu_blocks_override: Number of KV blocks, the null block included, instead of computing it.
        swap_space_gib: Memory of the host for blocks of preempted sequences.
        kv_offloading_gib: Memory of the host for cached blocks that are evicted.
        attention_backend: auto or a key of the attention registry.
        enforce_eager: Whether no CUDA graphs are captured.
        graph_sizes: Rows of the decode steps to capture; empty for the usual ones.
        num_threads: Threads of CPU kernels; None for the cores this process may use.
        seed: Of dummy weights.
        async_scheduling: Whether a second step may be submitted while one runs.
        enable_chunked_prefill: Whether a prompt may be computed over several steps; if not, a step must take
            the longest one.

    Raises:
        ConfigError: An option cannot work.
        UnsupportedModel: No implementation of the architecture.
        CheckpointError: Weights are missing or damaged.
        OutOfDeviceMemory: Says what to lower.
    """
    began_s = time.perf_counter()
    opened = open_device(device, num_threads=num_threads)
    opened.activate()
    is_gpu = opened.is_async
    dtype = choose_dtype(dtype, checkpoint.config, opened)
    kv_dtype = dtype if kv_cache_dtype == "auto" else choose_kv_dtype(kv_cache_dtype)
    token_budget = max_num_batched_tokens
    num_slots = max_num_seqs
    if num_slots is None:
        num_slots = 256 if is_gpu else 64
        if token_budget is not None:
            num_slots = min(num_slots, token_budget)
    trained_len = load_model_class(checkpoint.architecture).context_len(checkpoint.config)
    wanted_len = max_model_len if max_model_len is not None else trained_len
    # Without chunked prefill a prompt is computed in one step, so a step must take the longest.
    least_budget = num_slots if enable_chunked_prefill else max(num_slots, wanted_len)
    if token_budget is None:
        token_budget = max(8192 if is_gpu else 512, least_budget)
    for name, value in (
        ("max_num_seqs", num_slots),
        ("max_num_batched_tokens", token_budget),
        ("block_size", block_len),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if token_budget < num_slots:
        # A decode step of every sequence must fit one step, or some would starve.
        raise ConfigError(
            f"max_num_batched_tokens is {token_budget}, below max_num_seqs {num_slots}; raise the one or "
            "lower the other"
        )
    if max_model_len is not None and not 1 <= max_model_len <= trained_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}; it must lie in [1, {trained_len}], the model's context length"
        )
    if token_budget < least_budget:
        raise ConfigError(
            f"max_num_batched_tokens is {token_budget}, below max_model_len {wanted_len}: without "
            "enable_chunked_prefill a prompt must fit one step; raise the one or lower the other"
        )

    asked_sizes = decode_sizes(num_slots, graph_sizes or None) + mixed_sizes(num_slots, token_budget)
    model, weights_bytes, scales = _load_model(
        checkpoint, opened, dtype=dtype, load_format=load_format, seed=seed
    )
    specs = model.kv_specs(block_len=block_len, dtype=kv_dtype)
    groups = group_layers(specs, max_model_len=wanted_len)
    attention = load_attention(attention_backend, groups, opened.torch_device)
    num_host_blocks, num_swap_blocks = host_blocks_for(
        pool_bytes_per_block(groups), swap_space_gib=swap_space_gib, kv_offloading_gib=kv_offloading_gib
    )
    if scales and DTYPE_BYTES[kv_dtype] > 1:
        logger.info("the checkpoint has scales for an 8-bit KV cache, which --kv-cache-dtype fp8 uses")
        scales = {}

    on_device = is_gpu and not attention.reads_unwritten
    sizes = asked_sizes if on_device and not enforce_eager else []

    def make_runner(sized: tuple[KVGroup, ...], model_len: int, num_host_blocks: int = 0) -> ModelRunner:
        return ModelRunner(
            model=model,
            device=opened,
            kv_cache=KVCache(sized, device=opened.torch_device, scales=scales),
            attention=attention,
            sampler=Sampler(num_slots, model.vocab_size, model_len, opened.torch_device),
            num_slots=num_slots,
            max_model_len=model_len,
            makes_inputs_on_device=on_device,
            graph_sizes=sizes,
            num_host_blocks=num_host_blocks,
        )

    activation_bytes = graph_bytes = 0
    if is_gpu and kv_cache_memory_bytes is None and num_gpu_blocks_override is None:
        activation_bytes, graph_bytes = profile(
            make_runner,
            groups,
            opened,
            num_slots=num_slots,
            token_budget=token_budget,
            model_len=wanted_len,
        )
        activation_bytes += staging_bytes(pool_bytes_per_block(groups), num_host_blocks)
    num_blocks, reason = size_pool(
        groups,
        opened,
        wanted_len=max_model_len,
        chunk_len=token_budget,
        utilization=gpu_memory_utilization,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        graph_bytes=graph_bytes,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_blocks_override=num_gpu_blocks_override,
    )
    model_len = fit_model_len(
        wanted_len, num_blocks, groups, chunk_len=token_budget, is_fixed=max_model_len is not None
    )
    sized = tuple(replace(group, num_blocks=num_blocks) for group in groups)
    with opened.lasting_memory():
        runner = make_runner(sized, model_len, num_host_blocks)
    _warm_up(runner, block_len=block_len, model_len=model_len, mixes=is_gpu and num_slots > 1)

    host_block_s = 0.0
    if num_host_blocks:
        host_block_s = runner.measure_transfers()
        block_bytes = pool_bytes_per_block(groups)
        logger.info(
            "the host has %.0f MiB for KV blocks, of which preempted sequences may hold %d of %d; a block "
            "takes %.3f ms there and back (%.1f GB/s)",
            num_host_blocks * block_bytes / _MIB,
            num_swap_blocks,
            num_host_blocks - 1,
            1e3 * host_block_s,
            2 * block_bytes / host_block_s / 1e9,
        )

    info = ExecutorInfo(
        num_slots=num_slots,
        kv_groups=sized,
        max_model_len=model_len,
        len_is_of=(
            "kv_cache" if model_len < wanted_len else "option" if wanted_len < trained_len else "model"
        ),
        vocab_size=model.vocab_size,
        max_num_batched_tokens=token_budget,
        max_unapplied=2 if async_scheduling else 1,
        num_host_blocks=num_host_blocks,
        num_swap_blocks=num_swap_blocks,
        host_block_s=host_block_s,
        device_name=opened.name,
    )
    assert info.max_unapplied < RESULT_ROWS, "a step would overwrite tokens that nobody read"
    graphs = ""
    if sizes:
        graphs = f", {len(sizes)} graphs {graph_bytes / _MIB:.0f} MiB"
    memory = opened.memory()
    logger.info(
        "ready on %s in %.1f s: weights %.0f MiB (%s), activations and rows %s%s, KV cache "
        "%.0f MiB (%s) of %s%s = %d blocks of %s, for sequences of up to %d; %.0f of %.0f MiB free",
        opened.name,
        time.perf_counter() - began_s,
        weights_bytes / _MIB,
        dtype,
        f"{activation_bytes / _MIB:.0f} MiB" if activation_bytes else "not measured",
        graphs,
        num_blocks * pool_bytes_per_block(groups) / _MIB,
        reason,
        kv_dtype,
        f" with scales of {len(scales)} layers" if scales else "",
        num_blocks - 1,
        _describe_groups(groups),
        model_len,
        memory.free_bytes / _MIB,
        memory.total_bytes / _MIB,
    )
    return runner, info


def choose_dtype(asked: str, config: Mapping[str, Any], device: Device) -> str:
    """Return the dtype of weights and activations.

    On a GPU auto is the checkpoint's own, with float32 taken as bfloat16, and bfloat16 as float16 where the
    hardware has none; on a CPU bfloat16 where the processor multiplies it in hardware, else float32.

    Raises:
        ConfigError: Unknown name.
    """
    if asked != "auto":
        return _known_dtype("dtype", asked)
    if device.torch_device.type == "cpu":
        return "bfloat16" if device.has_fast_bfloat16 else "float32"
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return "float16" if stored == "float16" or not device.has_fast_bfloat16 else "bfloat16"


def choose_kv_dtype(asked: str) -> str:
    """Return the dtype of the KV cache, a key of `DTYPE_BYTES`.

    Args:
        asked: Not auto.

    Raises:
        ConfigError: Unknown name.
    """
    return FP8_DTYPES.get(asked) or _known_dtype("kv_cache_dtype", asked, *FP8_DTYPES)


def _known_dtype(option: str, name: str, *others: str) -> str:
    known = [each for each, num_bytes in DTYPE_BYTES.items() if num_bytes > 1]
    if name not in known:
        raise ConfigError(f"{option} is {name!r}; it must be auto, {', '.join((*known, *others))}")
    return name


def group_layers(specs: Iterable[KVSpec], *, max_model_len: int = _TYPICAL_LEN) -> tuple[KVGroup, ...]:
    """Put layers that keep the same into KV groups that can share one pool of blocks.

    A block has the same bytes in a layer of any group: where layers have unequal bytes per token, blocks are
    made longer until they have. And it is a page in as many layers as the largest group has, so a group with
    fewer leaves memory unused in each of its blocks (padding). Hence layers of one kind are cut into groups
    of equally many layers, the last of a kind holding what is left: the number for which a sequence of
    `max_model_len` tokens takes the least memory, the larger one if two are equal, and one that makes at most
    eight groups, if there are not more kinds.

    Args:
        specs: What each layer keeps, by layer index.
        max_model_len: Most tokens of a sequence; a window that long is none.

    Returns:
        The groups, unsized, in order of their first layer.
    """
    layers: dict[KVSpec, list[int]] = {}
    for layer_id, spec in enumerate(specs):
        layers.setdefault(_without_idle_window(spec, max_model_len), []).append(layer_id)
    kinds = list(zip(_with_equal_pages(list(layers)), layers.values(), strict=True))

    def group_count(group_len: int) -> int:
        return sum(-(-len(layer_ids) // group_len) for _, layer_ids in kinds)

    def pages_of_sequence(group_len: int) -> int:
        return group_len * sum(
            -(-len(layer_ids) // group_len) * spec.most_held(max_model_len, 1) for spec, layer_ids in kinds
        )

    most = max(len(layer_ids) for _, layer_ids in kinds)
    candidates = [size for size in range(1, most + 1) if group_count(size) <= _MOST_GROUPS] or [most]
    group_len = min(candidates, key=lambda size: (pages_of_sequence(size), -size))
    cut = [
        (spec, tuple(layer_ids[begin : begin + group_len]))
        for spec, layer_ids in kinds
        for begin in range(0, len(layer_ids), group_len)
    ]
    cut.sort(key=lambda part: part[1][0])
    groups = tuple(
        KVGroup(group_id=group_id, spec=spec, layer_ids=layer_ids)
        for group_id, (spec, layer_ids) in enumerate(cut)
    )
    if len(groups) > 1:
        num_layers = sum(len(group.layer_ids) for group in groups)
        logger.info(
            "KV groups: %s; a block is %d pages of %d bytes, %d of %d layers of groups are padding",
            _describe_groups(groups),
            group_len,
            groups[0].spec.bytes_per_block,
            len(groups) * group_len - num_layers,
            len(groups) * group_len,
        )
    return groups


def _without_idle_window(spec: KVSpec, max_model_len: int) -> KVSpec:
    if not isinstance(spec, SlidingWindow) or spec.window_len < max_model_len:
        return spec
    return FullAttention(
        block_len=spec.block_len, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=spec.dtype
    )


def _with_equal_pages(specs: Sequence[KVSpec]) -> list[KVSpec]:
    """Return the specs with blocks of equal bytes: as long as need be, a state in as many as need be."""
    attention_bytes = [spec.bytes_per_block for spec in specs if isinstance(spec, FullAttention)]
    state_bytes = [spec.state_bytes for spec in specs if isinstance(spec, RecurrentState)]
    # Two halves, of K and of V.
    page_bytes = math.lcm(*attention_bytes) if attention_bytes else -(-max(state_bytes) // 2) * 2
    return [
        replace(spec, page_bytes=page_bytes)
        if isinstance(spec, RecurrentState)
        else replace(spec, block_len=spec.block_len * (page_bytes // spec.bytes_per_block))
        for spec in specs
    ]


def _describe_groups(groups: Sequence[KVGroup]) -> str:
    """Return what the blocks hold, for people."""
    if len(groups) == 1 and not isinstance(groups[0].spec, RecurrentState):
        return f"{groups[0].spec.block_len} tokens"
    parts: list[str] = []
    for group in groups:
        layers = f"{len(group.layer_ids)} layer{'s' if len(group.layer_ids) > 1 else ''}"
        if isinstance(group.spec, RecurrentState):
            parts.append(f"a state in {layers}")
        elif isinstance(group.spec, SlidingWindow):
            parts.append(
                f"{group.spec.block_len} tokens in {layers} with a window of {group.spec.window_len}"
            )
        else:
            parts.append(f"{group.spec.block_len} tokens in {layers}")
    counts = Counter(parts)
    return " or ".join(f"{part} ({num} groups)" if num > 1 else part for part, num in counts.items())


def size_pool(
    groups: tuple[KVGroup, ...],
    device: Device,
    *,
    wanted_len: int | None,
    chunk_len: int,
    utilization: float,
    weights_bytes: int,
    activation_bytes: int,
    graph_bytes: int,
    kv_cache_memory_bytes: int | None,
    num_blocks_override: int | None,
) -> tuple[int, str]:
    """Choose the number of KV blocks, the null block included.

    Args:
        groups: Unsized.
        device: Whose memory counts.
        wanted_len: `max_model_len` if the user gave it: one such sequence must fit.
        chunk_len: Most tokens of it that a step computes.
        utilization: Share of a GPU's memory the server may use.
        weights_bytes: Of the model.
        activation_bytes: What a full step needs besides weights and cache.
        graph_bytes: What graphs that are captured later will need.
        kv_cache_memory_bytes: Asked size.
        num_blocks_override: Asked number.

    Returns:
        The number and, for people, why.

    Raises:
        ConfigError: An asked size is too small for a single block.
        OutOfDeviceMemory: No room; says what to lower.
    """
    per_block = pool_bytes_per_block(groups)
    block_len = groups[0].spec.block_len
    if num_blocks_override is not None:
        if num_blocks_override < 2:
            raise ConfigError(f"num_gpu_blocks_override is {num_blocks_override}; it must be at least 2")
        return num_blocks_override, "as asked"
    needed_bytes = per_block * (most_blocks_held(groups, wanted_len or 1, chunk_len) + 1)
    memory = device.memory()
    if kv_cache_memory_bytes is not None:
        if kv_cache_memory_bytes < 2 * per_block:
            raise ConfigError(
                f"kv_cache_memory_bytes is {kv_cache_memory_bytes}; one block ({_describe_groups(groups)}) "
                f"takes {per_block} and two are needed"
            )
        if kv_cache_memory_bytes > memory.free_bytes:
            raise OutOfDeviceMemory(
                f"kv_cache_memory_bytes is {kv_cache_memory_bytes / _MIB:.0f} MiB, but only "
                f"{memory.free_bytes / _MIB:.0f} MiB are free; lower it",
                needed_bytes=kv_cache_memory_bytes,
                free_bytes=memory.free_bytes,
            )
        return kv_cache_memory_bytes // per_block, "as asked"
    if device.is_async:
        if not 0 < utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization is {utilization}; it must lie in (0, 1]")
        others = activation_bytes + graph_bytes
        budget = int(utilization * memory.total_bytes) - weights_bytes - others
        # Another process may hold a part of the GPU.
        room = min(budget, memory.free_bytes - others)
        reason = f"{utilization:.0%} of the GPU less all that"
        advice = (
            "raise --gpu-memory-utilization, or lower --max-model-len, --max-num-batched-tokens or "
            "--max-num-seqs"
        )
    else:
        room = min(_CPU_KV_BYTES, memory.free_bytes // 4)
        reason = f"at most {_CPU_KV_BYTES // _MIB} MiB and a quarter of the available memory"
        advice = "lower --max-model-len, set --kv-cache-memory-bytes, or use a smaller dtype"
        if room < needed_bytes <= memory.free_bytes // 2:
            room, reason = needed_bytes, "one sequence of max_model_len"
    if room < max(needed_bytes, 2 * per_block):
        raise OutOfDeviceMemory(
            f"the KV cache may take {max(room, 0) / _MIB:.0f} MiB on {device.name}, but one sequence of "
            f"{wanted_len or block_len} tokens needs {needed_bytes / _MIB:.0f} MiB; {advice}",
            needed_bytes=needed_bytes,
            free_bytes=memory.free_bytes,
        )
    return room // per_block, reason


def host_blocks_for(
    bytes_per_block: int, *, swap_space_gib: float, kv_offloading_gib: float
) -> tuple[int, int]:
    """Choose how many blocks the host's memory holds.

    Returns:
        The number, block 0 (never used) included, or 0 for none; and of those, how many preempted sequences
        may hold.

    Raises:
        ConfigError: That is more memory than there is, or not a block of it.
    """
    num_swap_blocks, num_others = (
        int(gib * _GIB) // bytes_per_block for gib in (swap_space_gib, kv_offloading_gib)
    )
    for name, gib, num_blocks in (
        ("swap_space_gib", swap_space_gib, num_swap_blocks),
        ("kv_offloading_size", kv_offloading_gib, num_others),
    ):
        if gib > 0 and not num_blocks:
            raise ConfigError(f"{name} is {gib}, less than one block of {bytes_per_block} bytes; raise it")
    if not num_swap_blocks + num_others:
        return 0, 0
    num_blocks = 1 + num_swap_blocks + num_others
    free_bytes = host_memory().free_bytes
    if num_blocks * bytes_per_block > free_bytes:
        raise ConfigError(
            f"swap_space_gib and kv_offloading_size ask for {num_blocks * bytes_per_block / _GIB:.1f} GiB of "
            f"the host's memory, of which {free_bytes / _GIB:.1f} GiB are free; lower them"
        )
    return num_blocks, num_swap_blocks


def fit_model_len(
    wanted_len: int, num_blocks: int, groups: tuple[KVGroup, ...], *, chunk_len: int, is_fixed: bool
) -> int:
    """Return the longest sequence the pool holds, at most `wanted_len`.

    Args:
        wanted_len: Of a sequence.
        num_blocks: Of the pool, the null block included.
        groups: That share it.
        chunk_len: Most tokens of a sequence that a step computes.
        is_fixed: Whether the user asked for that length.

    Raises:
        OutOfDeviceMemory: The user fixed a length that does not fit.
    """
    held_len = longest_held(groups, num_blocks - 1, chunk_len)
    if held_len >= wanted_len:
        return wanted_len
    if is_fixed or not held_len:
        per_block = pool_bytes_per_block(groups)
        raise OutOfDeviceMemory(
            f"max_model_len is {wanted_len}, but the KV cache holds {held_len} tokens; lower --max-model-len "
            "or enlarge the cache",
            needed_bytes=(most_blocks_held(groups, wanted_len, chunk_len) + 1) * per_block,
            free_bytes=num_blocks * per_block,
        )
    logger.info("max_model_len is cut from %d to %d, what the KV cache holds", wanted_len, held_len)
    return held_len


def _load_model(
    checkpoint: Checkpoint, device: Device, *, dtype: str, load_format: str, seed: int
) -> tuple[Model, int, dict[int, KVScales]]:
    """Build on meta, give the parameters memory, fill them.

    Returns:
        The model, its weights' bytes, and what the checkpoint says of scales of an 8-bit KV cache.
    """
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format is {load_format!r}; it must be auto or dummy")
    model_class = load_model_class(checkpoint.architecture)
    with torch.device("meta"):
        model = model_class(checkpoint.config, dtype=getattr(torch, dtype))
    assert isinstance(model, nn.Module)
    model.requires_grad_(requires_grad=False)
    with device.lasting_memory():
        model.to_empty(device=device.torch_device)
    if load_format == "dummy":
        initialize_dummy(model, seed)
    else:
        with contextlib.closing(read_weights(checkpoint, progress=True)) as weights:
            # Closed whatever happens, and the progress bar with it: an error message begins its own line.
            model.load_weights(weights)
    # Counted before layers rearrange them: packed weights are no parameters any more.
    weights_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with device.lasting_memory():
        model.finish_loading()
    model.eval()
    return model, weights_bytes, kv_scales(model)


def profile(
    make_runner: Callable[[tuple[KVGroup, ...], int], ModelRunner],
    groups: tuple[KVGroup, ...],
    device: Device,
    *,
    num_slots: int,
    token_budget: int,
    model_len: int,
) -> tuple[int, int]:
    """Run the largest steps there can be over a tiny cache; return what they need besides weights and cache.

    What the runner keeps for good (token history, sampler state) counts too: it is there beside the cache. So
    does what sampling takes of rows that ask for all it can do, or that are beams: several times the logits.

    Returns:
        Bytes of activations and persistent rows, and of the CUDA graphs.
    """
    before_bytes = device.allocated_bytes()
    num_blocks = 1 + len(groups)
    sized = tuple(replace(group, num_blocks=num_blocks) for group in groups)
    runner = make_runner(sized, model_len)
    device.reset_peak()
    longest = max(1, model_len - 1)
    chunk = min(longest, token_budget)
    few = min(num_slots, max(1, token_budget // longest))
    bytes_per_sequence = pool_bytes_per_block(groups) * most_blocks_held(groups, longest, 1)
    num_long = min(num_slots, max(1, device.memory().free_bytes // bytes_per_sequence))
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    # Decode steps over all the memory there could be for a cache, beside short ones.
    decodes = [(longest - 1, 1)] * num_long + [(0, 1)] * (num_slots - num_long)
    for rows in (
        # A few long prompts ask most of the layers, one row per slot asks most of the sampler.
        [(0, min(longest, token_budget // few))] * few,
        [(0, min(longest, token_budget // num_slots))] * num_slots,
        # The end of the longest prompt attends to the most cached positions.
        [(longest - chunk, chunk)],
        decodes,
    ):
        run_dummy_rows(runner, rows, sampling=sampling)
    run_dummy_rows(runner, [(0, 1)] * num_slots, sampling=ASKS_MOST)
    run_dummy_rows(
        runner,
        decodes,
        sampling=SEARCHES,
        widths=(num_long, num_slots - num_long),
    )
    device.synchronize()
    cache_bytes = num_blocks * pool_bytes_per_block(groups)
    activation_bytes = device.peak_bytes() - before_bytes - cache_bytes
    graph_bytes = 0
    if runner.graphs_pending:
        device.empty_cache()
        free_bytes = device.memory().free_bytes
        # The largest is the first; the others find their memory in its pool, but for their nodes.
        runner.capture_next()
        device.synchronize()
        device.empty_cache()
        graph_bytes = free_bytes - device.memory().free_bytes + runner.graphs_pending * _NODES_BYTES
    del runner
    device.empty_cache()
    return max(0, activation_bytes), max(0, graph_bytes)


def _warm_up(runner: ModelRunner, *, block_len: int, model_len: int, mixes: bool) -> None:
    """Run a prefill and a decode step, so that the first request meets warm kernels, and drop the results.

    Args:
        runner: Without sequences.
        block_len: Of the cache.
        model_len: Most tokens of a sequence.
        mixes: Whether to run a step of both kinds, too, for which a GPU has other kernels.
    """
    prompt_len = max(1, min(2 * block_len, model_len - 1))
    prefill, decode = (0, prompt_len), (prompt_len - 1, 1)
    for rows in ([prefill], [decode], *([[decode, prefill]] if mixes else [])):
        run_dummy_rows(runner, rows, sampling=SamplingParams(temperature=0.0))


def run_dummy_rows(
    runner: ModelRunner,
    rows: list[tuple[int, int]],
    *,
    sampling: SamplingParams,
    widths: Sequence[int] = (),
) -> None:
    """Run one step and forget its sequences.

    The K and V of them all lie in one block of each group again and again, so however long they are, they
    need no cache.

    Args:
        runner: Without sequences.
        rows: (start, num_tokens) of each; single tokens first.
        sampling: Of every row.
        widths: Of beam searches whose rows these are, in order; 0 for none.
    """
    beams = [
        BeamAssignment(search_id, beam_idx, width, 0.0)
        for search_id, width in enumerate(widths)
        for beam_idx in range(width)
    ]
    for slot, (start, num_tokens) in enumerate(rows):
        assignment = SlotAssignment(
            slot=slot,
            token_ids=array("i", [0]) * (start + num_tokens),
            prompt_len=start + num_tokens,
            sampling=sampling,
            seed=0,
            beam=beams[slot] if beams else None,
        )
        # Block 0 is the null block.
        appends = tuple(
            BlockAppend(group_id, slot, (1 + group_id,) * group.spec.blocks_for(start + num_tokens))
            for group_id, group in enumerate(runner.kv_groups)
        )
        # A plan each: a server, too, admits what one step can begin, and not all its slots at full length.
        plan = StepPlan(step_id=0, sequences=(), admitted=(assignment,), block_appends=appends)
        runner.run(plan).wait()
    sequences = tuple(
        ScheduledSequence(slot, start, num_tokens, samples=True)
        for slot, (start, num_tokens) in enumerate(rows)
    )
    runner.run(StepPlan(step_id=0, sequences=sequences)).wait()
    runner.run(StepPlan(step_id=0, sequences=(), released_slots=tuple(range(len(rows))))).wait()
