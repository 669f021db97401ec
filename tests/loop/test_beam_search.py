"""The host's side of a beam search, against transformers' own on models without attention."""

import math
import random

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from asyncserve.errors import InvariantError
from asyncserve.loop.beam_search import BeamSearch
from asyncserve.request import EarlyStopping
from asyncserve.step import BeamCandidate

VOCAB_SIZE = 24
MAX_OUTPUT_LEN = 9
MAX_LEN = 2 + MAX_OUTPUT_LEN
PAD = 1
"""Not 0, for which transformers takes a stop token."""


class BigramConfig(PretrainedConfig):
    model_type = "bigram"
    vocab_size = VOCAB_SIZE
    num_hidden_layers = 1


class BigramModel(PreTrainedModel, GenerationMixin):
    """The next token depends on the last one and its position alone; so no two texts have equal scores."""

    config_class = BigramConfig
    main_input_name = "input_ids"

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(BigramConfig())
        self.table = torch.nn.Parameter(table, requires_grad=False)

    def forward(self, input_ids: torch.Tensor, **_: object) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.table[torch.arange(input_ids.shape[1]), input_ids])


def random_table(seed: int, *, sharpness: float, stop_bias: float, stops: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (MAX_LEN, VOCAB_SIZE, VOCAB_SIZE)
    table = torch.randn(shape, generator=generator) * sharpness
    table[..., stops] += stop_bias
    return table


def candidates_of(
    search: BeamSearch, table: torch.Tensor, prompt: list[int], num: int
) -> list[BeamCandidate]:
    """What the device gives: the best of all rows' log-probabilities together."""
    last = [[*prompt, *row][-1] for row in search.rows]
    logits = table[len(prompt) + search.output_len - 1, last]
    scores = torch.log_softmax(logits, dim=-1) + torch.tensor(search.scores)[:, None]
    best = scores.view(-1).topk(min(num, scores.numel()))
    return [
        BeamCandidate(index // VOCAB_SIZE, index % VOCAB_SIZE, score)
        for index, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def run(search: BeamSearch, table: torch.Tensor, prompt: list[int], stops: list[int]) -> int:
    """Let a search go to its end; returns the number of its steps."""
    num_steps = 0
    while not search.is_done:
        num = max(2, 1 + len(stops)) * search.width
        search.advance(candidates_of(search, table, prompt, num))
        num_steps += 1
    return num_steps


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_results_and_scores_are_those_of_transformers(width: int, early_stopping: EarlyStopping) -> None:
    for seed in range(8):
        chance = random.Random(seed)
        stops = [3, 7][: chance.randint(0, 2)]
        length_penalty = chance.choice([-1.0, 0.0, 0.5, 1.0, 2.0])
        table = random_table(
            seed,
            sharpness=chance.choice([0.3, 1.0, 3.0]),
            stop_bias=chance.choice([-2.0, 0.0, 2.0]),
            stops=stops,
        )
        prompt = [11, 5]
        model = BigramModel(table)
        config = GenerationConfig(
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=MAX_OUTPUT_LEN,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
            eos_token_id=stops or None,
            pad_token_id=PAD,
            use_cache=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        search = BeamSearch(
            width=width,
            max_output_len=MAX_OUTPUT_LEN,
            stop_token_ids=frozenset(stops),
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        num_steps = run(search, table, prompt, stops)
        results = search.results(width)
        expected = model.generate(torch.tensor([prompt]), generation_config=config)
        texts = [sequence[len(prompt) :].tolist() for sequence in expected.sequences]
        own = [result.token_ids.tolist() for result in results]
        assert [tokens + [PAD] * (len(texts[0]) - len(tokens)) for tokens in own] == texts
        scores = expected.sequences_scores.tolist()
        assert [result.score for result in results] == pytest.approx(scores, rel=1e-5)
        assert num_steps == len(expected.scores)


def test_a_row_without_probability_neither_ends_nor_counts() -> None:
    search = BeamSearch(width=2, max_output_len=3, stop_token_ids=frozenset({9}), early_stopping=True)
    nothing = -math.inf
    search.advance(
        [
            BeamCandidate(0, 5, -0.1),
            BeamCandidate(0, 9, -2.0),
            BeamCandidate(1, 9, nothing),
            BeamCandidate(1, 4, nothing),
        ]
    )
    assert not search.is_done
    search.advance(
        [
            BeamCandidate(0, 9, -0.5),
            BeamCandidate(1, 9, nothing),
            BeamCandidate(1, 4, nothing),
            BeamCandidate(0, 4, nothing),
        ]
    )
    assert search.is_done
    assert [each.token_ids.tolist() for each in search.results(2)] == [[5, 9], [9]]


def test_where_restrictions_leave_fewer_texts_than_asked_for_fewer_are_given() -> None:
    search = BeamSearch(width=2, max_output_len=1)
    search.advance(
        [BeamCandidate(0, 5, -0.1), BeamCandidate(0, 6, -math.inf), *[BeamCandidate(1, 5, -math.inf)] * 2]
    )
    assert search.is_done
    (only,) = search.results(2)
    assert (only.token_ids.tolist(), only.stop_token_id, only.log_probability) == ([5], None, -0.1)


def test_a_search_in_which_nothing_is_allowed_is_over() -> None:
    search = BeamSearch(width=2, max_output_len=8)
    search.advance([BeamCandidate(0, token_id, -math.inf) for token_id in range(4)])
    assert search.is_done
    assert not search.results(2)


def test_an_end_by_a_stop_token_is_told_from_one_by_length() -> None:
    search = BeamSearch(width=2, max_output_len=1, stop_token_ids=frozenset({9}))
    candidates = [(9, -0.1), (5, -0.2), (6, -0.3), (7, -0.4)]
    search.advance([BeamCandidate(0, token_id, score) for token_id, score in candidates])
    assert [each.stop_token_id for each in search.results(2)] == [9, None]


def test_too_few_candidates_and_any_after_the_end_are_refused() -> None:
    search = BeamSearch(width=2, max_output_len=1, stop_token_ids=frozenset({9}))
    with pytest.raises(InvariantError, match="1 candidates go on"):
        search.advance([BeamCandidate(0, 5, -0.1), BeamCandidate(0, 9, -0.2)])
    search.advance([BeamCandidate(0, 5, -0.1), BeamCandidate(0, 6, -0.2)])
    with pytest.raises(InvariantError, match="after its end"):
        search.advance([BeamCandidate(0, 5, -0.1), BeamCandidate(0, 6, -0.2)])
