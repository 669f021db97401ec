"""Checkpoints written in the test, read back: safetensors in one file and in shards, GGUF in every type."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config

from asyncserve.checkpoint import Checkpoint, CheckpointFormat, open_checkpoint
from asyncserve.errors import CheckpointError
from asyncserve.gpu.layers.mlp import GatedMLP
from asyncserve.gpu.layers.norm import RMSNorm
from asyncserve.gpu.weights import gguf_to_hf_name, initialize_dummy, read_weights
from tests.gpu.models.paged import PagedRun, build_model

DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def checkpoint(path: Path, stored_as: CheckpointFormat) -> Checkpoint:
    return Checkpoint(name="test", path=path, format=stored_as, config=HEADS, generation_config={})


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_weights(checkpoint(folder, CheckpointFormat.SAFETENSORS), progress=False))


def read_gguf(path: Path) -> dict[str, torch.Tensor]:
    return dict(read_weights(checkpoint(path, CheckpointFormat.GGUF), progress=False))


def write_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    for file_name, tensors in shards.items():
        save_file(tensors, folder / file_name)
    weight_map = {name: file_name for file_name, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


SHARDS = {
    "model-00001-of-00002.safetensors": {"a": torch.ones(2, 3), "b": torch.arange(4).bfloat16()},
    "model-00002-of-00002.safetensors": {"c": torch.full((5,), 7.0).half()},
}


class TestSafetensors:
    def test_a_single_file_gives_every_tensor_as_stored(self, tmp_path: Path) -> None:
        stored = {"x": torch.randn(3, 4), "y": torch.randn(5).bfloat16()}
        save_file(stored, tmp_path / "model.safetensors")
        found = read_folder(tmp_path)
        assert found.keys() == stored.keys()
        for name, tensor in stored.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)

    def test_shards_are_read_through_the_index(self, tmp_path: Path) -> None:
        write_shards(tmp_path, SHARDS)
        found = read_folder(tmp_path)
        assert sorted(found) == ["a", "b", "c"]
        assert torch.equal(found["c"], torch.full((5,), 7.0).half())

    def test_the_index_is_followed_even_if_an_unsharded_file_lies_beside_it(self, tmp_path: Path) -> None:
        write_shards(tmp_path, SHARDS)
        save_file({"stale": torch.zeros(1)}, tmp_path / "model.safetensors")
        assert sorted(read_folder(tmp_path)) == ["a", "b", "c"]

    def test_a_missing_shard_is_named_before_anything_is_read(self, tmp_path: Path) -> None:
        write_shards(tmp_path, SHARDS)
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        pairs = read_weights(checkpoint(tmp_path, CheckpointFormat.SAFETENSORS), progress=False)
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
            next(iter(pairs))

    def test_a_tensor_missing_from_its_shard_is_named(self, tmp_path: Path) -> None:
        write_shards(tmp_path, SHARDS)
        save_file({"other": torch.zeros(1)}, tmp_path / "model-00002-of-00002.safetensors")
        with pytest.raises(CheckpointError, match="lacks tensor 'c'"):
            read_folder(tmp_path)

    def test_a_damaged_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not json at all.")
        with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
            read_folder(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": [1]}', '{"metadata": {}}'])
    def test_a_damaged_index_is_named(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
            read_folder(tmp_path)

    def test_a_folder_without_weights_says_what_it_looked_for(self, tmp_path: Path) -> None:
        with pytest.raises(
            CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index"
        ):
            read_folder(tmp_path)

    def test_progress_counts_bytes_on_stderr(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_file({"x": torch.zeros(1 << 19)}, tmp_path / "model.safetensors")
        for progress, is_drawn in ((True, True), (False, False)):
            list(read_weights(checkpoint(tmp_path, CheckpointFormat.SAFETENSORS), progress=progress))
            out, err = capsys.readouterr()
            assert out == ""
            assert ("2.00M/2.00M" in err) == is_drawn


def write_gguf(
    path: Path,
    tensors: dict[str, tuple[np.ndarray[Any, Any], Kind]],
    *,
    architecture: str = "qwen2",
    metadata: dict[str, int | float] | None = None,
) -> Path:
    """Write tensors, each already in the bytes of its type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata or {}).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{key}", value)  # type: ignore[arg-type]
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_bytes(kind: Kind, num_rows: int, num_columns: int) -> np.ndarray[Any, Any]:
    """Return valid data of a type nothing here can quantize to: any bytes, but small scales in float16."""
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_blocks = num_rows * num_columns // block_len
    data = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    scales = np.linspace(0.01, 0.02, num_blocks, dtype=np.float16).view(np.uint8).reshape(-1, 2)
    if kind is Kind.Q6_K:
        data[:, -2:] = scales
    else:
        data[:, 0:2] = data[:, 2:4] = scales
    return data.reshape(num_rows, -1)


