"""Tiny random models that take images, saved with real processors, and transformers' answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from pagedserve import EngineArgs
from pagedserve.models.image_processor import ImageProcessor, load_image_processor
from pagedserve.models.tokenizer.loader import load_tokenizer
from tests.support.tiny import enlarge_weights

NUM_WORDS: Final = 97
FAMILIES: Final = ("llava", "qwen2_vl", "qwen2_5_vl", "smolvlm", "idefics3")
_TEXT: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_PIECES: Final = [f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)]
_MARKS: Final = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
# The template of a model that takes the parts of a message.
TEMPLATE: Final = (
    "{% for message in messages %}{{ ' w' ~ (5 if message.role == 'user' else 6) ~ ' ' }}"
    "{% for part in message.content %}{% if part.type == 'image' %}{{ IMAGE }}{% else %}"
    "{{ part.text }}{% endif %}{{ ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w6' }}{% endif %}"
)


def picture(seed: int, width: int = 40, height: int = 24) -> Image.Image:
    """A picture of noise, in RGB."""
    generator = torch.Generator().manual_seed(seed)
    size = (height, width, 3)
    pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


def save_image_model(family: str, directory: Path) -> Path:
    """Save a model whose weights are so large that a wrong image shows; the directory."""
    directory.mkdir(parents=True)
    tokens, options, image_processor, kind, more = _parts(family)
    tokenizer = _tokenizer(tokens)
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", repr(tokens[0]))
    tokenizer.save_pretrained(directory)
    image_processor.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": kind} | more))
    torch.manual_seed(0)
    size = NUM_WORDS + len(tokens)
    text = {"vocab_size": size} | _TEXT | options.pop("text_config")
    make: Any = CONFIG_MAPPING[family]
    config = make(text_config=text, **options)
    config.eos_token_id, config.pad_token_id = 2, 0
    model: Any = AutoModelForImageTextToText.from_config(config)
    enlarge_weights(model, "bias")
    model.save_pretrained(directory)
    return directory


def _tokenizer(tokens: list[str]) -> PreTrainedTokenizerFast:
    words = {"<unk>": 0, **{f"w{index}": index for index in range(1, NUM_WORDS)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": tokens})
    return fast


def _parts(family: str) -> tuple[list[str], dict[str, Any], Any, str, dict[str, Any]]:
    """Special tokens, config, image processor, class of the processor, and its options."""
    if family == "llava":
        vision = _VISION | {"model_type": "clip_vision_model", "image_size": 16}
        options = {
            "text_config": {"model_type": "llama"},
            "vision_config": vision,
            "image_token_index": NUM_WORDS,
            "vision_feature_layer": -2,
        }
        size = {"height": 16, "width": 16}
        processor: Any = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
        more = {
            "patch_size": 4,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        }
        return ["<image>"], options, processor, "LlavaProcessor", more
    if family.startswith("qwen"):
        sizes = {"shortest_edge": 64, "longest_edge": 1024}
        processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=sizes)
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        options = {
            "text_config": {"rope_parameters": rope, "layer_types": ["full_attention"] * 2},
            "vision_config": _QWEN_VISION[family],
            "image_token_id": NUM_WORDS,
            "video_token_id": NUM_WORDS + 1,
        }
        kind = "Qwen2VLProcessor" if family == "qwen2_vl" else "Qwen2_5_VLProcessor"
        return ["<|image_pad|>", "<|video_pad|>"], options, processor, kind, {}
    kinds: dict[str, tuple[Any, str]] = {
        "smolvlm": (SmolVLMImageProcessorPil, "SmolVLMProcessor"),
        "idefics3": (Idefics3ImageProcessorPil, "Idefics3Processor"),
    }
    make, kind = kinds[family]
    processor = make(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    options = {
        "text_config": {"model_type": "llama"},
        "vision_config": _VISION | {"image_size": 16},
        "image_token_id": NUM_WORDS,
        "scale_factor": 2,
        "tie_word_embeddings": False,
    }
    return [*_MARKS, *_PIECES], options, processor, kind, {"image_seq_len": 4}


_VISION: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
_QWEN_VISION: Final[dict[str, dict[str, Any]]] = {
    "qwen2_vl": {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 64,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 4,
    },
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
}


class ImageOracle:
    """transformers' model, given what its processor makes of a whole prompt."""

    def __init__(self, directory: Path) -> None:
        args = EngineArgs(model=str(directory))
        self._processor: ImageProcessor = load_image_processor(args, load_tokenizer(args))
        self.token = self._processor.token
        model: Any = AutoModelForImageTextToText.from_pretrained(
            directory, attn_implementation="eager"
        )
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None  # as with ignore_eos

    @torch.inference_mode()
    def generate(
        self, text: str, images: Sequence[Image.Image], num_new: int, num_beams: int = 1
    ) -> list[list[int]]:
        """New tokens of the best sequences."""
        inputs = self._processor.processor(
            images=list(images) or None, text=[text], return_tensors="pt"
        )
        made = self._model.generate(
            **inputs,
            max_new_tokens=num_new,
            do_sample=False,
            num_beams=num_beams,
            num_return_sequences=num_beams,
        )
        length = inputs["input_ids"].shape[1]
        return [sequence[length:].tolist() for sequence in made]
