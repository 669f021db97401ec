"""What the products of few tokens cost on a GPU: `python -m loadtest.linears`, run in the repository's root.

Each product of a layer with what belongs to it (norm, gate, residual), all four of a layer one after the
other, and the output head: what layers run, `gpu/kernels/small_linear.py` or `tiled_linear.py`, beside
cuBLAS with the kernels before and after it, which is what they run with more tokens. µs is device time of one
call inside a CUDA graph of many, weights taken in turn from more than the L2 cache holds. GB/s counts the
weight alone, % is its share of a copy in the same run. `--sweep` instead times other ways to cut the work
than the ones chosen.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton

from asyncserve.gpu.kernels import gated_mul, rms_norm, small_linear, tiled_linear
from asyncserve.gpu.kernels.small_linear import SmallLinearConfig
from asyncserve.gpu.kernels.tiled_linear import TiledLinearConfig
from asyncserve.gpu.layers.linear import SmallProduct
from asyncserve.gpu.layers.norm import RMSNorm
from loadtest.figures import Rows
from loadtest.kernel_benchmark import (
    DTYPE,
    EPS,
    compile_ahead,
    device_us,
    kernel_shapes,
    num_inputs,
    random,
    run_benchmark,
)
from loadtest.model_shapes import Shape

TOKENS = (1, 2, 8, 16, 32, 64)
SWEPT_TOKENS = (1, 8, 16, 32, 64)
MOST_SHOWN = 10
MOST_SHARED_BYTES = 200 * 1024


Config = SmallLinearConfig | TiledLinearConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One of a layer's products.

    Args:
        name: As the models call it.
        in_features: Columns of the weight.
        out_features: Of the result.
        has_norm: Whether the norm of its input belongs to it.
        is_gated: Whether the gate of the MLP does.
        is_added: Whether the residual does.
    """

    name: str
    in_features: int
    out_features: int
    has_norm: bool = False
    is_gated: bool = False
    is_added: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the weight."""
        return self.out_features * (2 if self.is_gated else 1)


def products(shape: Shape) -> tuple[Product, ...]:
    """Return those of one layer, in order, and the head."""
    size, head_dim = shape.hidden_size, shape.head_dim
    heads = shape.num_heads + 2 * shape.num_kv_heads
    return (
        Product(name="qkv", in_features=size, out_features=heads * head_dim, has_norm=True),
        Product(name="o", in_features=shape.num_heads * head_dim, out_features=size, is_added=True),
        Product(
            name="gate_up",
            in_features=size,
            out_features=shape.intermediate_size,
            has_norm=True,
            is_gated=True,
        ),
        Product(name="down", in_features=shape.intermediate_size, out_features=size, is_added=True),
        Product(name="head", in_features=size, out_features=shape.vocab_size),
    )


class Weight(NamedTuple):
    """A weight, `[rows, in_features]`, and what a layer that has it multiplies by."""

    tensor: torch.Tensor
    product: SmallProduct


def new_weight(product: Product) -> Weight:
    """Return a random weight."""
    tensor = random(product.num_rows, product.in_features) * 2**-6
    return Weight(tensor, SmallProduct(tensor, None))


def run_product(
    product: Product,
    x: torch.Tensor,
    weight: Weight,
    norm_weight: torch.Tensor,
    residual: torch.Tensor,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiply as a layer does on a GPU, few tokens; cut in the way given, or as suits it."""
    added_to = residual if product.is_added else None
    if isinstance(config, SmallLinearConfig):
        return small_linear.small_linear(
            x,
            weight.tensor,
            norm_weight=norm_weight if product.has_norm else None,
            eps=EPS,
            is_gated=product.is_gated,
            residual=added_to,
            config=config,
        )
    if config is not None:
        if product.has_norm:
            x = rms_norm.rms_norm(x, norm_weight, eps=EPS)
        return tiled_linear.tiled_linear(
            x, weight.tensor, arrived=counters(), is_gated=product.is_gated, residual=added_to, config=config
        )
    norm = layer_norm(norm_weight) if product.has_norm else None
    return weight.product.run(x, norm, added_to, is_gated=product.is_gated)


