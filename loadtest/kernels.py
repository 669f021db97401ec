"""What the layers' kernels cost on a GPU: `python -m loadtest.kernels`, run in the repository's root.

Each Triton kernel beside the composition of torch's own kernels that it stands for, for the shapes of two
models and several numbers of tokens, in bfloat16. µs is device time of one call inside a CUDA graph of many,
which take their inputs in turn from buffers that together exceed the L2 cache if the step is large (small
ones stay in it, as in a model). GB/s counts each byte that must be read or written once, % is its share of
a copy measured in the same run. The eager columns are wall time per call, launches from Python included.
`--sweep` instead times other tiles than the ones chosen.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from asyncserve.gpu.kernels import gated_mul, rms_norm, rotary
from asyncserve.gpu.kv_cache import KVCache, token_rows
from asyncserve.gpu.layers import mlp, norm
from asyncserve.gpu.layers.rotary import Rotary, Rotation, rotate
from asyncserve.kv_spec import FullAttention, KVGroup
from loadtest.figures import Rows
from loadtest.kernel_benchmark import (
    CALLS_PER_GRAPH,
    DTYPE,
    EPS,
    Call,
    device_us,
    kernel_shapes,
    num_inputs,
    random,
    run_benchmark,
)
from loadtest.model_shapes import Shape

BLOCK_LEN = 16
TOKENS = (1, 8, 64, 256, 2048)


class Tile(NamedTuple):
    """One way to cut a kernel's work; which numbers, the kernel's own argument says."""

    name: str
    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel on one shape.

    Args:
        kernel: Its name.
        shape: The model's name.
        num_tokens: Of the step.
        num_bytes: Read and written by one call.
        num_inputs: How many sets of inputs there are to take in turn.
        fused: Calls the kernel.
        composed: Calls torch's own kernels instead.
        tiles: Calls the kernel in other ways.
    """

    kernel: str
    shape: str
    num_tokens: int
    num_bytes: int
    num_inputs: int
    fused: Call
    composed: Call
    tiles: Sequence[Tile]


def norm_case(shape: Shape, num_tokens: int) -> Case:
    """Rows normalized."""
    size = shape.hidden_size
    inputs = num_inputs(2 * num_tokens * size)
    hidden = [random(num_tokens, size) for _ in range(inputs)]
    weight = random(size)
    gain, floor = norm.rms_norm_gain(weight), norm.rms_norm_floor(weight, EPS)
    return Case(
        kernel="rms_norm",
        shape=shape.name,
        num_tokens=num_tokens,
        num_bytes=2 * (2 * num_tokens + 1) * size,
        num_inputs=inputs,
        fused=lambda i: rms_norm.rms_norm(hidden[i], weight, eps=EPS),
        composed=lambda i: norm.rms_norm(hidden[i], gain, floor),
        tiles=[
            Tile(
                f"{warps} warps",
                lambda i, warps=warps: rms_norm.rms_norm(  # type: ignore[misc]
                    hidden[i], weight, eps=EPS, num_warps=warps
                ),
            )
            for warps in (2, 4, 8, 16)
        ],
    )


def gate_case(shape: Shape, num_tokens: int) -> Case:
    """The gate of the feed-forward network."""
    size = shape.intermediate_size
    inputs = num_inputs(4 * num_tokens * size)
    gate_up = [random(num_tokens, 2 * size) for _ in range(inputs)]
    return Case(
        kernel="silu_mul",
        shape=shape.name,
        num_tokens=num_tokens,
        num_bytes=6 * num_tokens * size,
        num_inputs=inputs,
        fused=lambda i: gated_mul.silu_mul(gate_up[i]),
        composed=lambda i: mlp.silu_mul(gate_up[i]),
        tiles=[
            Tile(
                f"{tile[0]} elements, {tile[1]} warps",
                lambda i, tile=tile: gated_mul.silu_mul(gate_up[i], tile=tile),  # type: ignore[misc]
            )
            for tile in ((256, 1), (512, 2), (512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8))
        ],
    )


