"""Where the Triton kernels run: compiled on a GPU, or else in triton's interpreter."""

import importlib.util
import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the kernels' tensors; skips where they cannot run."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1")
    return torch.device("cuda")


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
