"""Rotary position embedding (RoPE) with the scalings that stretch it to longer contexts.

Reads the parameters in both of Hugging Face's spellings (`rope_theta` + `rope_scaling`, and
`rope_parameters`). Cosines and sines are computed in float32 once a step from the positions, so there is no
table and no longest position. Element i of a head is paired with element i + head_dim / 2.

Source: the scalings' formulas as in transformers `modeling_rope_utils.py`; YaRN: arXiv 2309.00071.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from asyncserve.errors import CheckpointError

ROPE_FACTORS_NAME = "rope_freqs.weight"
"""The tensor by which a GGUF file states a scaling: divisors of the unscaled frequencies."""


class Rotation(NamedTuple):
    """The rotation of each token of a step.

    Args:
        cos: `[num_tokens, 1, head_dim] float32`, contiguous.
        sin: `[num_tokens, 1, head_dim] float32`, contiguous, its first half negated.
    """

    cos: torch.Tensor
    sin: torch.Tensor


class Rotary(nn.Module):
    """Makes the step's rotation from its positions.

    Args:
        config: The checkpoint's configuration.
        head_dim: Elements per head, all of them rotated.

    Raises:
        CheckpointError: An unknown scaling, or one that lacks a value.
    """

    def __init__(self, config: Mapping[str, Any], *, head_dim: int) -> None:
        super().__init__()
        self._parameters_of_rope = read_rope_parameters(config)
        self._head_dim = head_dim
        frequencies, self._magnitude = rope_frequencies(self._parameters_of_rope, head_dim=head_dim)
        self._set(frequencies)
        self.kernel: Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]] | None
        self.kernel = None

    def _set(self, frequencies: torch.Tensor) -> None:
        # Not a buffer: it is computed, not loaded, and must survive the model's birth on the meta device.
        # The negated half makes sin(-a) = -sin(a) do the sign of the rotation.
        self.frequencies = torch.cat((-frequencies, frequencies))

    def take_factors(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass a checkpoint's tensors on, keeping a GGUF file's frequency factors for the rotation.

        Raises:
            CheckpointError: The factors do not fit the head.
        """
        for name, tensor in weights:
            if name != ROPE_FACTORS_NAME:
                yield name, tensor
                continue
            if tensor.shape != (self._head_dim // 2,):
                raise CheckpointError(
                    f"{name} has shape {tuple(tensor.shape)}, expected {(self._head_dim // 2,)}"
                )
            base = _unscaled(float(self._parameters_of_rope["rope_theta"]), self._head_dim)
            self._set(base / tensor.to(device="cpu", dtype=torch.float32))

    def finish_loading(self, device: torch.device, *, fused: bool = False) -> None:
        """Move to the model's device; there, take the kernel in place of torch's own ones."""
        self.frequencies = self.frequencies.to(device)
        if fused:
            from asyncserve.gpu.kernels import rotary as kernels

            self.kernel = kernels.make_rotation

    def forward(self, positions: torch.Tensor) -> Rotation:
        """`[num_tokens] int64` → the rotation of each token."""
        if self.kernel is not None:
            return Rotation(*self.kernel(positions, self.frequencies, self._magnitude))
        angles = (positions.float().unsqueeze(-1) * self.frequencies).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin_()
        if self._magnitude != 1.0:
            cos.mul_(self._magnitude)
            sin.mul_(self._magnitude)
        return Rotation(cos, sin)


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate every head of every token.

    Args:
        heads: `[num_tokens, any number of heads, head_dim]`; overwritten if it is float32.
        rotation: Of the step.

    Returns:
        The rotated heads, same shape and dtype.
    """
    x = heads.float()
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(rotation.cos).addcmul_(swapped, rotation.sin).to(heads.dtype)


def read_rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE parameters in the newer spelling, whichever the configuration uses.

    Returns:
        At least `rope_type`, `rope_theta` and `original_max_position_embeddings`.

    Raises:
        CheckpointError: One set per layer type, or only part of the head rotated.
    """
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(stated, Mapping):
        raise CheckpointError(f"the RoPE parameters are {stated!r}; they must be an object")
    parameters = dict(stated)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise CheckpointError("rope_parameters per layer type are not supported by this architecture")
    parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):
        if parameters.get(name) is None:
            value = config.get(name)
            parameters[name] = default if value is None else value
    if not isinstance(parameters["rope_theta"], int | float) or not parameters["rope_theta"] > 0:
        raise CheckpointError(f"rope_theta is {parameters['rope_theta']!r}; it must be a number above 0")
    if parameters["partial_rotary_factor"] != 1.0:
        raise CheckpointError("partial_rotary_factor other than 1 is not supported by this architecture")
    max_len = config.get("max_position_embeddings")
    original_len = config.get("original_max_position_embeddings")
    if original_len is not None:
        parameters["original_max_position_embeddings"] = original_len
    elif parameters.get("original_max_position_embeddings") is None:
        parameters["original_max_position_embeddings"] = max_len
    if parameters.get("factor") is None and parameters["rope_type"] == "yarn" and max_len is not None:
        parameters["factor"] = max_len / parameters["original_max_position_embeddings"]
    return parameters


