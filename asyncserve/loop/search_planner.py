"""What beam searches add to a plan: all rows of a search enter slots together, and sample together.

`SearchPlanner` takes a draft and a search, and puts what its rows compute into the draft, if there is room
for all of them; what rows have to compute before is shared out as prompts are. Searches take turns where a
step does not hold all. Knows neither when it is theirs (`step_planner`) nor what they have found
(`beam_search`).
"""

from bisect import bisect_right, insort

from asyncserve.loop.beams import BeamRows
from asyncserve.loop.live_sequences import LiveSequences
from asyncserve.loop.plan_draft import PlanDraft
from asyncserve.loop.sequence import SequenceStatus
from asyncserve.loop.waiting import by_order


class SearchPlanner:
    """Plans the rows of beam searches.

    Args:
        live: The sequences.
    """

    def __init__(self, live: LiveSequences) -> None:
        self._live = live
        self._next_search_id = 0
        self._last_turn = (0, 0)  # order of the last that sampled when not all could

    def sample_ready(self, draft: PlanDraft) -> None:
        """Let the searches sample that are ready, in turn where a step does not hold all of them."""
        ready = [beams for beams in self._live.searches if beams.is_ready]
        if sum(len(beams.computing_rows) for beams in ready) <= draft.budget_left:
            for beams in ready:
                self._sample(draft, beams)
            return
        turn = bisect_right(ready, self._last_turn, key=lambda beams: beams.first.order)
        for beams in ready[turn:] + ready[:turn]:
            if self._has_budget(draft, beams):
                self._sample(draft, beams)
                self._last_turn = beams.first.order
            elif not beams.first.is_planned_to_its_end:
                break  # narrower ones do not pass it

    def _has_budget(self, draft: PlanDraft, beams: BeamRows) -> bool:
        """Return whether a step holds all rows of a search; kept small, it goes beyond that for one alone."""
        return len(beams.computing_rows) <= draft.budget_left or draft.is_empty

    def _sample(self, draft: PlanDraft, beams: BeamRows) -> None:
        """Let all rows of a search sample that is ready, if it runs still and there is room for that."""
        live = self._live
        rows = beams.computing_rows
        first, others = beams.first, beams.rows[1:]
        begins, start = beams.begins, first.num_computed_tokens
        if first.status is not SequenceStatus.RUNNING or start + 1 >= first.max_len:
            return
        if beams.has_sampled:
            lacking = [row for row in rows if start >= row.block_table.covered_len]
            for row in lacking:
                live.allocator.drop_unseen(row)
            if not draft.make_room(first, sum(map(live.allocator.extend_cost, lacking))):
                return
            for row in lacking:
                draft.append_blocks(row, live.allocator.extend(row))
        else:
            # What this step computes before the last token needs what the window of that token has passed.
            planned = {row for row, _ in draft.prefills}
            if any(len(row.token_ids) > row.block_table.covered_len for row in rows if row in planned):
                return
            if begins and not draft.make_room(
                first, len(others) * live.allocator.fork_cost(len(first.token_ids))
            ):
                return
            given = []
            for row in rows:
                if row in planned:
                    continue
                new_ids = live.allocator.advance(row)
                if new_ids is None:
                    # All give back what they hold; of what others were given just now the device is not told,
                    # for their slots may be another's in this very plan.
                    live.preempt(first)
                    return
                given.append((row, new_ids))
            for row, new_ids in given:
                draft.append_blocks(row, new_ids)
        for row in beams.rows:
            row.last_step_id = draft.step_id
        for row in rows:
            row.num_computed_tokens += 1
        if beams.has_sampled:
            draft.beam_rows += rows
        else:
            # For some this step is to compute what is before their last token, too.
            before = dict(draft.prefills)
            draft.prefills = [each for each in draft.prefills if each[0] not in rows]
            draft.prefills += [(row, before.get(row, 0) + 1) for row in rows]
        if begins:
            for row in others:
                copies = live.allocator.fork(first, row, 0)
                assert copies is not None, "room was made"
                draft.copies += copies
                draft.append_blocks(row, row.block_table.block_ids)
            draft.branches[first] = others
        beams.has_sampled = True
        draft.searches.append(beams)
        draft.budget_left = max(0, draft.budget_left - len(rows))

    def admit(self, draft: PlanDraft, beams: BeamRows, num_spare: int) -> bool:
        """Give all rows of a waiting search slots, and blocks for what they know, if there are enough."""
        live = self._live
        beams.enter(self._next_search_id)
        width, rows = beams.width, beams.computing_rows
        allocator = live.allocator
        num_tokens = len(beams.first.token_ids)
        needed = len(rows) * allocator.most_taken(num_tokens)
        if beams.begins:
            needed += (width - 1) * allocator.fork_cost(num_tokens)
        if len(live.free_slots) < width or needed + num_spare > allocator.pool.num_free:
            return False
        self._next_search_id += 1
        insort(live.searches, beams, key=lambda each: each.first.order)
        draft.entered += beams.rows
        for row in beams.rows:
            is_branch = row not in rows
            if not is_branch:
                taken = allocator.take(row, allocator.match_prefix(row), 0)
                assert taken, "blocks were counted"
            draft.admit(row, is_branch=is_branch)
            row.last_step_id = draft.step_id
            if not is_branch and row.num_remaining_tokens > 1:
                insort(live.prefilling, row, key=by_order)
                if draft.budget_left > 0:
                    draft.take_chunk(row, draft.prompt_chunk(row, draft.num_wanted(row), others_want=True))
        if beams.is_ready and self._has_budget(draft, beams):
            self._sample(draft, beams)
        return True

    def retry(self, draft: PlanDraft, beams: BeamRows) -> bool:
        """Plan for a suspected search what a step takes; return whether there is room for it."""
        live = self._live
        if beams.first.status is SequenceStatus.WAITING:
            if not self.admit(draft, beams, 0):
                return False
            for row in beams.rows[1:]:
                live.waiting.start(row)
            return True
        for row in beams.rows:
            if row in live.prefilling and draft.budget_left > 0:
                if not draft.cover_or_preempt(row, live.allocator.advance):
                    return False
                num_tokens = draft.prompt_chunk(row, draft.num_wanted(row), others_want=False)
                draft.take_chunk(row, num_tokens)
        if beams.is_ready and beams not in draft.searches and self._has_budget(draft, beams):
            self._sample(draft, beams)
        return True
