import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_torch_seed() -> None:
    """Make the tensors a test draws the same in every run."""
    torch.manual_seed(0)
