"""Models made up from a config: no files but that, the same weights for the same seed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedserve import LLM, SamplingParams
from pagedserve.config import EngineArgs
from pagedserve.device import choose_device
from pagedserve.errors import ConfigError, ModelLoadError, UnsupportedModelError
from pagedserve.models.loader import LoadedModel, load_model
from pagedserve.models.tokenizer.loader import load_tokenizer


@pytest.fixture
def directory(tmp_path: Path, tiny_config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    return tmp_path


def load(directory: Path, **options: Any) -> LoadedModel:
    config = EngineArgs(
        model=str(directory), load_format="dummy", cpu_kernels="generic", device="cpu", **options
    )
    return load_model(config)


def weights(loaded: LoadedModel) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in loaded.model.parameters()]


def test_a_config_is_enough_to_generate(directory: Path) -> None:
    llm = LLM(str(directory), load_format="dummy", device="cpu", num_gpu_blocks=16)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    output = llm.generate("5 17 3", params, use_tqdm=False)[0]
    assert output.prompt_token_ids == [5, 17, 3]
    token_ids = output.outputs[0].token_ids
    assert len(token_ids) == 5
    assert output.outputs[0].text.split() == [str(token) for token in token_ids]


def test_the_seed_names_the_weights_and_nothing_else_is_drawn_from(directory: Path) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, again, other = (weights(load(directory, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))
    assert all(weight.isfinite().all() for weight in first)


def test_a_tokenizer_in_the_directory_is_taken(
    directory: Path, save_tokenizer: Callable[[Path], None]
) -> None:
    save_tokenizer(directory)
    assert load_tokenizer(EngineArgs(str(directory), load_format="dummy"))("w5").input_ids == [5]


def test_weights_are_still_wanted_by_default(directory: Path) -> None:
    with pytest.raises(ModelLoadError, match="no weights"):
        load_model(EngineArgs(model=str(directory)))


def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "vit", "vocab_size": 9, "max_position_embeddings": 8})
    )
    with pytest.raises(UnsupportedModelError, match="vit"):
        load(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_named(directory: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '{name}', and torch .*: give 'cpu' or"):
        load_model(EngineArgs(model=str(directory), load_format="dummy", device=name))
    assert choose_device("auto") == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_beyond_the_last_is_named() -> None:
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"device is .cuda:99., and there are .* accepted are"):
        choose_device("cuda:99")
