import pytest
import torch

from asyncserve.gpu.kv_cache import KVCache, token_rows
from asyncserve.gpu.kv_scales import KVScales
from asyncserve.kv_spec import DTYPE_BYTES, FullAttention, KVGroup

CPU = torch.device("cpu")


def group(group_id: int, layer_ids: tuple[int, ...], **spec: object) -> KVGroup:
    fields = {"block_len": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32", **spec}
    return KVGroup(group_id=group_id, spec=FullAttention(**fields), layer_ids=layer_ids, num_blocks=5)  # type: ignore[arg-type]


def test_layers_of_each_group_get_tensors_of_their_own_shape() -> None:
    cache = KVCache([group(0, (0, 2)), group(1, (1,), num_kv_heads=3, dtype="bfloat16")], device=CPU)
    assert cache.group_of_layer == [0, 1, 0]
    assert [tuple(key.shape) for key in cache.keys] == [(5, 2, 4, 8), (5, 3, 4, 8), (5, 2, 4, 8)]
    assert [value.dtype for value in cache.values] == [torch.float32, torch.bfloat16, torch.float32]
    pointers = {tensor.data_ptr() for tensor in (*cache.keys, *cache.values)}
    assert len(pointers) == 6
    for tensor in (*cache.keys, *cache.values):
        assert tensor.is_contiguous()
        assert not tensor.any()


def test_size_is_what_the_spec_says() -> None:
    groups = [group(0, (0, 2)), group(1, (1,), num_kv_heads=3, dtype="bfloat16")]
    cache = KVCache(groups, device=CPU)
    num_bytes = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert num_bytes == 5 * sum(group.bytes_per_block for group in groups)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bits_hold_what_is_in_their_range_and_their_largest_for_what_is_beyond(dtype: str) -> None:
    cache = KVCache([group(0, (0,), dtype=dtype)], device=CPU)
    largest = torch.finfo(cache.keys[0].dtype).max
    k = torch.tensor([0.0, -0.0, 1.5, largest, 2 * largest, -1e30, torch.inf, torch.nan]).expand(1, 2, 8)
    held, _ = cache.write(0, token_rows(torch.tensor([6]), cache.groups[0].spec), k, -k)
    expected = torch.tensor([0.0, -0.0, 1.5, largest, largest, -largest, largest, torch.nan])
    for found, sign in ((held[0], 1), (cache.keys[0][1, :, 2], 1), (cache.values[0][1, :, 2], -1)):
        torch.testing.assert_close(
            found.float(), sign * expected.expand(2, 8), rtol=0, atol=0, equal_nan=True
        )
    assert held[0, 0, 1].float().signbit()
    assert int((cache.keys[0].view(torch.uint8) != 0).any(-1).sum()) == 2


def test_scales_are_divided_by_and_what_is_held_stays_as_it_is() -> None:
    scales = {1: KVScales(torch.tensor([0.1, 3.0]), torch.tensor([0.7, 1.0]))}
    cache = KVCache([group(0, (0, 1), dtype="float8_e4m3fn")], device=CPU, scales=scales)
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8).bfloat16()
    plain, scaled = cache.held(0, k, v), cache.held(1, k, v)
    assert torch.equal(plain[0].float(), k.to(torch.float8_e4m3fn).float())
    for held, given, scale in zip(scaled, (k, v), scales[1], strict=True):
        restored = held.float() * scale[:, None]
        assert not torch.equal(held.float(), given.to(held.dtype).float())
        torch.testing.assert_close(restored, given.float(), rtol=2**-4, atol=float(scale.max()) * 2**-10)
    again = cache.held(1, *scaled)
    assert again[0] is scaled[0]
    assert again[1] is scaled[1]


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_zeroing_blocks_spares_the_others_and_other_groups(dtype: str) -> None:
    cache = KVCache([group(0, (0, 2), dtype=dtype), group(1, (1,))], device=CPU)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))
    cache.zero_blocks(0, torch.tensor([3, 1]))
    for layer_id in (0, 2):
        for tensor in (cache.keys[layer_id], cache.values[layer_id]):
            assert tensor.isnan().flatten(1).all(1).tolist() == [True, False, True, False, True]
            assert not tensor[[1, 3]].any()
    assert cache.keys[1].isnan().all()
