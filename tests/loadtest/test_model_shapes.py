from pathlib import Path

import pytest

from asyncserve.checkpoint import open_checkpoint
from asyncserve.gpu.models.registry import load_model_class
from loadtest.gpu.aims import AIMS, OTHERS
from loadtest.model_shapes import known_shapes
from tests.loadtest.gpu.extents import tiny_shape


def test_the_bytes_of_a_step_are_those_of_the_models() -> None:
    qwen, llama = known_shapes(["qwen3-0.6b", "llama-3.1-8b"])
    # Linear weights, in millions, and output matrix, as the models' authors have them.
    assert qwen.linear_params == pytest.approx(440.4e6, rel=1e-3)
    assert llama.linear_params == pytest.approx(6_979e6, rel=1e-3)
    assert (qwen.weight_bytes, llama.weight_bytes) == (1_191_968_768, 15_009_316_864)
    assert (qwen.kv_bytes_per_token(), llama.kv_bytes_per_token()) == (114_688, 131_072)
    assert qwen.kv_bytes_per_token(1) == 57_344
    assert qwen.step_bytes(8, 1000, bytes_per_kv_value=1) == qwen.weight_bytes + 8 * 1000 * 57_344
    assert qwen.step_bytes(8, 1000) == qwen.weight_bytes + 8 * 1000 * 114_688


def test_every_shape_is_a_model_that_is_served_and_has_aims() -> None:
    shapes = known_shapes()
    assert {shape.name for shape in shapes} == AIMS.keys() == OTHERS.keys()
    for shape in shapes:
        checkpoint = open_checkpoint(str(shape.folder), needs_weights=False)
        assert load_model_class(checkpoint.architecture)


def test_a_folder_is_a_shape_too_and_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    (shape,) = known_shapes([str(tiny_shape(tmp_path / "tiny").folder)])
    assert (shape.name, shape.num_layers, shape.vocab_size) == ("tiny", 2, 320)
    with pytest.raises(ValueError, match=r"no shape 'x'; there are .*llama-3\.1-8b"):
        known_shapes(["x"])
