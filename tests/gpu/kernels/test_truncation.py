import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch

from asyncserve.gpu.sampling.truncation import RowShapes, largest_values, truncate
from tests.gpu.kernels.machine import DEVICE, DTYPES, MARKS, ON_GPU

pytest.importorskip("triton")
from asyncserve.gpu.kernels.truncation import DEFAULT_CONFIG, TruncationConfig, find_thresholds

pytestmark = MARKS

# So that a short row has several programs, and lists and searches a part of its groups at once. A list holds
# a part of the row, which top-k and top-p exceed now and then.
SMALL = TruncationConfig(
    groups_per_program=8, num_warps=4, row_warps=4, list_len=128, groups_listed=8, groups_searched=16
)
# There are more groups than fit a list, and nearly all rules search.
TINY = dataclasses.replace(SMALL, list_len=16)

VOCAB = 1011
"""Of the short rows, one for all tests: kernels are compiled for it. No multiple of anything."""


class Rule(NamedTuple):
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0


RULES = [
    Rule(top_k=1),
    Rule(top_k=5),
    Rule(top_k=50, temperature=0.7),
    Rule(top_k=400),  # more than there are groups
    Rule(top_k=1010),
    Rule(top_p=0.01),
    Rule(top_p=0.5, temperature=2.0),
    Rule(top_p=0.9),
    Rule(top_p=0.97, temperature=0.4),  # maxima have less, but nearly as much
    Rule(top_p=0.999, temperature=0.3),
    Rule(min_p=0.3),
    Rule(min_p=1.0),
    Rule(top_k=20, top_p=0.8),
    Rule(top_k=300, top_p=0.3, min_p=0.001),
    Rule(top_p=0.7, min_p=0.02),
    Rule(top_k=40, min_p=0.4),
]
LONG = [
    (151_936, 1.0, torch.float32),
    (151_936, 1.0, torch.float16),
    (151_936, 1.0, torch.bfloat16),
    (151_936, 4.0, torch.bfloat16),
    (128_256, 0.05, torch.bfloat16),
]
"""Vocabularies, how far logits stray, and their dtypes."""

ROUNDING = 4e-6
"""Of a share of the weight: its sums and exponentials are float32."""


def shapes_of(rules: list[Rule]) -> RowShapes:
    shapes = RowShapes.empty(len(rules))
    for row, rule in enumerate(rules):
        shapes.set(row, **rule._asdict())
    return shapes


def thresholds_of(
    logits: torch.Tensor,
    shapes: RowShapes,
    *,
    slots: list[int] | None = None,
    config: TruncationConfig = DEFAULT_CONFIG,
) -> torch.Tensor:
    slot_ids = torch.tensor(range(len(logits)) if slots is None else slots, dtype=torch.int32, device=DEVICE)
    return find_thresholds(
        logits.to(DEVICE),
        slot_ids,
        inv_temperature=torch.from_numpy(shapes.inv_temperature).to(DEVICE),
        top_k=torch.from_numpy(shapes.top_k).to(DEVICE),
        top_p=torch.from_numpy(shapes.top_p).to(DEVICE),
        min_p=torch.from_numpy(shapes.min_p).to(DEVICE),
        config=config,
    ).cpu()


def kept(logits: torch.Tensor, shapes: RowShapes, config: TruncationConfig = DEFAULT_CONFIG) -> torch.Tensor:
    return logits.float() >= thresholds_of(logits, shapes, config=config).unsqueeze(1)


def kept_by_sorting(logits: torch.Tensor, shapes: RowShapes) -> torch.Tensor:
    whole = logits.float()
    return whole >= truncate(largest_values(whole, whole.shape[1]), shapes).threshold


