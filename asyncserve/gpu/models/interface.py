"""The seam of models: what an architecture must provide to be served.

A model reads like its paper: it is built from the checkpoint's configuration (in Hugging Face's spelling),
uses `layers/` and calls attention through the step it is given. It knows no request, slot or plan.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from asyncserve.gpu.attention.interface import StepAttention
from asyncserve.gpu.batch import Batch
from asyncserve.kv_spec import KVSpec


class Model(Protocol):
    """A causal language model. Also an `nn.Module`, built on the meta device and filled by `load_weights`."""

    vocab_size: int

    @staticmethod
    def context_len(config: Mapping[str, Any]) -> int:
        """Return the longest sequence the model is meant for, RoPE scaling included.

        Args:
            config: As given to the class.

        Raises:
            CheckpointError: It states no possible length.
        """

    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype) -> None:
        """Build the modules.

        Args:
            config: The checkpoint's `config.json` (a GGUF file's metadata is translated to it).
            dtype: Of the weights and activations.

        Raises:
            CheckpointError: The configuration lacks or contradicts something.
        """

    def kv_specs(self, *, block_len: int, dtype: str) -> tuple[KVSpec, ...]:
        """Return what each layer keeps, by layer index."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter from (checkpoint name, tensor) pairs, in any order.

        Raises:
            CheckpointError: A tensor is missing, unknown or of the wrong shape; names it.
        """

    def finish_loading(self) -> None:
        """Prepare what follows from the weights (packed copies, tables); once, after they are in.

        Must be called before `forward`. Parameters may be gone afterwards, replaced by their packed form.
        """

    def forward(self, batch: Batch, attention: StepAttention) -> torch.Tensor:
        """Run all layers.

        Returns:
            Hidden states after the final norm, `[num_tokens, hidden]`.
        """

    def logits(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the output matrix to rows of hidden states.

        Args:
            hidden: `[rows, hidden]`.
            out: `[rows, vocab]`, gets the result; None: a new tensor does.

        Returns:
            `[rows, vocab]`, in the dtype of `hidden`.
        """
