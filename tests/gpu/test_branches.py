"""Branches get the tokens of sequences of their own, however the prompt they share is computed."""

from typing import Any

import pytest

from asyncserve.gpu.batch import plan_rows
from tests.gpu.tiny_runners import (
    BLOCK_LEN,
    MIXED_GRAPH,
    PROMPTS,
    Subject,
    drive,
    expected,
    generate_alone,
    subjects,
)

pytestmark = pytest.mark.timeout(300)

DRAWING: tuple[dict[str, Any], ...] = (
    {"temperature": 1.2, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_p": 0.9, "frequency_penalty": 0.5},
)

each_quick_subject = pytest.mark.parametrize("subject", subjects("cpu", "cuda"))


@each_quick_subject
@pytest.mark.parametrize("last_chunk", [1, 2, 5])
@pytest.mark.parametrize("prompt_len", [5, 7, 8, 9])
def test_branches_get_what_sequences_of_their_own_get(
    subject: Subject, prompt_len: int, last_chunk: int
) -> None:
    prompt = PROMPTS[2][:prompt_len]
    driver = drive(subject)
    alone = [generate_alone(driver, prompt, 6, **sampling) for sampling in ({}, *DRAWING)]
    # What blocks held before must not show.
    neighbour = driver.admit(PROMPTS[0])
    driver.step({neighbour: len(PROMPTS[0])})
    leader = driver.admit(prompt)
    if prompt_len > last_chunk:
        driver.step({neighbour: 1, leader: prompt_len - last_chunk})
    branches = [driver.admit(prompt, **sampling) for sampling in DRAWING]
    rows = {neighbour: 1, leader: min(prompt_len, last_chunk), **dict.fromkeys(branches, 0)}
    _, *first = driver.step(rows).token_ids
    more = driver.generate([leader, *branches], 5)
    assert [[token, *rest] for token, rest in zip(first, more, strict=True)] == alone


@each_quick_subject
def test_branches_stand_before_the_chunks_of_others(subject: Subject) -> None:
    driver = drive(subject)
    leader, branch, other = (driver.admit(prompt) for prompt in (PROMPTS[2], PROMPTS[2], PROMPTS[3]))
    first = driver.step({leader: len(PROMPTS[2]), branch: 0, other: len(PROMPTS[3])}).token_ids
    more = driver.generate([leader, branch, other], 3)
    assert [[token, *rest] for token, rest in zip(first, more, strict=True)] == [
        expected(subject, prompt, 4) for prompt in (PROMPTS[2], PROMPTS[2], PROMPTS[3])
    ]


@pytest.mark.parametrize("subject", subjects(with_graphs=True))
def test_a_graph_runs_branches_as_launches_do(subject: Subject) -> None:
    prompt = PROMPTS[2][:6]
    first, second = expected(subject, prompt, 2)
    for last_chunk in (1,) if subject.is_slow else (1, 6):
        driver = drive(subject)
        neighbour = driver.admit(PROMPTS[0])
        leader = driver.admit(prompt)
        driver.step({neighbour: len(PROMPTS[0]), **({leader: 6 - last_chunk} if last_chunk < 6 else {})})
        branches = [driver.admit(prompt) for _ in range(2)]
        plan = driver.plan({neighbour: 1, leader: last_chunk, **dict.fromkeys(branches, 0)})
        graph = driver.runner._find_graph(plan, plan_rows(plan))
        assert graph is None or graph.size == MIXED_GRAPH
        assert (graph is None) == (MIXED_GRAPH not in subject.graphs)
        tokens = list(driver.runner.run(plan).wait().token_ids)
        assert tokens == [expected(subject, PROMPTS[0], 2)[1], first, first, first]
        assert list(driver.step(dict.fromkeys((leader, *branches), 1)).token_ids) == [second] * 3


@each_quick_subject
def test_a_branch_goes_on_by_itself_when_the_one_it_branched_off_from_is_gone(subject: Subject) -> None:
    driver = drive(subject)
    prompt = PROMPTS[2][: BLOCK_LEN + 2]
    leader, branch = driver.admit(prompt), driver.admit(prompt)
    (_, token) = driver.step({leader: len(prompt), branch: 0}).token_ids
    # Its block that was not full goes to the next one, who writes to it.
    shared, own = driver.tables[leader][0]
    driver.release(leader, keep_blocks=True)
    driver.free.insert(0, own)
    heir = driver.admit(PROMPTS[0], slot=leader)
    assert list(driver.step({heir: len(PROMPTS[0])}).token_ids) == expected(subject, PROMPTS[0], 1)
    assert driver.tables[heir][0] == [own]
    assert driver.tables[branch][0][0] == shared
    assert [token, *driver.generate([branch], 2)[0]] == expected(subject, prompt, 3)