def some_logits(num_rows: int, vocab: int, spread: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * spread


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "config", "dtype"),
    [
        (spread, config, dtype)
        for spread in (1.0, 6.0)
        for config, dtype in (*((SMALL, dtype) for dtype in DTYPES), (TINY, torch.float32))
    ]
    if ON_GPU
    else [
        (1.0, SMALL, torch.float32),
        (1.0, SMALL, torch.bfloat16),
        (6.0, SMALL, torch.float16),
        (6.0, TINY, torch.float32),
    ],
    ids=lambda value: f"list{value.list_len}" if isinstance(value, TruncationConfig) else None,
)
def test_what_is_kept_is_what_sorting_keeps(
    spread: float, config: TruncationConfig, dtype: torch.dtype
) -> None:
    logits = some_logits(len(RULES), VOCAB, spread).to(dtype)
    shapes = shapes_of(RULES)
    expected, result = kept_by_sorting(logits, shapes), kept(logits, shapes, config)
    for row, rule in enumerate(RULES):
        assert torch.equal(result[row], expected[row]), rule


@pytest.mark.slow
@pytest.mark.skipif(not ON_GPU, reason="too slow in the interpreter")
@pytest.mark.parametrize(("vocab", "spread", "dtype"), LONG)
def test_of_a_long_row_the_same_weight_is_kept_as_by_sorting(
    vocab: int, spread: float, dtype: torch.dtype
) -> None:
    rules = [*RULES, Rule(top_p=0.9999, temperature=0.3)]
    logits = some_logits(len(rules), vocab, spread).to(dtype)
    shapes = shapes_of(rules)
    expected, result = kept_by_sorting(logits, shapes), kept(logits, shapes)
    for row, rule in enumerate(rules):
        # Tokens at the end may each have less of the weight than float32 tells apart, so their number may
        # differ, but not what they weigh together. A single one may be heavy, and which side of p it is on
        # may hang on the last bit.
        differing = result[row] ^ expected[row]
        values = logits[row].double()
        weights = ((values - values.max()) / rule.temperature).exp()
        is_one_value = rule.top_p < 1.0 and bool((values[differing] == values[differing][:1]).all())
        share = float(weights[differing].sum() / weights.sum())
        assert is_one_value or share <= (ROUNDING if rule.top_p < 1.0 else 0.0), (rule, share)


@pytest.mark.slow
def test_a_list_of_the_largest_gives_what_a_search_gives() -> None:
    """A model's logits: few tokens have most of the weight, and a list holds what is kept by most rules."""
    ranks = torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(i)) for i in range(4)])
    logits = 20.0 - 1.6 * (ranks + 2.0).log()
    shapes = shapes_of([Rule(top_k=12), Rule(top_p=0.7), Rule(top_p=0.95), Rule(top_k=60, top_p=0.97)])
    expected = kept_by_sorting(logits, shapes)
    for config in (SMALL, TINY):
        assert torch.equal(kept(logits, shapes, config), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [Rule(top_k=3), Rule(top_p=0.4), Rule(top_k=2, top_p=0.5), Rule(min_p=0.9)])
def test_equal_logits_are_kept_together(rule: Rule, dtype: torch.dtype) -> None:
    rows = torch.zeros(3, VOCAB)
    rows[1] = -2.5
    rows[2, 100:] = -50.0
    assert torch.equal(kept(rows.to(dtype), shapes_of([rule] * 3), SMALL), rows > -50.0)


@pytest.mark.slow
def test_tokens_tied_with_the_last_of_top_k_count_in_the_share_of_top_p() -> None:
    """Three likely tokens and many equal ones with most of the mass: half of it needs those."""
    for config, num_equal in ((SMALL, 100), (SMALL, 1000), (TINY, 1000)):
        rows = torch.full((1, VOCAB), -30.0)
        rows[0, :num_equal] = 0.0
        rows[0, :3] = torch.tensor([0.5, 0.6, 0.7]) + 0.004 * num_equal
        result = kept(rows, shapes_of([Rule(top_k=10, top_p=0.5)]), config)
        assert result.sum() == num_equal, (config, num_equal)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else [torch.float32])
def test_zero_of_either_sign_is_one_value(dtype: torch.dtype) -> None:
    rows = torch.full((1, VOCAB), -2.0, dtype=dtype)
    rows[0, :80] = torch.tensor([-1.0, 0.0, -0.0, 1.0] * 20, dtype=dtype)
    for top_k, least in ((20, 1.0), (21, 0.0), (60, 0.0), (61, -1.0)):
        result = kept(rows, shapes_of([Rule(top_k=top_k)]), SMALL)
        assert torch.equal(result, rows >= least)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 100.0])
