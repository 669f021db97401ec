"""What one GPU step is asked and what it gives: the whole contract between `loop` and `gpu`.

A `StepPlan` holds no tensor and, but for a grammar, pickles to an equal value, so the device side can be a
thread, several processes or a fake. Rules that every plan keeps (checked by `tests/contracts/plan_rules.py`):

* slots in `sequences` are distinct; a slot is admitted before (or in) the first plan that uses it and not
  used after the plan that releases it, until admitted again;
* `num_tokens` is at most the token budget, every `ScheduledSequence.num_tokens` at least 1, but for a branch:
  a sequence of 0 tokens stands behind another that samples, or behind further branches of it, was admitted
  with the same known tokens and has computed none, and samples its own first token from that one's logits;
* block ids are in `1 … num_blocks - 1` (block 0 is the null block) and a slot's table, as built up by
  appends, covers `start + num_tokens` positions of every sequence scheduled;
* the table of a group of window layers may begin with null blocks, all in its first append, where every
  position to be computed has the blocks of its window; other tables hold none;
* a sequence's steps are contiguous: `start` equals the previous `start + num_tokens`.

Block ids are of one pool, whatever group a block serves; in the tables of a slot none stands twice, but for
those that a window has passed: they may be others' by then. The device is not told, and reads nothing there.

Host blocks are in `1 … num_host_blocks - 1`; of one plan's stores no two go to the same. Blocks are loaded
when they are given to a slot, from a host block that was stored before and not lost with a failed step.

Within one plan the device applies, in this order: releases, admissions, block appends, block stores, block
loads, the forward pass, block copies, sampling; and at last rows of beam searches take the tokens and blocks
of those they go on from.
Within the forward pass each layer writes the K and V of *all* its tokens before any sequence attends, so a
sequence may read blocks that another sequence of the same plan fills.
"""

from array import array
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Literal, NamedTuple, Protocol, cast, overload

from asyncserve.grammar import Grammar
from asyncserve.kv_spec import KVGroup
from asyncserve.request import SamplingParams, TokenLogprobs


