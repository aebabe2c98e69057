"""A load that begins before the engine is made: who takes it, and what is not begun."""

from pathlib import Path

import pytest

from pagedserve import EngineArgs, LLMEngine
from pagedserve.engine.ahead import load_ahead, take_ahead
from pagedserve.errors import ModelLoadError
from pagedserve.native.executor import NativeExecutor
from tests.support.decoders import save_decoder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_decoder(tmp_path_factory.mktemp("llama"), "llama"))


def test_an_engine_of_equal_options_has_the_model_that_was_begun(llama: str) -> None:
    args = EngineArgs(llama, backend="native")
    load_ahead(args)
    (Path(llama) / "model.safetensors").rename(Path(llama) / "moved")
    engine = LLMEngine(EngineArgs(llama, backend="native"))
    (Path(llama) / "moved").rename(Path(llama) / "model.safetensors")
    assert isinstance(engine.model_executor, NativeExecutor)
    assert take_ahead(args) is None
    engine.shutdown()


def test_the_model_that_was_begun_is_given_once(llama: str) -> None:
    args = EngineArgs(llama, backend="native")
    load_ahead(args)
    begun = take_ahead(EngineArgs(llama, backend="native"))
    assert begun is not None
    assert begun.loaded.result(60).model.dtype == "float32"
    assert take_ahead(args) is None


def test_an_engine_of_other_options_loads_its_model(llama: str) -> None:
    load_ahead(EngineArgs(llama, backend="native"))
    engine = LLMEngine(EngineArgs(llama, backend="native", dtype="bfloat16"))
    assert isinstance(engine.model_executor, NativeExecutor)
    assert engine.model_executor.loaded.model.dtype == "bfloat16"
    engine.shutdown()


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "torch"},
        {"backend": "native", "logits_processors": ["some.module:Processor"]},
        {"model": "hub/model", "backend": "native"},
    ],
)
def test_what_may_take_long_or_change_threads_is_not_begun(
    llama: str, options: dict[str, object]
) -> None:
    args = EngineArgs(**({"model": llama} | options))  # type: ignore[arg-type]  # see EngineArgs
    load_ahead(args)
    assert take_ahead(args) is None


def test_damaged_files_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="is cut short or damaged"):
        load_ahead(EngineArgs(str(tmp_path / "a.gguf"), backend="native"))