def test_extreme_temperatures_cut_where_sorting_does(temperature: float) -> None:
    logits = some_logits(4, VOCAB, 8.0)
    rules = [Rule(top_p=p, min_p=m, temperature=temperature) for p in (0.3, 0.99) for m in (0.0, 0.5)]
    assert torch.equal(kept(logits, shapes_of(rules), SMALL), kept_by_sorting(logits, shapes_of(rules)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [Rule(top_k=2), Rule(top_p=0.95), Rule(top_k=5, top_p=0.9), Rule(min_p=0.5)])
def test_forbidden_tokens_have_no_weight(rule: Rule, dtype: torch.dtype) -> None:
    rows = torch.full((2, VOCAB), -torch.inf)
    rows[0, [3, 200, 699]] = torch.tensor([1.0, 3.0, 1.5])
    rows[1, 500] = -7.0
    expected = kept_by_sorting(rows, shapes_of([rule] * 2)) & rows.isfinite()
    assert torch.equal(kept(rows.to(dtype), shapes_of([rule] * 2), SMALL) & rows.isfinite(), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, in the interpreter
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_smallest_of_a_dtype_are_ordered(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    values = torch.tensor([info.min, -1.0, -info.tiny, 0.0, info.tiny, 1.0, info.max], dtype=dtype)
    row = values.repeat(1, 1 + VOCAB // 7)[:, :VOCAB]  # so often that a search is needed
    counts = torch.tensor([(row >= value).sum() for value in values])
    shapes = shapes_of([Rule(top_k=int(count)) for count in counts])
    assert torch.equal(kept(row.expand(7, -1), shapes, SMALL), row >= values[:, None])
    row = torch.cat((values.repeat(1, 3), row[:, :1].expand(1, VOCAB - 21)), 1)
    shapes = shapes_of([Rule(top_k=3 * rank) for rank in range(7, 0, -1)])
    assert torch.equal(kept(row.expand(7, -1), shapes, SMALL), row >= values[:, None])


def test_the_smallest_share_keeps_the_likeliest_token() -> None:
    logits = some_logits(1, VOCAB)
    assert kept(logits, shapes_of([Rule(top_p=1e-300)]), SMALL).sum() == 1


def test_rows_that_cut_nothing_get_minus_infinity() -> None:
    logits = some_logits(4, VOCAB)
    shapes = shapes_of([Rule(), Rule(temperature=0.5), Rule(top_k=VOCAB), Rule(top_k=3)])
    shapes.set_greedy(3)
    assert thresholds_of(logits, shapes, config=SMALL).tolist() == [-torch.inf] * 4


def test_a_row_is_its_slots_and_padding_is_left_alone() -> None:
    logits = some_logits(3, VOCAB)
    shapes = shapes_of([Rule(top_k=1), Rule(top_k=2), Rule(top_k=3), Rule(top_k=4)])
    result = thresholds_of(logits, shapes, slots=[3, -1, 1], config=SMALL)
    counts = (logits >= result.unsqueeze(1)).sum(1)
    assert counts[0] == 4
    assert counts[2] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, in the interpreter
def test_a_row_is_cut_as_if_alone_whatever_stands_beside_it() -> None:
    logits = some_logits(len(RULES), VOCAB, 2.0).to(torch.bfloat16)
    shapes = shapes_of(RULES)
    others = [row for row in range(len(RULES)) if row not in (3, 7)]
    together = thresholds_of(logits, shapes, config=SMALL)
    logits[3, 100] = torch.nan
    logits[7, 0] = torch.inf
    beside_bad = thresholds_of(logits, shapes, config=SMALL)
    assert torch.equal(together[others], beside_bad[others])
    assert beside_bad[[3, 7]].tolist() == [-torch.inf] * 2
    for row in others if ON_GPU else others[1::3]:
        alone = thresholds_of(logits[row : row + 1], shapes.take(np.array([row])), config=SMALL)
        assert together[row] == alone[0]
