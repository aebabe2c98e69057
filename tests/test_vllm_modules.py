"""Imports as vLLM's users have them in their scripts, with the name of this package."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

import pagedserve
from pagedserve import AsyncLLMEngine, metrics
from pagedserve.models.tokenizer import loader
from pagedserve.vllm_modules import MODULES
from tests.support.tokenizer_kinds import save

# Lines of vLLM's examples and of programs that use it.
IMPORTS = """
from vllm import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm import PoolingOutput, PoolingParams, PromptType, TextPrompt
from vllm.beam_search import BeamSearchSequence
from vllm.distributed import cleanup_dist_env_and_memory, destroy_model_parallel
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.engine.llm_engine import LLMEngine
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.chat_utils import resolve_hf_chat_template
from vllm.entrypoints.llm import LLM
from vllm.inputs.data import PromptType, TextPrompt, TokensPrompt
from vllm.inputs.llm import PromptType, TextPrompt, TokensPrompt
from vllm.inputs import ExplicitEncoderDecoderPrompt, PromptType, TextPrompt, TokensPrompt
from vllm.logger import init_logger
from vllm.logprobs import Logprob, PromptLogprobs, SampleLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.renderers.hf import resolve_chat_template
from vllm.sampling_params import GuidedDecodingParams, RequestOutputKind, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.sequence import Logprob, RequestMetrics
from vllm.tokenizers import get_tokenizer
from vllm.transformers_utils.tokenizer import AnyTokenizer, MistralTokenizer, get_tokenizer
from vllm.usage.usage_lib import UsageContext
from vllm.utils import FlexibleArgumentParser, random_uuid
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.print_utils import print_embeddings
from vllm.v1.engine.async_llm import AsyncEngineArgs, AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Metric, Vector
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor
from vllm.version import __version__
""".replace("vllm", "pagedserve").split("\n")[1:-1]


def imported(*lines: str) -> dict[str, Any]:
    """The names that lines of a script import."""
    names: dict[str, Any] = {}
    for line in lines:
        exec(line, names)  # noqa: S102  # type checkers do not know the modules
    return names


@pytest.mark.parametrize("line", IMPORTS)
def test_scripts_import_from_the_same_modules(line: str) -> None:
    found = imported(line)
    for home in (pagedserve, metrics):
        for name in found.keys() & set(dir(home)):
            assert found[name] is getattr(home, name)


@pytest.fixture
def other_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Another name of the package, under which no module is imported yet."""
    name = "other_name"
    monkeypatch.setitem(sys.modules, name, pagedserve)
    yield name
    for module in [module for module in sys.modules if module.startswith(f"{name}.")]:
        del sys.modules[module]


def test_a_module_is_one_under_another_name_of_the_package(other_name: str) -> None:
    for line in (*IMPORTS, "from pagedserve.lora import request"):
        found, own = imported(line.replace("pagedserve", other_name)), imported(line)
        assert found.keys() == own.keys()
        assert all(found[name] is own[name] for name in own.keys() - {"__builtins__"})
    module = sys.modules[f"{other_name}.lora.request"]
    assert module is sys.modules["pagedserve.lora.request"]
    assert module.__spec__ is not None
    assert (module.__name__, module.__spec__.name) == ("pagedserve.lora.request",) * 2
    with pytest.raises(ModuleNotFoundError, match=rf"'{other_name}\.v1\.worker'"):
        imported(f"import {other_name}.v1.worker")


def test_every_module_of_vllm_is_imported_above() -> None:
    lines = "\n".join(IMPORTS)
    assert not {name for name in MODULES if f"from pagedserve.{name} import" not in lines}


def test_names_of_other_modules_are_the_same_objects() -> None:
    found = imported(*IMPORTS)
    assert found["AsyncLLM"] is found["AsyncLLMEngine"] is AsyncLLMEngine
    assert found["UsageContext"].LLM_CLASS.value == "LLM_CLASS"
    found["cleanup_dist_env_and_memory"](shutdown_ray=True)
    found["destroy_model_parallel"]()
    found["init_logger"]("script").info("a line")
    assert len({found["random_uuid"](), found["random_uuid"]()}) == 2


def test_a_module_that_neither_has_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"'pagedserve\.v1\.worker'"):
        imported("import pagedserve.v1.worker")
    with pytest.raises(ImportError, match="cannot import name 'get_ip'"):
        imported("from pagedserve.utils import get_ip")


def test_a_tokenizer_is_loaded_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*given: Any, **named: Any) -> Any:
        loads.append(named)
        return load_tokenizer(*given, **named)

    load_tokenizer, loads = loader.load_tokenizer, list[Any]()
    monkeypatch.setattr(loader, "load_tokenizer", load)
    found = imported(*IMPORTS)
    save("byte_level", tmp_path)
    tokenizer = found["get_tokenizer"](tmp_path, tokenizer_mode="auto", revision=None)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    assert loads == [{"uses_transformers": True}]
    assert tokenizer.decode(tokenizer.encode("the License", add_special_tokens=False)) == (
        "the License"
    )
    assert not isinstance(tokenizer, found["MistralTokenizer"])
    resolve = found["resolve_chat_template"]
    assert found["resolve_hf_chat_template"] is resolve
    assert resolve(tokenizer, None, None, model_config=None) == tokenizer.chat_template
    assert resolve(tokenizer, "{{ a }}", tools=None) == "{{ a }}"
    tokenizer.chat_template = None
    assert resolve(tokenizer) is None
    options = {"padding_side": "left", "truncation_side": "left", "add_bos_token": True}
    tokenizer = found["get_tokenizer"](tmp_path, tokenizer_mode="slow", use_fast=True, **options)
    assert {name: getattr(tokenizer, name) for name in options} == options
    found["print_embeddings"]([0.5] * 5, "Scores")
    found["print_embeddings"]([0.5])
    shown = "Scores: [0.5, 0.5, 0.5, 0.5, ...] (size=5)\nEmbeddings: [0.5] (size=1)\n"
    assert capsys.readouterr().out == shown
