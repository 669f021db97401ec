"""The executor contract, run on the fake executor: so that tests with the fake mean something."""

from tests.contracts.executor_contract import DeviceUnderTest, ExecutorContract
from tests.fakes.executor import FakeExecutor, fake_info


class FakeDevice:
    """The fake executor with the hooks the contract asks for."""

    def __init__(self) -> None:
        self.executor = FakeExecutor(fake_info(num_slots=2, num_blocks=16, vocab_size=64))

    def hold(self) -> None:
        self.executor.hold()

    def release(self) -> None:
        self.executor.resume()

    def fail_step(self, step_id: int) -> None:
        self.executor.fail(step_id)

    def lose_device_at(self, step_id: int) -> None:
        self.executor.lose_device_at(step_id)


class TestFakeExecutor(ExecutorContract):
    def make_device(self) -> DeviceUnderTest:
        return FakeDevice()
