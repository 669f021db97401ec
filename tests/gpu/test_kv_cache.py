import pytest
import torch

from asyncserve.errors import InvariantError
from asyncserve.gpu.kv_cache import KVCache, token_rows
from asyncserve.gpu.kv_scales import KVScales
from asyncserve.kv_spec import (
    DTYPE_BYTES,
    FullAttention,
    KVGroup,
    RecurrentState,
    pool_bytes_per_block,
)

CPU = torch.device("cpu")


def group(group_id: int, layer_ids: tuple[int, ...], **spec: object) -> KVGroup:
    fields = {"block_len": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32", **spec}
    return KVGroup(group_id=group_id, spec=FullAttention(**fields), layer_ids=layer_ids, num_blocks=5)  # type: ignore[arg-type]


def test_layers_of_each_group_get_tensors_of_their_own_shape() -> None:
    groups = [group(0, (0, 2)), group(1, (1,), num_kv_heads=1, block_len=16, dtype="bfloat16")]
    cache = KVCache(groups, device=CPU)
    assert cache.group_of_layer == [0, 1, 0]
    assert [tuple(key.shape) for key in cache.keys] == [(5, 2, 4, 8), (5, 1, 16, 8), (5, 2, 4, 8)]
    assert [value.dtype for value in cache.values] == [torch.float32, torch.bfloat16, torch.float32]
    for tensor in (*cache.keys, *cache.values):
        assert tensor.is_contiguous()
        assert not tensor.any()


def test_the_first_layers_of_all_groups_share_a_storage_and_a_block_its_page() -> None:
    groups = [group(0, (0, 2)), group(1, (1,), num_kv_heads=1, block_len=16, dtype="bfloat16")]
    cache = KVCache(groups, device=CPU)
    for first, second in ((cache.keys[0], cache.keys[1]), (cache.values[0], cache.values[1])):
        assert first.nbytes == second.nbytes
        assert [page.data_ptr() for page in first] == [page.data_ptr() for page in second]
    pointers = {tensor.data_ptr() for tensor in (*cache.keys, *cache.values)}
    assert len(pointers) == 4


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


def test_size_is_a_page_for_each_layer_of_the_largest_group() -> None:
    groups = [group(0, (0, 2)), group(1, (1,), num_kv_heads=4)]
    with pytest.raises(InvariantError, match="share no storages"):
        KVCache(groups, device=CPU)
    groups = [group(0, (0, 2)), group(1, (1,), num_kv_heads=4, head_dim=4)]
    cache = KVCache(groups, device=CPU)
    num_bytes = sum(cache.keys[layer_id].nbytes + cache.values[layer_id].nbytes for layer_id in (0, 2))
    assert num_bytes == 5 * groups[0].bytes_per_block == 5 * pool_bytes_per_block(groups)


def test_a_layer_that_keeps_a_state_has_the_bytes_of_its_pages() -> None:
    state = RecurrentState(state_bytes=700, page_bytes=512)
    groups = [group(0, (0,)), KVGroup(group_id=1, spec=state, layer_ids=(1,), num_blocks=5)]
    cache = KVCache(groups, device=CPU)
    assert cache.keys[1].shape == cache.values[1].shape == (5, 256)
    assert cache.keys[1].dtype == torch.uint8
    assert state.blocks_for(1) == state.blocks_for(10**6) == 2


@pytest.mark.parametrize("head_dim", [8, 3])
def test_copied_blocks_take_the_place_of_others_in_every_layer_and_may_swap(head_dim: int) -> None:
    groups = [group(0, (0, 1), head_dim=head_dim), group(1, (2,), head_dim=head_dim)]
    cache = KVCache(groups, device=torch.device("cpu"))
    for layer in (*cache.keys, *cache.values):
        layer.copy_(torch.arange(layer.shape[0])[:, None, None, None].expand(layer.shape))
    cache.copy_blocks(torch.tensor([1, 2, 1]), torch.tensor([2, 1, 3]))
    for layer in (*cache.keys, *cache.values):
        held = layer.float().flatten(1)
        assert (held == held[:, :1]).all()
        num_blocks = layer.shape[0]
        assert held[:, 0].tolist() == [0, 2, 1, 1, *range(4, num_blocks)]


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_zeroing_blocks_spares_the_others(dtype: str) -> None:
    cache = KVCache([group(0, (0, 2), dtype=dtype), group(1, (1,), dtype=dtype)], device=CPU)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))
    cache.zero_blocks(torch.tensor([3, 1]))
    for tensor in (*cache.keys, *cache.values):
        assert tensor.isnan().flatten(1).all(1).tolist() == [True, False, True, False, True]
        assert not tensor[[1, 3]].any()
