"""Faults on purpose, for tests and soaks: a step that fails or hangs, a lost device, a tokenizer that raises.

Takes the text of `ASYNCSERVE_FAULTS`, gives `Faults`, which wrap the executor and the tokenizer; without the
variable nothing of this is there. Parts are separated by commas:

    fail-step=WHEN          a step raises
    oom-step=WHEN           a step lacks memory
    hang-step=WHEN:TIME     a step takes that much longer
    lose-device=WHEN        a step loses the device
    nan-row=WHEN            a row's logits are not finite: the one with the token, or the first that samples
    tokenizer=TEXT          encoding a prompt that has this text raises
    slow-disk=TIME          opening the device, and files read again while serving, take that much longer

WHEN is 100 (step 100, once), every:500 (each 500th step) or token:7 (each step of a sequence whose prompt has
the token 7); TIME is 200ms or 30s.
"""

import asyncio
import dataclasses
import logging
import re
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncserve.errors import ConfigError, DeviceLost, EngineError, StepFailed, StepOutOfMemory
from asyncserve.loop.tokenizer import Tokenizer
from asyncserve.request import ChatPrompt
from asyncserve.step import BAD_LOGITS, Executor, ExecutorInfo, StepOutput, StepPlan

logger = logging.getLogger(__name__)

STEP_FAULTS = ("lose-device", "hang-step", "oom-step", "fail-step", "nan-row")
"""Kinds that befall a step, in the order in which one is chosen if several are due."""
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """When a fault is due: at one step, at each n-th, or at each that computes a certain sequence.

    Args:
        step_id: The one step.
        every: Each so manieth.
        token_id: Each step of a sequence whose prompt has this token.
        delay_s: How long it hangs.
    """

    step_id: int | None = None
    every: int | None = None
    token_id: int | None = None
    delay_s: float = 0.0

    def is_due(self, plan: StepPlan, marked_slots: set[int]) -> bool:
        """Return whether it is due in this step, of which the marked slots hold the token."""
        if self.token_id is not None:
            return any(sequence.slot in marked_slots for sequence in plan.sequences)
        if self.every is not None:
            return (plan.step_id + 1) % self.every == 0
        return plan.step_id == self.step_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is to go wrong.

    Args:
        steps: By kind, of `STEP_FAULTS`.
        poisoned_text: Prompts that have it cannot be encoded.
        disk_delay_s: How much longer files take.
    """

    steps: Mapping[str, Trigger] = field(default_factory=dict)
    poisoned_text: str | None = None
    disk_delay_s: float = 0.0

    def around_executor(self, executor: Executor) -> Executor:
        """Return an executor whose steps go wrong as asked."""
        return FaultyExecutor(executor, self) if self.steps or self.disk_delay_s else executor

    def around_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return a tokenizer that goes wrong as asked."""
        if self.poisoned_text is None:
            return tokenizer
        return FaultyTokenizer(tokenizer, self.poisoned_text)

    def around_read(self, read: Callable[[], None]) -> Callable[[], None]:
        """Return what reads a file, as late as asked; it is called in a thread."""

        def read_slowly() -> None:
            time.sleep(self.disk_delay_s)
            read()

        return read_slowly if self.disk_delay_s else read


def parse_faults(text: str) -> Faults:
    """Read the value of `ASYNCSERVE_FAULTS`.

    Raises:
        ConfigError: It is not as described above; names the part.
    """
    steps: dict[str, Trigger] = {}
    poisoned_text: str | None = None
    disk_delay_s = 0.0
    for part in filter(None, (each.strip() for each in text.split(","))):
        kind, separator, value = part.partition("=")
        if not separator or not value:
            raise _wrong(part, "a fault is written KIND=VALUE")
        if kind == "tokenizer":
            poisoned_text = value
        elif kind == "slow-disk":
            disk_delay_s = _seconds(part, value)
        elif kind == "hang-step":
            when, separator, delay = value.rpartition(":")
            if not separator:
                raise _wrong(part, "what hangs is written WHEN:TIME")
            steps[kind] = dataclasses.replace(_trigger(part, when), delay_s=_seconds(part, delay))
        elif kind in STEP_FAULTS:
            steps[kind] = _trigger(part, value)
        else:
            known = ", ".join(sorted((*STEP_FAULTS, "tokenizer", "slow-disk")))
            raise _wrong(part, f"there is no such kind; known: {known}")
    return Faults(steps=steps, poisoned_text=poisoned_text, disk_delay_s=disk_delay_s)


def _trigger(part: str, text: str) -> Trigger:
    kind, _, number = text.rpartition(":")
    if not number.isdecimal() or kind not in ("", "every", "token"):
        raise _wrong(part, "when is a step's number, every:NUMBER or token:ID")
    if kind == "every":
        if int(number) < 1:
            raise _wrong(part, "every:NUMBER is at least 1")
        return Trigger(every=int(number))
    return Trigger(token_id=int(number)) if kind == "token" else Trigger(step_id=int(number))


def _seconds(part: str, text: str) -> float:
    match = _TIME.fullmatch(text)
    if match is None:
        raise _wrong(part, "a time is written like 200ms or 30s")
    return float(match[1]) * (0.001 if match[2] == "ms" else 1.0)


def _wrong(part: str, what: str) -> ConfigError:
    return ConfigError(f"ASYNCSERVE_FAULTS: {part!r}: {what}")


