"""How full the KV cache's blocks are, and what sequences of one request save by sharing them.

`python -m loadtest.kv_use [MODEL]`, run in the repository's root. A scheduler is driven step by step, without
a clock: so many requests run at once, and each that ends is followed by the next. The lengths of prompts and
outputs are drawn from log-normal distributions with the means of the data sets of the PagedAttention paper
(arXiv 2309.06180, figure 11), ShareGPT and Alpaca, and from both in turn. Over all steps between the first
end of a request and the last beginning it reports

* used: tokens held, by slots of the blocks that are held;
* saved: blocks that sequences would hold beyond those held if they shared none, by that sum;
* bound: the most that could be saved. `n` sequences of a request share the full blocks of its prompt; beams
  can share all full blocks. Every row needs one of its own for what it is about to write.

Blocks depend on lengths alone, unless beams decide who shares them: these need a model, which continues cuts
of a text. Nothing here depends on the machine's speed.
"""

import argparse
import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from asyncserve.checkpoint import open_checkpoint
from asyncserve.gpu.startup import start_runner
from asyncserve.kv_spec import FullAttention, KVGroup
from asyncserve.loop.scheduler import Scheduler
from asyncserve.loop.tokenizer import load_tokenizer
from asyncserve.observer import EngineStatistics, RequestTimeline
from asyncserve.request import Request, SamplingParams, TokenizedRequest, TokensPrompt
from asyncserve.step import ExecutorInfo, StepOutput, StepPlan

BLOCK_LEN = 16
SPREAD = 0.8
"""Standard deviation of the logarithm of a length."""
LONGEST = 1024
"""Tokens of a prompt, and of an output, at most."""
SEARCHES_AT_ONCE = 4
TEXTS = ("README.md", "ARCHITECTURE.md", "docs")
"""What prompts for a model are cut from."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths of requests.

    Args:
        name: For people.
        lens: Means of prompt and output, in tokens: one such pair for each request.
    """

    name: str
    lens: tuple[tuple[float, float], ...]

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Return lengths of a prompt and of its output."""
        prompt_len, output_len = rng.choice(self.lens)
        return _draw(rng, prompt_len), _draw(rng, output_len)


SHAREGPT, ALPACA = (161.31, 337.99), (19.31, 58.45)
MIXES = (Mix("sharegpt", (SHAREGPT,)), Mix("alpaca", (ALPACA,)), Mix("both", (SHAREGPT, ALPACA)))


def _draw(rng: random.Random, mean: float) -> int:
    length = rng.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)
    return min(max(1, round(length)), LONGEST)


class Runner(Protocol):
    """What runs plans."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Run one and return what it gave."""


class NoModel:
    """Samples the same token always."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Return a token for each row that samples."""
        return StepOutput(step_id=plan.step_id, token_ids=[7] * plan.rows.num_samples)


class WithModel:
    """A model on this machine.

    Args:
        model: Path.
        device: Where it runs.
        num_slots: Most sequences at once.
    """

    def __init__(self, model: str, *, device: str, num_slots: int) -> None:
        checkpoint = open_checkpoint(model)
        self._runner, self.info = start_runner(
            checkpoint,
            device=device,
            max_num_seqs=num_slots,
            max_num_batched_tokens=max(512, num_slots),
            max_model_len=2 * LONGEST,
            block_len=BLOCK_LEN,
            kv_cache_memory_bytes=4 << 30,
        )
        text = "\n".join(path.read_text(encoding="utf-8") for path in _texts())
        self.token_ids = load_tokenizer(checkpoint, chat_template=None).encode(text, add_special_tokens=False)

    def run(self, plan: StepPlan) -> StepOutput:
        """Run a plan to its end."""
        return self._runner.run(plan).wait()


def _texts() -> Iterator[Path]:
    for name in TEXTS:
        path = Path(name)
        yield from sorted(path.rglob("*.md")) if path.is_dir() else [path]


