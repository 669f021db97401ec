"""What a step that went well means for each of its sequences: its token, or its end.

Takes a step that was in flight and its `StepOutput`, changes the live sequences, gives `StepDeltas`. Keeps
nothing from step to step. Knows no text: stop strings arrive as aborts. What a step that failed means is in
`step_failures`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from asyncserve.errors import InvalidRequest, InvariantError
from asyncserve.loop.beams import BeamRows
from asyncserve.loop.live_sequences import LiveSequences, StepInFlight
from asyncserve.loop.sequence import SequenceState, SequenceStatus
from asyncserve.request import FinishReason, TokenDelta, TokenLogprobs
from asyncserve.step import BAD_LOGITS, NO_TOKEN, StepOutput
from asyncserve.token_path import apply_rows


class StepDeltas(NamedTuple):
    """What a step gave: scheduler → detokenizer. Each sequence is in it once at most.

    Args:
        sequences: Those that got one more token, and nothing is to be said but that: nearly all.
        token_ids: That token of each.
        deltas: What the others got.
    """

    sequences: Sequence[SequenceState]
    token_ids: Sequence[int]
    deltas: list[TokenDelta]


def apply_output(live: LiveSequences, entry: StepInFlight, output: StepOutput, now_s: float) -> StepDeltas:
    """Account for a finished step and return what it gave to whom.

    Slots and blocks come back with it; those of many sequences in part by `release_some`.

    Args:
        live: The sequences.
        entry: The step, no longer in flight.
        output: What the device gave.
        now_s: Time.

    Raises:
        InvariantError: It has the wrong number of tokens.
    """
    if len(output.token_ids) != len(entry.sampling):
        raise InvariantError(
            f"step {output.step_id} gave {len(output.token_ids)} tokens, not {len(entry.sampling)}"
        )
    live.waiting.note_outputs(entry.sampling)
    if output.prompt_logprobs:
        _gather_prompt_logprobs(entry, output)
    num_live = len(live.sequences)
    deltas: list[TokenDelta] = []
    sampling, sampled = entry.sampling, output.token_ids
    num_plain = entry.num_decodes
    plain, plain_ids = sampling[:num_plain], sampled[:num_plain]
    others = apply_rows(plain, plain_ids, output.logprobs or {})
    for sequence, token_id in others:
        _apply_row(live, sequence, token_id, output, now_s, deltas)
    for sequence, token_id in zip(sampling[num_plain:], sampled[num_plain:], strict=True):
        _apply_row(live, sequence, token_id, output, now_s, deltas)
    for beams in entry.searches:
        _apply_search(live, beams, output, now_s, deltas)
    if others:
        told = {sequence for sequence, _ in others}
        plain_ids = [each for each, sequence in zip(plain_ids, plain, strict=True) if sequence not in told]
        plain = [sequence for sequence in plain if sequence not in told]
    if len(live.sequences) != num_live:
        live.drop_ended()
    if live.num_releasing:
        live.releasable += [
            each for each in (*entry.states, *entry.entered) if each.status is not SequenceStatus.RUNNING
        ]
        live.release_some()
    live.allocator.note_step(entry.plan, entry.num_decodes, output.device_s)
    return StepDeltas(plain, plain_ids, deltas)


def _apply_row(
    live: LiveSequences,
    sequence: SequenceState,
    token_id: int,
    output: StepOutput,
    now_s: float,
    deltas: list[TokenDelta],
) -> None:
    """Account for any token of a step; what is to be told of it is added to `deltas`."""
    sequence.num_unseen_tokens -= 1
    if not sequence.accepts_output:
        return
    if (beams := live.beams.get(sequence)) is not None:
        beams.has_bad_logits |= token_id == BAD_LOGITS
        return
    if token_id < 0:
        if token_id == BAD_LOGITS:
            deltas.append(live.end_with_bad_logits(sequence, output.step_id))
        elif token_id == NO_TOKEN:
            deltas.append(live.end_with_error(sequence, _nothing_allowed(sequence)))
        else:
            raise InvariantError(f"step {output.step_id} gave token {token_id}")
        return
    token_ids = sequence.token_ids
    token_ids.append(token_id)
    timeline = sequence.timeline
    if timeline.first_token_s is None:
        timeline.first_token_s = now_s
    timeline.last_token_s = now_s
    delta = TokenDelta(sequence.sequence_id, (token_id,), num_cached_tokens=sequence.num_cached_tokens)
    deltas.append(delta)
    if output.logprobs and (logprobs := output.logprobs.get(sequence.slot)) is not None:
        delta.logprobs = (logprobs,)
    if sequence.prompt_logprobs is not None:
        delta.prompt_logprobs = sequence.prompt_logprobs
        sequence.prompt_logprobs = None
    if token_id in sequence.stop_token_ids and len(token_ids) >= sequence.min_len:
        delta.finish_reason = FinishReason.STOP
        delta.stop_token_id = token_id
        live.end(sequence)
    elif len(token_ids) >= sequence.max_len:
        delta.finish_reason = FinishReason.LENGTH
        live.end(sequence)


def _apply_search(
    live: LiveSequences, beams: BeamRows, output: StepOutput, now_s: float, deltas: list[TokenDelta]
) -> None:
    """Account for what a step gave a beam search; its results, in the end, are added to `deltas`."""
    if not beams.first.accepts_output:
        return
    if beams.has_bad_logits:
        deltas += [live.end_with_bad_logits(row, output.step_id) for row in beams.rows]
        return
    num_computed = len(beams.first.token_ids)
    parents = beams.advance(output.beams[beams.search_id])
    live.allocator.inherit(beams.rows, parents, num_computed)
    for row in beams.rows:
        live.allocator.prefix_cache.register(row)
    if not beams.search.is_done:
        return
    for row, result in zip(beams.rows, beams.results(), strict=True):
        if beams.search.has_found_nothing:
            deltas.append(live.end_with_error(row, _nothing_allowed(row)))
            continue
        row.timeline.first_token_s = row.timeline.last_token_s = now_s
        deltas.append(result)
        live.end(row)


def _gather_prompt_logprobs(entry: StepInFlight, output: StepOutput) -> None:
    for scheduled, sequence in zip(entry.plan.sequences, entry.states, strict=True):
        gathered = sequence.prompt_logprobs
        scored: Sequence[TokenLogprobs] = output.prompt_logprobs.get(scheduled.slot, ())
        # Those of one that has ended, too: it may share its list with branches.
        if gathered is None or not scored or not sequence.blocks_are_valid:
            continue
        # Entry i scores position start + 1 + i; a preempted sequence scores some positions again.
        num_known = len(gathered) - scheduled.start
        if num_known < 0:
            raise InvariantError(
                f"sequence {sequence.sequence_id} lacks prompt logprobs before {scheduled.start}"
            )
        gathered.extend(scored[num_known:])


def _nothing_allowed(sequence: SequenceState) -> InvalidRequest:
    structured = sequence.tokenized.request.sampling.structured
    return InvalidRequest(
        "no token is left to continue with: what restricts the output (its structure, allowed_token_ids,"
        " bad_words, logit_bias) allows none, or its structure takes too long to follow",
        param=None if structured is None else structured.param,
    )
