"""The benches of the GPU kernels: without a GPU one line says so; what they attend to is valid."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="triton is not installed")

BENCHES = Path(__file__).resolve().parents[2] / "benches" / "python"


@pytest.fixture
def module(script: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.delitem(sys.modules, "kernels", raising=False)  # the folder, of other tests
    monkeypatch.syspath_prepend(str(BENCHES))
    yield importlib.import_module(script)
    for name in {"kernels", script}:
        del sys.modules[name]


@pytest.mark.parametrize("script", ["kernels", "tune_kernels"])
def test_without_a_gpu(module: ModuleType, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        module.main([])
    [line] = str(end.value).splitlines()
    assert f"{script}.py needs a CUDA device" in line


@pytest.mark.parametrize("script", ["tune_kernels"])
def test_what_is_tuned_can_be_called(module: ModuleType) -> None:
    for kernel, loads in module.LOADS.items():
        assert list(module.candidates(kernel))
        for rows in loads:
            with FakeTensorMode(allow_non_fake_inputs=True):
                call = module.call_of(kernel, 128, rows)
            assert call.is_plain == (kernel != "prefill")
            assert call.num_rows == len(rows)
