"""A device side without a device: `FakeExecutor`, and `FakeRunner`, its synchronous core.

The next token is a fixed function of the tokens before it (`fake_token`), so results depend on nothing else:
not on batching, chunking, prefix caching, preemption or steps ahead. With `check_plans` every plan is held
against `PlanRules`, and a paged KV cache is simulated: each position of a block keeps the digest of the
prefix that wrote it, and every step checks that what a sequence reads through its block table is its own.
Without `check_plans` a token costs about a third of a microsecond, for throughput benchmarks.
"""

import asyncio
import math
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from asyncserve.errors import AsyncserveError, DeviceLost, EngineStopped, StepFailed
from asyncserve.kv_spec import FullAttention, KVGroup, KVSpec, RecurrentState, SlidingWindow
from asyncserve.request import TokenLogprobs
from asyncserve.step import NO_TOKEN, BeamCandidate, ExecutorInfo, SlotAssignment, StepOutput, StepPlan
from tests.contracts.plan_rules import PlanRules

NextToken = Callable[["array[int]", int], int]
"""(all tokens so far, prompt_len) → the next token, or BAD_LOGITS. Where a grammar forbids it, another is
taken."""


def fake_info(
    *,
    num_slots: int = 8,
    num_blocks: int = 64,
    block_len: int = 4,
    max_model_len: int = 128,
    vocab_size: int = 512,
    max_num_batched_tokens: int = 32,
    max_unapplied: int = 2,
    num_groups: int = 1,
    specs: Sequence[KVSpec] = (),
    num_host_blocks: int = 0,
    num_swap_blocks: int = 0,
    host_block_s: float = 0.0,
) -> ExecutorInfo:
    """Return the description of a small device, with `num_groups` groups of full attention or `specs`."""
    spec = FullAttention(block_len=block_len, num_kv_heads=1, head_dim=1, dtype="float32")
    return ExecutorInfo(
        num_slots=num_slots,
        kv_groups=tuple(
            KVGroup(group_id=group_id, spec=each, layer_ids=(group_id,), num_blocks=num_blocks)
            for group_id, each in enumerate(specs or (spec,) * num_groups)
        ),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_unapplied=max_unapplied,
        num_host_blocks=num_host_blocks,
        num_swap_blocks=num_swap_blocks,
        host_block_s=host_block_s,
        device_name="fake",
    )


def fake_token(token_ids: "array[int]", vocab_size: int) -> int:
    """Return the token that follows `token_ids` when no `next_token` is given."""
    return zlib.crc32(token_ids) % vocab_size


def fake_continuation(
    prompt_token_ids: Sequence[int],
    num_tokens: int,
    vocab_size: int,
    next_token: NextToken | None = None,
) -> list[int]:
    """Return the first `num_tokens` output tokens of a prompt, stop tokens not considered."""
    token_ids = array("i", prompt_token_ids)
    prompt_len = len(token_ids)
    for _ in range(num_tokens):
        token_ids.append(
            next_token(token_ids, prompt_len) if next_token else fake_token(token_ids, vocab_size)
        )
    return list(token_ids[prompt_len:])


def fake_logprobs(token_id: int, num_top: int, vocab_size: int) -> TokenLogprobs:
    """Return the log-probabilities every fake step reports for a chosen (or prompt) token."""
    top = tuple(((token_id + i) % vocab_size, -0.25 * (i + 1)) for i in range(num_top))
    return TokenLogprobs(token_id=token_id, logprob=-0.25, rank=1, top=top)


def fake_candidates(
    rows: Sequence[tuple[int, float]],
    num_stop_tokens: int,
    vocab_size: int,
    *,
    allowed_token_ids: Sequence[int] | None = None,
    is_lost: bool = False,
) -> list[BeamCandidate]:
    """Return the best candidates of a beam search.

    Args:
        rows: Of each the CRC of all its tokens, and its score.
        num_stop_tokens: How many tokens end a row.
        vocab_size: Tokens.
        allowed_token_ids: Nothing else has a probability; None: all have.
        is_lost: Give others, as a device would that has computed nonsense.
    """
    candidates = [
        BeamCandidate(
            parent,
            token_id,
            score - (zlib.crc32(bytes((token_id % 256, is_lost)), digest) % 9973 + 1) / 64
            if allowed_token_ids is None or token_id in allowed_token_ids
            else -math.inf,
        )
        for parent, (digest, score) in enumerate(rows)
        for token_id in range(vocab_size)
    ]
    candidates.sort(key=lambda each: (-each.score, each.parent, each.token_id))
    return candidates[: max(2, 1 + num_stop_tokens) * len(rows)]