@dataclass(slots=True)
class Use:
    """Sums over steps, in blocks and in their slots."""

    used: int = 0
    saved: int = 0
    slots: int = 0
    unused: int = 0
    could_save: int = 0
    num_steps: int = 0
    lens: list[tuple[int, float]] = field(default_factory=list)

    def note(self, statistics: EngineStatistics, could_save: int) -> None:
        """Add what is held after a step, and how many blocks could be saved of it."""
        self.used += statistics.num_blocks_used
        self.saved += statistics.num_blocks_saved
        for group in statistics.kv_groups:
            self.slots += group.num_slots
            self.unused += group.num_slots_unused
        self.could_save += could_save
        self.num_steps += 1

    def row(self, mix: Mix, kind: str, n: int) -> str:
        """Return the figures as a row of a table."""
        prompt_len, output_len = (sum(lens) / len(lens) for lens in zip(*self.lens, strict=True))
        whole = self.used + self.saved
        shares = (1 - self.unused / self.slots, self.saved / whole, self.could_save / whole)
        cells = [mix.name, f"{prompt_len:.0f} / {output_len:.0f}", f"{kind} {n}", f"{self.num_steps:,}"]
        return f"| {' | '.join(cells + [f'{share:.1%}' for share in shares])} |"


@dataclass(slots=True)
class _Live:
    """A request under way.

    Args:
        prompt_len: Tokens of its prompt.
        num_live: How many of its sequences have not ended.
        computed_len: Tokens of each of them that are in the cache.
    """

    prompt_len: int
    num_live: int
    computed_len: int = 0


