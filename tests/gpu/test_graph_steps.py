"""Steps that a captured graph runs: which they are, what padding leaves alone, capturing beside others."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from asyncserve.checkpoint import Checkpoint, CheckpointFormat
from asyncserve.gpu.graphs import mixed_sizes
from asyncserve.gpu.runner import ModelRunner
from asyncserve.gpu.startup import start_runner
from tests.fakes.plan_driver import PlanDriver
from tests.fakes.tiny_model import tiny_llama_folder
from tests.gpu.tiny_runners import (
    BLOCK_LEN,
    MIXED_GRAPH,
    PROMPTS,
    TINY_SIZES,
    Subject,
    drive,
    expected,
    start_subject,
    subjects,
)

pytestmark = pytest.mark.timeout(300)

MARK = 7.5
"""Fills the cache where nothing was written yet: what writes there changes it."""

each_subject = pytest.mark.parametrize("subject", subjects(with_graphs=True))
on_a_gpu = pytest.mark.parametrize("subject", subjects("cuda", with_graphs=True))


def caches(runner: ModelRunner) -> list[torch.Tensor]:
    """Return K and V of every layer, on the device."""
    return [*runner._kv_cache.keys, *runner._kv_cache.values]


def contents(runner: ModelRunner) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return a copy of all that steps write to: the cache, and the tokens of every slot."""
    runner.device.synchronize()
    # The last cell of the history is nobody's.
    return [cache.cpu().clone() for cache in caches(runner)], runner._slots.history[:-1].cpu().clone()


