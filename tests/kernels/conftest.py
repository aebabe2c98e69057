"""Where the Triton kernels run: compiled on a GPU, or else in triton's interpreter."""

import pytest
import torch


@pytest.fixture(scope="session")
def interpreted(device: torch.device) -> torch.device:
    """The CPU, where kernels run in the interpreter: nothing is compiled, so anything may vary."""
    if device.type != "cpu":
        pytest.skip("kernels are compiled here")
    return device


@pytest.fixture(scope="session")
def gpu(device: torch.device) -> torch.device:
    """A CUDA device on which the kernels run compiled."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    return device