class FaultyExecutor:
    """An executor in front of another, between which steps get lost.

    A step that fails still changes the rows, as the real one does, and computes nothing.

    Args:
        inner: Runs what goes well.
        faults: What does not.
    """

    def __init__(self, inner: Executor, faults: Faults) -> None:
        self._inner = inner
        self._triggers = [(kind, faults.steps[kind]) for kind in STEP_FAULTS if kind in faults.steps]
        self._disk_delay_s = faults.disk_delay_s
        self._marked: dict[int, set[int]] = {
            trigger.token_id: set() for _, trigger in self._triggers if trigger.token_id is not None
        }
        self._lost: DeviceLost | None = None
        self._delayed: list[asyncio.Task[StepOutput]] = []  # since one hangs, each behind the one before

    async def start(self) -> ExecutorInfo:
        """Start the other one, slowly if asked."""
        await asyncio.sleep(self._disk_delay_s)
        return await self._inner.start()

    def submit(self, plan: StepPlan) -> Awaitable[StepOutput]:
        """Queue one step, and let happen to it what is due."""
        for token_id, slots in self._marked.items():
            slots.difference_update(plan.released_slots)
            slots.update(each.slot for each in plan.admitted if token_id in each.token_ids[: each.prompt_len])
        if self._lost is not None:
            return _failed(self._lost)
        kind, trigger = self._due(plan)
        self._delayed = [task for task in self._delayed if not task.done()]
        if kind == "hang-step" or self._delayed:
            task = asyncio.ensure_future(self._run_late(plan, kind, trigger, self._delayed[-1:]))
            self._delayed.append(task)
            return task
        return self._run(plan, kind, trigger)

    @property
    def graphs_pending(self) -> int:
        """As the other one says."""
        return self._inner.graphs_pending

    async def restart(self) -> ExecutorInfo:
        """Restart the other one."""
        self._forget_delayed()
        for slots in self._marked.values():
            slots.clear()
        await asyncio.sleep(self._disk_delay_s)
        info = await self._inner.restart()
        self._lost = None
        return info

    async def stop(self) -> None:
        """Stop the other one."""
        self._forget_delayed()
        await self._inner.stop()

    def _due(self, plan: StepPlan) -> tuple[str | None, Trigger]:
        for kind, trigger in self._triggers:
            if trigger.is_due(plan, self._marked.get(trigger.token_id or 0, set())):
                logger.warning("injected fault: %s at step %d", kind, plan.step_id)
                return kind, trigger
        return None, Trigger()

    def _run(self, plan: StepPlan, kind: str | None, trigger: Trigger) -> Awaitable[StepOutput]:
        if kind == "lose-device":
            self._lost = DeviceLost(f"step {plan.step_id} lost the device: injected fault")
            return _failed(self._lost)
        if kind in ("fail-step", "oom-step"):
            error_class = StepOutOfMemory if kind == "oom-step" else StepFailed
            error = error_class("injected fault", step_id=plan.step_id)
            rows_alone = self._inner.submit(dataclasses.replace(plan, sequences=()))
            return asyncio.ensure_future(_raise_after(rows_alone, error))
        output = self._inner.submit(plan)
        if kind == "nan-row":
            sampling = [sequence.slot for sequence in plan.sequences if sequence.samples]
            marked = self._marked.get(trigger.token_id or 0, set())
            bad = [slot in marked for slot in sampling] if trigger.token_id is not None else [True]
            return asyncio.ensure_future(_spoil(output, bad))
        return output

    async def _run_late(
        self,
        plan: StepPlan,
        kind: str | None,
        trigger: Trigger,
        before: Sequence["asyncio.Task[StepOutput]"],
    ) -> StepOutput:
        try:
            if before:
                await asyncio.wait(before)
            await asyncio.sleep(trigger.delay_s)
        except asyncio.CancelledError:
            # Given up on: the device never got this step, so it can do nothing with those behind it.
            self._lost = self._lost or DeviceLost(f"step {plan.step_id} hung: injected fault")
            raise
        if self._lost is not None:
            raise self._lost
        return await self._run(plan, None if kind == "hang-step" else kind, trigger)

    def _forget_delayed(self) -> None:
        for task in self._delayed:
            task.cancel()
        self._delayed.clear()


class FaultyTokenizer:
    """A tokenizer that cannot encode prompts with a certain text.

    Args:
        inner: Does everything else.
        poisoned_text: That text.
    """

    def __init__(self, inner: Tokenizer, poisoned_text: str) -> None:
        self._inner = inner
        self._poisoned_text = poisoned_text
        self.vocab_size = inner.vocab_size
        self.eos_token_ids = inner.eos_token_ids
        self.strips_leading_space = inner.strips_leading_space
        self.special_tokens = inner.special_tokens
        self.chat_template_text = inner.chat_template_text

    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Return the text's token ids, or raise.

        Raises:
            EngineError: It has the poisoned text.
        """
        if self._poisoned_text in text:
            logger.warning("injected fault: tokenizer")
            raise EngineError("the prompt could not be encoded: injected fault")
        return self._inner.encode(text, add_special_tokens=add_special_tokens)

    def render_chat(self, prompt: ChatPrompt) -> str:
        """Return the conversation as text."""
        return self._inner.render_chat(prompt)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for."""
        return self._inner.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` leaves the token out."""
        return self._inner.is_special(token_id)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the tokens."""
        return self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)


def _failed(error: Exception) -> "asyncio.Future[StepOutput]":
    future: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


async def _raise_after(rows_alone: Awaitable[StepOutput], error: StepFailed) -> StepOutput:
    await rows_alone
    raise error


async def _spoil(output: Awaitable[StepOutput], bad: Sequence[bool]) -> StepOutput:
    """Put `BAD_LOGITS` in place of the tokens of bad rows; rows without a word are good."""
    done = await output
    token_ids = [
        BAD_LOGITS if row < len(bad) and bad[row] else token_id for row, token_id in enumerate(done.token_ids)
    ]
    return dataclasses.replace(done, token_ids=token_ids)
