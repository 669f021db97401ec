import numpy as np
import numpy.typing as npt
import pytest
import torch

from asyncserve.gpu.sampling.gumbel import BLOCK_LEN, draw, draw_among, exponential
from tests.gpu.sampling.rows import assert_drawn_from, keys_of

NUM_DRAWS = 20_000


def some_weights(num: int) -> torch.Tensor:
    return torch.randn(1, num, generator=torch.Generator().manual_seed(num)).mul_(1.5).exp_()


def probabilities(weights: torch.Tensor) -> npt.NDArray[np.float64]:
    exact = weights.squeeze(0).to(torch.float64).numpy()
    normalised: npt.NDArray[np.float64] = exact / exact.sum()
    return normalised


def keys_by(changing: str) -> torch.Tensor:
    counting = np.arange(NUM_DRAWS)
    return keys_of(1234, counting) if changing == "position" else keys_of(counting, 77)


@pytest.mark.parametrize("changing", ["position", "seed"])
@pytest.mark.parametrize("vocab", [5, BLOCK_LEN, 5 * BLOCK_LEN + 13])
def test_draws_from_a_vocabulary_follow_the_weights(vocab: int, changing: str) -> None:
    weights = some_weights(vocab)
    drawn = draw(weights.expand(NUM_DRAWS, -1), keys_by(changing))
    assert_drawn_from(probabilities(weights), drawn.numpy())


@pytest.mark.parametrize("changing", ["position", "seed"])
def test_draws_among_listed_tokens_follow_the_weights(changing: str) -> None:
    weights = some_weights(30)
    ids = torch.arange(30) * 1000 + 7
    drawn = draw_among(weights.expand(NUM_DRAWS, -1), ids.expand(NUM_DRAWS, -1), keys_by(changing))
    assert_drawn_from(probabilities(weights), ((drawn - 7) // 1000).numpy())


@pytest.mark.parametrize("changing", ["position", "seed"])
@pytest.mark.parametrize("distance", [1, 2, 256])
def test_draws_of_neighbours_are_independent(changing: str, distance: int) -> None:
    weights = some_weights(8)
    drawn = draw(weights.expand(NUM_DRAWS, -1), keys_by(changing)).numpy()
    pairs = drawn[:-distance] * 8 + drawn[distance:]
    one = probabilities(weights)
    assert_drawn_from(np.outer(one, one).ravel(), pairs)


def test_draws_of_the_same_position_with_other_seeds_are_independent_of_high_seed_bits() -> None:
    weights = some_weights(8)
    seeds = np.arange(NUM_DRAWS, dtype=np.uint64) << np.uint64(49)
    drawn = draw(weights.expand(NUM_DRAWS, -1), keys_of(seeds, 3)).numpy()
    assert_drawn_from(probabilities(weights), drawn)


def test_rare_tokens_are_drawn_as_often_as_their_weight_says() -> None:
    weights = torch.ones(1, 2000)
    weights[0, 0] = 2_000_000.0
    drawn = draw(weights.expand(NUM_DRAWS, -1), keys_by("position"))
    # Binomial with mean 20: outside 5 … 42 once in 20,000.
    assert 5 <= (drawn != 0).sum() <= 42


def test_noise_is_exponential_in_its_tail_and_near_zero() -> None:
    noise = exponential(keys_of(5, np.arange(100)), torch.arange(2000).unsqueeze(0)).flatten()
    assert noise.min() > 0
    edges = torch.tensor([0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0])
    survival = torch.cat((torch.exp(-edges.to(torch.float64)), torch.zeros(1)))
    bins = torch.bucketize(noise, edges, right=True) - 1
    assert_drawn_from((survival[:-1] - survival[1:]).numpy(), bins.numpy())


def test_noise_of_neighbouring_ids_is_uncorrelated() -> None:
    noise = exponential(keys_of(5, np.arange(200)), torch.arange(1000).unsqueeze(0)) - 1.0
    for shifted, kept in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])):
        correlation = (shifted * kept).mean().item()
        # Its deviation is 1 / sqrt(200,000); four of them are exceeded once in 16,000.
        assert abs(correlation) < 4 / np.sqrt(200_000)


def test_a_weight_of_zero_is_never_drawn() -> None:
    weights = torch.zeros(1, 3 * BLOCK_LEN)
    weights[0, [17, 200]] = 1e-30
    drawn = draw(weights.expand(500, -1), keys_of(0, np.arange(500)))
    assert set(drawn.tolist()) == {17, 200}


def test_draw_among_depends_neither_on_the_order_nor_on_dropped_tokens() -> None:
    weights, ids = some_weights(20).expand(200, -1), torch.arange(20).expand(200, -1)
    keys = keys_of(9, np.arange(200))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    drawn = draw_among(weights, ids, keys)
    assert torch.equal(drawn, draw_among(weights[:, order], ids[:, order], keys))
    padded_ids = torch.cat((ids, ids + 20), dim=1)
    padded = torch.cat((weights, torch.zeros_like(weights)), dim=1)
    assert torch.equal(drawn, draw_among(padded, padded_ids, keys))


def test_row_keys_use_all_bits_of_seed_and_position() -> None:
    bits = np.uint64(1) << np.arange(64, dtype=np.uint64)
    keys = torch.cat((keys_of(bits, 0), keys_of(0, bits[:32]), keys_of(0, 0)))
    assert len(set(keys.flatten().tolist())) == 64 + 32 + 1


def test_a_seed_is_not_another_one_shifted_by_positions() -> None:
    golden = 0x9E3779B97F4A7C15
    later = keys_of(7, np.arange(1, 50)).flatten().tolist()
    shifted = keys_of(7 + golden, np.arange(49)).flatten().tolist()
    assert not set(later) & set(shifted)
