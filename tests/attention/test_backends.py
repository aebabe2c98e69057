"""Which backend is taken where, and what a wish that cannot be met is told."""

import importlib.util
import subprocess
import sys
from typing import get_args

import pytest
import torch

from pagedserve.attention.backend import AttentionBackend
from pagedserve.attention.backends import AttentionBackendName, choose_backend, get_backend
from pagedserve.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="the package triton is not installed")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rust_is_taken_on_the_cpu(dtype: torch.dtype) -> None:
    assert choose_backend(None, CPU, dtype) is get_backend("rust")


@needs_triton
def test_triton_is_taken_on_a_gpu() -> None:
    assert choose_backend(None, GPU, torch.bfloat16) is get_backend("triton")


def test_torch_is_taken_on_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedserve.attention.triton.find_spec", lambda _: None)
    assert choose_backend(None, GPU, torch.bfloat16) is get_backend("torch")
    with pytest.raises(ConfigError, match="'triton', which needs the package triton"):
        choose_backend("triton", GPU, torch.bfloat16)


@pytest.mark.parametrize("name", ["rust", "torch"])
def test_a_wish_is_met(name: AttentionBackendName) -> None:
    assert choose_backend(name, CPU, torch.float32) is get_backend(name)


def test_rust_on_a_gpu_is_refused() -> None:
    message = "'rust', which takes float32, bfloat16 and float16 on the CPU; the model is in .*cuda"
    with pytest.raises(ConfigError, match=message):
        choose_backend("rust", GPU, torch.bfloat16)


@needs_triton
def test_triton_on_the_cpu_wants_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="on cpu, where it runs only in Triton's interpreter"):
        choose_backend("triton", CPU, torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("triton", CPU, torch.float32) is get_backend("triton")
    assert choose_backend(None, CPU, torch.float32) is get_backend("rust")


@pytest.mark.parametrize("name", get_args(AttentionBackendName))
def test_a_registered_name_is_that_of_its_backend(name: AttentionBackendName) -> None:
    backend = get_backend(name)
    assert isinstance(backend, AttentionBackend)
    assert backend.name == name
    assert backend.describe().startswith(name)
    backend.check_block_size(backend.min_block_size)


@pytest.mark.parametrize("block_size", [4, 8, 24, 48])
def test_triton_refuses_blocks_it_cannot_read(block_size: int) -> None:
    get_backend("torch").check_block_size(block_size)
    with pytest.raises(ConfigError, match=f"block_size is {block_size}; .* power of two, at least"):
        get_backend("triton").check_block_size(block_size)


@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_powers_of_two_are_read(block_size: int) -> None:
    get_backend("triton").check_block_size(block_size)


def test_importing_the_registry_loads_no_backend_and_no_torch() -> None:
    code = (
        "import sys\n"
        "import pagedserve.config\n"
        "ours = [name for name in sys.modules if name.startswith('pagedserve.attention.')]\n"
        "print(ours, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "['pagedserve.attention.backends'] False\n"


def test_the_cpu_path_does_not_load_the_kernels() -> None:
    # Whether triton itself is loaded is not ours to say: torch and transformers look for it.
    code = (
        "import sys, torch\n"
        "from pagedserve import LLM\n"
        "from pagedserve.attention.backends import choose_backend\n"
        "choose_backend(None, torch.device('cpu'), torch.float32)\n"
        "ours = [name for name in sys.modules if name.startswith('pagedserve.')]\n"
        "print([name for name in ours if 'triton' in name or name.endswith('kernels.attention')])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
