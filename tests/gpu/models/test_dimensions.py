"""Configurations that leave things out, and ones that cannot be."""

from typing import Any

import pytest

from asyncserve.errors import CheckpointError
from asyncserve.gpu.models.dimensions import layer_windows, read_dimensions

CONFIG: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_what_is_left_out_has_the_usual_values() -> None:
    sizes = read_dimensions(CONFIG)
    assert (sizes.num_kv_heads, sizes.head_dim, sizes.norm_eps, sizes.tied) == (4, 8, 1e-6, False)


def test_null_means_left_out() -> None:
    sizes = read_dimensions({**CONFIG, "num_key_value_heads": None, "head_dim": None})
    assert (sizes.num_kv_heads, sizes.head_dim) == (4, 8)


def test_an_architecture_gives_its_own_defaults() -> None:
    sizes = read_dimensions(CONFIG, head_dim=128, num_kv_heads=2)
    assert (sizes.num_kv_heads, sizes.head_dim) == (2, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_key_value_heads": [4, 2]}, r"num_key_value_heads is \[4, 2\]"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 5}, "hidden_size 32 is not a multiple of num_attention_heads 5"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_an_impossible_size_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_dimensions({**CONFIG, **change})


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, (None, None, None)),
        ({"sliding_window": 8}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, (None, None, 8)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows_stand_where_the_configuration_puts_them(
    config: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert layer_windows(config, num_layers=3) == windows


@pytest.mark.parametrize(
    ("layer_types", "message"),
    [
        (["full_attention"], "names 1 layers of 2"),
        (["full_attention", "linear_attention"], "'linear_attention' is not supported"),
        (["full_attention", "sliding_attention"], "no sliding window in use"),
    ],
)
def test_wrong_layer_types_are_refused(layer_types: list[str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        layer_windows({"layer_types": layer_types}, num_layers=2)
