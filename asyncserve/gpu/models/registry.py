"""Which class serves which architecture: names as in a checkpoint's `architectures`.

Adding a model is a file here and a line in `MODELS`.
"""

import importlib

from asyncserve.errors import UnsupportedModel
from asyncserve.gpu.models.interface import Model

MODELS = {
    "LlamaForCausalLM": "asyncserve.gpu.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "asyncserve.gpu.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "asyncserve.gpu.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "asyncserve.gpu.models.qwen3:Qwen3ForCausalLM",
    "Gemma3ForCausalLM": "asyncserve.gpu.models.gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "asyncserve.gpu.models.gemma3:Gemma3ForCausalLM",
    "GptOssForCausalLM": "asyncserve.gpu.models.gpt_oss:GptOssForCausalLM",
}


def load_model_class(architecture: str) -> type[Model]:
    """Import the class of an architecture.

    Raises:
        UnsupportedModel: It is not in `MODELS`; lists those that are.
    """
    if architecture not in MODELS:
        raise UnsupportedModel(architecture, known=tuple(MODELS))
    module_name, _, class_name = MODELS[architecture].partition(":")
    model_class: type[Model] = getattr(importlib.import_module(module_name), class_name)
    return model_class
