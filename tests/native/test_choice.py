"""Which backend runs a model, and what the native one refuses."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase

import pagedserve.native.choice as choice
from pagedserve import LLM, LLMEngine, SamplingParams
from pagedserve.config import EngineArgs
from pagedserve.engine.build import load
from pagedserve.errors import ConfigError
from pagedserve.host_ops.threads import num_compute_threads
from pagedserve.models.tokenizer.fast_tokenizer import FastTokenizer
from pagedserve.tokenizer import Tokenizer
from tests.support.decoders import save_decoder


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "absent_modules", lambda *_: ["torch"])


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_has_gpu", lambda: False)


def test_auto_is_native_on_a_cpu() -> None:
    found = choice.choose_backend(EngineArgs("m"))
    assert found == ("native", "for a known family on the CPU", True)
    assert found.extra == "engine"  # whose packages another model needs


def test_auto_is_torch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_has_gpu", lambda: True)
    assert choice.choose_backend(EngineArgs("m")) == ("torch", "on a GPU", False)
    assert choice.choose_backend(EngineArgs("m", device="cpu")).name == "native"


@pytest.mark.usefixtures("without_torch")
def test_auto_is_native_without_torch() -> None:
    found = choice.choose_backend(EngineArgs("m"))
    assert (found, found.extra) == (("native", "without torch", False), "cpu")


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
    choice.check_backend(EngineArgs("m", **options))
    found = choice.choose_backend(EngineArgs("m", **options))
    assert (found.name, found.extra) == ("torch", "engine")
    assert found.reason.startswith(f"{name} is ")


def test_an_option_is_refused_before_a_model_is_looked_for() -> None:
    args = EngineArgs("no/such-model", backend="native", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2"):
        LLMEngine(args)


def backend_of(args: EngineArgs, caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    """The executor of a model, and the log line that names its backend."""
    caplog.clear()
    with caplog.at_level("INFO", "pagedserve.engine.build"):
        _, executor = load(args, cast(Tokenizer, object()), None)
    executor.shutdown()
    (line,) = (text for text in caplog.messages if text.startswith("backend: "))
    return type(executor).__name__, line


def test_a_known_family_runs_natively(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = EngineArgs(str(save_decoder(tmp_path, "qwen3")))
    line = "backend: native, for a known family on the CPU"
    assert backend_of(args, caplog) == ("NativeExecutor", line)
    executor, line = backend_of(replace(args, cpu_kernels="generic"), caplog)
    assert (executor, line.split(",")[0]) == ("LocalExecutor", "backend: torch")
    assert "cpu_kernels is 'generic', which the native backend does not support" in line


def test_another_family_runs_by_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = GPT2Config(
        vocab_size=97,
        n_positions=64,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    executor, line = backend_of(EngineArgs(str(tmp_path)), caplog)
    assert executor == "LocalExecutor"
    assert line.startswith(f"backend: torch, model '{tmp_path}': architecture GPT2LMHeadModel")
    assert "give backend" not in line


def test_files_that_only_torch_reads_run_by_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_decoder(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    executor, line = backend_of(EngineArgs(str(tmp_path)), caplog)
    assert executor == "LocalExecutor"
    assert "it has no model.safetensors" in line


def test_processors_get_tensors_where_torch_is_installed(tmp_path: Path) -> None:
    path = str(save_decoder(tmp_path, "llama"))
    kinds = []

    def favour(_: list[int], logits: Any) -> Any:
        kinds.append(type(logits))
        logits[5] = 100.0
        return logits

    params = SamplingParams(temperature=0, max_tokens=2, logits_processors=[favour])
    for backend, kind in (("auto", torch.Tensor), ("native", np.ndarray), ("torch", torch.Tensor)):
        llm = LLM(path, backend=backend, num_gpu_blocks=16)  # type: ignore[arg-type]  # one of them
        (output,) = llm.generate([{"prompt_token_ids": [1, 2]}], params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == [5, 5]
        assert set(kinds) == {kind}
        kinds.clear()


def test_callers_get_the_tokenizer_of_transformers_where_torch_is_installed(tmp_path: Path) -> None:
    path = str(save_decoder(tmp_path, "llama"))
    for backend, kind in (("auto", PreTrainedTokenizerBase), ("native", FastTokenizer)):
        llm = LLM(path, backend=backend, num_gpu_blocks=16)  # type: ignore[arg-type]  # one of them
        used = llm.llm_engine.input_processor.tokenizer
        assert isinstance(used, FastTokenizer)
        assert isinstance(llm.get_tokenizer(), kind)
        assert llm.get_tokenizer() is llm.llm_engine.get_tokenizer()
        assert llm.get_tokenizer()("w5 w9").input_ids == used("w5 w9").input_ids


def test_threads_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert num_compute_threads() == 7
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert num_compute_threads() == 3