def compose_product(
    product: Product,
    x: torch.Tensor,
    weight: Weight,
    norm_weight: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    """Multiply as a layer does with more tokens: cuBLAS, and kernels before and after it."""
    if product.has_norm:
        x = rms_norm.rms_norm(x, norm_weight, eps=EPS)
    if product.is_added:
        return residual.addmm_(x, weight.tensor.t())
    result = F.linear(x, weight.tensor)
    return gated_mul.silu_mul(result) if product.is_gated else result


@functools.cache
def counters() -> torch.Tensor:
    """Return what programs that share rows count in."""
    return torch.zeros(tiled_linear.MOST_SHARED, dtype=torch.int32, device="cuda")


@functools.cache
def layer_norm(weight: torch.Tensor) -> RMSNorm:
    """Return a layer's norm with that weight; tensors are told apart by identity."""
    norm = RMSNorm(weight.shape[0], eps=EPS, dtype=weight.dtype)
    norm.weight.data = weight
    norm.finish_loading(fused=True)
    return norm


def other_configs(product: Product, num_tokens: int) -> list[Config]:
    """Return ways to cut a product that might suit it: those whose tiles fit registers and shared memory."""
    if num_tokens == 1:
        return one_token_configs(product)
    found: list[Config] = [*tiled_configs(product, num_tokens)]
    sides = 2 if product.is_gated else 1
    row_len = triton.next_power_of_2(product.in_features)
    if row_len <= 2048 and num_tokens <= small_linear.MOST_TOKENS:
        found += [
            SmallLinearConfig(rows=rows, tile_len=row_len, num_warps=warps)
            for rows, warps in itertools.product((8, 16, 32), (4, 8, 16))
            if max(16, sides * rows) * row_len // (256 * warps) <= 16
        ]
    return found


def one_token_configs(product: Product) -> list[Config]:
    """Return those for one token."""
    sides = 2 if product.is_gated else 1
    in_features = product.in_features
    row_len = triton.next_power_of_2(in_features)
    tile_lens = {min(row_len, 4096), 1024} if row_len != 2048 else {2048}
    found: list[Config] = []
    for rows, tile_len, warps, per_row in itertools.product(
        (1, 2, 4, 8, 16), sorted(tile_lens), (4, 8), (1, 2, 4, 8)
    ):
        # Of the weight, and of x, in 16 bytes a thread's registers hold at a time.
        kept, x_kept = sides * rows * tile_len // (256 * warps), tile_len // (256 * per_row)
        fits = per_row <= warps <= sides * rows * per_row and x_kept <= (4 if product.has_norm else 16)
        if fits and 2 <= kept <= (16 if x_kept <= 4 and tile_len >= in_features else 8):
            found.append(
                SmallLinearConfig(rows=rows, tile_len=tile_len, num_warps=warps, warps_per_row=per_row)
            )
    return found


def tiled_configs(product: Product, num_tokens: int) -> list[TiledLinearConfig]:
    """Return those of tiles: of one program a multiprocessor, and of two."""
    sides = 2 if product.is_gated else 1
    tokens = max(16, triton.next_power_of_2(num_tokens))
    found: dict[TiledLinearConfig, None] = {}
    for rows, tile_len, (warps, programs), splits in itertools.product(
        (16, 32, 64, 128, 256), (64, 128, 256), ((4, 1), (4, 2), (8, 1)), (1, 2, 4)
    ):
        has_tokens_first = sides * rows < 64 <= tokens
        tile_bytes = 2 * tile_len * (sides * rows + tokens)
        num_stages = min(8, MOST_SHARED_BYTES // (programs * tile_bytes))
        num_groups = -(-product.out_features // rows)
        fills = num_groups * splits >= 64 and (splits == 1 or num_groups * splits <= 264)
        # An accumulator of 128 registers a thread at most.
        fits = num_stages >= 3 and sides * rows * tokens <= 128 * 32 * warps and sides * rows >= 4 * warps
        if fills and fits and product.in_features >= 2 * splits * tile_len:
            config = TiledLinearConfig(
                rows=rows,
                tile_len=tile_len,
                num_warps=warps,
                num_stages=num_stages,
                num_splits=splits,
                has_tokens_first=has_tokens_first,
            )
            found[config] = None
    return list(found)


def named(config: Config) -> str:
    """Return a way to cut a product in short."""
    if isinstance(config, SmallLinearConfig):
        return f"small r{config.rows} t{config.tile_len} w{config.num_warps}/{config.warps_per_row}"
    order = " x first" if config.has_tokens_first else ""
    return (
        f"r{config.rows} t{config.tile_len} w{config.num_warps} s{config.num_stages} "
        f"/{config.num_splits}{order}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Products of one shape and number of tokens.

    Args:
        name: Of the product, or of all in a layer.
        shape: The model's name.
        num_tokens: Of the step.
        num_bytes: Of the weights.
        num_inputs: How many sets of weights there are to take in turn.
        run: Multiplies by the weights of that number, in the way chosen or in another.
        compose: Does the same with cuBLAS.
        ways: The other ways; none for a layer.
    """

    name: str
    shape: str
    num_tokens: int
    num_bytes: int
    num_inputs: int
    run: Callable[..., object]
    compose: Callable[[int], object]
    ways: Sequence[Config] = ()


def product_case(product: Product, shape: Shape, num_tokens: int) -> Case:
    """One product, with what belongs to it."""
    num_bytes = 2 * product.num_rows * product.in_features
    inputs = num_inputs(num_bytes)
    x = random(num_tokens, product.in_features)
    norm_weight, residual = random(product.in_features), random(num_tokens, product.out_features)
    weights = [new_weight(product) for _ in range(inputs)]

    def run(i: int, way: Config | None = None) -> torch.Tensor:
        return run_product(product, x, weights[i], norm_weight, residual, way)

    return Case(
        name=product.name,
        shape=shape.name,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        num_inputs=inputs,
        run=run,
        compose=lambda i: compose_product(product, x, weights[i], norm_weight, residual),
        ways=other_configs(product, num_tokens),
    )


def layer_case(shape: Shape, num_tokens: int) -> Case:
    """The four products of a layer one after the other, each waiting for the one before."""
    of_layer = products(shape)[:4]
    num_bytes = sum(2 * product.num_rows * product.in_features for product in of_layer)
    inputs = num_inputs(num_bytes)
    hidden, norm_weight = random(num_tokens, shape.hidden_size), random(shape.hidden_size)
    weights = [[new_weight(product) for product in of_layer] for _ in range(inputs)]
    qkv, o, gate_up, down = of_layer

    def layer(multiply: Callable[..., torch.Tensor], i: int) -> None:
        projected = multiply(qkv, hidden, weights[i][0], norm_weight, hidden)
        multiply(o, projected[:, : o.in_features], weights[i][1], norm_weight, hidden)
        gated = multiply(gate_up, hidden, weights[i][2], norm_weight, hidden)
        multiply(down, gated, weights[i][3], norm_weight, hidden)

    return Case(
        name="layer",
        shape=shape.name,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        num_inputs=inputs,
        run=lambda i: layer(run_product, i),
        compose=lambda i: layer(compose_product, i),
    )


def cases(tokens: Sequence[int]) -> Iterator[Case]:
    """Make the cases, one at a time: their weights are large."""
    for shape in kernel_shapes():
        for product in products(shape):
            for num_tokens in tokens:
                yield product_case(product, shape, num_tokens)
        for num_tokens in tokens:
            yield layer_case(shape, num_tokens)


def measure(copy: float) -> Rows:
    """Measure every case and print its row."""
    print(f"{'shape':14}{'product':9}{'tokens':>7}{'µs':>9}{'GB/s':>8}{'%':>6}{'cuBLAS µs':>11}{'times':>7}")
    found: Rows = []
    for case in cases(TOKENS):
        own, cublas = (device_us(call, case.num_inputs) for call in (case.run, case.compose))
        gbps = case.num_bytes / own / 1e3
        print(
            f"{case.shape:14}{case.name:9}{case.num_tokens:7}{own:9.2f}{gbps:8.0f}{100 * gbps / copy:6.0f}"
            f"{cublas:11.2f}{cublas / own:7.2f}",
            flush=True,
        )
        found.append(
            {
                "shape": case.shape,
                "product": case.name,
                "num_tokens": case.num_tokens,
                "us": round(own, 3),
                "gbps": round(gbps, 1),
                "cublas_us": round(cublas, 3),
            }
        )
    return found


def sweep() -> Rows:
    """Time other ways to cut each product and print the quickest, beside the one that is chosen."""
    jobs = [
        (product, num_tokens, config)
        for shape in kernel_shapes()
        for product in products(shape)
        for num_tokens in SWEPT_TOKENS
        for config in other_configs(product, num_tokens)
    ]
    compile_ahead(run_once, jobs)
    found: Rows = []
    for case in cases(SWEPT_TOKENS):
        if not case.ways:
            continue
        chosen, times = device_us(case.run, case.num_inputs), {}
        for way in case.ways:
            try:
                times[named(way)] = device_us(functools.partial(case.run, way=way), case.num_inputs)
            except triton.TritonError as error:  # it takes more than the device has
                print(f"{case.name} {named(way)}: {error}")
        ranked = sorted(times.items(), key=lambda item: item[1])
        shown = "; ".join(f"{name} {us:.2f}" for name, us in ranked[:MOST_SHOWN])
        print(f"{case.shape} {case.name} {case.num_tokens}: chosen {chosen:.2f} µs; {shown}", flush=True)
        found.append(
            {
                "shape": case.shape,
                "product": case.name,
                "num_tokens": case.num_tokens,
                "us": round(chosen, 3),
                "ways": {name: round(us, 3) for name, us in ranked},
            }
        )
    return found


def run_once(job: tuple[Product, int, Config]) -> None:
    """Run a product in one way, for its binary in Triton's cache."""
    product, num_tokens, config = job
    weight = new_weight(product)
    x = torch.zeros(num_tokens, product.in_features, dtype=DTYPE, device="cuda")
    residual = torch.zeros(num_tokens, product.out_features, dtype=DTYPE, device="cuda")
    try:
        run_product(product, x, weight, weight.tensor[0], residual, config)
    except triton.TritonError as error:
        print(f"{product.name}, {num_tokens} tokens, {named(config)}: {error}")
    torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    run_benchmark(
        arguments,
        description=__doc__,
        search_option="--sweep",
        search_help="time other ways than the ones chosen",
        measure=measure,
        search=sweep,
    )


if __name__ == "__main__":
    main()
