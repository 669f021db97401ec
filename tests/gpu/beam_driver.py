"""Runs beam searches on a `ModelRunner` without a scheduler, plans made by hand.

Rows begin as branches of the first, unless they have outputs already: then each computes its own.

Blocks are never given back before a search ends: a row's own block may have become another row's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncserve.loop.beam_search import BeamSearch
from asyncserve.request import EarlyStopping
from asyncserve.step import BeamAssignment
from tests.fakes.plan_driver import PlanDriver


@dataclass(slots=True, kw_only=True)
class DrivenSearch:
    """A search, what its rows are admitted with, and their slots."""

    search: BeamSearch
    prompt: list[int]
    stops: frozenset[int]
    sampling: dict[str, Any]
    slots: list[int]
    search_id: int


class BeamDriver:
    """Drives searches."""

    def __init__(self, driver: PlanDriver) -> None:
        self.driver = driver
        self._next_search_id = 100

    def begin(
        self,
        prompt: Sequence[int],
        *,
        width: int,
        max_output_len: int,
        stops: Sequence[int] = (),
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        **sampling: Any,
    ) -> DrivenSearch:
        """Let a search enter with the next plan."""
        search = BeamSearch(
            width=width,
            max_output_len=max_output_len,
            stop_token_ids=frozenset(stops),
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        driven = DrivenSearch(
            search=search,
            prompt=list(prompt),
            stops=frozenset(stops),
            sampling=sampling,
            slots=[],
            search_id=-1,
        )
        self.enter(driven)
        return driven

    def enter(self, driven: DrivenSearch) -> None:
        """Admit the rows of a search with all they know; its first time, or again."""
        search = driven.search
        driven.search_id = self._next_search_id
        self._next_search_id += 1
        for beam_idx, (row, score) in enumerate(zip(search.rows, search.scores, strict=True)):
            driven.slots.append(
                self.driver.admit(
                    [*driven.prompt, *row],
                    prompt_len=len(driven.prompt),
                    stop_token_ids=driven.stops,
                    beam=BeamAssignment(driven.search_id, beam_idx, search.width, score),
                    **driven.sampling,
                )
            )

    def leave(self, driven: DrivenSearch) -> None:
        """Release the rows of a search with the next plan."""
        tables = [self.driver.tables[slot] for slot in driven.slots]
        self.driver.free += dict.fromkeys(block for table in tables for blocks in table for block in blocks)
        for slot in driven.slots:
            self.driver.release(slot, keep_blocks=True)
        driven.slots = []

    def tokens(self, driven: DrivenSearch) -> dict[int, int]:
        """Return what a step computes of a search: all that is known and not computed."""
        driver = self.driver
        first, *others = driven.slots
        rest = {slot: driver.known_lens[slot] - driver.starts[slot] for slot in driven.slots}
        if driven.search.output_len == 0 and driver.known_lens[first] == len(driven.prompt):
            rest |= dict.fromkeys(others, 0)
        return rest

    def compute_all_but_last(self, driven: DrivenSearch) -> None:
        """Compute the known tokens of a search that entered again, row after row, but their last."""
        for slot, num in self.tokens(driven).items():
            if num > 1:
                self.driver.launch({slot: num - 1})

    def run(self, driven: DrivenSearch, *, ahead: int = 0) -> None:
        """Let a search run to its end, so many steps launched before one is read, and leave."""
        if driven.search.output_len:
            self.compute_all_but_last(driven)
        pending = []
        max_steps = driven.search._max_output_len - driven.search.output_len
        while not driven.search.is_done:
            while len(pending) <= ahead and max_steps:
                pending.append(self.driver.launch(self.tokens(driven)))
                max_steps -= 1
            output = pending.pop(0).wait()
            survivors = driven.search.advance(output.beams[driven.search_id])
            assert list(output.token_ids) == [survivor.token_id for survivor in survivors]
        for each in pending:
            each.wait()
        self.leave(driven)
