import torch

from asyncserve.gpu.kv_cache import KVCache
from asyncserve.kv_spec import FullAttention, KVGroup

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


def test_copied_blocks_take_the_place_of_others_in_every_layer_and_may_swap() -> None:
    cache = KVCache([group(0, (0, 1)), group(1, (2,), dtype="bfloat16")], device=torch.device("cpu"))
    for layer in (*cache.keys, *cache.values):
        layer.copy_(torch.arange(layer.shape[0])[:, None, None, None].expand(layer.shape))
    cache.copy_blocks(torch.tensor([1, 2, 1]), torch.tensor([2, 1, 3]))
    for layer in (*cache.keys, *cache.values):
        held = layer.float().flatten(1)
        assert (held == held[:, :1]).all()
        num_blocks = layer.shape[0]
        assert held[:, 0].tolist() == [0, 2, 1, 1, *range(4, num_blocks)]


def test_zeroing_blocks_spares_the_others_and_other_groups() -> None:
    cache = KVCache([group(0, (0, 2)), group(1, (1,))], device=CPU)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))
    cache.zero_blocks(0, torch.tensor([3, 1]))
    for layer_id in (0, 2):
        for tensor in (cache.keys[layer_id], cache.values[layer_id]):
            assert tensor.isnan().flatten(1).all(1).tolist() == [True, False, True, False, True]
            assert not tensor[[1, 3]].any()
    assert cache.keys[1].isnan().all()
