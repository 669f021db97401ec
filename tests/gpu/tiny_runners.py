"""Runners of tiny Llama and Qwen3 models, on every device there is, for tests of whole steps.

A `Subject` is one way to run them: on a CPU; on a GPU launch by launch; on a GPU with steps captured as
graphs; and, slowly, what a GPU runs in Triton's interpreter, behind a device that captures by calling again.
Models are random, in float32, their greedy choices far from ties, and can be told to raise.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from asyncserve.gpu.attention.interface import StepAttention
from asyncserve.gpu.attention.registry import load_attention
from asyncserve.gpu.batch import Batch
from asyncserve.gpu.device import CpuDevice, Device, open_device
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.gpu.layers.loading import finish_layers
from asyncserve.gpu.models.llama import LlamaForCausalLM
from asyncserve.gpu.models.qwen3 import Qwen3ForCausalLM
from asyncserve.gpu.runner import ModelRunner
from asyncserve.gpu.sampling.sampler import Sampler
from asyncserve.gpu.startup import group_layers
from asyncserve.gpu.step_inputs import StepSize
from asyncserve.step import ExecutorInfo
from tests.fakes.device import FakeDevice
from tests.fakes.plan_driver import PlanDriver
from tests.gpu.models.test_equal_transformers import SIZES, config_dict, reference_model

TINY_SIZES = SIZES | {"num_hidden_layers": 2, "vocab_size": 291, "head_dim": 12}
"""The same for all models of these tests, so that a GPU's kernels are compiled once."""
WINDOW_LEN = 7
CONFIGS = {
    "llama": LlamaConfig(**TINY_SIZES),
    "qwen3": Qwen3Config(**TINY_SIZES),
    "qwen3_windows": Qwen3Config(
        **TINY_SIZES,
        use_sliding_window=True,
        sliding_window=WINDOW_LEN,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
VOCAB: int = TINY_SIZES["vocab_size"]
MAX_MODEL_LEN: int = TINY_SIZES["max_position_embeddings"]
BLOCK_LEN = 4
PROMPTS = [[5, 6, 7], [11], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [8, 8, 8, 8]]
NUM_SLOTS = len(PROMPTS)
GRAPHS = (StepSize(num_rows=2, num_tokens=2), StepSize(num_rows=4, num_tokens=4))
MIXED_GRAPH = StepSize(num_rows=4, num_tokens=16, num_long_rows=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One way to run a model.

    Args:
        kind: cpu, cuda, or interpreted: what cuda runs, on a CPU.
        architecture: llama, qwen3 or qwen3_windows.
        graphs: Sizes of steps that are captured.
    """

    kind: str
    architecture: str
    graphs: tuple[StepSize, ...] = ()

    @property
    def is_slow(self) -> bool:
        """Whether a step takes a good part of a second, so that tests take few."""
        return self.kind == "interpreted"

    def __str__(self) -> str:
        sizes = ["mixed" if size == MIXED_GRAPH else "decode" for size in self.graphs]
        return " ".join((self.kind, self.architecture, *dict.fromkeys(sizes), *(["graphs"] if sizes else [])))


class _Watch:
    """Counts forward passes, and spoils the next ones if it is told how.

    Attributes:
        num_forwards: Forward passes that were launched one by one, or captured.
        spoil: Called after a forward pass, with the device; may raise.
    """

    num_forwards = 0
    spoil: Callable[[torch.device], object] | None = None

    def passed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Take note that everything of a forward pass was launched."""
        self.num_forwards += 1
        if self.spoil is not None:
            self.spoil(hidden.device)
        return hidden


class WatchedLlama(_Watch, LlamaForCausalLM):
    def forward(self, batch: Batch, attention: StepAttention) -> torch.Tensor:
        return self.passed(LlamaForCausalLM.forward(self, batch, attention))


class WatchedQwen3(_Watch, Qwen3ForCausalLM):
    def forward(self, batch: Batch, attention: StepAttention) -> torch.Tensor:
        return self.passed(Qwen3ForCausalLM.forward(self, batch, attention))


WatchedModel = WatchedLlama | WatchedQwen3


def subjects(*kinds: str, with_graphs: bool = False) -> list[Any]:
    """Return the ways to run, as parameters of a test.

    Args:
        kinds: Of these only; none for all.
        with_graphs: Those only that capture.
    """
    return [
        pytest.param(each, id=str(each), marks=marks_of(each))
        for each in (
            Subject(kind="cpu", architecture="llama"),
            Subject(kind="cpu", architecture="qwen3"),
            Subject(kind="interpreted", architecture="qwen3", graphs=(GRAPHS[1], MIXED_GRAPH)),
            Subject(kind="cuda", architecture="llama"),
            Subject(kind="cuda", architecture="llama", graphs=GRAPHS),
            Subject(kind="cuda", architecture="qwen3", graphs=(*GRAPHS, MIXED_GRAPH)),
        )
        if each.kind in (kinds or (each.kind,)) and (each.graphs or not with_graphs)
    ]


def marks_of(subject: Subject) -> list[pytest.MarkDecorator]:
    """Return what keeps the tests of a subject to where it can be."""
    has_gpu = torch.cuda.is_available()
    if subject.kind == "cuda":
        return [pytest.mark.gpu, pytest.mark.skipif(not has_gpu, reason="there is no GPU")]
    if subject.kind == "interpreted":
        return [
            pytest.mark.slow,
            pytest.mark.skipif(has_gpu, reason="the kernels run for real"),
            # Rows of padding hold what the memory held, and rows of NaN are asked for their maximum: a GPU
            # does that in silence.
            pytest.mark.filterwarnings("ignore::RuntimeWarning"),
        ]
    return []


@functools.cache
def _reference(architecture: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    model = reference_model(CONFIGS[architecture])
    return config_dict(model), model.state_dict()


def open_subject_device(subject: Subject) -> Device:
    """Open and activate the device of a subject."""
    if subject.kind == "interpreted":
        pytest.importorskip("triton")
        return FakeDevice()
    device = open_device(subject.kind, num_threads=1)
    device.activate()
    return device


def build_model(subject: Subject, device: torch.device) -> WatchedModel:
    """Build the subject's model, the same for each of its architecture."""
    config, weights = _reference(subject.architecture)
    model_class: type[WatchedModel] = WatchedLlama if subject.architecture == "llama" else WatchedQwen3
    with torch.device("meta"):
        model = model_class(config, dtype=torch.float32)
    model.to_empty(device=device)
    model.load_weights(weights.items())
    finish_layers(model, fused=subject.kind != "cpu")
    assert isinstance(model, WatchedLlama | WatchedQwen3)
    return model


def start_subject(
    subject: Subject,
    *,
    num_slots: int = NUM_SLOTS,
    num_blocks: int = 100,
    captures: bool = True,
    change: Callable[[WatchedModel], object] = lambda _: None,
    runner_class: type[ModelRunner] = ModelRunner,
) -> tuple[ModelRunner, ExecutorInfo, WatchedModel]:
    """Bring a subject up on the calling thread.

    Args:
        subject: The way to run.
        num_slots: Most sequences at once.
        num_blocks: Of the KV cache.
        captures: Whether all its graphs are captured now.
        change: Called with the model before anything is captured.
        runner_class: Of the runner.
    """
    device = open_subject_device(subject)
    model = build_model(subject, device.torch_device)
    change(model)
    groups = tuple(
        replace(group, num_blocks=num_blocks)
        for group in group_layers(model.kv_specs(block_len=BLOCK_LEN, dtype="float32"))
    )
    is_cpu = isinstance(device, CpuDevice)
    on_device: dict[str, Any] = (
        {} if is_cpu else {"makes_inputs_on_device": True, "graph_sizes": subject.graphs}
    )
    runner = runner_class(
        model=model,
        device=device,
        kv_cache=KVCache(groups, device=device.torch_device),
        attention=load_attention("cpu" if is_cpu else "triton", groups, device.torch_device),
        sampler=Sampler(num_slots, VOCAB, MAX_MODEL_LEN, device.torch_device, has_kernels=not is_cpu),
        num_slots=num_slots,
        max_model_len=MAX_MODEL_LEN,
        **on_device,
    )
    info = ExecutorInfo(
        num_slots=num_slots,
        kv_groups=groups,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB,
        max_num_batched_tokens=64,
        device_name=device.name,
    )
    if captures:
        while runner.graphs_pending:
            runner.capture_next()
        # What cannot be captured is left out in silence, and then nothing of graphs would be tested.
        assert len(runner._graphs._ready) == len(subject.graphs)
    return runner, info, model


def drive(subject: Subject, **options: Any) -> PlanDriver:
    """Bring a subject up, with options of `start_subject`, and return what drives it."""
    runner, info, _ = start_subject(subject, **options)
    return PlanDriver(runner, info)


def generate_alone(driver: PlanDriver, prompt: Sequence[int], num_tokens: int, **sampling: Any) -> list[int]:
    """Let a sequence have the runner to itself, whole prompt first, and leave."""
    slot = driver.admit(prompt, **sampling)
    tokens = driver.generate([slot], num_tokens)[0]
    driver.release(slot)
    return tokens


@functools.cache
def _greedy_on_a_cpu(architecture: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    fresh = drive(Subject(kind="cpu", architecture=architecture))
    return generate_alone(fresh, prompt, num_tokens)


def expected(subject: Subject, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return what the prompt's greedy tokens are, alone, on a CPU."""
    return _greedy_on_a_cpu(subject.architecture, tuple(prompt), num_tokens)
