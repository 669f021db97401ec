"""In the steady state the host waits for nothing while sequences come, go on and leave."""

from typing import Any

import pytest

from asyncserve.gpu.completion import PendingOutput
from tests.fakes.plan_driver import PlanDriver
from tests.gpu.synchronization import waits_are_errors
from tests.gpu.tiny_runners import PROMPTS, Subject, drive, subjects

pytestmark = pytest.mark.timeout(300)

PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.02, "seed": 2},
]
OTHERS: list[dict[str, Any]] = [
    {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"logit_bias": {5: 1.0, 6: -1.0}, "allowed_token_ids": tuple(range(50))},
    {"num_logprobs": 2, "min_tokens": 3},
]


def serve(driver: PlanDriver, samplings: list[dict[str, Any]]) -> list[PendingOutput]:
    """Launch the life of three sequences, one of which comes while the others decode; seven steps."""
    slots = [
        driver.admit(prompt, **sampling) for prompt, sampling in zip(PROMPTS, samplings[:2], strict=False)
    ]
    lens = {slot: driver.known_lens[slot] for slot in slots}
    launched = [driver.launch(dict(sorted(lens.items(), key=lambda row: row[1])))]
    launched += [driver.launch(dict.fromkeys(slots, 1)) for _ in range(2)]
    late = driver.admit(PROMPTS[2], **samplings[2])
    launched.append(driver.launch({**dict.fromkeys(slots, 1), late: 5}))
    launched.append(driver.launch({**dict.fromkeys(slots, 1), late: driver.known_lens[late] - 5}))
    driver.release(slots.pop(0))
    launched += [driver.launch(dict.fromkeys([*slots, late], 1)) for _ in range(2)]
    for slot in (*slots, late):
        driver.release(slot)
    return launched


@pytest.mark.parametrize("subject", subjects("cuda"))
@pytest.mark.parametrize("samplings", [PLAIN, OTHERS], ids=["plain", "others"])
def test_the_host_waits_for_nothing_while_sequences_come_and_go(
    subject: Subject, samplings: list[dict[str, Any]]
) -> None:
    driver = drive(subject)
    first = [list(step.wait().token_ids) for step in serve(driver, samplings)]
    # Once more: everything is compiled, and what is allocated once is there.
    with waits_are_errors():
        launched = serve(driver, samplings)
    assert [list(step.wait().token_ids) for step in launched] == first
    assert all(token_id >= 0 for tokens in first for token_id in tokens)


@pytest.mark.parametrize("subject", subjects("cuda"))
def test_the_host_waits_for_nothing_while_it_reads_the_tokens_of_plain_steps(subject: Subject) -> None:
    driver = drive(subject)
    first = [list(step.wait().token_ids) for step in serve(driver, PLAIN)]
    with waits_are_errors():
        again = [list(step.wait().token_ids) for step in serve(driver, PLAIN)]
    assert again == first
