"""The invariants of the scheduler that hold between two calls: `check_invariants`, slow, for tests.

Takes the live sequences and changes nothing. Asks the queue, the suspects and the allocator to verify their
own. What must hold of the plans themselves is in `PlanRules` of the tests.
"""

from asyncserve.errors import InvariantError
from asyncserve.loop.live_sequences import LiveSequences
from asyncserve.loop.sequence import SequenceStatus
from asyncserve.loop.waiting import by_order


def check_invariants(live: LiveSequences, *, max_unapplied: int) -> None:
    """Verify every invariant that holds between two calls.

    Args:
        live: The sequences of the scheduler.
        max_unapplied: Steps that may be in flight.

    Raises:
        InvariantError: One does not hold.
    """
    running = live.decoding + [s for s in live.prefilling if s not in live.beams]
    for beams in live.searches:
        running += beams.rows
    _check_searches(live)
    holders = live.holders
    _require(len(live.in_flight) <= max_unapplied, "no more steps in flight than credits")
    _require(all(s.status is SequenceStatus.RUNNING for s in running), "the running lists hold running ones")
    _require(all(s.status is SequenceStatus.WAITING for s in live.waiting), "the waiting queue holds waiters")
    live.waiting.check()
    for sequences in (live.decoding, live.prefilling):
        _require(sequences == sorted(sequences, key=by_order), "sequences stand in order")
    _require(
        sorted(live.free_slots + [s.slot for s in holders]) == list(range(len(live.slot_holders))),
        "every slot is free or held once",
    )
    releasing = [s for s in holders if s.status is not SequenceStatus.RUNNING]
    _require(len(releasing) == live.num_releasing, "sequences to be released are counted")
    _require(
        {s.sequence_id for s in releasing if s.status is SequenceStatus.PREEMPTED}
        | {s.sequence_id for s in running}
        | {s.sequence_id for s in live.waiting}
        | {s.sequence_id for s in live.suspects}
        | {s.sequence_id for s in live.sequences.values() if s.status is SequenceStatus.PAUSED}
        == set(live.sequences),
        "a live sequence waits, runs, is preempted or paused",
    )
    _require(
        all(
            live.sequences[each].status in (SequenceStatus.PAUSED, SequenceStatus.PREEMPTED)
            for each in live.paused
        ),
        "a paused sequence neither waits nor runs",
    )
    _require(len(running) + len(releasing) == len(holders), "a running sequence holds a slot")
    _require(
        all(s.last_step_id > live.last_applied_step_id or s in live.releasable for s in releasing),
        "what no step in flight mentions is released, or about to be",
    )
    live.suspects.check()
    _require(
        {s.sequence_id for s in live.sequences.values() if s.trial_len}
        == {s.sequence_id for s in live.suspects},
        "a live sequence under suspicion will be tried",
    )
    _require(not any(s.trial_len for s in live.waiting), "no suspect stands in the queue")
    _require(
        len(live.in_flight) < 2
        or not any(entry.is_trial and any(s.trial_len for s in entry.states) for entry in live.in_flight),
        "a step that tries suspects is alone in flight",
    )
    num_unseen: dict[int, int] = {}
    for entry in live.in_flight:
        for sequence in entry.sampling:
            num_unseen[sequence.slot] = num_unseen.get(sequence.slot, 0) + 1
        for sequence in entry.states:
            _require(live.slot_holders[sequence.slot] is sequence, "a sequence in flight holds its slot")
    for sequence in holders:
        _require(
            sequence.num_unseen_tokens == num_unseen.get(sequence.slot, 0), "unseen tokens are in flight"
        )
        _require(
            sequence.block_table.covered_len >= sequence.num_computed_tokens,
            "computed positions have blocks",
        )
    for sequence in running:
        known_len = len(sequence.token_ids) + sequence.num_unseen_tokens
        _require(known_len <= sequence.max_len, "no sequence is planned beyond its length")
    for sequence in live.decoding:
        known_len = len(sequence.token_ids) + sequence.num_unseen_tokens
        _require(sequence.num_computed_tokens == known_len - 1, "a decode step has one token to compute")
        plain_until = min(sequence.block_table.covered_len, sequence.max_len - 1)
        _require(sequence.plain_until == plain_until, "it is known how far a sequence decodes as it is")
    _require(
        all(each.slot >= 0 for each in live.unregistered),
        "who has blocks that are yet to become findable holds them",
    )
    planned_to_end = {s.sequence_id for s in live.decoding}
    for sequence in live.sequences.values():
        for follower in sequence.followers:
            _require(follower.leader is sequence, "a leader knows its followers")
            _require(not follower.followers, "who follows leads nobody")
            _require(
                follower.status is SequenceStatus.WAITING
                and live.sequences.get(follower.sequence_id) is follower,
                "who follows waits",
            )
            _require(
                sequence.sequence_id not in planned_to_end and not sequence.num_unseen_tokens,
                "who leads has its prompt to be computed still",
            )
        leader = sequence.leader
        _require(
            leader is None
            or (live.sequences.get(leader.sequence_id) is leader and sequence in leader.followers),
            "who is followed lives",
        )
        if sequence.status not in (SequenceStatus.WAITING, SequenceStatus.PAUSED):
            continue
        _require(not any(sequence.block_table.block_ids), "a waiting sequence holds no blocks")
    host_tier = live.allocator.host_tier
    if host_tier is not None:
        _require(
            all(each in live.sequences and live.sequences[each].slot < 0 for each in host_tier.swapped_ids),
            "who is swapped waits or rests",
        )
        _require(
            not any(live.sequences[each] in live.beams for each in host_tier.swapped_ids),
            "rows of searches are not swapped",
        )
    live.allocator.check(holders)


def _check_searches(live: LiveSequences) -> None:
    _require(
        live.searches == sorted(live.searches, key=lambda beams: beams.first.order),
        "searches stand in order",
    )
    _require(
        set(live.beams) <= {*live.sequences.values(), *live.holders}, "rows of searches live or hold slots"
    )
    for row, beams in live.beams.items():
        _require(row in beams.rows, "a row is one of its search")
        _require(
            (beams in live.searches) == (row.status is SequenceStatus.RUNNING),
            "the rows of a search run together",
        )
        is_computing = row in beams.computing_rows and row.num_remaining_tokens > 1
        _require(
            (row in live.prefilling) == (row.status is SequenceStatus.RUNNING and is_computing),
            "rows with more than a token to compute are computed as prompts are",
        )


def _require(holds: bool, invariant: str) -> None:
    if not holds:
        raise InvariantError(f"scheduler: it does not hold that {invariant}")
