"""Both ends of a language model: token ids to hidden states, hidden states to logits.

The two may share one matrix (tied). The look-up needs it plain and the product wants it packed, so on a CPU
a tied model keeps a second, packed copy.
"""

import torch
import torch.nn.functional as F
from torch import nn

from asyncserve.gpu.layers.linear import SmallProduct, pack_weight, packed_linear


class Embedding(nn.Module):
    """The vector of each token id.

    Args:
        vocab_size: Rows of the table.
        hidden_size: Elements of a vector.
        dtype: Of the table.
        scale: Factor on the vectors, which the table does not hold; rounded to its dtype.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = float(torch.tensor(scale, dtype=dtype, device="cpu"))
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[num_tokens] int32` → a new tensor `[num_tokens, hidden_size]`."""
        vectors = F.embedding(token_ids, self.weight)
        return vectors if self.scale == 1.0 else vectors.mul_(self.scale)


class OutputHead(nn.Module):
    """The product of hidden states with the vector of every token.

    Args:
        vocab_size: Rows of the matrix.
        hidden_size: Its columns.
        dtype: Of the matrix.
        tied_to: The embedding whose table is the matrix; None if the head has its own.
        softcap: A logit x becomes `softcap * tanh(x / softcap)`; None leaves it.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        tied_to: Embedding | None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.tied_to = tied_to
        self.softcap = softcap
        self.weight: nn.Parameter | None = None
        if tied_to is None:
            self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype), requires_grad=False)
        self.packed: torch.Tensor | None = None
        self.kernel: SmallProduct | None = None

    def finish_loading(self, *, fused: bool = False) -> None:
        """Take the kernel, or pack the matrix where that is possible; one that is the head's own is freed."""
        if fused:
            self.kernel = SmallProduct(self._matrix().data, None)
            return
        self.packed = pack_weight(self._matrix())
        if self.packed is not None:
            self.weight = None

    def forward(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply rows of hidden states.

        Args:
            hidden: `[rows, hidden_size]`.
            out: `[rows, vocab_size]`, gets the result; None: a new tensor does.

        Returns:
            `[rows, vocab_size]`, in the dtype of `hidden`.
        """
        logits = self._multiply(hidden, out)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def _multiply(self, hidden: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        # For several tokens cuBLAS is quicker here: the matrix is far larger than what it needs to start.
        if self.kernel is not None and hidden.shape[0] == 1:
            return self.kernel.run(hidden, out=out)
        if self.packed is not None:
            logits = packed_linear(hidden, self.packed, None)
            return logits if out is None else out.copy_(logits)
        if out is None:
            return F.linear(hidden, self._matrix())
        return torch.mm(hidden, self._matrix().t(), out=out)

    def _matrix(self) -> torch.Tensor:
        if self.tied_to is not None:
            return self.tied_to.weight
        assert self.weight is not None
        return self.weight
