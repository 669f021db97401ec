import pytest
import torch

from asyncserve.errors import ConfigError
from asyncserve.gpu.attention.registry import BACKENDS, load_attention
from asyncserve.kv_spec import FullAttention, KVGroup

GROUP = KVGroup(
    group_id=0,
    spec=FullAttention(block_len=16, num_kv_heads=1, head_dim=8, dtype="float32"),
    layer_ids=(0,),
    num_blocks=2,
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_every_listed_backend_loads_under_its_own_name(name: str) -> None:
    assert load_attention(name, [GROUP], CPU).name == name


def test_auto_on_a_cpu_is_the_backend_for_cpus() -> None:
    assert load_attention("auto", [GROUP], CPU).name == "cpu"


def test_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'flash'.*auto, cpu, reference"):
        load_attention("flash", [GROUP], CPU)
