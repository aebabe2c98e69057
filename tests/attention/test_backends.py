"""Which backend is taken where, and what a wish that cannot be met is told."""

import importlib.util
import subprocess
import sys

import pytest
import torch

import pagedserve.attention.torch
from pagedserve.attention.backends import check_block_size, choose_backend, write_and_attend
from pagedserve.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="the package triton is not installed")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rust_is_taken_on_the_cpu(dtype: torch.dtype) -> None:
    assert choose_backend(None, CPU, dtype) == "rust"


@needs_triton
def test_triton_is_taken_on_a_gpu() -> None:
    assert choose_backend(None, GPU, torch.bfloat16) == "triton"


def test_torch_is_taken_on_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedserve.attention.backends.find_spec", lambda _: None)
    assert choose_backend(None, GPU, torch.bfloat16) == "torch"
    with pytest.raises(ConfigError, match="'triton', which needs the package triton"):
        choose_backend("triton", GPU, torch.bfloat16)


@pytest.mark.parametrize("backend", ["rust", "torch"])
def test_a_wish_is_met(backend: str) -> None:
    assert choose_backend(backend, CPU, torch.float32) == backend  # type: ignore[arg-type]


def test_rust_on_a_gpu_is_refused() -> None:
    message = "'rust', which takes float32, bfloat16 and float16 on the CPU; the model is in .*cuda"
    with pytest.raises(ConfigError, match=message):
        choose_backend("rust", GPU, torch.bfloat16)


@needs_triton
def test_triton_on_the_cpu_wants_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="on cpu, where it runs only in Triton's interpreter"):
        choose_backend("triton", CPU, torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("triton", CPU, torch.float32) == "triton"
    assert choose_backend(None, CPU, torch.float32) == "rust"


def test_a_name_leads_to_its_function() -> None:
    assert write_and_attend("torch") is pagedserve.attention.torch.write_and_attend


@pytest.mark.parametrize("block_size", [4, 8, 24, 48])
def test_triton_refuses_blocks_it_cannot_read(block_size: int) -> None:
    check_block_size("torch", block_size)
    with pytest.raises(ConfigError, match=f"block_size is {block_size}; .* power of two, at least"):
        check_block_size("triton", block_size)


@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_powers_of_two_are_read(block_size: int) -> None:
    check_block_size("triton", block_size)


def test_the_cpu_path_does_not_load_the_kernels() -> None:
    # Whether triton itself is loaded is not ours to say: torch and transformers look for it.
    code = (
        "import sys, torch\n"
        "from pagedserve import LLM\n"
        "from pagedserve.attention.backends import choose_backend, write_and_attend\n"
        "write_and_attend(choose_backend(None, torch.device('cpu'), torch.float32))\n"
        "ours = [name for name in sys.modules if name.startswith('pagedserve.')]\n"
        "print([name for name in ours if 'triton' in name or name.endswith('kernels.attention')])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