QUANTIZED = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.BF16]
# How far a value may lie from what was quantized, in units of the largest value of its block.
ROUNDING = {
    Kind.Q8_0: 1 / 200,
    Kind.Q4_0: 1 / 7,
    Kind.Q4_1: 1 / 14,
    Kind.Q5_0: 1 / 15,
    Kind.Q5_1: 1 / 30,
    Kind.BF16: 1 / 250,
}


class TestGGUF:
    @pytest.mark.parametrize("kind", QUANTIZED)
    def test_a_quantized_tensor_comes_back_near_what_it_was(self, tmp_path: Path, kind: Kind) -> None:
        # More elements than are dequantized at a time, and not a multiple of them.
        values = np.random.default_rng(1).uniform(-1, 1, (3, 600, 96)).astype(np.float32)
        data = quantize(values.reshape(1800, 96), kind)
        path = write_gguf(tmp_path / "m.gguf", {"w": (data, kind)})
        found = read_gguf(path)["w"]
        assert found.dtype == (torch.bfloat16 if kind is Kind.BF16 else torch.float32)
        assert found.shape == (1800, 96)
        assert (found.float() - torch.from_numpy(values).view(1800, 96)).abs().max() < ROUNDING[kind]
        assert torch.equal(found.float(), torch.from_numpy(dequantize(data, kind)))

    @pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
    def test_a_k_quantized_tensor_is_dequantized_block_by_block(self, tmp_path: Path, kind: Kind) -> None:
        data = random_bytes(kind, 300, 768)
        found = read_gguf(write_gguf(tmp_path / "m.gguf", {"w": (data, kind)}))["w"]
        assert found.isfinite().all()
        assert torch.equal(found, torch.from_numpy(dequantize(data, kind)))

    @pytest.mark.parametrize(("kind", "dtype"), [(Kind.F32, np.float32), (Kind.F16, np.float16)])
    def test_plain_tensors_come_as_stored(self, tmp_path: Path, kind: Kind, dtype: type) -> None:
        data: np.ndarray[Any, Any] = np.random.default_rng(2).normal(size=(6, 5)).astype(dtype)
        row: np.ndarray[Any, Any] = np.arange(3).astype(dtype)
        found = read_gguf(write_gguf(tmp_path / "m.gguf", {"w": (data, kind), "norm": (row, kind)}))
        assert torch.equal(found["w"], torch.from_numpy(data))
        assert torch.equal(found["norm"], torch.from_numpy(row))

    def test_a_type_that_cannot_be_dequantized_is_named_with_the_tensor(self, tmp_path: Path) -> None:
        block_bytes = gguf.GGML_QUANT_SIZES[Kind.Q8_K][1]
        data = np.zeros((2, block_bytes), dtype=np.uint8)
        path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (data, Kind.Q8_K)})
        with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_up\.weight' has type Q8_K"):
            read_gguf(path)

    def test_a_type_without_a_name_is_given_as_its_number(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", {"abc": (np.zeros((2, 32), np.float32), Kind.F32)})
        content = path.read_bytes()
        head = content.index(b"abc") + 3 + 4 + 16  # name, number of dimensions, two dimensions
        path.write_bytes(content[:head] + (250).to_bytes(4, "little") + content[head + 4 :])
        with pytest.raises(CheckpointError, match="'abc' has unknown type 250"):
            read_gguf(path)

    def test_a_file_cut_short_names_the_tensor_that_is_not_whole(self, tmp_path: Path) -> None:
        data = np.zeros((64, 64), np.float32)
        path = write_gguf(tmp_path / "m.gguf", {"first": (data, Kind.F32), "second": (data, Kind.F32)})
        path.write_bytes(path.read_bytes()[:-5000])
        with pytest.raises(CheckpointError, match="cut short: tensor 'second'"):
            read_gguf(path)

    @pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
    def test_names_are_those_the_library_maps_from_hugging_face(self, architecture: str) -> None:
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        names = gguf.get_tensor_name_map(arch, 12)
        config = {
            "llama": transformers.LlamaConfig,
            "qwen2": transformers.Qwen2Config,
            "qwen3": Qwen3Config,
            "gemma3": Gemma3TextConfig,
        }
        sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": 12}
        sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config[architecture](**sizes)
            )
        for name in model.state_dict():
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert gguf_name is not None
            assert gguf_to_hf_name(gguf_name, architecture) == name

    @pytest.mark.parametrize(
        "name", ["rope_freqs.weight", "blk.0.ffn_gate_exps.weight", "output_norm", "v.x"]
    )
    def test_a_name_without_a_counterpart_is_passed_on(self, name: str) -> None:
        assert gguf_to_hf_name(name, "llama") == name


