"""The records of families, against the classes and configs of transformers."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from pagedserve.models.families.record import DecoderFamily
from pagedserve.models.families.table import DECODERS, FAMILIES, family_of, family_of_gguf
from pagedserve.models.fused.recognize import family_of_layer, norm_factor

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
    "pad_token_id": 0,
}
of_each_decoder = pytest.mark.parametrize(
    "family", DECODERS, ids=[family.model_type for family in DECODERS]
)


def model_of(family: DecoderFamily) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **SIZES))


def test_model_types_are_those_of_transformers() -> None:
    known = {family.model_type for family in FAMILIES if family.classes is None}
    assert known <= CONFIG_MAPPING_NAMES.keys()
    assert not {family.model_type for family in FAMILIES} - known & CONFIG_MAPPING_NAMES.keys()


def test_there_is_one_record_per_family() -> None:
    assert max(Counter(family.model_type for family in FAMILIES).values()) == 1
    assert max(Counter(family.gguf for family in FAMILIES if family.gguf).values()) == 1
    assert all(family_of(family.model_type) is family for family in FAMILIES)
    assert all(family_of_gguf(family.gguf) is family for family in FAMILIES if family.gguf)


def test_records_of_other_families_are_empty() -> None:
    assert family_of("olmo2") == family_of(None) == family_of_gguf("olmo2")
    assert not isinstance(family_of("olmo2"), DecoderFamily)


def test_architectures_of_gguf_files_exist() -> None:
    gguf = pytest.importorskip("gguf")
    named = {family.gguf for family in FAMILIES if family.gguf is not None}
    assert named <= set(gguf.MODEL_ARCH_NAMES.values())


@pytest.mark.parametrize(
    "model_type", [family.model_type for family in FAMILIES if family.classes is None]
)
def test_encoder_decoders_are_those_of_transformers(model_type: str) -> None:
    is_encoder_decoder = AutoConfig.for_model(model_type).is_encoder_decoder
    assert is_encoder_decoder or not family_of(model_type).is_encoder_decoder


def test_families_with_images_take_images_and_text() -> None:
    seeing = {family.model_type for family in FAMILIES if family.images is not None}
    assert seeing <= MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()


@of_each_decoder
def test_decoder_layers_have_the_modules_of_their_record(family: DecoderFamily) -> None:
    model = model_of(family)
    layer: nn.Module = model.model.layers[0]
    assert type(model).__name__ == family.architecture
    assert family_of_layer(layer) is family
    weights = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
    assert weights == set(family.modules.values())
    biases = {name for name, _ in layer.named_parameters() if name.endswith("bias")}
    assert bool(biases) == (family.has_biases is True)


@of_each_decoder
def test_norms_multiply_by_the_weight_with_the_offset(family: DecoderFamily) -> None:
    norm = model_of(family).model.norm
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    norm.weight.data = torch.linspace(-1, 1, 16)
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm_factor(norm)
    assert torch.allclose(norm(x), expected, atol=1e-5)


@of_each_decoder
def test_activations_and_embeddings_are_those_of_the_record(family: DecoderFamily) -> None:
    model = model_of(family)
    config = model.config
    assert (getattr(config, "hidden_activation", None) or config.hidden_act) in family.activations
    assert hasattr(model.model.embed_tokens, "embed_scale") == family.scales_embeddings


@of_each_decoder
def test_defaults_are_those_of_the_config(family: DecoderFamily) -> None:
    config = AutoConfig.for_model(family.model_type, use_sliding_window=True)
    found = {name: getattr(config, name) for name in family.defaults if hasattr(config, name)}
    found.pop("use_sliding_window", None)
    assert len(found) > 1
    assert found.items() <= family.defaults.items()