class BeamAssignment(NamedTuple):
    """A row's place in a beam search: the device chooses what each row of it goes on with.

    All rows of a search are in a plan, or none is that samples. The device adds the log-probabilities of a
    row's next token to the row's score and takes the best `(row, token)` pairs of all rows together.

    Args:
        search_id: Of the search, while any of its rows is admitted.
        beam_idx: Of the row in it, in `0 … width - 1`.
        width: Rows of the search.
        score: Sum of the log-probabilities of the row's outputs; `-inf` for a row that is to be chosen over
            by the others.
    """

    search_id: int
    beam_idx: int
    width: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAssignment:
    """A sequence enters a slot: everything the device must know once.

    Args:
        slot: The device row, in `0 … num_slots - 1`, which is the sequence's until released.
        token_ids: Every token known now: the prompt, and outputs if it was preempted before.
        prompt_len: How many of them are the request's prompt; the rest are earlier outputs. Penalties
            and sampling positions need the difference.
        sampling: The request's parameters.
        seed: 64-bit seed of its random numbers.
        stop_token_ids: Tokens that `min_tokens` forbids.
        bad_words: Token sequences that never stand in the output.
        grammar: What the output must follow, from its first token on; its stop tokens are among
            `stop_token_ids`. None leaves it free.
        beam: Its place in a beam search; None if it is a sequence by itself.
    """

    slot: int
    token_ids: "array[int]"
    prompt_len: int
    sampling: SamplingParams
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    beam: BeamAssignment | None = None


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step.

    Args:
        slot: Its row.
        start: First position computed: how many tokens are already in the KV cache.
        num_tokens: Positions computed: 1 for a decode step, a chunk for prefill, 0 for a branch.
        samples: Whether the last position's logits are sampled; False for a prefill chunk that does not
            reach the last known token.
    """

    slot: int
    start: int
    num_tokens: int
    samples: bool


class ScheduledRows(Sequence[ScheduledSequence]):
    """The sequences of a step, a column for each of their fields.

    Reads as a tuple of `ScheduledSequence`s and equals one. There is a row per stream and step, so what makes
    a plan, and what reads all of it, takes the columns. They are not changed once the plan is made.

    Args:
        slots: Of each row; so are the others.
        starts: First position computed.
        lens: Positions computed: `num_tokens`.
        samples: Whether it samples.
    """

    __slots__ = ("lens", "samples", "slots", "starts")

    def __init__(self, slots: list[int], starts: list[int], lens: list[int], samples: list[bool]) -> None:
        # Lists are made, copied and summed faster than any array whose numbers come one by one.
        self.slots = slots
        self.starts = starts
        self.lens = lens
        self.samples = samples

    @classmethod
    def of(cls, rows: Iterable[ScheduledSequence]) -> "ScheduledRows":
        """Return rows as columns."""
        columns = cls([], [], [], [])
        for row in rows:
            columns.append(*row)
        return columns

    def append(self, slot: int, start: int, num_tokens: int, samples: bool) -> None:
        """Add a row, while the plan is made."""
        self.slots.append(slot)
        self.starts.append(start)
        self.lens.append(num_tokens)
        self.samples.append(samples)

    @property
    def num_tokens(self) -> int:
        """Positions computed, all rows together."""
        return sum(self.lens)

    @property
    def num_samples(self) -> int:
        """How many rows sample."""
        return sum(self.samples)

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return starmap(ScheduledSequence, zip(self.slots, self.starts, self.lens, self.samples, strict=True))

    @overload
    def __getitem__(self, index: int) -> ScheduledSequence: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ScheduledSequence, ...]: ...
    def __getitem__(self, index: int | slice) -> ScheduledSequence | tuple[ScheduledSequence, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return ScheduledSequence(self.slots[index], self.starts[index], self.lens[index], self.samples[index])

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, ScheduledRows | tuple) else NotImplemented

    def __repr__(self) -> str:
        return repr(tuple(self))


class BlockAppend(NamedTuple):
    """Blocks added to the end of a slot's block table in one KV group.

    A sequence that begins with a prefix hit brings the null block for what its windows have passed.
    """

    group_id: int
    slot: int
    block_ids: tuple[int, ...]


class BlockCopy(NamedTuple):
    """A block whose content, in every layer, becomes another's once the step has written it."""

    source: int
    target: int


