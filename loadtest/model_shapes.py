"""Sizes of a model, and the bytes one decode step cannot avoid to read.

Takes a folder with a `config.json` (`loadtest/shapes/` has some), gives a `Shape`. Counts matrices only:
norms and biases are less than a thousandth of them. Knows no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncserve.checkpoint import read_json

SHAPES = Path(__file__).parent / "shapes"
BYTES_PER_VALUE = 2
"""Of weights, and of the KV cache unless told: bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model.

    Args:
        name: Its folder's name.
        folder: Holds `config.json`.
        hidden_size: Width of the activations.
        intermediate_size: Width inside the feed-forward network.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Heads of K, and of V.
        head_dim: Width of a head.
        has_qk_norm: Whether each head of q and of k is normalized.
        vocab_size: Rows of the output matrix.
    """

    name: str
    folder: Path
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qk_norm: bool
    vocab_size: int

    @staticmethod
    def read(folder: Path) -> "Shape":
        """Read the sizes from a folder's `config.json`.

        Raises:
            CheckpointError: It is missing or damaged.
        """
        config = read_json(folder / "config.json")
        return Shape(
            name=folder.name,
            folder=folder,
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            has_qk_norm=config["model_type"] in ("qwen3", "gemma3_text"),  # no field says so
            vocab_size=config["vocab_size"],
        )

    @property
    def linear_params(self) -> int:
        """Weights of the layers' matrices, all layers together."""
        heads = self.num_heads * self.head_dim
        kv_heads = 2 * self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (heads + kv_heads) + heads * self.hidden_size
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that every step reads: the layers' and the output matrix, no embedding."""
        return BYTES_PER_VALUE * (self.linear_params + self.hidden_size * self.vocab_size)

    def kv_bytes_per_token(self, bytes_per_value: int = BYTES_PER_VALUE) -> int:
        """Bytes of K and V that one position takes, all layers together."""
        return 2 * bytes_per_value * self.num_layers * self.num_kv_heads * self.head_dim

    def step_bytes(
        self, batch: int, context_len: float, *, bytes_per_kv_value: int = BYTES_PER_VALUE
    ) -> float:
        """Return the bytes that a decode step must read: weights once, K and V of every row once.

        Args:
            batch: Rows.
            context_len: Mean positions a row attends to.
            bytes_per_kv_value: Of the KV cache.
        """
        return self.weight_bytes + batch * context_len * self.kv_bytes_per_token(bytes_per_kv_value)


def known_shapes(names: Sequence[str] = ()) -> list[Shape]:
    """Read the shapes of these names (folders are taken, too), or all of `loadtest/shapes`.

    Raises:
        ValueError: There is none of a name.
    """
    known = {path.parent.name: path.parent for path in sorted(SHAPES.glob("*/config.json"), reverse=True)}
    folders = []
    for name in names or known:
        folder = known.get(name, Path(name))
        if not (folder / "config.json").is_file():
            raise ValueError(f"no shape {name!r}; there are {', '.join(known)}")
        folders.append(folder)
    return [Shape.read(folder) for folder in folders]
