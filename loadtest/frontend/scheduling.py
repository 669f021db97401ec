"""What planning and applying a step costs, by the number of running requests: the scheduler alone."""

import time
from array import array
from collections import deque

from asyncserve.loop.scheduler import Scheduler
from asyncserve.observer import RequestTimeline
from asyncserve.request import Request, SamplingParams, TokenizedRequest, TokensPrompt
from asyncserve.step import StepOutput, StepPlan
from tests.fakes.executor import fake_info

PROMPT_LEN = 16
BLOCK_LEN = 16
NUM_STEPS = 512


def measure_scheduling(num_requests: int) -> tuple[float, float]:
    """Return the mean CPU µs of a plan and of an apply, with so many requests decoding and a step ahead."""
    blocks_each = (PROMPT_LEN + 2 * NUM_STEPS) // BLOCK_LEN + 1
    info = fake_info(
        num_slots=num_requests,
        num_blocks=num_requests * blocks_each + 1,
        block_len=BLOCK_LEN,
        max_model_len=blocks_each * BLOCK_LEN,
        vocab_size=49_152,
        max_num_batched_tokens=max(8192, PROMPT_LEN * num_requests),
    )
    scheduler = Scheduler(info=info, policy="fcfs", enable_prefix_caching=True, enable_chunked_prefill=True)
    for number in range(num_requests):
        scheduler.add(_request(number), RequestTimeline(arrived_s=0.0))
    in_flight: deque[StepPlan] = deque()
    token_ids = list(range(num_requests))
    plan_ns = apply_ns = num_steps = 0
    clock = time.thread_time_ns
    while num_steps < NUM_STEPS:
        began_ns = clock()
        plan = scheduler.plan(0.0)
        if plan is not None:
            scheduler.register_some()
        planned_ns = clock()
        if plan is not None:
            in_flight.append(plan)
            if len(in_flight) < 2:
                continue
        oldest = in_flight.popleft()
        num_samples = oldest.rows.num_samples
        output = StepOutput(step_id=oldest.step_id, token_ids=token_ids[:num_samples])
        applying_ns = clock()
        scheduler.apply(output, 0.0)
        applied_ns = clock()
        if num_samples == num_requests and plan is not None and not plan.admitted:
            plan_ns += planned_ns - began_ns
            apply_ns += applied_ns - applying_ns
            num_steps += 1
    return plan_ns / num_steps / 1000, apply_ns / num_steps / 1000


def _request(number: int) -> TokenizedRequest:
    return TokenizedRequest(
        request=Request(
            request_id=str(number),
            prompt=TokensPrompt(token_ids=[number]),
            sampling=SamplingParams(max_tokens=2 * NUM_STEPS, ignore_eos=True),
            arrival_s=0.0,
        ),
        sequence_id=number,
        index=0,
        prompt_token_ids=array("i", [number] * PROMPT_LEN),
        max_output_len=2 * NUM_STEPS,
        stop_token_ids=frozenset(),
        seed=number,
    )