def rotary_case(shape: Shape, num_tokens: int) -> Case:
    """Heads normalized (if the model does) and rotated, k and v written into the cache."""
    num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    width = (num_heads + 2 * num_kv_heads) * head_dim
    inputs = num_inputs(2 * num_tokens * width)
    qkv = [random(num_tokens, width) for _ in range(inputs)]
    spec = FullAttention(
        block_len=BLOCK_LEN,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=str(DTYPE).removeprefix("torch."),
    )
    num_blocks = 1 + 2 * -(-num_tokens // BLOCK_LEN) + 64
    group = KVGroup(group_id=0, spec=spec, layer_ids=tuple(range(inputs)), num_blocks=num_blocks)
    cache = KVCache([group], device=torch.device("cuda"))
    # Decoding rows write one token each, in blocks that lie anywhere.
    slots = torch.randperm((num_blocks - 1) * BLOCK_LEN, device="cuda")[:num_tokens] + BLOCK_LEN
    rows = token_rows(slots, spec)
    turn = Rotary({"rope_theta": 5e5}, head_dim=head_dim)
    turn.finish_loading(torch.device("cuda"))
    rotation = turn.forward(torch.randint(0, 8192, (num_tokens,), device="cuda"))
    qk_norm = composed_norm = None
    if shape.has_qk_norm:
        weight = random(head_dim)
        qk_norm = rotary.QKNorm(weight, weight, EPS)
        per_head = weight.expand(num_heads + num_kv_heads, -1)
        composed_norm = (norm.rms_norm_gain(per_head), norm.rms_norm_floor(per_head, EPS))

    def fused(i: int, tile: tuple[int, int] | None = None) -> None:
        rotary.rotate_and_write(
            qkv[i],
            *rotation,
            cache.keys[i],
            cache.values[i],
            slots,
            num_heads=num_heads,
            qk_norm=qk_norm,
            tile=tile,
        )

    def composed(i: int) -> None:
        heads = qkv[i].view(num_tokens, -1, head_dim)
        qk, v = heads.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), 1)
        if composed_norm is not None:
            qk = norm.rms_norm(qk, *composed_norm)
        cache.write(i, rows, rotate(qk, rotation)[:, num_heads:], v)

    # Of q: read and written; of k: read, and written twice; of v: read and written.
    moved = 2 * num_heads + 5 * num_kv_heads
    return Case(
        kernel="rotate_and_write",
        shape=shape.name,
        num_tokens=num_tokens,
        num_bytes=num_tokens * (2 * moved * head_dim + 4 * head_dim + 8),
        num_inputs=inputs,
        fused=fused,
        composed=composed,
        tiles=[
            Tile(f"{tile[0]} heads, {tile[1]} warps", lambda i, tile=tile: fused(i, tile))  # type: ignore[misc]
            for tile in ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (8, 4), (16, 4), (32, 4), (32, 8))
        ],
    )


def rotation_case(shape: Shape, num_tokens: int) -> Case:
    """A step's cosines and sines."""
    turn = Rotary({"rope_theta": 5e5}, head_dim=shape.head_dim)
    turn.finish_loading(torch.device("cuda"))
    positions = torch.randint(0, 8192, (num_tokens,), device="cuda")

    def fused(_: int) -> Rotation:
        return Rotation(*rotary.make_rotation(positions, turn.frequencies, 1.0))

    return Case(
        kernel="make_rotation",
        shape=shape.name,
        num_tokens=num_tokens,
        num_bytes=num_tokens * 8 * shape.head_dim,
        num_inputs=1,
        fused=fused,
        composed=lambda _: turn.forward(positions),
        tiles=[],
    )


def cases() -> Iterator[Case]:
    """Make the cases, one at a time: their inputs are large."""
    for shape in kernel_shapes():
        for make in (norm_case, gate_case, rotary_case, rotation_case):
            for num_tokens in TOKENS:
                yield make(shape, num_tokens)


def eager_us(call: Call, inputs: int) -> float:
    """Return wall time per call of a loop in Python."""
    rounds = []
    for _ in range(3):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for i in range(CALLS_PER_GRAPH):
            call(i % inputs)
        torch.cuda.synchronize()
        rounds.append(1e6 * (time.perf_counter() - began_s) / CALLS_PER_GRAPH)
    return statistics.median(rounds)


def measure(copy: float) -> Rows:
    """Measure every case and print its row."""
    print(
        f"{'kernel':18}{'shape':14}{'tokens':>7}{'µs':>9}{'GB/s':>8}{'%':>6}{'torch µs':>10}{'times':>7}"
        f"{'eager µs':>10}{'torch eager µs':>16}"
    )
    found = []
    for case in cases():
        fused, composed = (device_us(call, case.num_inputs) for call in (case.fused, case.composed))
        fused_eager, composed_eager = (
            eager_us(call, case.num_inputs) for call in (case.fused, case.composed)
        )
        gbps = case.num_bytes / fused / 1e3
        share = 100 * gbps / copy
        print(
            f"{case.kernel:18}{case.shape:14}{case.num_tokens:7}{fused:9.2f}{gbps:8.0f}{share:6.0f}"
            f"{composed:10.2f}{composed / fused:7.1f}{fused_eager:10.1f}{composed_eager:16.1f}",
            flush=True,
        )
        found.append(
            {
                "kernel": case.kernel,
                "shape": case.shape,
                "num_tokens": case.num_tokens,
                "us": round(fused, 3),
                "gbps": round(gbps, 1),
                "torch_us": round(composed, 3),
                "eager_us": round(fused_eager, 2),
                "torch_eager_us": round(composed_eager, 2),
            }
        )
    return found


def sweep() -> Rows:
    """Time the tiles of every case and print them, the quickest first, beside the one that is chosen."""
    found = []
    for case in cases():
        if not case.tiles:
            continue
        chosen = device_us(case.fused, case.num_inputs)
        times = {tile.name: device_us(tile.call, case.num_inputs) for tile in case.tiles}
        ranked = sorted(times.items(), key=lambda item: item[1])
        shown = "; ".join(f"{name} {us:.2f}" for name, us in ranked)
        print(f"{case.kernel} {case.shape} {case.num_tokens}: chosen {chosen:.2f} µs; {shown}", flush=True)
        found.append(
            {
                "kernel": case.kernel,
                "shape": case.shape,
                "num_tokens": case.num_tokens,
                "us": round(chosen, 3),
                "tiles": {name: round(us, 3) for name, us in ranked},
            }
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    run_benchmark(
        arguments,
        description=__doc__,
        search_option="--sweep",
        search_help="time other tiles than the ones chosen",
        measure=measure,
        search=sweep,
    )


if __name__ == "__main__":
    main()
