"""What blocks hold and what is shared, counted on the fake device."""

import pytest

from asyncserve.step import StepOutput, StepPlan
from loadtest.kv_use import ALPACA, Load, Mix
from tests.contracts.plan_rules import PlanRules
from tests.fakes.executor import FakeRunner, fake_info

SHORT = Mix("short", (ALPACA,))
INFO = fake_info(
    num_slots=16,
    num_blocks=2000,
    block_len=16,
    max_model_len=2048,
    max_num_batched_tokens=256,
    max_unapplied=1,
    vocab_size=50,
)


class CheckedRunner:
    """The fake device behind the rules that a real one holds plans to."""

    def __init__(self) -> None:
        self.rules = PlanRules(INFO)
        self.runner = FakeRunner(INFO)

    def run(self, plan: StepPlan) -> StepOutput:
        if plan.sequences:
            self.rules.check(plan)
        else:
            # As at its start: a real device takes it, and knows nobody afterwards.
            assert set(plan.released_slots) == self.runner._rows.keys()
            self.rules = PlanRules(INFO)
        return self.runner.run(plan)


@pytest.mark.parametrize("beams", [False, True])
def test_loads_follow_each_other_on_one_device_and_save_no_more_than_the_bound(beams: bool) -> None:
    device = CheckedRunner()
    shares = []
    for n in (1, 2, 4):
        use = Load(INFO, device, SHORT, n=n, use_beam_search=beams).run(8, 3)
        assert 0 <= use.saved <= use.could_save
        assert 0 < use.slots - use.unused <= use.slots
        assert len(use.lens) == 8
        shares.append(use.saved / (use.used + use.saved))
    assert shares[0] == 0 < shares[1] < shares[2]