def places(driver: PlanDriver, rows: Mapping[int, tuple[int, int]]) -> set[tuple[int, int]]:
    """Return (block, offset) of positions: slot → first and last but one."""
    return {
        (driver.tables[slot][0][position // BLOCK_LEN], position % BLOCK_LEN)
        for slot, (start, stop) in rows.items()
        for position in range(start, stop)
    }


def assert_wrote_only(
    driver: PlanDriver,
    before: tuple[list[torch.Tensor], torch.Tensor],
    *,
    positions: Mapping[int, tuple[int, int]],
    tokens: Mapping[int, int],
) -> None:
    """Hold what changed since `before` against what a step may write.

    Args:
        driver: That made the step.
        before: `contents` before it.
        positions: Slot to the positions whose K and V it computed.
        tokens: Slot to the position of the token it sampled.
    """
    after = contents(driver.runner)
    allowed = places(driver, positions)
    for old, new in zip(before[0], after[0], strict=True):
        changed = (old != new).any(dim=3).any(dim=1)
        assert {(int(block), int(offset)) for block, offset in changed.nonzero()} == allowed
    width = driver.runner._slots.width
    cells = set((before[1] != after[1]).nonzero().flatten().tolist())
    # A sampled token may be what stood there.
    assert cells <= {slot * width + position for slot, position in tokens.items()}


@each_subject
def test_a_padded_decode_step_writes_its_own_rows_places_and_nothing_else(subject: Subject) -> None:
    driver = drive(subject)
    for cache in caches(driver.runner):
        cache.fill_(MARK)
    lens = dict(enumerate(map(len, PROMPTS)))
    for prompt in PROMPTS:
        driver.admit(prompt)
    driver.step(lens)
    # Three rows where there is room for four. Slot 0 is live and has no part in it.
    before = contents(driver.runner)
    output = driver.step({1: 1, 2: 1, 3: 1})
    rows = {slot: lens[slot] for slot in (1, 2, 3)}
    assert_wrote_only(
        driver,
        before,
        positions={slot: (position, position + 1) for slot, position in rows.items()},
        tokens={slot: position + 1 for slot, position in rows.items()},
    )
    assert list(output.token_ids) == [expected(subject, PROMPTS[slot], 2)[1] for slot in (1, 2, 3)]
    # And the one left out goes on as if nothing had been.
    assert list(driver.step({0: 1}).token_ids) == expected(subject, PROMPTS[0], 2)[1:]


@each_subject
def test_a_padded_mixed_step_writes_its_own_rows_places_and_nothing_else(subject: Subject) -> None:
    driver = drive(subject)
    for cache in caches(driver.runner):
        cache.fill_(MARK)
    first, second, third = (driver.admit(prompt) for prompt in PROMPTS[:3])
    driver.step({second: 1, first: 3})
    before = contents(driver.runner)
    # A decode step, a chunk that does not reach the prompt's end, and the whole of another prompt: 11 tokens.
    fourth = driver.admit(PROMPTS[3])
    output = driver.step({first: 1, third: 6, fourth: 4})
    width = driver.runner._slots.width
    admitted = slice(fourth * width, fourth * width + len(PROMPTS[3]))
    before[1][admitted] = torch.tensor(PROMPTS[3], dtype=torch.int32)  # by the admission
    assert_wrote_only(
        driver,
        before,
        positions={first: (3, 4), third: (0, 6), fourth: (0, 4)},
        tokens={first: 4, fourth: 4},
    )
    assert list(output.token_ids) == [
        expected(subject, PROMPTS[0], 2)[1],
        expected(subject, PROMPTS[3], 1)[0],
    ]
    assert driver.generate([third], 2)[0] == expected(subject, PROMPTS[2], 2)


@each_subject
def test_capturing_beside_running_sequences_writes_nothing_of_theirs(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    driver = drive(subject, captures=False)
    for cache in caches(driver.runner):
        cache.fill_(MARK)
    slots = [driver.admit(prompt) for prompt in PROMPTS[:3]]
    tokens = [[token] for token in driver.step({1: 1, 0: 3, 2: 13}).token_ids]
    tokens[0], tokens[1] = tokens[1], tokens[0]
    num_pending = driver.runner.graphs_pending
    assert num_pending == len(subject.graphs)
    while num_pending:
        before = contents(driver.runner)
        # A step in flight, and a graph captured behind it.
        pending = driver.launch({0: 1, 1: 1})
        driver.runner.capture_next()
        for row, token_id in zip(tokens, pending.wait().token_ids, strict=False):
            row.append(token_id)
        starts = [driver.starts[slot] for slot in (0, 1)]
        assert_wrote_only(
            driver,
            before,
            positions={slot: (start - 1, start) for slot, start in enumerate(starts)},
            tokens=dict(enumerate(starts)),
        )
        num_pending -= 1
        assert driver.runner.graphs_pending == num_pending
    assert not [record for record in caplog.records if "no CUDA graph" in record.message]
    for row, more in zip(tokens, driver.generate(slots, 3), strict=True):
        row += more
    assert tokens == [
        expected(subject, prompt, len(row)) for prompt, row in zip(PROMPTS[:3], tokens, strict=True)
    ]


@each_subject
def test_a_step_in_a_graph_is_the_step_launched_one_by_one(subject: Subject) -> None:
    answers = []
    for captures in (True, False):
        driver = drive(subject, captures=captures)
        slots = [driver.admit(PROMPTS[0])]
        slots += [driver.admit(PROMPTS[2], temperature=1.0, seed=4, top_p=0.9, top_k=5)]
        slots += [driver.admit(PROMPTS[3], temperature=1.2, seed=5, frequency_penalty=0.5, num_logprobs=1)]
        answers.append(driver.generate(slots, 3 if subject.is_slow else 6))
    assert answers[0] == answers[1]


@each_subject
@pytest.mark.parametrize("captures", [True, False])
def test_a_row_of_one_token_reads_what_another_of_the_same_step_computes(
    subject: Subject, captures: bool
) -> None:
    driver = drive(subject, captures=captures)
    for cache in caches(driver.runner):
        cache.fill_(MARK)
    prompt = PROMPTS[2]
    first = driver.admit(prompt[:BLOCK_LEN])
    driver.step({first: BLOCK_LEN - 1})
    # Its last token fills a block that a sequence admitted now begins with, and that stands before it.
    second = driver.admit(prompt[: BLOCK_LEN + 1], shares_blocks_of=first, num_shared=1)
    output = driver.step({second: 1, first: 1})
    assert list(output.token_ids) == [
        expected(subject, prompt[:length], 1)[0] for length in (BLOCK_LEN + 1, BLOCK_LEN)
    ]


def run_out_of_memory(device: torch.device) -> None:
    if device.type == "cpu":
        raise torch.OutOfMemoryError("there is no more")
    torch.empty(2**50, dtype=torch.uint8, device=device)


def fail_as_a_compiler_does(device: torch.device) -> None:
    raise Exception("out of resource: shared memory")  # Triton's errors have no narrower base


@each_subject
@pytest.mark.parametrize(("failure", "num_lost"), [(run_out_of_memory, 1), (fail_as_a_compiler_does, None)])
def test_a_capture_that_fails_leaves_steps_to_run_without_it(
    subject: Subject,
    failure: Callable[[torch.device], object],
    num_lost: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner, info, model = start_subject(subject, captures=False)
    num_pending = runner.graphs_pending

    def fail_while_recording(device: torch.device) -> None:
        # The first pass of a capture is a plain one, the second is recorded.
        if model.num_forwards == 2:
            failure(device)

    model.spoil = fail_while_recording
    runner.capture_next()
    model.spoil = None
    assert model.num_forwards == 2
    # What lacks memory costs its own size; anything else would befall the others, too.
    assert runner.graphs_pending == (0 if num_lost is None else num_pending - num_lost)
    assert [record for record in caplog.records if "no CUDA graph" in record.message]
    driver = PlanDriver(runner, info)
    slots = [driver.admit(prompt) for prompt in PROMPTS]
    num_tokens = 2 if subject.is_slow else 4
    tokens = driver.generate(slots, num_tokens)
    assert tokens == [expected(subject, prompt, num_tokens) for prompt in PROMPTS]


@on_a_gpu
def test_a_step_that_fits_a_graph_is_replayed_and_another_is_launched(subject: Subject) -> None:
    runner, info, model = start_subject(subject)
    driver = PlanDriver(runner, info)
    fits = MIXED_GRAPH in subject.graphs
    for prompt in PROMPTS:
        driver.admit(prompt)
    for step, num_launched in (
        ({2: 13}, 0 if fits else 1),
        ({0: 3, 1: 1, 3: 4}, 0 if fits else 1),
        ({2: 1}, 0),
        ({0: 1, 1: 1, 3: 1}, 0),
        ({0: 1, 1: 1, 2: 1, 3: 1}, 0),
    ):
        before = model.num_forwards
        driver.step(dict(sorted(step.items(), key=lambda row: row[1])))
        assert model.num_forwards - before == num_launched, step
    driver.release(0)
    long = driver.admit([1] * (MIXED_GRAPH.num_tokens + 1))
    before = model.num_forwards
    driver.step({long: MIXED_GRAPH.num_tokens + 1})
    assert model.num_forwards - before == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_startup_captures_what_it_was_told_and_nothing_if_steps_are_to_be_eager(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path, **TINY_SIZES)
    checkpoint = Checkpoint(
        name="tiny",
        path=folder,
        format=CheckpointFormat.SAFETENSORS,
        config=json.loads((folder / "config.json").read_text()),
        generation_config={},
    )
    answers = []
    with_prompts = len(mixed_sizes(5, token_budget=8192))
    for eager, sizes, num_graphs in (
        (True, (), 0),
        (False, (2, 3, 99), 2 + with_prompts),
        (False, (), 4 + with_prompts),
    ):
        runner, info = start_runner(
            checkpoint,
            device="cuda",
            dtype="float32",
            block_len=BLOCK_LEN,
            num_gpu_blocks_override=64,
            max_num_seqs=5,
            enforce_eager=eager,
            graph_sizes=sizes,
        )
        assert runner.graphs_pending == num_graphs
        while runner.graphs_pending:
            runner.capture_next()
        driver = PlanDriver(runner, info)
        answers.append(driver.generate([driver.admit(prompt) for prompt in PROMPTS], 8))
    assert answers[0] == answers[1] == answers[2]
