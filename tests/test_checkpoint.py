import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncserve.checkpoint import CheckpointFormat, open_checkpoint
from asyncserve.errors import CheckpointError, ConfigError
from tests.fakes.demo_model import demo_model_path
from tests.fakes.gguf_files import write_gguf
from tests.fakes.hub_server import HubServer, serve_hub

_CONFIG = {"architectures": ["Qwen3ForCausalLM"], "rope_parameters": {"rope_theta": 1e6}}


def _folder(path: Path, **files: object) -> Path:
    """Write a model folder; names are given with `_` for `.` at the end only, contents as JSON or bytes."""
    for name, content in files.items():
        file = path / name.replace("__", ".")
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_a_folder_gives_its_configurations_as_they_stand(tmp_path: Path) -> None:
    generation = {"eos_token_id": [1, 2]}
    folder = _folder(tmp_path, config__json=_CONFIG, generation_config__json=generation, a__safetensors=b"x")
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config == _CONFIG
    assert checkpoint.generation_config == generation
    assert (checkpoint.format, checkpoint.path) == (CheckpointFormat.SAFETENSORS, folder)
    assert checkpoint.architecture == "Qwen3ForCausalLM"


def test_of_a_model_of_several_parts_the_language_models_configuration_is_taken(tmp_path: Path) -> None:
    parts = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {"model_type": "gemma3_text", "hidden_size": 32, "eos_token_id": None},
        "vision_config": {"hidden_size": 8},
    }
    checkpoint = open_checkpoint(str(_folder(tmp_path, config__json=parts, a__safetensors=b"x")))
    assert checkpoint.architecture == "Gemma3ForConditionalGeneration"
    config = checkpoint.config
    assert (config["model_type"], config["hidden_size"], config["eos_token_id"]) == (
        "gemma3_text",
        32,
        [1, 106],
    )


def test_generation_config_may_be_missing(tmp_path: Path) -> None:
    folder = _folder(tmp_path, config__json=_CONFIG, a__safetensors=b"x")
    assert open_checkpoint(str(folder)).generation_config == {}


def test_a_gguf_file_is_opened_as_one() -> None:
    checkpoint = open_checkpoint(str(demo_model_path()))
    assert checkpoint.format is CheckpointFormat.GGUF
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.generation_config == {"eos_token_id": [2]}


def test_a_folder_with_one_gguf_file_means_that_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(str(tmp_path))
    assert (checkpoint.path, checkpoint.format) == (file, CheckpointFormat.GGUF)


def test_of_several_gguf_files_one_must_be_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(str(tmp_path))


def test_a_part_of_a_split_gguf_file_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", metadata={"split.count": 3})
    with pytest.raises(CheckpointError, match="join the parts"):
        open_checkpoint(str(file))


def test_a_configuration_without_an_architecture_is_refused_when_it_is_needed(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(_folder(tmp_path, config__json={}, a__safetensors=b"x")))
    with pytest.raises(CheckpointError, match="names no architecture"):
        _ = checkpoint.architecture


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json"),
        ({"config__json": _CONFIG}, "no weights in safetensors format"),
        ({"config__json": _CONFIG, "pytorch_model__bin": b"x"}, r"\.bin"),
        ({"config__json": b"{", "a__safetensors": b"x"}, "not valid JSON"),
        ({"config__json": b"\xff\xfe", "a__safetensors": b"x"}, "not valid JSON"),
        ({"config__json": [1], "a__safetensors": b"x"}, "does not hold a JSON object"),
        (
            {"config__json": _CONFIG, "a__safetensors": b"version https://git-lfs.github.com/spec/v1\n"},
            "git lfs pull",
        ),
        (
            {
                "config__json": _CONFIG,
                "a__safetensors": b"x",
                "model.safetensors.index__json": {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}},
            },
            r"lacks 1 of its 2 weight files, such as b\.safetensors",
        ),
    ],
)
def test_an_incomplete_folder_is_refused_with_the_reason(
    tmp_path: Path, files: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(_folder(tmp_path, **files)))


def test_without_need_of_weights_a_configuration_is_enough(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(_folder(tmp_path, config__json=_CONFIG)), needs_weights=False)
    assert checkpoint.config == _CONFIG


def test_without_need_of_weights_a_tokenizer_is_enough(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(_folder(tmp_path, tokenizer__json={})), needs_weights=False)
    assert checkpoint.config == {}


@pytest.mark.parametrize("name", ["/no/such/folder", "./model", "~/nothing-here", "a/b/c", "model.gguf"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_checkpoint(name)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    files = {
        "config.json": json.dumps(_CONFIG).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": b"weights",
        "consolidated.safetensors": b"the same in another form",
        "onnx/config.json": b"{}",
        "pytorch_model.bin": b"the same in another form",
        "README.md": b"text",
    }
    with serve_hub("org/name", files) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield server


@pytest.mark.slow
def test_of_a_hub_repository_only_what_is_needed_is_downloaded(hub: HubServer, tmp_path: Path) -> None:
    checkpoint = open_checkpoint("org/name", download_dir=str(tmp_path))
    assert checkpoint.config == _CONFIG
    assert checkpoint.name == "org/name"
    assert sorted(hub.downloaded) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (checkpoint.path / "model.safetensors").read_bytes() == b"weights"


def test_without_need_of_weights_none_are_downloaded(hub: HubServer, tmp_path: Path) -> None:
    open_checkpoint("org/name", download_dir=str(tmp_path), needs_weights=False)
    assert sorted(hub.downloaded) == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("org/unknown", None, "the hub does not know it.*HF_TOKEN"),
        ("org/gated", None, "accept its terms.*HF_TOKEN"),
        ("org/name", "nowhere", "no revision 'nowhere'"),
        ("not a name!", None, "neither a folder"),
    ],
)
def test_what_the_hub_refuses_is_told_apart(
    hub: HubServer, tmp_path: Path, name: str, revision: str | None, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(name, revision=revision, download_dir=str(tmp_path))


def test_an_unreachable_hub_says_what_can_be_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        port = closed.getsockname()[1]
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with pytest.raises(CheckpointError) as raised:
            open_checkpoint("org/name", download_dir=str(tmp_path))
    for hint in ("org/name", "cannot be reached", "pass the folder", "HF_ENDPOINT", "HF_HOME", "refused"):
        assert hint in str(raised.value)


def test_offline_mode_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE=1 forbids downloads"):
        open_checkpoint("org/name", download_dir=str(tmp_path))


@pytest.mark.parametrize("model", ["~no-such-user-at-all/model", "x" * 5000])
def test_a_path_that_cannot_be_looked_up_is_one_message(model: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be looked up"):
        open_checkpoint(model)


@pytest.mark.parametrize("weight_map", [None, [1], {"a": 1}, "x"])
def test_an_index_that_names_no_files_is_refused(tmp_path: Path, weight_map: object) -> None:
    folder = _folder(tmp_path, config__json=_CONFIG, a__safetensors=b"x")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index\.json names no file"):
        open_checkpoint(str(folder))


def test_one_architecture_may_stand_without_a_list(tmp_path: Path) -> None:
    config = {**_CONFIG, "architectures": "LlamaForCausalLM"}
    folder = _folder(tmp_path, config__json=config, a__safetensors=b"x")
    assert open_checkpoint(str(folder)).architecture == "LlamaForCausalLM"
