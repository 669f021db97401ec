import pytest
import torch

pytest.importorskip("triton")
from loadtest import sampling

CPU = torch.device("cpu")


def test_peaked_logits_have_the_mass_with_few_tokens_and_normal_ones_with_many() -> None:
    for make, fewest, most in ((sampling.peaked_logits, 50, 400), (sampling.normal_logits, 5000, 20_000)):
        logits = make(2, 20_000, device=CPU)
        assert logits.dtype == torch.bfloat16
        sorted_shares = logits.float().softmax(1).sort(1, descending=True).values
        num_kept = (sorted_shares.cumsum(1) < 0.9).sum(1) + 1
        assert ((fewest <= num_kept) & (num_kept <= most)).all(), num_kept


def test_ways_to_cut_have_names_of_their_own_and_the_chosen_ones_are_among_them() -> None:
    for ways in (sampling.CHOICES, sampling.FIRST_CUTS, sampling.SECOND_CUTS):
        names = [sampling.named(way) for way in ways]
        assert len(set(names)) == len(names)
        assert "default" in names


def test_truncation_is_measured_on_both_kinds_of_logits_and_the_rest_once() -> None:
    found = list(sampling.cases())
    assert len(set(found)) == len(found)
    assert {kind for kind, rule, *_ in found if rule == "draw"} == {"peaked"}
    assert {kind for kind, rule, *_ in found if rule == "top-k 50"} == {"peaked", "normal"}
