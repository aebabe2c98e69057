"""The check at load: what errs beyond a few dozen tokens, in few bits, or after an exchange."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pagedserve.config import EngineArgs
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.loader import LoadedModel, load_model

SaveTiny = Callable[..., Path]
AssertExact = Callable[..., None]
WIDE = {"intermediate_size": 64}


class LateLinear(nn.Linear):
    """Scales what comes after ``floor_scale`` tokens of a flat batch, whosever tokens they are."""

    floor_scale: int
    strength: float

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1]).div(self.floor_scale).floor()
        return super().forward(x) * (1 + self.strength * steps)[:, None].to(x.dtype)


class OwnLlama(LlamaForCausalLM):
    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers looks for its own attention call in this file


class LateConfig(LlamaConfig):
    model_type = "late_llama"
    late_scale: int = 4096
    late_strength: float = 1.0


class LateLlama(OwnLlama):
    config_class = LateConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            late = LateLinear(config.hidden_size, config.hidden_size, bias=False)
            late.floor_scale, late.strength = config.late_scale, config.late_strength
            layer.self_attn.q_proj = late


class LookingConfig(LlamaConfig):
    model_type = "looking_llama"


class LookingLlama(OwnLlama):
    """Looks into its own layers, as no replaced layer lets anybody do."""

    config_class = LookingConfig

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self.model.layers[0].mlp.down_proj, nn.Linear)
        return super().forward(*args, **kwargs)


@pytest.fixture(autouse=True, scope="module")
def own_architectures() -> None:
    for config, model in ((LateConfig, LateLlama), (LookingConfig, LookingLlama)):
        AutoConfig.register(config.model_type, config)
        AutoModelForCausalLM.register(config, model)


def load(directory: Path, **options: Any) -> LoadedModel:
    return load_model(EngineArgs(model=str(directory), **options), torch.device("cpu"))


def test_what_begins_beyond_the_length_of_the_check_is_seen(save_tiny: SaveTiny) -> None:
    with pytest.raises(UnsupportedModelError, match=r"LateLlama.*differ from its own"):
        load(save_tiny("late_llama"))


def test_thresholds_are_themselves_again_after_the_check(save_tiny: SaveTiny) -> None:
    loaded = load(save_tiny("mistral", sliding_window=4096))
    assert [layer.window for layer in loaded.layers] == [4096, 4096]
    assert loaded.model.config.sliding_window == 4096


def test_an_error_that_hides_in_bfloat16_is_found_in_float32(save_tiny: SaveTiny) -> None:
    directory = save_tiny("late_llama", late_strength=0.003)
    for dtype in ("bfloat16", "float32"):
        with pytest.raises(UnsupportedModelError, match=r"accepted: 5e-05"):
            load(directory, dtype=dtype)


def test_modules_that_the_model_cannot_do_without_are_left(
    save_tiny: SaveTiny, assert_exact: AssertExact, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_tiny("looking_llama", **WIDE)
    for _ in range(2):  # the second load knows it from the first
        caplog.clear()
        loaded = load(directory)
        assert loaded.replaced_modules == "none"
        assert "'fused' kernels" in caplog.text
        assert "failed the numerics check" in caplog.text
        assert_exact(loaded, directory)
    with pytest.raises(UnsupportedModelError, match="AttributeError"):
        load(directory, quantization="int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_keep_a_state_of_their_own_are_refused_by_their_type(
    save_tiny: SaveTiny, dtype: str
) -> None:
    directory = save_tiny("recurrent_gemma", head_dim=8, num_hidden_layers=3)
    with pytest.raises(UnsupportedModelError, match=r"RecurrentGemma.*type 'linear_attention'"):
        load(directory, dtype=dtype)


def test_a_mask_of_the_models_own_is_refused(save_tiny: SaveTiny) -> None:
    with pytest.raises(UnsupportedModelError, match=r"a custom mask"):
        load(save_tiny("doge", keep_window_size=4))


def test_attention_in_code_of_the_models_own_is_refused_as_that(save_tiny: SaveTiny) -> None:
    with pytest.raises(UnsupportedModelError, match=r"none of its 2 layers attend.*in custom code"):
        load(save_tiny("rembert", is_decoder=True, **WIDE))


def test_a_recurrent_state_is_refused_as_that(save_tiny: SaveTiny) -> None:
    sizes = {"attention_hidden_size": 32, "context_length": 64}
    with pytest.raises(UnsupportedModelError, match=r"Rwkv.*keeps a recurrent state"):
        load(save_tiny("rwkv", **sizes), max_model_len=64)