class Load:
    """Requests of one kind on a scheduler.

    Args:
        info: Of the device.
        runner: The device.
        mix: Of lengths.
        text: What prompts are cut from; empty: every token of every prompt is drawn.
        n: Sequences of a request.
        use_beam_search: Whether these are the beams of a search.
        seed: Of what is drawn.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        runner: Runner,
        mix: Mix,
        *,
        text: Sequence[int] = (),
        n: int = 1,
        use_beam_search: bool = False,
        seed: int = 0,
    ) -> None:
        self._scheduler = Scheduler(
            info=info, policy="fcfs", enable_prefix_caching=True, enable_chunked_prefill=True
        )
        self._vocab_size = info.vocab_size
        self._runner, self._mix, self._text = runner, mix, text
        self._n, self._use_beam_search = n, use_beam_search
        self._rng = random.Random(seed)
        self._sequence_ids = count()
        self._live: dict[int, _Live] = {}
        self._holders: dict[int, int] = {}  # slot → sequence id

    def run(self, num_requests: int, concurrency: int) -> Use:
        """Run so many requests, so many of them at once, and return what they held."""
        use = Use()
        num_added = num_ended = step = 0
        while num_ended < num_requests:
            while num_added < num_requests and num_added - num_ended < concurrency:
                use.lens.append(self._add())
                num_added += 1
            plan = self._scheduler.plan(float(step))
            assert plan is not None, "requests live"
            self._scheduler.register_some()
            self._note_plan(plan)
            given = self._scheduler.apply(self._runner.run(plan), float(step))
            step += 1
            for delta in given.deltas:
                if delta.finish_reason is not None:
                    assert delta.error is None, delta.error
                    num_ended += self._end(delta.sequence_id)
            if num_ended and num_added < num_requests:
                statistics = EngineStatistics()
                self._scheduler.fill_statistics(statistics)
                live = {id(each): each for each in self._live.values()}.values()
                use.note(statistics, sum(map(self._could_save, live)))
        # The next load has the device as if nobody had been there.
        self._runner.run(StepPlan(step_id=step, sequences=(), released_slots=tuple(self._holders)))
        return use

    def _add(self) -> tuple[int, float]:
        """Add a request; return the length of its prompt and the mean of its outputs'."""
        prompt_len, output_len = self._mix.draw(self._rng)
        output_lens = [output_len] * self._n
        if not self._use_beam_search:
            output_lens = [output_len] + [self._mix.draw(self._rng)[1] for _ in range(self._n - 1)]
        if self._text:
            begin = self._rng.randrange(len(self._text) - prompt_len)
            prompt = array("i", self._text[begin : begin + prompt_len])
        else:
            prompt = array("i", (self._rng.randrange(self._vocab_size) for _ in range(prompt_len)))
        sampling = SamplingParams(
            max_tokens=max(output_lens), n=self._n, use_beam_search=self._use_beam_search, ignore_eos=True
        )
        live = _Live(prompt_len, self._n)
        leader_id: int | None = None
        for index, each_len in enumerate(output_lens):
            sequence_id = next(self._sequence_ids)
            self._live[sequence_id] = live
            tokenized = TokenizedRequest(
                request=Request(
                    request_id=str(sequence_id),
                    prompt=TokensPrompt(token_ids=prompt),
                    sampling=sampling,
                    arrival_s=0.0,
                ),
                sequence_id=sequence_id,
                index=index,
                prompt_token_ids=prompt,
                max_output_len=each_len,
                stop_token_ids=frozenset(),
                seed=sequence_id,
            )
            self._scheduler.add(tokenized, RequestTimeline(arrived_s=0.0), leader_id=leader_id)
            leader_id = sequence_id if leader_id is None else leader_id
        return prompt_len, sum(output_lens) / self._n

    def _note_plan(self, plan: StepPlan) -> None:
        for slot in plan.released_slots:
            del self._holders[slot]
        for assignment in plan.admitted:
            self._holders[assignment.slot] = assignment.seed
        for scheduled in plan.sequences:
            live = self._live.get(self._holders[scheduled.slot])
            if live is not None:
                live.computed_len = max(live.computed_len, scheduled.start + scheduled.num_tokens)

    def _could_save(self, live: _Live) -> int:
        """Return how many blocks at most the sequences of a request can do without by sharing."""
        shared_len = live.computed_len if self._use_beam_search else live.prompt_len
        return (live.num_live - 1) * (min(shared_len, live.computed_len) // BLOCK_LEN)

    def _end(self, sequence_id: int) -> bool:
        """Note the end of a sequence; return whether its request has ended."""
        live = self._live.pop(sequence_id)
        live.num_live -= 1
        return live.num_live == 0


def without_model() -> tuple[ExecutorInfo, NoModel]:
    """Return a device that samples always the same, and what it offers."""
    spec = FullAttention(block_len=BLOCK_LEN, num_kv_heads=1, head_dim=2, dtype="float32")
    group = KVGroup(group_id=0, spec=spec, layer_ids=(0,), num_blocks=64 * 1024)
    info = ExecutorInfo(
        num_slots=1024,
        kv_groups=(group,),
        max_model_len=2 * LONGEST,
        vocab_size=50_000,
        max_num_batched_tokens=8192,
        max_unapplied=1,
    )
    return info, NoModel()


HEAD = """| lengths of | prompt / output | sequences | steps | used | saved | bound |
|---|---|---|---|---|---|---|"""


def main() -> None:
    """Measure and print a table."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("model", nargs="?", help="for beam searches, too: a GGUF file or folder")
    options.add_argument(
        "--requests", type=int, default=1000, help="of each row without a model; 0: no such rows"
    )
    options.add_argument("--concurrency", type=int, default=64, help="requests at once, without a model")
    options.add_argument(
        "--searches", type=int, default=24, help=f"of each row with a model; {SEARCHES_AT_ONCE} at once"
    )
    options.add_argument("--mixes", nargs="+", choices=[mix.name for mix in MIXES], help="these only")
    options.add_argument("--device", default="cpu", help="where the model runs")
    options.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6], help="of beam searches")
    arguments = options.parse_args()
    if arguments.searches <= SEARCHES_AT_ONCE or 0 < arguments.requests <= arguments.concurrency:
        options.error("what is measured lies between the first end and the last beginning: ask for more")
    print(HEAD)
    mixes = [mix for mix in MIXES if arguments.mixes is None or mix.name in arguments.mixes]
    info, no_model = without_model()
    for mix in mixes if arguments.requests else ():
        for n in (1, 2, 4, 6):
            use = Load(info, no_model, mix, n=n).run(arguments.requests, arguments.concurrency)
            print(use.row(mix, "n", n), flush=True)
    if arguments.model is None:
        return
    with_model = WithModel(
        arguments.model, device=arguments.device, num_slots=SEARCHES_AT_ONCE * max(arguments.widths)
    )
    for mix in mixes:
        for width in arguments.widths:
            load = Load(
                with_model.info,
                with_model,
                mix,
                text=with_model.token_ids,
                n=width,
                use_beam_search=True,
            )
            print(load.run(arguments.searches, SEARCHES_AT_ONCE).row(mix, "beams", width), flush=True)


if __name__ == "__main__":
    main()
