"""Whisper base hears a sentence that is known."""

from pathlib import Path
from typing import Any

import soundfile
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from pagedserve import LLM, SamplingParams

SENTENCE = " Never tried, ever failed. No matter. Try again. Fail again. Fail better."


@torch.inference_mode()
def by_transformers(directory: Path, samples: Any, rate: int) -> list[int]:
    extract: Any = WhisperFeatureExtractor.from_pretrained(directory)
    model: Any = WhisperForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    features = extract(samples, sampling_rate=rate, return_tensors="pt").input_features
    output = model.generate(features, language="en", return_dict_in_generate=True)
    found: list[int] = output.sequences[0].tolist()
    return found


def test_the_sentence_is_written_beside_a_part_of_it(whisper_base: Path) -> None:
    samples, rate = soundfile.read(Path(__file__).parent / "beckett.wav", dtype="float32")
    parts = [samples, samples[: 4 * rate]]
    llm = LLM(str(whisper_base), kv_cache_memory=1 << 28, use_tqdm_on_load=False)
    prompts: list[Any] = [
        {"prompt": "", "multi_modal_data": {"audio": (part, rate)}} for part in parts
    ]
    params = SamplingParams(temperature=0, max_tokens=64)
    whole, part = llm.generate(prompts, params, use_tqdm=False)
    assert whole.outputs[0].text == SENTENCE
    found = [*(part.prompt_token_ids or ()), *part.outputs[0].token_ids]
    assert found == by_transformers(whisper_base, parts[1], rate)
