"""The demo model's tokenizer as the folder that clients want: they count tokens by themselves."""

import json
from pathlib import Path

from asyncserve.gguf_file import read_gguf_header
from asyncserve.loop.gguf_tokenizer import build_gguf_tokenizer


def write_tokenizer_folder(model: Path, folder: Path) -> None:
    """Write what `AutoTokenizer.from_pretrained` reads of a GGUF file's tokenizer."""
    metadata = read_gguf_header(model).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    build_gguf_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    special = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "eos"), ("unk", "unknown"))
    }
    config = {
        # Not the class of the model's hub: with it, transformers 5 rebuilds the tokenizer, and differently.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": metadata["tokenizer.chat_template"],
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model_config = {"model_type": "llama", "vocab_size": len(tokens), "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(model_config))