class BlockTransfer(NamedTuple):
    """A block that goes to the host's memory, or comes from there."""

    device_block: int
    host_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step is asked. `step_id` counts up by one from 0.

    It counts on over a restart of the device, which may not have seen the last ones before. `sequences` lists
    decode steps first, then prefill chunks; they are kept as columns, `rows`, however they are given.
    """

    step_id: int
    sequences: Sequence[ScheduledSequence]
    admitted: tuple[SlotAssignment, ...] = ()
    released_slots: tuple[int, ...] = ()
    block_appends: tuple[BlockAppend, ...] = ()
    block_stores: tuple[BlockTransfer, ...] = ()
    block_loads: tuple[BlockTransfer, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.sequences, ScheduledRows):
            object.__setattr__(self, "sequences", ScheduledRows.of(self.sequences))

    @property
    def rows(self) -> ScheduledRows:
        """The sequences, for those who read all of them."""
        return cast("ScheduledRows", self.sequences)

    @property
    def num_tokens(self) -> int:
        """Positions computed by the step, all sequences together."""
        return self.rows.num_tokens


BAD_LOGITS = -1
"""Stands for the token of a row whose logits were not finite: that sequence ends with an error."""
NO_TOKEN = -2
"""Stands for the token of a row to which its grammar and its other restrictions leave none: as
`BAD_LOGITS`."""


class BeamCandidate(NamedTuple):
    """One way to go on with a beam search.

    Args:
        parent: `beam_idx` of the row that it continues.
        token_id: With what.
        score: Sum of the log-probabilities of its outputs, this token's included.
    """

    parent: int
    token_id: int
    score: float


@dataclass(slots=True)
class StepTimes:
    """When a step passed through the device side, in the seconds of `time.monotonic`; 0 until it did.

    Mutable: each thread fills in its own.

    Args:
        launch_begin_s: The device thread began to prepare it.
        launch_end_s: The device thread had launched it (on a CPU: done it).
        wait_begin_s: Somebody began to wait for its results.
        done_s: Its results were on the host.
    """

    launch_begin_s: float = 0.0
    launch_end_s: float = 0.0
    wait_begin_s: float = 0.0
    done_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step gave.

    Args:
        step_id: The plan it answers.
        token_ids: One per sampling sequence, in the plan's order; where there is none, `BAD_LOGITS` or
            `NO_TOKEN`.
        logprobs: Slot to the sampled token's log-probabilities, for the slots that asked.
        prompt_logprobs: Slot to one entry per prompt token scored in this step (positions `start + 1`
            to `start + num_tokens`, as far as they are prompt), for the slots that asked.
        beams: Search id to its best candidates, best first: `max(2, 1 + number of stop tokens) * width` of
            them. The first `width` whose token is no stop token are what its rows are from now on, in order;
            the device has given each of them the tokens, the blocks and the score of its parent already.
        device_s: Seconds the device worked on the step.
        launch_s: Seconds the device thread needed to prepare and launch it (on a CPU, all but the work).
        idle_s: Seconds the device had nothing to do before this step, while the server had running
            sequences.
        times: When it passed through the device side, if that is known.
    """

    step_id: int
    token_ids: Sequence[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    beams: Mapping[int, Sequence[BeamCandidate]] = field(default_factory=dict)
    device_s: float = 0.0
    launch_s: float = 0.0
    idle_s: float = 0.0
    times: StepTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInfo:
    """What the started device side offers the scheduler.

    Args:
        num_slots: Rows, hence most sequences running at once.
        kv_groups: With the size of their common pool.
        max_model_len: Most tokens (prompt and output) of one sequence.
        len_is_of: What sets that: the model's context, the option, or, if less fits, the KV cache.
        vocab_size: Rows of the output matrix; every token id is below it.
        max_num_batched_tokens: Token budget of one step.
        max_unapplied: Steps that may be submitted and not yet applied: 2 is one step ahead.
        num_host_blocks: Blocks of the host's memory that blocks of the pool can be stored in, block 0 (never
            given out) included; 0 for none.
        num_swap_blocks: Of those, how many preempted sequences may hold. What is left, and what they do not
            use, is for cached blocks that are evicted from the pool.
        host_block_s: Seconds that a block takes to the host and back, as measured when it started.
        device_name: For people.
    """

    num_slots: int
    kv_groups: tuple[KVGroup, ...]
    max_model_len: int
    vocab_size: int
    max_num_batched_tokens: int
    len_is_of: Literal["model", "option", "kv_cache"] = "model"
    max_unapplied: int = 2
    num_host_blocks: int = 0
    num_swap_blocks: int = 0
    host_block_s: float = 0.0
    device_name: str = ""


class Executor(Protocol):
    """The device side, as the loop sees it."""

    async def start(self) -> ExecutorInfo:
        """Load everything and return when steps can be submitted.

        Raises:
            StartupError: With what to change.
        """

    def submit(self, plan: StepPlan) -> Awaitable[StepOutput]:
        """Queue one step and return at once; steps run and finish in the order submitted.

        The awaitable raises `StepFailed` if the step raised (`StepOutOfMemory` if for lack of memory),
        `DeviceLost` if the device did not survive it or an earlier one, `EngineStopped` if the executor
        stopped before the step ran.
        """

    @property
    def graphs_pending(self) -> int:
        """What will still be prepared in idle time to run steps faster; 0 when that is done."""

    async def restart(self) -> ExecutorInfo:
        """Open the device anew, after it was lost or a step of it has not ended in time.

        What it held is gone: rows, block tables, KV. Steps that were submitted before and are not finished
        raise `DeviceLost`; step ids count on.

        Raises:
            DeviceLost: It cannot be opened again in this process.
            StartupError: It could not be opened again.
            EngineStopped: `stop` was called.
        """

    async def stop(self) -> None:
        """Finish the step that runs, fail the ones that wait, free the device. Idempotent."""
