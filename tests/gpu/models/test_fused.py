"""Whole models whose layers run the kernels, against transformers' own logits.

On a GPU that is every model of the family list; in the interpreter, which takes milliseconds a row and
kernel, a few that have all kernels between them.
"""

import pytest
import torch

from asyncserve.gpu.attention.registry import load_attention
from asyncserve.kv_spec import KVGroup
from tests.gpu.kernels.machine import DEVICE, MARKS, ON_GPU
from tests.gpu.models.paged import PagedRun, build_model
from tests.gpu.models.test_equal_transformers import (
    CONFIGS,
    OTHER,
    PROMPT,
    TOLERANCE,
    config_dict,
    reference_logits,
    reference_model,
)

pytest.importorskip("triton")

pytestmark = [*MARKS, pytest.mark.slow]
FOR_TRITON = ("gemma3", "gemma3_capped_untied", "gpt_oss", "gpt_oss_plain")
CASES = [
    ("llama_yarn", "reference"),
    ("qwen3_biases_windows", "reference"),
    ("gemma3", "triton"),
    ("gpt_oss", "triton"),
]
if ON_GPU:
    CASES = [(name, "reference") for name in CONFIGS]
    CASES += [
        (name, "triton") for name in ("llama", "mistral_window", "qwen3", "qwen3_biases_windows", *FOR_TRITON)
    ]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_logits_equal_transformers_in_chunked_prefill_decode_and_mixed_batches(
    name: str, backend: str
) -> None:
    reference = reference_model(CONFIGS[name])
    model = build_model(config_dict(reference), reference.state_dict().items(), device=DEVICE, fused=True)
    expected = reference_logits(reference, PROMPT)
    expected_other = reference_logits(reference, OTHER)

    groups = [KVGroup(group_id=0, spec=model.kv_specs(block_len=4, dtype="float32")[0], layer_ids=(0,))]
    attend = load_attention(backend, groups, DEVICE)
    run = PagedRun(model, num_sequences=2, device=DEVICE, backend=attend)
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for step in (
        {0: PROMPT[:9]},  # a first chunk
        {0: PROMPT[9:14], 1: OTHER[:6]},  # a later chunk beside another prompt
        {0: PROMPT[14:18], 1: OTHER[6:7]},  # a chunk beside a decode
        {0: PROMPT[18:19], 1: OTHER[7:8]},  # decodes of different lengths
    ):
        for sequence, logits in run.step(step).items():
            seen[sequence].append(logits)
    # A GPU sums in another order than the CPU that transformers ran on.
    tolerance = 5 * TOLERANCE if ON_GPU else TOLERANCE
    torch.testing.assert_close(torch.cat(seen[0]), expected[:19], atol=tolerance, rtol=0)
    torch.testing.assert_close(torch.cat(seen[1]), expected_other[:8], atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", ["llama_biases", "qwen3"] if ON_GPU else ["qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"] if ON_GPU else ["float16"])
def test_sixteen_bits_stay_near_float32(name: str, dtype: str) -> None:
    reference = reference_model(CONFIGS[name])
    model = build_model(
        config_dict(reference),
        reference.state_dict().items(),
        dtype=getattr(torch, dtype),
        device=DEVICE,
        fused=True,
    )
    expected = reference_logits(reference, PROMPT)[:12]
    logits = PagedRun(model, dtype=dtype, device=DEVICE).step({0: PROMPT[:12]})[0]
    assert (logits - expected).std() < (0.1 if dtype == "bfloat16" else 0.02) * expected.std()
