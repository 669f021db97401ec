"""One sequence as the scheduler knows it, and its block tables.

A `SequenceState` is made by `Scheduler.add` and changed by the scheduler (blocks and digests: by
`KVAllocator` and its `PrefixCache`) alone. It knows no policy. How the counts relate, with one step in flight
(block_len 4):

    position            0 1 2 3 | 4 5 6 7 | 8
    token_ids           x x x x   x x             known here: prompt and applied outputs
    num_unseen_tokens                 ?           sampled by a step in flight
    num_computed_tokens ──────────────┘           positions planned so far; the next step starts here
"""

import enum

from asyncserve.observer import RequestTimeline
from asyncserve.request import TokenizedRequest, TokenLogprobs
from asyncserve.token_path import SequenceRow


class SequenceStatus(enum.Enum):
    """Where a sequence stands.

    WAITING: holds nothing; in the queue, or under suspicion. RUNNING: holds a slot and blocks. PREEMPTED: as
    RUNNING, but will wait again once its last step is applied. PAUSED: holds nothing and does not wait, until
    it is resumed. ENDED: as long as steps in flight mention it, it still holds slot and blocks.
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    PAUSED = enum.auto()
    ENDED = enum.auto()


class BlockTable:
    """The blocks of one sequence: append-only while it holds a slot, but for what windows pass.

    `block_ids[group_id][i]` holds positions `i * block_len …`; the first `num_null[group_id]` entries are the
    null block: no position to be computed attends to them. `covered_len` positions have an entry in every
    group. `dropped`: blocks that were let go of lately, with the last step that reads them.
    """

    __slots__ = ("block_ids", "covered_len", "dropped", "num_null")

    def __init__(self, num_groups: int) -> None:
        self.block_ids: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.num_null = [0] * num_groups
        self.covered_len = 0
        self.dropped: list[tuple[int, int]] = []


class SequenceState(SequenceRow):
    """Mutable state of one sequence, from arrival to its last release. What each token changes is the base's.

    Attributes:
        order: Sort key: smaller is served first, greater is preempted first.
        min_len: Below this length stop tokens do not end it.
        num_cached_tokens: Prompt tokens found in the prefix cache when it was first scheduled; all of them if
        it began as a branch.
        trial_len: Positions it must have computed to be suspected of failed steps no longer; 0 if it is not.
        blocks_are_valid: Its blocks hold what its tokens say; false after a failed step.
        block_digests: Chained digests of its full blocks (of the shortest blocks, if groups differ), as far
        as computed; they survive preemption.
        num_registered_blocks: How many of these digests the prefix index was given the blocks of.
        prompt_logprobs: Entries gathered so far, or None if not wanted or already delivered.
        leader: A sequence of the same prompt that is to compute it for both; this one waits meanwhile, passed
        over by admission. None if it computes its own. followers: Those whose leader it is, in order; there
        are none once a plan ends its prompt.
    """

    __slots__ = (
        "block_digests",
        "block_table",
        "blocks_are_valid",
        "followers",
        "leader",
        "min_len",
        "num_cached_tokens",
        "num_registered_blocks",
        "order",
        "prompt_len",
        "prompt_logprobs",
        "sequence_id",
        "status",
        "timeline",
        "tokenized",
        "trial_len",
    )

    def __init__(
        self,
        tokenized: TokenizedRequest,
        timeline: RequestTimeline,
        order: tuple[int, int],
        num_groups: int,
    ) -> None:
        sampling = tokenized.request.sampling
        self.tokenized = tokenized
        self.timeline = timeline
        self.order = order
        self.sequence_id = tokenized.sequence_id
        self.status = SequenceStatus.WAITING
        self.token_ids = tokenized.prompt_token_ids[:]
        self.prompt_len = len(self.token_ids)
        self.max_len = self.prompt_len + tokenized.max_output_len
        # A grammar is complete when it is: before `min_tokens` the device ends it only if nothing else is
        # left.
        self.min_len = self.prompt_len + (0 if tokenized.grammar is not None else sampling.min_tokens)
        self.stop_token_ids = tokenized.stop_token_ids
        self.num_cached_tokens = 0
        self.block_digests: list[bytes] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = (
            None if sampling.num_prompt_logprobs is None else []
        )
        self.last_step_id = -1
        self.trial_len = 0
        self.leader: SequenceState | None = None
        self.followers: list[SequenceState] = []
        self.reset(num_groups)

    def reset(self, num_groups: int) -> None:
        """Wait with all known tokens, holding nothing."""
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0
        self.num_unseen_tokens = 0
        self.num_registered_blocks = 0
        self.plain_until = 0
        self.slot = -1
        self.accepts_output = True
        self.blocks_are_valid = True
        self.block_table = BlockTable(num_groups)

    def follow(self, leader: "SequenceState") -> None:
        """Let another sequence of the same prompt, which follows none, compute it for this one, too."""
        self.leader = leader
        leader.followers.append(self)

    def leave_family(self) -> None:
        """Follow no longer; the first of those that follow this one leads the others instead."""
        if self.leader is not None:
            self.leader.followers.remove(self)
            self.leader = None
        if self.followers:
            first, *others = self.followers
            self.followers = []
            first.leader, first.followers = None, others
            for other in others:
                other.leader = first

    def note_end(self) -> None:
        """Write into the timeline what is only counted here while the sequence lives."""
        self.timeline.num_output_tokens = len(self.token_ids) - self.prompt_len

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens whose KV no planned step computes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_planned_to_its_end(self) -> bool:
        """Whether the steps in flight are certain to end it by length."""
        return len(self.token_ids) + self.num_unseen_tokens >= self.max_len
