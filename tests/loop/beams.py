"""What a beam search finds on the fake device, alone."""

import zlib
from array import array
from collections.abc import Sequence

from asyncserve.loop.beam_search import BeamSearch, Hypothesis
from tests.fakes.executor import fake_candidates


def searched(
    prompt_token_ids: Sequence[int], width: int, max_tokens: int, stops: frozenset[int], vocab_size: int
) -> list[Hypothesis]:
    """Return the results of a search, best first."""
    search = BeamSearch(width=width, max_output_len=max_tokens, stop_token_ids=stops)
    while not search.is_done:
        rows = [
            (zlib.crc32(array("i", prompt_token_ids) + outputs), score)
            for outputs, score in zip(search.rows, search.scores, strict=True)
        ]
        search.advance(fake_candidates(rows, len(stops), vocab_size))
    return search.results(width)
