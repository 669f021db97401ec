"""Compiles the products of a few tokens for an H100 or H200 and prints their registers: a GPU is not needed.

Run as a module in a process of its own, since a process that interprets kernels cannot compile them. A way to
cut the work that does not fit the registers is right, and slower by a factor of ten: nothing else would show.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from asyncserve.gpu.kernels import small_linear
from asyncserve.gpu.kernels.small_linear import small_linear_config, takes, takes_norm

POINTERS = ("x_ptr", "weight_ptr", "bias_ptr", "gain_ptr", "out_ptr")
SCALARS = {"x_stride": "i32", "out_stride": "i32", "num_tokens": "i32", "out_features": "i32", "eps": "fp32"}

# (in_features, out_features, is_gated, has_norm): hidden and intermediate sizes of small and large models.
PRODUCTS = [
    (in_features, out_features, is_gated, has_norm)
    for in_features in (576, 1024, 2048, 3072, 4096, 5120, 14336)
    for is_gated, has_norm in ((False, True), (True, True), (False, False))
    for out_features in ((6144, 1024) if in_features == 4096 and not is_gated else (6144,))
]


def usage(kernel: Any, constants: Mapping[str, object], dtype: str, num_warps: int) -> tuple[int, int]:
    """Compile a kernel; return its registers, and the bytes on its stack, which did not fit them."""
    names = kernel.arg_names
    types = dict.fromkeys(POINTERS, f"*{dtype}") | SCALARS
    aligned = [place for place, name in enumerate(names) if name in POINTERS or name.endswith("_stride")]
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place in aligned if names[place] not in constants},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "launch_pdl": True}
    )
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [str(cuobjdump), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+)", told)
    return int(found[0]), int(found[1])


def cases() -> Iterator[tuple[str, tuple[int, int]]]:
    """Compile every way that is chosen; yield what it is and its usage."""
    for in_features, out_features, is_gated, has_norm in PRODUCTS:
        for num_tokens in (1, 8, 16):
            if not takes(num_tokens, in_features, torch.bfloat16):
                continue
            config = small_linear_config(num_tokens, in_features, out_features, is_gated=is_gated, itemsize=2)
            sides = 2 if is_gated else 1
            constants: dict[str, object] = {
                "IN_FEATURES": in_features,
                "SIDES": sides,
                "HAS_BIAS": False,
                "HAS_NORM": has_norm and takes_norm(num_tokens, in_features),
                "HAS_RESIDUAL": not has_norm,
                "ROWS": config.rows,
                "PREFETCH_LEN": config.prefetch_len,
                "NUM_WARPS": config.num_warps,
                "USE_PDL": True,
            }
            if num_tokens == 1:
                kernel = small_linear._one_token
                span = min(config.tile_len, config.warps_per_row * 256)
                abreast = min(config.num_warps // config.warps_per_row, sides * config.rows)
                constants |= {"SPAN": span, "CHUNKS": config.tile_len // span, "ROWS_ABREAST": abreast}
            else:
                is_short = in_features <= config.tile_len
                kernel = small_linear._short_rows if is_short else small_linear._long_rows
                constants |= {
                    "TOKENS": small_linear._padded(num_tokens),
                    "TILE_ROWS": max(16, sides * config.rows),
                    "PART_LEN": config.tile_len // config.num_warps,
                    "NUM_STAGES": config.num_stages,
                    "DOT_DTYPE": tl.bfloat16,
                }
            name = f"{num_tokens} x {in_features} -> {out_features}, gated {is_gated}, norm {has_norm}"
            yield f"{name}: {config}", usage(kernel, constants, "bf16", config.num_warps)


if __name__ == "__main__":
    print(json.dumps(dict(cases())))
