"""Models for the examples of the docs, which name models that are not here or take long."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from pagedserve import EngineArgs, LLMEngine
from pagedserve.server.options import ServerArgs
from tests.server.conftest import Served


@pytest.fixture(scope="session")
def stand_in(
    real_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny random model with SmolLM2's tokenizer and chat template."""
    directory = tmp_path_factory.mktemp("stand_in")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(real_tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=real_tokenizer.bos_token_id,
        eos_token_id=real_tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    real_tokenizer.save_pretrained(directory)
    return directory


def _served(model: Path) -> Served:
    args = EngineArgs(str(model), num_gpu_blocks=256, use_tqdm_on_load=False)
    options = ServerArgs(port=0, uvicorn_log_level="warning", served_model_name=("smollm2",))
    return Served(lambda: LLMEngine(args), options)


@pytest.fixture(scope="session")
def stand_in_server(stand_in: Path) -> Iterator[Served]:
    """A server of the tiny model, by the name of the demo model."""
    with _served(stand_in) as running:
        yield running


@pytest.fixture(scope="session")
def embedding_server(minilm: Path) -> Iterator[Served]:
    """A server of all-MiniLM-L6-v2."""
    with _served(minilm) as running:
        yield running