def rope_of_layer_type(config: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """Return the configuration with the RoPE of one type of layer in place of all types'.

    Args:
        config: The checkpoint's, with `rope_parameters` for each type, or in the older spelling: `rope_theta`
            and `rope_scaling` are those of full attention, `rope_local_base_freq` is the local layers' base.
        layer_type: `full_attention` or `sliding_attention`.

    Raises:
        CheckpointError: The parameters are no objects.
    """
    parameters = config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"the RoPE parameters are {parameters!r}; they must be an object")
    is_full = layer_type == "full_attention"
    # What is stated once, for all types, is full attention's.
    of_type = parameters.get(layer_type, parameters if is_full and "rope_theta" in parameters else None) or {}
    if not isinstance(of_type, Mapping):
        raise CheckpointError(f"the RoPE parameters of {layer_type} are {of_type!r}; they must be an object")
    scaling = (config.get("rope_scaling") if is_full else None) or {}
    theta = config.get("rope_theta" if is_full else "rope_local_base_freq")
    return {**config, "rope_scaling": None, "rope_theta": theta, "rope_parameters": {**of_type, **scaling}}


def rope_frequencies(parameters: Mapping[str, Any], *, head_dim: int) -> tuple[torch.Tensor, float]:
    """Compute the angle per position of each pair of elements.

    Args:
        parameters: As `read_rope_parameters` returns them.
        head_dim: Elements per head; even.

    Returns:
        Frequencies `[head_dim / 2] float32` on the CPU, in radians per position, and a factor on cos and sin.

    Raises:
        CheckpointError: An unknown scaling, or one that lacks a value.
    """
    base = _unscaled(float(parameters["rope_theta"]), head_dim)
    rope_type = parameters["rope_type"]
    try:
        # Dynamic NTK changes the base only beyond the trained length, which is where serving ends.
        if rope_type in ("default", "dynamic"):
            return base, 1.0
        if rope_type == "linear":
            return base / float(parameters["factor"]), 1.0
        if rope_type == "llama3":
            return _llama3(base, parameters), 1.0
        if rope_type == "yarn":
            return _yarn(base, parameters, head_dim), _yarn_magnitude(parameters)
    except KeyError as error:
        raise CheckpointError(f"RoPE scaling {rope_type!r} lacks {error.args[0]!r}") from error
    raise CheckpointError(
        f"RoPE scaling {rope_type!r} is not supported; supported: default, dynamic, linear, llama3, yarn"
    )


def _unscaled(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / theta**exponents


def _llama3(base: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Divide long wavelengths by the factor, keep short ones, blend in between."""
    factor, low, high = (float(parameters[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    # Turns of each pair within the original context; low and high bound the blend.
    turns = float(parameters["original_max_position_embeddings"]) * base / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * base / factor + keep * base


def _yarn(base: torch.Tensor, parameters: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """Keep fast pairs, divide slow ones by the factor, with a linear ramp over the pairs in between."""
    original_len = float(parameters["original_max_position_embeddings"])
    theta = float(parameters["rope_theta"])

    def pair_with_turns(turns: float) -> float:
        return head_dim * math.log(original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_with_turns(float(parameters.get("beta_fast") or 32))
    last = pair_with_turns(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)
    slow = ramp.clamp(0, 1)
    return base / float(parameters["factor"]) * slow + base * (1 - slow)


def _yarn_magnitude(parameters: Mapping[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor = float(parameters["factor"])
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return magnitude(float(mscale)) / magnitude(float(mscale_all_dim))
    return magnitude(1.0)
