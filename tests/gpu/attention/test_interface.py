"""What `StepAttention` does before it calls a backend: who writes the cache, and what the backend gets."""

from typing import Any

import torch

from asyncserve.gpu.attention.interface import AttentionLayer, StepAttention
from asyncserve.gpu.batch import Batch
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.gpu.kv_scales import KVScales
from asyncserve.kv_spec import FullAttention, KVGroup, KVSpec

CPU = torch.device("cpu")
SLOTS = torch.tensor([9, 4])


class Recorder:
    """A backend that keeps the k and v it is given and what the cache held then."""

    name = "recorder"
    reads_unwritten = False

    def __init__(self, *, takes_scales: bool = False) -> None:
        self.takes_scales = takes_scales
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def supports(self, spec: KVSpec, device: torch.device) -> str | None:
        return None

    def plan(self, batch: Batch, kv_cache: KVCache) -> object:
        return "planned"

    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        kv_cache: KVCache,
        planned: object,
    ) -> torch.Tensor:
        assert planned == "planned"
        self.calls.append((k, v, kv_cache.keys[layer.layer_id].clone()))
        return q.flatten(1)


def step(backend: Recorder, *, dtype: str = "float16", scales: KVScales | None = None) -> StepAttention:
    spec = FullAttention(block_len=4, num_kv_heads=2, head_dim=3, dtype=dtype)
    groups = [
        KVGroup(group_id=group_id, spec=spec, layer_ids=layer_ids, num_blocks=4)
        for group_id, layer_ids in enumerate([(0, 2), (1,)])
    ]
    fields: dict[str, Any] = dict.fromkeys(Batch.__dataclass_fields__)
    batch = Batch(**fields | {"slot_mapping": (torch.tensor([12, 13]), SLOTS)})
    cache = KVCache(groups, device=CPU, scales={1: scales} if scales else None)
    return StepAttention(backend, batch, cache, "planned")


def heads() -> tuple[AttentionLayer, torch.Tensor, torch.Tensor, torch.Tensor]:
    layer = AttentionLayer(layer_id=1, num_heads=4, num_kv_heads=2, head_dim=3, scale=1.0)
    return layer, torch.randn(2, 4, 3), torch.randn(2, 2, 3), torch.randn(2, 2, 3)


def test_run_writes_the_layers_slots_before_the_backend_attends() -> None:
    backend = Recorder()
    attention = step(backend)
    layer, q, k, v = heads()
    for _ in range(2):
        assert torch.equal(attention.run(layer, q, k, v), q.flatten(1))
    for given_k, given_v, keys in backend.calls:
        assert torch.equal(given_k, k.half())
        assert torch.equal(given_v, v.half())
        assert torch.equal(keys[2, :, 1], k[0].half())
        assert torch.equal(keys[1, :, 0], k[1].half())
    assert torch.equal(attention.kv_cache.values[1][2, :, 1], v[0].half())
    assert not attention.kv_cache.keys[2].any(), "nothing else shares its storage"


def test_attend_leaves_the_cache_to_the_layer_and_gives_the_backend_its_dtype() -> None:
    backend = Recorder()
    attention = step(backend)
    layer, q, k, v = heads()
    attention.attend(layer, q, k, v)
    ((given_k, given_v, keys),) = backend.calls
    assert torch.equal(given_k, k.half())
    assert torch.equal(given_v, v.half())
    assert not keys.any()


def test_a_layer_that_writes_itself_is_shown_its_own_cache_and_slots() -> None:
    attention = step(Recorder())
    layer, *_ = heads()
    place = attention.cache_of(layer)
    assert place.keys is attention.kv_cache.keys[1]
    assert place.values is attention.kv_cache.values[1]
    assert place.slot_mapping is SLOTS
    assert place.scales is None


SCALES = KVScales(torch.tensor([0.5, 2.0]), torch.tensor([0.25, 4.0]))


def test_around_a_backend_without_scales_those_of_k_are_taken_into_q_and_those_of_v_into_the_output() -> None:
    backend = Recorder()
    attention = step(backend, dtype="float8_e5m2", scales=SCALES)
    layer, q, k, v = heads()
    out = attention.run(layer, q, k, v)
    # The recorder gives back the queries that it gets.
    by_head = torch.tensor([0.5 * 0.25] * 2 + [2.0 * 4.0] * 2)
    assert torch.equal(out, (q * by_head[:, None]).flatten(1))
    ((given_k, given_v, keys),) = backend.calls
    assert torch.equal(given_k.float(), (k / SCALES.k[:, None]).to(torch.float8_e5m2).float())
    assert torch.equal(given_v.float(), (v / SCALES.v[:, None]).to(torch.float8_e5m2).float())
    assert torch.equal(keys[2, :, 1].float(), given_k[0].float())
    backend.calls.clear()
    assert torch.equal(attention.attend(layer, q, k, v), out)
    assert torch.equal(backend.calls[0][0].float(), given_k.float())


def test_a_backend_that_takes_scales_gets_everything_as_it_is() -> None:
    backend = Recorder(takes_scales=True)
    attention = step(backend, dtype="float8_e4m3fn", scales=SCALES)
    layer, q, k, v = heads()
    assert torch.equal(attention.attend(layer, q, k, v), q.flatten(1))
    assert backend.calls[0][0] is k
    assert attention.cache_of(layer).scales is attention.kv_cache.scales[1]
