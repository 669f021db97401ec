import pytest
import torch

from asyncserve.errors import UnsupportedModel
from asyncserve.gpu.models.registry import MODELS, load_model_class


@pytest.mark.parametrize("architecture", MODELS)
def test_every_listed_architecture_has_a_module_with_the_model_methods(architecture: str) -> None:
    model_class = load_model_class(architecture)
    assert issubclass(model_class, torch.nn.Module)
    for method in ("kv_specs", "load_weights", "finish_loading", "forward", "logits"):
        assert method in vars(model_class)


def test_an_unknown_architecture_is_refused_with_the_known_ones_listed() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load_model_class("GPT9ForCausalLM")
    assert caught.value.architecture == "GPT9ForCausalLM"
    for architecture in MODELS:
        assert architecture in str(caught.value)
