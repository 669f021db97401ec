import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncserve.gpu.sampling.drawing import draw_rows, sorted_threshold
from asyncserve.gpu.sampling.truncation import (
    NUM_CANDIDATES,
    NUM_VALUES,
    RowShapes,
    largest_values,
    truncate,
    weights_of,
)
from tests.gpu.sampling.rows import assert_drawn_from, keys_of


def shapes_of(
    num_rows: int = 1, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> RowShapes:
    shapes = RowShapes.empty(num_rows)
    for row in range(num_rows):
        shapes.set(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return shapes


def kept_reference(
    logits: npt.NDArray[np.float64], temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[npt.NDArray[np.bool_], float]:
    """Return which tokens are kept, and how close the closest decision was (0: undecidable in floats)."""
    keep = np.ones(len(logits), bool)
    if top_k:
        keep &= logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    weights = np.exp((logits - logits.max()) / temperature)
    keep &= weights >= min_p
    margin = np.abs(weights - min_p).min() if min_p else np.inf
    if top_p < 1.0:
        kept = np.where(keep, weights, 0.0)
        order = np.argsort(-logits, kind="stable")
        before = np.concatenate(([0.0], np.cumsum(kept[order])[:-1])) / kept.sum()
        margin = min(margin, np.abs(before - top_p).min())
        last = logits[order][(before < top_p) & keep[order]].min()
        keep &= logits >= last
    return keep, float(margin)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(st.integers(-20, 20), min_size=1, max_size=60),
    temperature=st.sampled_from([0.3, 0.8, 1.0, 2.5]),
    top_k=st.integers(0, 70),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)
def test_kept_tokens_are_those_of_the_definition(
    steps: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.array(steps) / 4
    expected, margin = kept_reference(logits, temperature, top_k, top_p, min_p)
    assume(margin > 1e-6)
    rows = torch.from_numpy(logits).to(torch.float32).unsqueeze(0)
    shapes = shapes_of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = truncate(largest_values(rows, len(steps)), shapes)
    assert (rows >= kept.threshold).squeeze(0).tolist() == expected.tolist()
    assert (kept.weights > 0).sum() == expected.sum()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    vocab=st.sampled_from([NUM_CANDIDATES - 1, NUM_CANDIDATES, NUM_CANDIDATES + 1, 700, NUM_VALUES + 300]),
    top_k=st.sampled_from([0, 1, 50, NUM_CANDIDATES - 1, NUM_CANDIDATES, 600]),
    top_p=st.sampled_from([1.0, 0.1, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.2]),
)
def test_drawn_tokens_are_kept_ones_however_many_must_be_looked_at(
    seed: int, spread: float, vocab: int, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.round(np.random.default_rng(seed).normal(size=vocab) * spread, 1)
    keep, margin = kept_reference(logits, 0.9, top_k, top_p, min_p)
    assume(margin > 1e-6)
    rows = torch.from_numpy(logits).to(torch.float32).expand(50, -1).contiguous()
    shapes = shapes_of(50, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = draw_rows(rows, shapes, keys_of(seed, np.arange(50)))
    assert keep[drawn.numpy()].all()


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "spread"),
    [
        pytest.param(0, 1.0, 0.0, 1.0, id="plain"),
        pytest.param(5, 1.0, 0.0, 1.0, id="top-k"),
        pytest.param(0, 0.6, 0.0, 1.5, id="top-p"),
        pytest.param(0, 1.0, 0.1, 1.0, id="min-p"),
        pytest.param(40, 0.9, 0.02, 1.0, id="all three"),
        pytest.param(0, 0.9, 0.0, 0.2, id="top-p that needs more than the candidates"),
        pytest.param(200, 0.9, 0.0, 0.2, id="top-k above the candidates"),
    ],
)
def test_draws_follow_the_truncated_distribution(
    top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    num_draws = 6000
    logits = np.random.default_rng(3).normal(size=400) * spread
    keep, margin = kept_reference(logits.astype(np.float32), 0.8, top_k, top_p, min_p)
    assert margin > 1e-6
    weights = np.where(keep, np.exp(logits / 0.8), 0.0)
    shapes = shapes_of(num_draws, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    rows = torch.from_numpy(logits).to(torch.float32).expand(num_draws, -1)
    drawn = draw_rows(rows, shapes, keys_of(11, np.arange(num_draws)))
    assert_drawn_from(weights / weights.sum(), drawn.numpy())


def test_candidates_lead_to_the_threshold_of_the_whole_row() -> None:
    logits = torch.randn(20, 3000, generator=torch.Generator().manual_seed(5)) * 4
    shapes = shapes_of(20, temperature=0.7, top_p=0.9, min_p=0.001)
    whole_weight = weights_of(logits, shapes).sum(dim=1, keepdim=True)
    of_few = truncate(largest_values(logits, NUM_CANDIDATES), shapes, whole_weight=whole_weight)
    of_all = truncate(largest_values(logits, 3000), shapes)
    assert torch.equal(of_few.threshold, of_all.threshold)


@pytest.mark.parametrize(
    ("vocab", "top_k", "top_p", "min_p", "spread"),
    [
        pytest.param(49152, 20000, 0.9, 0.0, 1.0, id="top-k above the sorted values"),
        pytest.param(49152, 20000, 0.9, 0.1, 1.0, id="and min-p above it"),
        pytest.param(6000, NUM_VALUES, 0.9, 0.0, 0.3, id="top-k at the sorted values"),
        pytest.param(6000, NUM_VALUES + 1, 0.9, 0.0, 0.3, id="just above them"),
        pytest.param(6000, NUM_VALUES - 1, 0.9, 0.0, 0.3, id="just below them"),
        pytest.param(3000, NUM_CANDIDATES, 0.9, 0.0, 0.3, id="at the candidates"),
        pytest.param(3000, NUM_CANDIDATES - 1, 0.9, 0.0, 0.3, id="just below the candidates"),
        pytest.param(6000, 5999, 0.2, 0.0, 4.0, id="a small share of nearly all"),
    ],
)
def test_threshold_keeps_what_the_definition_keeps_however_much_must_be_sorted(
    vocab: int, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    logits = (np.random.default_rng(1).normal(size=vocab) * spread).astype(np.float32)
    expected, margin = kept_reference(logits.astype(np.float64), 0.8, top_k, top_p, min_p)
    assert margin > 1e-7
    rows = torch.from_numpy(logits).unsqueeze(0)
    shapes = shapes_of(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    whole_weight = weights_of(rows, shapes).sum(dim=1, keepdim=True)
    kept = (rows >= sorted_threshold(rows, shapes, whole_weight)).squeeze(0).numpy()
    assert kept.sum() == expected.sum()
    assert (kept == expected).all()


@pytest.mark.parametrize("top_k", [10, NUM_CANDIDATES - 1, NUM_CANDIDATES, NUM_VALUES])
def test_tokens_tied_with_the_last_of_top_k_count_in_the_share_of_top_p(top_k: int) -> None:
    """Three likely tokens and thousands of equal ones with two thirds of the mass: half of it needs those."""
    logits = np.zeros(NUM_VALUES + 1, np.float32)
    logits[:3] = 5.0, 6.0, 7.0
    expected, _ = kept_reference(logits.astype(np.float64), 1.0, top_k, 0.5, 0.0)
    assert expected.all()
    rows = torch.from_numpy(logits).expand(100, -1).contiguous()
    drawn = draw_rows(rows, shapes_of(100, top_k=top_k, top_p=0.5), keys_of(4, np.arange(100)))
    assert (drawn > 2).sum() > 30


def test_weights_are_those_of_softmax() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 5
    logits[0, 7] = -torch.inf
    weights = weights_of(logits, shapes_of(4, temperature=0.6))
    torch.testing.assert_close(weights / weights.sum(1, keepdim=True), (logits / 0.6).softmax(1))


@pytest.mark.parametrize("temperature", [1e-5, 100.0])
def test_extreme_temperatures_give_tokens_of_the_vocabulary(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -torch.inf]])
    drawn = draw_rows(logits, shapes_of(temperature=temperature, top_p=0.9), keys_of([1], [1]))
    assert drawn.item() == 1 if temperature < 1 else drawn.item() in (0, 1, 2)


def test_smallest_top_p_keeps_the_likeliest_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert draw_rows(logits, shapes_of(top_p=1e-300), keys_of([1], [1])).item() == 1


def test_rows_of_one_value_keep_all_tokens_under_top_k() -> None:
    """Equal tokens cannot be told apart, so top-k drops none of them, beyond the candidates too."""
    rows = torch.zeros(3000, 2 * NUM_CANDIDATES)
    drawn = draw_rows(rows, shapes_of(3000, top_k=3), keys_of(2, np.arange(3000)))
    assert_drawn_from(np.full(2 * NUM_CANDIDATES, 0.5 / NUM_CANDIDATES), drawn.numpy())
