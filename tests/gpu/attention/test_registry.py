import logging
import sys
import typing
from types import ModuleType

import pytest
import torch

from asyncserve.config import ServerConfig
from asyncserve.errors import ConfigError
from asyncserve.gpu.attention.registry import BACKENDS, load_attention
from asyncserve.kv_spec import FullAttention, KVGroup

GROUP = KVGroup(
    group_id=0,
    spec=FullAttention(block_len=16, num_kv_heads=1, head_dim=8, dtype="float32"),
    layer_ids=(0,),
    num_blocks=2,
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_every_backend_for_cpus_loads_under_its_own_name(name: str) -> None:
    assert load_attention(name, [GROUP], CPU).name == name


def test_auto_on_a_cpu_is_the_backend_for_cpus() -> None:
    assert load_attention("auto", [GROUP], CPU).name == "cpu"


def test_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'flash'.*auto, cpu, flash_attn, flashinfer, reference, triton"):
        load_attention("flash", [GROUP], CPU)


def test_the_choice_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "asyncserve"):
        load_attention("auto", [GROUP], CPU)
        load_attention("reference", [GROUP], CPU)
    assert [record.getMessage() for record in caplog.records] == [
        "attention backend cpu: the first that serves this model on cpu",
        "attention backend reference: asked for",
    ]


def test_a_backend_whose_library_is_missing_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("asyncserve.gpu.") or name == "triton"]:
        if name == "triton" or "kernels" in name or name.endswith("attention.triton"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(
        ConfigError,
        match=r"attention_backend triton cannot serve .* on cpu: it needs triton, which is not inst",
    ):
        load_attention("triton", [GROUP], CPU)
    # Only the names of the devices count here: nothing is put on this one.
    with caplog.at_level(logging.INFO, "asyncserve"):
        assert load_attention("auto", [GROUP], torch.device("cuda")).name == "reference"
    assert caplog.messages == [
        "attention backend reference: the first that serves this model on cuda; "
        "triton: it needs triton, which is not installed"
    ]


@pytest.mark.parametrize(
    ("backend", "library", "package"),
    [("flash_attn", "flash_attn", "--pre flash-attn-4"), ("flashinfer", "flashinfer", "flashinfer-python")],
)
def test_a_library_that_was_asked_for_and_is_missing_is_said(
    backend: str, library: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    for name in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError, match=rf"{library}[.\w]*, which is not installed \(pip install {package}\)"
    ):
        load_attention(backend, [GROUP], CPU)


@pytest.mark.parametrize(
    ("backend", "library", "missing"),
    [
        ("flash_attn", "flash_attn.cute", "flash_attn_varlen_func"),
        ("flashinfer", "flashinfer", "BatchPrefillWithPagedKVCacheWrapper"),
    ],
)
def test_a_library_without_what_is_called_is_another_version(
    backend: str, library: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    package = library.partition(".")[0]
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, library, ModuleType(library))
    with pytest.raises(
        ConfigError, match=f"{backend} .*: another version of {library} is needed: .*{missing}"
    ):
        load_attention(backend, [GROUP], CPU)


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((9, 0), "bfloat16", None),
        ((9, 0), "float16", None),
        ((10, 0), "bfloat16", "it serves compute capability 9.0, the device has 10.0"),
        ((9, 0), "float8_e4m3fn", "it serves a KV cache of bfloat16 or float16, not of float8_e4m3fn"),
    ],
)
def test_what_no_library_serves_is_said(capability: tuple[int, int], dtype: str, reason: str | None) -> None:
    pytest.importorskip("triton")
    from asyncserve.gpu.attention.library_prefill import lacking

    assert lacking(capability, dtype) == reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_auto_on_a_gpu_is_triton_and_reference_can_be_asked_for() -> None:
    pytest.importorskip("triton")
    cuda = torch.device("cuda")
    assert load_attention("auto", [GROUP], cuda).name == "triton"
    assert load_attention("reference", [GROUP], cuda).name == "reference"
    with pytest.raises(ConfigError, match=r"triton .*: it needs a CUDA device"):
        load_attention("triton", [GROUP], CPU)


def test_the_option_names_every_backend() -> None:
    names = typing.get_args(typing.get_type_hints(ServerConfig)["attention_backend"])
    assert set(names) == {"auto", *BACKENDS}
