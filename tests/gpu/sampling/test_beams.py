"""What beam searches choose, against every pair of row and token looked at in float64."""

from array import array

import numpy as np
import pytest
import torch

from asyncserve.errors import InvariantError
from asyncserve.gpu.sampling.beams import BeamSearches, ChosenBeams
from asyncserve.request import SamplingParams
from asyncserve.step import BeamAssignment, BeamCandidate, SlotAssignment

VOCAB = 53
NUM_SLOTS = 12
CPU = torch.device("cpu")


def row(slot: int, beam: BeamAssignment, stops: frozenset[int] = frozenset()) -> SlotAssignment:
    return SlotAssignment(
        slot=slot,
        token_ids=array("i", [1]),
        prompt_len=1,
        sampling=SamplingParams(),
        seed=0,
        stop_token_ids=stops,
        beam=beam,
    )


def admit(searches: BeamSearches, search_id: int, slots: list[int], scores: list[float], *stops: int) -> None:
    for beam_idx, (slot, score) in enumerate(zip(slots, scores, strict=True)):
        searches.admit(row(slot, BeamAssignment(search_id, beam_idx, len(slots), score), frozenset(stops)))
    searches.upload()


def choose(searches: BeamSearches, logits: torch.Tensor, slots: list[int]) -> ChosenBeams:
    return searches.choose(logits, slots, lambda _log_probs, _rows: None)


def candidates_of(chosen: ChosenBeams, search_id: int) -> list[BeamCandidate]:
    return list(chosen.candidates(chosen.pairs, chosen.scores)[search_id])


def expected_candidates(logits: torch.Tensor, scores: list[float], num: int) -> list[tuple[int, int]]:
    """The best (row, token) pairs, best first."""
    totals = torch.log_softmax(logits.double(), dim=1) + torch.tensor(scores).double()[:, None]
    pairs = [(float(totals[row, token]), row, token) for row in range(len(scores)) for token in range(VOCAB)]
    return [(parent, token) for _, parent, token in sorted(pairs, reverse=True)[:num]]


def test_several_searches_get_the_best_pairs_of_their_own_rows() -> None:
    random = np.random.default_rng(3)
    for seed in range(10):
        searches = BeamSearches(NUM_SLOTS, CPU)
        layout: dict[int, tuple[list[int], list[float], tuple[int, ...]]] = {
            7: ([4, 1, 9], [-1.0, -1.5, -2.5], (3, 40)),
            8: ([0, 5], [0.0, -np.inf], ()),
            9: ([11, 2, 10], [-0.5, -0.25, -4.0], (3, 40)),
        }
        for search_id, (slots, scores, stops) in layout.items():
            admit(searches, search_id, slots, scores, *stops)
        order = [int(slot) for slot in random.permutation([4, 1, 9, 0, 5, 11, 2, 10, 3, 6])]
        logits = torch.randn(len(order), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
        before = logits.clone()
        chosen = choose(searches, logits, order)
        assert torch.equal(logits, before)
        assert sorted(chosen.slots) == sorted(slot for slots, _, _ in layout.values() for slot in slots)
        assert [order[each] for each in chosen.rows] == list(chosen.slots)
        for search_id, (slots, scores, stops) in layout.items():
            own = logits[[order.index(slot) for slot in slots]]
            num = max(2, 1 + len(stops)) * len(slots)
            expected = expected_candidates(own, scores, num)
            given = candidates_of(chosen, search_id)
            assert [(each.parent, each.token_id) for each in given] == expected
            survivors = [pair for pair in expected if pair[1] not in stops][: len(slots)]
            by_slot = dict(
                zip(
                    chosen.slots,
                    zip(chosen.parent_slots.tolist(), chosen.token_ids.tolist(), strict=True),
                    strict=True,
                )
            )
            assert [by_slot[slot] for slot in slots] == [
                (slots[parent], token) for parent, token in survivors
            ]


def test_scores_are_kept_from_step_to_step() -> None:
    searches = BeamSearches(NUM_SLOTS, CPU)
    admit(searches, 1, [6, 2], [0.0, -np.inf])
    scores = [0.0, -np.inf]
    for seed in range(4):
        logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(seed))
        given = candidates_of(choose(searches, logits, [6, 2]), 1)
        assert [(each.parent, each.token_id) for each in given] == expected_candidates(logits, scores, 4)
        scores = [each.score for each in given[:2]]


def test_equal_scores_stand_as_topk_has_them() -> None:
    for seed in range(5):
        searches = BeamSearches(NUM_SLOTS, CPU)
        admit(searches, 1, [0, 1, 2, 3], [-1.0] * 4)
        logits = torch.randint(0, 2, (4, VOCAB), generator=torch.Generator().manual_seed(seed)).float()
        given = candidates_of(choose(searches, logits, [0, 1, 2, 3]), 1)
        totals = (torch.log_softmax(logits, dim=-1) + torch.full((4, 1), -1.0)).reshape(1, -1)
        values, pairs = torch.topk(totals, k=8)
        assert [each.parent * VOCAB + each.token_id for each in given] == pairs[0].tolist()
        assert [each.score for each in given] == values[0].tolist()


def test_a_slot_serves_another_search_once_it_is_released() -> None:
    searches = BeamSearches(NUM_SLOTS, CPU)
    admit(searches, 1, [0, 1], [-1.0, -2.0], 5)
    with pytest.raises(InvariantError, match="cannot be row"):
        searches.admit(row(2, BeamAssignment(1, 1, 2, 0.0), frozenset({5})))
    for slot in (0, 1, 2):
        searches.release(slot)
    admit(searches, 2, [1, 0], [0.0, -np.inf])
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    given = candidates_of(choose(searches, logits, [1, 0]), 2)
    assert [(each.parent, each.token_id) for each in given] == expected_candidates(logits, [0.0, -np.inf], 4)


def test_rows_of_one_search_agree_on_its_width_and_stop_tokens() -> None:
    searches = BeamSearches(NUM_SLOTS, CPU)
    searches.admit(row(0, BeamAssignment(1, 0, 2, 0.0), frozenset({5})))
    for other in (
        row(1, BeamAssignment(1, 1, 3, 0.0), frozenset({5})),
        row(1, BeamAssignment(1, 1, 2, 0.0)),
        row(1, BeamAssignment(1, 2, 2, 0.0), frozenset({5})),
    ):
        with pytest.raises(InvariantError, match="cannot be row"):
            searches.admit(other)


def test_a_search_that_samples_without_one_of_its_rows_is_refused() -> None:
    searches = BeamSearches(NUM_SLOTS, CPU)
    admit(searches, 1, [0, 1], [-1.0, -2.0])
    with pytest.raises(InvariantError, match="without some of its rows"):
        choose(searches, torch.zeros(2, VOCAB), [0, 3])