def permuted(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Order rows as llama.cpp's converter does (its `LlamaModel.permute`)."""
    heads = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(weight.shape))


def write_model_as_gguf(path: Path, model: transformers.PreTrainedModel, architecture: str) -> Path:
    """Write a Llama, Qwen3 or Gemma 3 as llama.cpp's converter would, in float32."""
    config = model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        data = tensor.numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            is_query = ".q_proj." in name
            data = permuted(data, config.num_attention_heads if is_query else config.num_key_value_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            data = data + 1
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None
        if gguf_name != "output.weight" or not config.tie_word_embeddings:
            tensors[gguf_name] = (data, Kind.F32)
    rope = config.rope_parameters
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    if architecture == "gemma3":
        metadata["attention.sliding_window"] = config.sliding_window
    return write_gguf(path, tensors, architecture=architecture, metadata=metadata)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_gguf_model_gives_the_logits_of_transformers_on_the_same_file(
    tmp_path: Path, architecture: str
) -> None:
    """Llama's q and k rows are put back in order; Qwen's never left it. One is taken off Gemma's norms."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # The library does not read it from a GGUF file for Qwen3, and takes 128.
        "head_dim": 128 if architecture == "qwen3" else 8,
        "initializer_range": 0.3,
        "max_position_embeddings": 128,
        "tie_word_embeddings": architecture == "gemma3",
    }
    if architecture == "gemma3":
        # What a file does not say is what the library's default is; the sixth layer sees everything.
        sizes |= {"num_hidden_layers": 6, "sliding_window": 5, "query_pre_attn_scalar": 8, "pad_token_id": 0}
    configs: dict[str, type[transformers.PreTrainedConfig]]
    configs = {"llama": LlamaConfig, "qwen3": Qwen3Config, "gemma3": Gemma3TextConfig}
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        configs[architecture](**sizes), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-0.5, 1.5)
    path = write_model_as_gguf(tmp_path / "m.gguf", made, architecture)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    token_ids = list(range(3, 20))
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0]
        original = made(torch.tensor([token_ids])).logits[0]
    opened = open_checkpoint(str(path))
    model = build_model(opened.config, read_weights(opened, progress=False))
    logits = PagedRun(model).step({0: token_ids})[0]
    if architecture != "gemma3":  # of whose scale the library knows nothing but 256
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits, original, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(not DEMO.exists(), reason="the demo model has not been fetched")
def test_the_demo_model_gives_transformers_logits_and_greedy_tokens() -> None:
    """The weights go through this reader for both, so this is about a real model's sizes and depth."""
    opened = open_checkpoint(str(DEMO))
    weights = dict(read_weights(opened, progress=False))
    model = build_model(opened.config, weights.items())
    config = LlamaConfig(
        **{k: v for k, v in opened.config.items() if k not in ("architectures", "model_type")}
    )
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config)
    theirs.to_empty(device="cpu")
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)
    theirs.load_state_dict(weights, strict=False)
    theirs.tie_weights()
    theirs.eval()  # type: ignore[no-untyped-call]

    token_ids = [504, 3575, 282, 4649, 314]  # The capital of France is
    run = PagedRun(model)
    logits = run.step({0: token_ids})[0]
    with torch.inference_mode():
        torch.testing.assert_close(logits, theirs(torch.tensor([token_ids])).logits[0], atol=1e-3, rtol=0)
        expected = theirs.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
            max_new_tokens=16,
            min_new_tokens=16,
            do_sample=False,
            pad_token_id=2,
            eos_token_id=None,
        )[0, len(token_ids) :].tolist()
    greedy = [int(logits[-1].argmax())]
    while len(greedy) < 16:
        greedy.append(int(run.step({0: greedy[-1:]})[0][-1].argmax()))
    assert greedy == expected


class TestDummy:
    @staticmethod
    def layer(seed: int) -> torch.nn.Module:
        module = torch.nn.ModuleDict(
            {
                "post_norm": RMSNorm(512, eps=1e-5, dtype=torch.float32),
                "mlp": GatedMLP(64, 128, bias=True, dtype=torch.bfloat16),
            }
        )
        initialize_dummy(module, seed)
        return module

    def test_equal_seeds_give_equal_weights_and_others_do_not(self) -> None:
        first, second, other = self.layer(1), self.layer(1), self.layer(2)
        for a, b, c in zip(first.parameters(), second.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
            assert not torch.equal(a, c)

    def test_weights_are_small_and_norms_near_one(self) -> None:
        for name, parameter in self.layer(0).named_parameters():
            assert float(parameter.std()) == pytest.approx(0.02, rel=0.3)
            assert float(parameter.mean()) == pytest.approx(1.0 if "norm" in name else 0.0, abs=0.01)