class _Page:
    """A block: `digests[offset]` is that of the prefix that ends there, None if a failed step wrote it.

    A page that another group writes to holds nothing any more of the one before.
    """

    __slots__ = ("digests", "group_id")

    def __init__(self) -> None:
        self.group_id = -1
        self.digests: dict[int, int | None] = {}

    def write(self, group_id: int, offset: int, digest: int | None) -> None:
        if group_id != self.group_id:
            self.group_id, self.digests = group_id, {}
        self.digests[offset] = digest

    def copy_from(self, other: "_Page", *, is_garbage: bool) -> None:
        """Take over what another holds; or garbage instead."""
        self.group_id = other.group_id
        self.digests = dict.fromkeys(other.digests) if is_garbage else dict(other.digests)

    def read(self, group_id: int, offset: int) -> int | None:
        """Return what is there; -1 if nothing is."""
        return self.digests.get(offset, -1) if group_id == self.group_id else -1

    def copy(self) -> "_Page":
        page = _Page()
        page.group_id, page.digests = self.group_id, dict(self.digests)
        return page


class _Row:
    """A device row. `digest` is the CRC of all its tokens; `is_lost` once a failed step touched it."""

    __slots__ = ("assignment", "digest", "is_lost", "matcher", "prompt_len", "score", "tables", "token_ids")

    def __init__(self, assignment: SlotAssignment, num_groups: int) -> None:
        self.assignment = assignment
        self.token_ids = assignment.token_ids[:]
        self.prompt_len = assignment.prompt_len
        self.digest = zlib.crc32(self.token_ids)
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.is_lost = False
        self.score = 0.0 if assignment.beam is None else assignment.beam.score
        self.matcher = None
        if assignment.grammar is not None:
            self.matcher = assignment.grammar.matcher()
            assert all(map(self.matcher.accept, self.token_ids[self.prompt_len :]))

    def follow(self, token_id: int, vocab_size: int) -> int:
        """Return the token that the grammar allows in place of this one, and move on by it."""
        assert self.matcher is not None
        words = array("i", bytes(4 * -(-vocab_size // 32)))
        self.matcher.fill_mask(memoryview(words))
        allowed = [each for each in range(vocab_size) if words[each // 32] >> each % 32 & 1]
        if not allowed:
            return NO_TOKEN
        if token_id not in allowed:
            token_id = allowed[token_id % len(allowed)]
        assert self.matcher.accept(token_id)
        return token_id

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.digest = zlib.crc32(token_id.to_bytes(4, "little"), self.digest)


class FakeRunner:
    """Runs plans one after the other, synchronously: what `ModelRunner` is to the device thread.

    Args:
        next_token: Chooses tokens instead of `fake_token`.
        check_plans: Hold every plan against `PlanRules` and simulate the KV cache.
    """

    def __init__(
        self, info: ExecutorInfo, *, next_token: NextToken | None = None, check_plans: bool = True
    ) -> None:
        self.info = info
        self._next_token = next_token
        self._rows: dict[int, _Row] = {}
        self._scored_slots: set[int] = set()
        self._checks = check_plans
        self._pages = [_Page() for _ in range(info.kv_groups[0].num_blocks)] if check_plans else []
        self._host_pages = [_Page() for _ in range(info.num_host_blocks)] if check_plans else []

    def reopened(self) -> "FakeRunner":
        """Return a runner for the same device, opened anew: rows and KV are gone."""
        return FakeRunner(self.info, next_token=self._next_token, check_plans=self._checks)

    def tables_of(self, slot: int) -> list[list[int]]:
        """Return a row's block tables, one per group; with `check_plans`."""
        return self._rows[slot].tables

    def prompt_tokens(self, plan: StepPlan) -> set[int]:
        """Return the tokens of the prompts of all sequences in the next plan."""
        assigned = {slot: row.assignment for slot, row in self._rows.items()}
        assigned.update({each.slot: each for each in plan.admitted})
        rows = [assigned[sequence.slot] for sequence in plan.sequences]
        return {token_id for row in rows for token_id in row.token_ids[: row.prompt_len]}

    def run(self, plan: StepPlan) -> StepOutput:
        """Run the next plan."""
        self._prepare(plan)
        if self._checks:
            self._move_pages(plan, is_garbage=False)
            self._write_kv(plan, is_garbage=False)
            self._check_kv(plan)
            self._copy_blocks(plan)
        if self._scored_slots or self._next_token is not None or self._checks:
            return self._sample(plan)
        rows, vocab_size, crc32 = self._rows, self.info.vocab_size, zlib.crc32
        token_ids = []
        for slot, _, _, samples in plan.sequences:
            if samples:
                row = rows[slot]
                token_id = row.digest % vocab_size
                token_ids.append(token_id)
                row.digest = crc32(token_id.to_bytes(4, "little"), row.digest)
        return StepOutput(step_id=plan.step_id, token_ids=token_ids)

    def fail(self, plan: StepPlan) -> None:
        """Run the next plan as a step that raises half-way: what it should have written is garbage."""
        self._prepare(plan)
        if self._checks:
            self._move_pages(plan, is_garbage=True)
            self._write_kv(plan, is_garbage=True)
            self._copy_blocks(plan)
        for sequence in plan.sequences:
            row = self._rows[sequence.slot]
            row.is_lost = True
            if sequence.samples:
                row.append(0)

    def _prepare(self, plan: StepPlan) -> None:
        for slot in plan.released_slots:
            del self._rows[slot]
            self._scored_slots.discard(slot)
        for assignment in plan.admitted:
            self._rows[assignment.slot] = _Row(assignment, len(self.info.kv_groups))
            sampling = assignment.sampling
            if (
                sampling.num_logprobs is not None
                or sampling.num_prompt_logprobs is not None
                or assignment.grammar is not None
                or assignment.beam is not None
            ):
                self._scored_slots.add(assignment.slot)
        if self._checks:
            for group_id, slot, block_ids in plan.block_appends:
                self._rows[slot].tables[group_id].extend(block_ids)

    def _move_pages(self, plan: StepPlan, *, is_garbage: bool) -> None:
        for device_block, host_block in plan.block_stores:
            self._host_pages[host_block].copy_from(self._pages[device_block], is_garbage=is_garbage)
        for device_block, host_block in plan.block_loads:
            self._pages[device_block].copy_from(self._host_pages[host_block], is_garbage=is_garbage)

    def _write_kv(self, plan: StepPlan, *, is_garbage: bool) -> None:
        for slot, start, num_tokens, _ in plan.sequences:
            row = self._rows[slot]
            digests = _prefix_digests(row.token_ids[: start + num_tokens])
            for group in self.info.kv_groups:
                if isinstance(group.spec, RecurrentState) and start and num_tokens:
                    # What is read is overwritten.
                    self._check_position(plan, row, group, start - 1, digests[start - 1])
                for position in range(start, start + num_tokens):
                    lost = is_garbage or row.is_lost
                    for page, offset in self._places(row, group, position):
                        page.write(group.group_id, offset, None if lost else digests[position])

    def _copy_blocks(self, plan: StepPlan) -> None:
        pages = self._pages
        copies = [(target, pages[source].copy()) for source, target in plan.block_copies]
        for target, page in copies:
            pages[target] = page

    def _check_kv(self, plan: StepPlan) -> None:
        origin: _Row | None = None
        for slot, start, num_tokens, _ in plan.sequences:
            row = self._rows[slot]
            if not num_tokens:
                assert origin is not None
                row.is_lost |= origin.is_lost  # its logits; its blocks are looked at when it reads them
                continue
            origin = row
            digests = _prefix_digests(row.token_ids[: start + num_tokens])
            for group in self.info.kv_groups:
                first, spec = 0, group.spec
                if isinstance(spec, SlidingWindow):
                    first = max(0, start - spec.window_len + 1)
                elif isinstance(spec, RecurrentState):
                    first = start + num_tokens - 1
                for position in range(first, start + num_tokens):
                    self._check_position(plan, row, group, position, digests[position])
            if row.is_lost:
                for group in self.info.kv_groups:
                    for position in range(start, start + num_tokens):
                        for page, offset in self._places(row, group, position):
                            page.write(group.group_id, offset, None)

    def _places(self, row: _Row, group: KVGroup, position: int) -> list[tuple[_Page, int]]:
        """Return where a position is kept: at one place, or, a state, in every block of its run."""
        table = row.tables[group.group_id]
        if isinstance(group.spec, RecurrentState):
            return [(self._pages[block_id], 0) for block_id in table]
        block_idx, offset = divmod(position, group.spec.block_len)
        return [(self._pages[table[block_idx]], offset)]

    def _check_position(self, plan: StepPlan, row: _Row, group: KVGroup, position: int, digest: int) -> None:
        for page, offset in self._places(row, group, position):
            held = page.read(group.group_id, offset)
            if held is None:
                # What a failed step left: everything computed from it is lost as well.
                row.is_lost = True
            elif held != digest and not row.is_lost:
                raise AssertionError(
                    f"step {plan.step_id}, slot {row.assignment.slot}: group {group.group_id} does not hold"
                    f" the sequence's prefix at position {position}"
                )

    def _sample(self, plan: StepPlan) -> StepOutput:
        vocab_size = self.info.vocab_size
        token_ids: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        searches: dict[int, list[tuple[int, _Row, int]]] = {}
        for slot, start, num_tokens, samples in plan.sequences:
            row = self._rows[slot]
            sampling = row.assignment.sampling
            if sampling.num_prompt_logprobs is not None and start + 1 < row.prompt_len:
                scored = row.token_ids[start + 1 : min(start + num_tokens + 1, row.prompt_len)]
                prompt_logprobs[slot] = [
                    fake_logprobs(token_id, sampling.num_prompt_logprobs, vocab_size) for token_id in scored
                ]
            if not samples:
                continue
            if row.assignment.beam is not None:
                searches.setdefault(row.assignment.beam.search_id, []).append(
                    (len(token_ids), row, start + num_tokens)
                )
                token_ids.append(0)
                continue
            if row.is_lost:
                # Not what the sequence should get, so that a test notices if it ever arrives.
                token_id = (row.digest + 1) % vocab_size
            elif self._next_token is not None:
                token_id = self._next_token(row.token_ids, row.prompt_len)
            else:
                token_id = row.digest % vocab_size
            if row.matcher is not None and token_id >= 0:
                token_id = row.follow(token_id, vocab_size)
            token_ids.append(token_id)
            row.append(max(token_id, 0))
            if sampling.num_logprobs is not None and token_id >= 0:
                logprobs[slot] = fake_logprobs(token_id, sampling.num_logprobs, vocab_size)
        beams = {search_id: self._choose_beams(rows, token_ids) for search_id, rows in searches.items()}
        return StepOutput(
            step_id=plan.step_id,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            beams=beams,
        )

    def _choose_beams(
        self, sampling: list[tuple[int, _Row, int]], token_ids: list[int]
    ) -> list[BeamCandidate]:
        """Let the rows of a search, with where their tokens go and how much they have computed, go on."""
        rows = [row for _, row, _ in sampling]
        (length,) = {length for _, _, length in sampling}
        for beam_idx, row in enumerate(rows):
            assert row.assignment.beam is not None
            assert row.assignment.beam.beam_idx == beam_idx
        stops = rows[0].assignment.stop_token_ids
        is_lost = any(row.is_lost for row in rows)
        candidates = fake_candidates(
            [(row.digest, row.score) for row in rows],
            len(stops),
            self.info.vocab_size,
            allowed_token_ids=rows[0].assignment.sampling.allowed_token_ids,
            is_lost=is_lost,
        )
        survivors = [each for each in candidates if each.token_id not in stops][: len(rows)]
        before = [(row.token_ids[:], row.digest, [table[:] for table in row.tables]) for row in rows]
        copies: list[tuple[int, _Page]] = []
        for (place, row, _), survivor in zip(sampling, survivors, strict=True):
            token_ids[place] = survivor.token_id
            known, row.digest, tables = before[survivor.parent]
            row.token_ids, row.score, row.is_lost = known[:], survivor.score, is_lost
            row.append(survivor.token_id)
            if not self._checks:
                continue
            for group, table, taken in zip(self.info.kv_groups, row.tables, tables, strict=True):
                num_full, rest_len = divmod(length, group.spec.block_len)
                if rest_len:
                    copies.append((table[num_full], self._pages[taken[num_full]].copy()))
                table[:num_full] = taken[:num_full]
        for target, page in copies:
            self._pages[target] = page
        return candidates


def _prefix_digests(token_ids: "array[int]") -> list[int]:
    """Return the CRC of every non-empty prefix, shortest first."""
    digest, digests = 0, []
    for token_id in token_ids:
        digest = zlib.crc32(token_id.to_bytes(4, "little"), digest)
        digests.append(digest)
    return digests


class FakeExecutor:
    """An `Executor` whose steps finish at the next loop iteration, or when the test says so.

    Args:
        info: What `start` returns; `fake_info()` if not given.
        next_token: Chooses tokens instead of `fake_token`: (all tokens so far, prompt_len) → token id.
        check_plans: Hold every plan against the rules; off for benchmarks.
        start_error: What `start` raises, for tests of failing start-up.

    After `hold()` steps wait for `complete(step_id)`, `fail(step_id)` or `resume()`. `fail` of a step not yet
    submitted makes it fail when its turn comes, in both modes.
    """

    def __init__(
        self,
        info: ExecutorInfo | None = None,
        *,
        next_token: NextToken | None = None,
        check_plans: bool = True,
        start_error: Exception | None = None,
    ) -> None:
        self.info = info or fake_info()
        self.plans: list[StepPlan] = []
        """Every plan submitted, in order (only with `check_plans`)."""
        self.num_completed_steps = 0
        self.is_started = False
        self.is_stopped = False
        self._start_error = start_error
        self._runner = FakeRunner(self.info, next_token=next_token, check_plans=check_plans)
        self._rules = PlanRules(self.info) if check_plans else None
        self._pending: deque[tuple[StepPlan, asyncio.Future[StepOutput]]] = deque()
        self._failures: dict[int, str] = {}
        self._culprits: dict[int, str] = {}
        self._last_step_id: int | None = None
        self._failing_from: tuple[int, str] | None = None
        self._lost: DeviceLost | None = None
        self._is_held = False
        self.num_restarts = 0
        self.restart_error: AsyncserveError | None = None
        """What `restart` raises."""

    @property
    def pending_step_ids(self) -> list[int]:
        """Steps submitted and not finished, oldest first."""
        return [plan.step_id for plan, _ in self._pending]

    async def start(self) -> ExecutorInfo:
        """Start at once."""
        if self._start_error is not None:
            raise self._start_error
        self.is_started = True
        return self.info

    def submit(self, plan: StepPlan) -> "asyncio.Future[StepOutput]":
        """Queue one step."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepOutput] = loop.create_future()
        if not self.is_started:
            raise RuntimeError("submit before start")
        if self.is_stopped:
            future.set_exception(EngineStopped("the executor has stopped"))
            return future
        if self._lost is not None:
            future.set_exception(self._lost)
            return future
        if self._rules is not None:
            self._rules.check(plan)
            self._check_release_rule(plan)
            if len(self._pending) >= self.info.max_unapplied:
                raise AssertionError(f"more than {self.info.max_unapplied} steps are unfinished")
            self.plans.append(plan)
        self._pending.append((plan, future))
        if not self._is_held:
            loop.call_soon(self._finish_unless_held)
        return future

    @property
    def graphs_pending(self) -> int:
        """None."""
        return 0

    async def restart(self) -> ExecutorInfo:
        """Forget rows and KV; steps that wait are lost, and later ones are held no more."""
        if self.is_stopped:
            raise EngineStopped("the executor has stopped")
        self.lose_device("the device is opened anew")
        self.num_restarts += 1
        await asyncio.sleep(0)
        if self.restart_error is not None:
            raise self.restart_error
        self._lost = None
        self._is_held = False
        self._runner = self._runner.reopened()
        if self._rules is not None:
            self._rules = self._rules.reopened()
        return self.info

    async def stop(self) -> None:
        """Fail the steps that wait."""
        self.is_stopped = True
        while self._pending:
            _, future = self._pending.popleft()
            if not future.done():
                future.set_exception(EngineStopped("the executor stopped before the step ran"))

    def hold(self) -> None:
        """Let steps wait from now on."""
        self._is_held = True

    def resume(self) -> None:
        """Finish every waiting step, and further ones at the next loop iteration."""
        self._is_held = False
        while self._pending:
            self._finish_oldest()

    def complete(self, step_id: int | None = None) -> None:
        """Finish the oldest waiting step; `step_id`, if given, must be it, since steps finish in order."""
        assert self._pending, "no step is waiting"
        oldest = self._pending[0][0].step_id
        assert step_id is None or step_id == oldest, f"step {oldest} finishes before step {step_id}"
        self._finish_oldest()

    def fail(self, step_id: int, message: str = "the fake device failed") -> None:
        """Let a step raise `StepFailed`: now if it is the oldest waiting one, else when its turn comes."""
        self._failures[step_id] = message
        if self._is_held and self._pending and self._pending[0][0].step_id == step_id:
            self._finish_oldest()

    def fail_from(self, step_id: int, message: str = "the fake device failed") -> None:
        """Let this step and all behind it raise `StepFailed`, until `mend`: who is in them ends with it."""
        self._failing_from = (step_id, message)

    def mend(self) -> None:
        """Let steps fail no longer."""
        self._failing_from = None

    def fail_with(self, token_id: int, message: str = "the fake device failed") -> None:
        """Let every step raise `StepFailed` that computes a sequence whose prompt has this token."""
        self._culprits[token_id] = message

    def lose_device_at(self, step_id: int) -> None:
        """Let a step that has not run yet be the device's last."""
        self._last_step_id = step_id

    def lose_device(self, message: str = "the fake device fell off the bus") -> None:
        """Answer all steps that wait, and those that come, with `DeviceLost` until the restart."""
        self._lost = DeviceLost(message)
        while self._pending:
            _, future = self._pending.popleft()
            if not future.done():
                future.set_exception(self._lost)
                future.exception()

    def _finish_unless_held(self) -> None:
        if self._pending and not self._is_held:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        if self._pending[0][0].step_id == self._last_step_id:
            self.lose_device()
            return
        plan, future = self._pending.popleft()
        self.num_completed_steps += 1
        message = self._failures.pop(plan.step_id, None) if self._failures else None
        if self._failing_from is not None and plan.step_id >= self._failing_from[0]:
            message = self._failing_from[1]
        if message is None and self._culprits:
            held = self._runner.prompt_tokens(plan)
            message = next((said for token_id, said in self._culprits.items() if token_id in held), None)
        if message is None:
            try:
                output = self._runner.run(plan)
            except Exception as error:
                # A broken rule must reach whoever awaits the step, not the event loop's log.
                if not future.done():
                    future.set_exception(error)
                return
            if not future.done():
                future.set_result(output)
        else:
            self._runner.fail(plan)
            if not future.done():
                future.set_exception(StepFailed(message, step_id=plan.step_id))

    def _check_release_rule(self, plan: StepPlan) -> None:
        for earlier, _ in self._pending:
            mentioned = {sequence.slot for sequence in earlier.sequences}
            early = mentioned.intersection(plan.released_slots)
            if early:
                raise AssertionError(
                    f"step {plan.step_id} releases slots {sorted(early)} which unfinished step"
                    f" {earlier.step_id} mentions"
                )
