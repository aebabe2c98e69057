"""Whisper base in transformers' format, from a package that has it as CTranslate2 stores it.

CTranslate2 lays the three projections of self-attention, and keys and values of cross-attention,
one after another in one matrix; Whisper's keys have no bias, and what is stored for them is zeros.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

_TYPES: Final = (np.float32, np.int8, np.int16, np.int32, np.float16)
_WIDTH: Final = 512
_LAYERS: Final = 6
_VOCAB_SIZE: Final = 51865
_END: Final = 50257
# Parts of a layer, as transformers and as CTranslate2 calls them.
_NORMS: Final = {
    "self_attn_layer_norm": "self_attention/layer_norm",
    "encoder_attn_layer_norm": "attention/layer_norm",
    "final_layer_norm": "ffn/layer_norm",
}
_LINEARS: Final = {
    "self_attn.out_proj": "self_attention/linear_1",
    "encoder_attn.q_proj": "attention/linear_0",
    "encoder_attn.out_proj": "attention/linear_2",
    "fc1": "ffn/linear_0",
    "fc2": "ffn/linear_1",
}
_JOINED: Final = {
    "self_attn": ("self_attention/linear_0", "qkv"),
    "encoder_attn": ("attention/linear_1", "kv"),
}


class _Reader:
    """Numbers, texts and arrays of CTranslate2's file."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._place = 0

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self._content, self._place)
        self._place += struct.calcsize(form)
        return int(value)

    def text(self) -> str:
        return self._bytes(self.number("H")).rstrip(b"\0").decode()

    def array(self) -> NDArray[Any]:
        shape = [self.number("I") for _ in range(self.number("B"))]
        dtype = _TYPES[self.number("B")]
        return np.frombuffer(self._bytes(self.number("I")), dtype).reshape(shape)

    def _bytes(self, length: int) -> bytes:
        self._place += length
        return self._content[self._place - length : self._place]


def _variables(content: bytes) -> dict[str, Tensor]:
    reader = _Reader(content)
    reader.number("I"), reader.text(), reader.number("I")  # version, name, revision
    return {
        reader.text(): torch.from_numpy(reader.array().copy()) for _ in range(reader.number("I"))
    }


def _weights(stored: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """By transformers' names."""
    for conv in ("conv1", "conv2"):
        yield from _linear(f"model.encoder.{conv}", stored, f"encoder/{conv}")
    yield "model.decoder.embed_tokens.weight", stored["decoder/embeddings/weight"]
    for side in ("encoder", "decoder"):
        positions = stored[f"{side}/position_encodings/encodings"]
        yield f"model.{side}.embed_positions.weight", positions
        yield from _norm(f"model.{side}.layer_norm", stored, f"{side}/layer_norm")
        for layer in range(_LAYERS):
            yield from _layer(f"model.{side}.layers.{layer}", stored, f"{side}/layer_{layer}")


def _layer(ours: str, stored: Mapping[str, Tensor], theirs: str) -> Iterator[tuple[str, Tensor]]:
    for name, norm in _NORMS.items():
        yield from _norm(f"{ours}.{name}", stored, f"{theirs}/{norm}")
    for name, linear in _LINEARS.items():
        yield from _linear(f"{ours}.{name}", stored, f"{theirs}/{linear}")
    for name, (joined, parts) in _JOINED.items():
        for kind, values in _linear("", stored, f"{theirs}/{joined}"):
            for part, piece in zip(parts, values.split(_WIDTH), strict=True):
                if (part, kind) != ("k", ".bias"):
                    yield f"{ours}.{name}.{part}_proj{kind}", piece


def _linear(ours: str, stored: Mapping[str, Tensor], theirs: str) -> Iterator[tuple[str, Tensor]]:
    """Weight and bias; nothing of a side that has no such part."""
    for kind in ("weight", "bias"):
        if f"{theirs}/{kind}" in stored:
            yield f"{ours}.{kind}", stored[f"{theirs}/{kind}"]


def _norm(ours: str, stored: Mapping[str, Tensor], theirs: str) -> Iterator[tuple[str, Tensor]]:
    for kind, name in (("weight", "gamma"), ("bias", "beta")):
        if f"{theirs}/{name}" in stored:
            yield f"{ours}.{kind}", stored[f"{theirs}/{name}"]


def _generation_config(folder: Path) -> GenerationConfig:
    stored = json.loads((folder / "config.json").read_text())
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    tokens = {token["content"]: token["id"] for token in added}
    names = {token: name for name, token in tokens.items()}
    return GenerationConfig(
        bos_token_id=_END,
        eos_token_id=_END,
        pad_token_id=_END,
        decoder_start_token_id=tokens["<|startoftranscript|>"],
        is_multilingual=True,
        lang_to_id={names[token]: token for token in stored["lang_ids"]},
        task_to_id={task: tokens[f"<|{task}|>"] for task in ("transcribe", "translate")},
        no_timestamps_token_id=tokens["<|notimestamps|>"],
        prev_sot_token_id=tokens["<|startofprev|>"],
        suppress_tokens=stored["suppress_ids"],
        begin_suppress_tokens=stored["suppress_ids_begin"],
        return_timestamps=False,
    )


def save_whisper_base(folders: tuple[Path, Path], directory: Path) -> Path:
    """Saves the model; the directory.

    Args:
        folders: of the two halves of the file; the first has the configs, too.
        directory: where to.
    """
    halves = [folder / f"model.bin.part{part}" for part, folder in enumerate(folders, 1)]
    stored = _variables(b"".join(half.read_bytes() for half in halves))
    config = WhisperConfig(
        vocab_size=_VOCAB_SIZE,
        d_model=_WIDTH,
        encoder_layers=_LAYERS,
        decoder_layers=_LAYERS,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=4 * _WIDTH,
        decoder_ffn_dim=4 * _WIDTH,
        num_mel_bins=80,
        dtype=torch.float16,
    )
    model: Any = WhisperForConditionalGeneration(config).half()
    found = model.load_state_dict(dict(_weights(stored)), strict=False)
    if found.missing_keys != ["proj_out.weight"] or found.unexpected_keys:  # which is tied
        raise ValueError(f"the file is no Whisper base: {found}")
    model.generation_config = _generation_config(folders[0])
    model.save_pretrained(directory)
    WhisperFeatureExtractor().save_pretrained(directory)
    (directory / "tokenizer.json").write_bytes((folders[0] / "tokenizer.json").read_bytes())
    return directory
