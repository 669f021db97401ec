import numpy as np
import torch

from asyncserve.gpu.sampling.gumbel import seed_keys
from asyncserve.gpu.sampling.slot_values import SlotValues
from asyncserve.request import SamplingParams
from tests.gpu.sampling.rows import CPU


def test_what_was_set_is_what_kernels_read() -> None:
    values = SlotValues(5, CPU)
    values.set(1, SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125), seed=-3)
    values.set(4, SamplingParams(temperature=2.0), seed=2**64 + 9)
    values.upload()
    on_device = values.on_device
    assert on_device.inv_temperature.tolist() == [0.0, 2.0, 0.0, 0.0, 0.5]
    assert on_device.top_k[[1, 4]].tolist() == [7, 2**31 - 1]
    assert on_device.top_p[1] == 0.25
    assert on_device.top_p[4] >= 1.0
    assert on_device.min_p[[1, 4]].tolist() == [0.125, 0.0]
    expected = seed_keys(np.array([2**64 - 3, 9], np.uint64))
    assert on_device.seed_keys[[1, 4]].tolist() == expected.tolist()


def test_a_greedy_sequence_leaves_nothing_of_the_one_before() -> None:
    values = SlotValues(2, CPU)
    values.set(1, SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125), seed=1)
    assert values.shapes.truncates(1)
    values.set(1, SamplingParams(temperature=0.0), seed=1)
    assert not values.shapes.truncates(1)
    assert values.on_device.inv_temperature[1] == 0.0


def test_every_rule_alone_truncates() -> None:
    values = SlotValues(1, CPU)
    for rule, truncates in (
        ({}, False),
        ({"top_k": 3}, True),
        ({"top_p": 0.5}, True),
        ({"min_p": 0.1}, True),
    ):
        values.set(0, SamplingParams(temperature=1.0, **rule), seed=0)
        assert values.shapes.truncates(0) == truncates
        assert torch.equal(values.on_device.inv_temperature, torch.ones(1))
