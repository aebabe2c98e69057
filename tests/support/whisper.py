"""A tiny random Whisper of two languages, and sounds that it tells apart."""

import json
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from tests.support.tiny import EOS, VOCAB_SIZE, save_tokenizer

SECONDS: Final = 2
RATE: Final = 16_000
START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_TIMESTAMPS = range(90, 97)
_NAMES: Final = ("startoftranscript", "en", "de", "translate", "transcribe", "startofprev")


Sound: TypeAlias = tuple[NDArray[np.float32], int]


def sounds(num_sounds: int) -> list[Sound]:
    """Of several lengths and colours, with their sampling rate."""
    rng = np.random.default_rng(3)
    found = []
    for index in range(num_sounds):
        times = np.arange(rng.integers(RATE // 8, SECONDS * RATE)) / RATE
        tones = [np.sin(2 * np.pi * rng.uniform(80, 6000) * times) for _ in range(1 + index % 3)]
        noise = rng.normal(0, 0.05, len(times))
        found.append(((sum(tones) / 4 + noise).astype(np.float32), RATE))
    return found


def save_whisper(directory: Path, *, languages: bool = True) -> Path:
    """Saves the model; the directory."""
    torch.manual_seed(9)  # it takes some sounds for one language, some for the other
    config = WhisperConfig(
        vocab_size=VOCAB_SIZE,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=SECONDS * 50,
        max_target_positions=64,
        pad_token_id=EOS,
        bos_token_id=EOS,
        eos_token_id=EOS,
        decoder_start_token_id=START,
    )
    model: Any = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "encoder.embed_positions" not in name:
                # So large that a wrong key or value shows, but for what every token repeats.
                parameter.normal_(0, 0.05 if "embed_tokens" in name else 0.3)
    model.generation_config = generation_config(languages=languages)
    model.save_pretrained(directory)
    WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS).save_pretrained(directory)
    save_tokenizer(directory)
    _name_tokens(directory)
    return directory


def generation_config(*, languages: bool) -> GenerationConfig:
    several: dict[str, Any] = {
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
        "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    }
    return GenerationConfig(
        decoder_start_token_id=START,
        eos_token_id=EOS,
        pad_token_id=EOS,
        bos_token_id=EOS,
        suppress_tokens=[-1, 7, 11, *range(START, VOCAB_SIZE + 1)],  # some are no tokens
        begin_suppress_tokens=[EOS, 13],
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=PREVIOUS,
        return_timestamps=False,
        **(several if languages else {"is_multilingual": False}),
    )


def _name_tokens(directory: Path) -> None:
    """Call the last words what Whisper calls them."""
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    for token, name in zip(range(START, VOCAB_SIZE), (*_NAMES, "notimestamps"), strict=True):
        del words[f" w{token}"]
        words[f"<|{name}|>"] = token
        special = {"id": token, "content": f"<|{name}|>", "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append(special | flags)
    file.write_text(json.dumps(content))


class WhisperOracle:
    """What transformers makes of one sound at a time."""

    def __init__(self, directory: Path) -> None:
        model: Any = WhisperForConditionalGeneration.from_pretrained(directory)
        self._model = model.eval()
        self._extract: Any = WhisperFeatureExtractor.from_pretrained(directory)

    def features(self, audio: Sound) -> torch.Tensor:
        found: torch.Tensor = self._extract(
            audio[0], sampling_rate=audio[1], return_tensors="pt"
        ).input_features
        return found

    def language(self, audio: Sound) -> int:
        return int(self._model.detect_language(self.features(audio)))

    def generate(self, audio: Sound, num_tokens: int, **options: Any) -> list[int]:
        """The tokens of the likeliest sequence, those that it begins with included."""
        output = self._model.generate(
            self.features(audio),
            max_new_tokens=num_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            **options,
        )
        found: list[int] = output.sequences[0].tolist()
        end = found.index(EOS) + 1 if EOS in found else len(found)
        return found[:end]
