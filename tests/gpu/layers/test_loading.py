"""Which layers run kernels: what `finish_layers` chooses, and what a machine without a GPU never imports."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from asyncserve.gpu.layers.loading import finish_layers
from asyncserve.gpu.layers.mlp import GatedMLP
from asyncserve.gpu.layers.norm import RMSNorm


def layers() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "norm": RMSNorm(8, eps=1e-6, dtype=torch.float32),
            "mlp": GatedMLP(8, 16, bias=False, dtype=torch.float32),
        }
    )


def test_on_a_cpu_layers_run_torchs_own_kernels() -> None:
    model = layers()
    finish_layers(model)
    assert model["norm"].kernel is None
    assert model["mlp"].kernel is None
    assert model["mlp"].gate_up_proj.kernel is None


def test_told_so_they_run_the_triton_kernels() -> None:
    pytest.importorskip("triton")
    from asyncserve.gpu.kernels.gated_mul import silu_mul

    model = layers()
    finish_layers(model, fused=True)
    assert model["norm"].kernel is not None
    assert model["mlp"].kernel is silu_mul
    assert model["mlp"].gate_up_proj.kernel is not None
    assert model["mlp"].down_proj.kernel is not None


@pytest.mark.slow
def test_a_model_on_a_cpu_leaves_triton_out() -> None:
    script = """
import sys, torch
from asyncserve.gpu.models.registry import load_model_class
sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
load_model_class("Qwen3ForCausalLM")(sizes, dtype=torch.float32).finish_loading()
names = [name for name in sys.modules if name.startswith(("triton", "asyncserve.gpu.kernels"))]
sys.exit(", ".join(names) or 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"imported: {done.stderr}"
