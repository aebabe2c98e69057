"""Tiny random models with a tokenizer, saved in Hugging Face format, and what is exact of them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from pagedserve import _core
from pagedserve.config import EngineArgs
from pagedserve.models.check.paged_logits import paged_logits
from pagedserve.models.loader import LoadedModel, load_model
from tests.support.tiny import enlarge_weights

PROMPTS = [(torch.arange(length) * 31 + 11) % 97 for length in (21, 6)]
# Largest difference from float64, as a share of the largest logit.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 6e-3}

SaveTiny = Callable[..., Path]
AssertExact = Callable[..., None]


@pytest.fixture
def save_tokenizer(tiny_config: dict[str, Any]) -> Callable[[Path], None]:
    """Saves a word-level tokenizer into a directory."""

    def save(directory: Path) -> None:
        numbers = range(1, tiny_config["vocab_size"])
        words = {"<unk>": 0, **{f"w{index}": index for index in numbers}}
        tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
        fast.save_pretrained(directory)

    return save


@pytest.fixture
def save_tiny(
    tmp_path: Path,
    tiny_config: dict[str, Any],
    save_tokenizer: Callable[[Path], None],
) -> SaveTiny:
    """Saves a causal model of a type, with weights so large that wrong attention shows."""

    def save(model_type: str, **options: Any) -> Path:
        torch.manual_seed(0)
        config = AutoConfig.for_model(**(tiny_config | {"model_type": model_type} | options))
        model = AutoModelForCausalLM.from_config(config)
        enlarge_weights(model, "bias", "sinks")
        directory = tmp_path / model_type
        model.save_pretrained(directory)
        save_tokenizer(directory)
        return directory

    return save


@pytest.fixture
def load_on(device: torch.device) -> Callable[..., LoadedModel]:
    """Loads a model for an attention backend, in "float32" or in "half" precision.

    Half is bfloat16, but in Triton's interpreter float16: it multiplies bfloat16 wrongly.
    """

    def load(backend: Any, directory: Path, precision: str, **options: Any) -> LoadedModel:
        where = device if backend == "triton" else torch.device("cpu")
        is_interpreted = backend == "triton" and device.type == "cpu"
        half = "float16" if is_interpreted else "bfloat16"
        dtype: Any = half if precision == "half" else precision
        args = EngineArgs(str(directory), attention_backend=backend, dtype=dtype, **options)
        return load_model(args, where)

    return load


@pytest.fixture
def assert_exact() -> AssertExact:
    """Compares logits over paged memory with the model's own, weights rounded alike."""

    @torch.inference_mode()
    def check(
        loaded: LoadedModel,
        directory: Path,
        edit: Callable[[Any], None] | None = None,
        attention: str = "eager",
        exact_dtype: torch.dtype = torch.float64,
    ) -> None:
        """Two sequences, one in two chunks and one that decodes; ``edit`` gives other weights."""
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=loaded.dtype,
            attn_implementation=attention,
            experts_implementation="eager",  # the grouped product has no float64
        )
        if edit is not None:
            edit(model)
        model = model.to(exact_dtype)
        backend = loaded.attention_backend
        found = paged_logits(loaded.model, loaded.layers, PROMPTS, [16, 5], backend)
        for prompt, ours in zip(PROMPTS, found, strict=True):
            exact = model(prompt[None]).logits[0]
            error = float((ours.cpu().double() - exact).abs().max() / exact.abs().max())
            assert error <= BOUNDS[loaded.dtype]

    return check


@pytest.fixture
def best_instructions() -> Iterator[None]:
    """Whatever a test chose, the next one begins with the best."""
    yield
    _core.cpu.use_instructions(None)
