"""Checkpoints of quantized weights, against the dense model that their numbers stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pagedserve.config import EngineArgs
from pagedserve.errors import ModelLoadError, UnsupportedModelError
from pagedserve.models.check.paged_logits import paged_logits
from pagedserve.models.loader import LoadedModel, load_model

SaveTiny = Callable[..., Path]
AssertExact = Callable[..., None]
WIDE = {"intermediate_size": 64}
_BLOCK = 8


def load(directory: Path, **options: Any) -> LoadedModel:
    return load_model(EngineArgs(model=str(directory), **options), torch.device("cpu"))


def quantize(directory: Path, method: dict[str, Any]) -> None:
    """Names a method in a checkpoint's config."""
    config = AutoConfig.from_pretrained(directory)
    config.dtype = torch.bfloat16
    config.quantization_config = method
    config.save_pretrained(directory)


@pytest.fixture
def fp8(save_tiny: SaveTiny) -> tuple[Path, Path]:
    """Two checkpoints: one with weights in blocks of float8, one with what they stand for."""
    directory = save_tiny("llama", **WIDE)
    dense = directory.with_name("dense")
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(dense)
    packed, exact = {}, {}
    for name, weight in load_file(directory / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            packed[name] = exact[name] = weight.bfloat16()
            continue
        blocks = weight.unflatten(0, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK))
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        codes = (blocks / scales).to(torch.float8_e4m3fn)
        packed[name] = codes.view(weight.shape)
        packed[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
        exact[name] = (codes.float() * scales).view(weight.shape)
    save_file(packed, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(exact, dense / "model.safetensors", metadata={"format": "pt"})
    method = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}
    quantize(directory, method | {"modules_to_not_convert": ["lm_head"]})
    return directory, dense


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_fp8_weights_run_in_the_dtype_that_is_asked_for(
    fp8: tuple[Path, Path], assert_exact: AssertExact, dtype: str
) -> None:
    quantized, dense = fp8
    loaded = load(quantized, dtype=dtype)
    dtypes = {parameter.dtype for parameter in loaded.model.parameters()}
    assert dtypes == {torch.bfloat16 if dtype == "bfloat16" else torch.float32}
    assert "decoder layers 2" in loaded.replaced_modules
    assert_exact(loaded, dense)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ({"quant_method": "gptq", "bits": 4}, "GPTQ.*optimum.*quantization='gptq' reads"),
        ({"quant_method": "awq", "bits": 4}, "AWQ.*gptqmodel.*quantization='awq' reads"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm fp8.*GPU"),
    ],
)
def test_a_format_whose_library_is_missing_is_refused_by_its_name(
    save_tiny: SaveTiny, method: dict[str, Any], reason: str
) -> None:
    directory = save_tiny("llama")
    quantize(directory, method)
    with pytest.raises(ModelLoadError, match=reason):
        load(directory)


def quantized_by_torchao(directory: Path, config: str) -> Path:
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    method = TorchAoConfig(getattr(torchao, config)())
    made: Any = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=method, dtype=torch.bfloat16
    )
    made.save_pretrained(directory)
    return directory


def assert_as_transformers(loaded: LoadedModel, directory: Path, bound: float) -> None:
    """Within a share of the largest logit of what transformers gives with the same weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=loaded.dtype)
    prompt = (torch.arange(21) * 31 + 11) % 97
    (found,) = paged_logits(loaded.model, loaded.layers, [prompt], [16], loaded.attention_backend)
    with torch.inference_mode():
        exact = model(prompt[None]).logits[0].float()
    assert float((found - exact).abs().max() / exact.abs().max()) <= bound


@pytest.mark.filterwarnings("ignore")  # of a library that is there by chance
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("bfloat16", 5e-2)])
def test_torchao_weights_run(save_tiny: SaveTiny, dtype: str, bound: float) -> None:
    directory = quantized_by_torchao(save_tiny("llama", **WIDE), "Int8WeightOnlyConfig")
    assert_as_transformers(load(directory, dtype=dtype), directory, bound)


@pytest.mark.filterwarnings("ignore")
def test_weights_of_one_dtype_are_refused_in_another_by_that_reason(save_tiny: SaveTiny) -> None:
    directory = quantized_by_torchao(save_tiny("llama", **WIDE), "Float8WeightOnlyConfig")
    reason = r"own attention it fails, too, in float32 on cpu.*try the dtype"
    with pytest.raises(UnsupportedModelError, match=reason):
        load(directory, dtype="float32")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bitsandbytes_weights_run(save_tiny: SaveTiny, bits: int, dtype: str) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    directory = save_tiny("llama", hidden_size=64, **WIDE)
    method = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    made: Any = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=method, dtype=torch.bfloat16
    )
    made.save_pretrained(directory)
    assert_as_transformers(load(directory, dtype=dtype), directory, 5e-2)
