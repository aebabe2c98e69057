"""Which backend runs a model, and what the native one refuses."""

from typing import Any

import pytest

import pagedserve.native.choice as choice
from pagedserve import LLMEngine
from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "absent_modules", lambda *_: ["torch"])


def test_auto_is_torch_where_it_is_installed() -> None:
    assert choice.choose_backend(EngineArgs("m")) == ("torch", "which is installed")


@pytest.mark.usefixtures("without_torch")
def test_auto_is_native_elsewhere() -> None:
    assert choice.choose_backend(EngineArgs("m")) == ("native", "without torch")


def test_a_backend_may_be_given() -> None:
    assert choice.choose_backend(EngineArgs("m", backend="native")).name == "native"
    assert choice.choose_backend(EngineArgs("m", backend="torch")).name == "torch"
    with pytest.raises(ConfigError, match="backend is 'numpy'; it must be one of"):
        EngineArgs("m", backend="numpy")  # type: ignore[arg-type]  # refused


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cuda"},
        {"attention_backend": "torch"},
        {"cpu_kernels": "modules"},
        {"tensor_parallel_size": 2},
        {"load_format": "dummy"},
    ],
)
def test_options_that_it_lacks_are_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=rf"{name} is .*the native backend.*backend='torch'"):
        choice.check_backend(EngineArgs("m", backend="native", **options))


def test_an_option_is_refused_before_a_model_is_looked_for() -> None:
    args = EngineArgs("no/such-model", backend="native", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2"):
        LLMEngine(args)
