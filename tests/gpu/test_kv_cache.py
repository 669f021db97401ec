import pytest
import torch

from asyncserve.errors import InvariantError
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.kv_spec import FullAttention, KVGroup, RecurrentState, pool_bytes_per_block

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


def test_copied_blocks_take_the_place_of_others_in_every_layer_and_may_swap() -> None:
    cache = KVCache([group(0, (0, 1)), group(1, (2,))], device=torch.device("cpu"))
    for layer in (*cache.keys, *cache.values):
        layer.copy_(torch.arange(layer.shape[0])[:, None, None, None].expand(layer.shape))
    cache.copy_blocks(torch.tensor([1, 2, 1]), torch.tensor([2, 1, 3]))
    for layer in (*cache.keys, *cache.values):
        held = layer.float().flatten(1)
        assert (held == held[:, :1]).all()
        num_blocks = layer.shape[0]
        assert held[:, 0].tolist() == [0, 2, 1, 1, *range(4, num_blocks)]


def test_zeroing_blocks_spares_the_others() -> None:
    cache = KVCache([group(0, (0, 2)), group(1, (1,))], device=CPU)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))
    cache.zero_blocks(torch.tensor([3, 1]))
    for tensor in (*cache.keys, *cache.values):
        assert tensor.isnan().flatten(1).all(1).tolist() == [True, False, True, False, True]
        assert not tensor[[1, 3]].any()
