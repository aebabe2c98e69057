"""One architecture, tiny and with random weights: what it gives here, and in transformers."""

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, NamedTuple, cast

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
)

from pagedserve import LLM, RequestOutput, SamplingParams
from pagedserve.errors import PagedServeError, UnsupportedModelError
from tests.support.tiny import VOCAB_SIZE, save_tokenizer
from tests.sweep.tiny import tiny_config

Kind = Literal["exact", "refused", "wrong", "crashed", "not built"]

# Of log-probabilities in float32, as a share of the largest.
BOUND: Final = 1e-5
_LENGTHS: Final = (3, 33, 20, 40)
_NUM_NEW: Final = 8
_OPTIONS: Final[dict[str, Any]] = {
    "num_gpu_blocks": 64,
    "max_model_len": 64,
    "generation_config": "vllm",
}
_CHUNKED: Final[dict[str, Any]] = {
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
}


class Outcome(NamedTuple):
    """What became of an architecture, and why."""

    model_type: str
    kind: Kind
    reason: str = ""


def run_architecture(model_type: str) -> Outcome:
    """Build it, run it plain and in chunks over cached prefixes, compare with transformers."""
    with TemporaryDirectory() as directory:
        os.environ["PAGEDSERVE_CACHE"] = f"{directory}/cache"
        path = Path(directory) / "model"
        try:
            save_random(model_type, path)
            model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
            model.eval()(torch.tensor([[1, 2, 3]]), use_cache=False)
        except Exception as error:  # noqa: BLE001  # whatever a config of ours does to it
            return Outcome(model_type, "not built", _line(error))
        try:
            difference = largest_error(path, model)
        except UnsupportedModelError as refusal:
            if not _is_accepted(path, "bfloat16"):
                return Outcome(model_type, "refused", _line(refusal))
            return Outcome(model_type, "wrong", "accepted in bfloat16 alone")
        except Exception as crash:  # noqa: BLE001  # what the sweep is there to find
            return Outcome(model_type, "crashed", f"{type(crash).__name__}: {_line(crash)}")
    if difference <= BOUND:
        return Outcome(model_type, "exact")
    return Outcome(model_type, "wrong", f"log-probabilities differ by {difference:.1e}")


def save_random(model_type: str, directory: Path) -> None:
    """Save a model whose weights are so large that wrong attention shows, and a tokenizer."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name or "sinks" in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(directory)
    if type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # the text part of a larger model
        config.save_pretrained(directory)
    save_tokenizer(directory)


def largest_error(directory: Path, model: Any) -> float:
    """The largest difference of a log-probability from transformers', as a share of the largest.

    It is infinite where a token is not the likeliest that transformers knows, or not the one that
    it generates.
    """
    prompts = [
        ((torch.arange(length) * 31 + row // 2) % (VOCAB_SIZE - 3) + 3).tolist()
        for row, length in enumerate(_LENGTHS)
    ]
    _leave_defaults(model)
    generated = [_generate(model, prompt) for prompt in prompts]
    error = 0.0
    for is_chunked in (False, True):
        options = _chunked(model) if is_chunked else {}
        llm = LLM(model=str(directory), **_OPTIONS, **options)
        params = SamplingParams(
            temperature=0,
            max_tokens=_NUM_NEW,
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=None if is_chunked else 0,
        )
        for _ in range(2 if is_chunked else 1):  # again, over what the first left in the cache
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
            error = max(error, *(_error(output, model) for output in outputs))
            if [output.outputs[0].token_ids for output in outputs] != generated:
                return torch.inf
    return error


def _leave_defaults(model: Any) -> None:
    """Let a model generate without what it ends with or forces, and by positions of its own.

    Generation counts positions from 0, RoBERTa from behind its padding.
    """
    model.generation_config = GenerationConfig(
        max_new_tokens=_NUM_NEW, pad_token_id=0, use_cache=False
    )
    inputs = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: (
        inputs(*args, **kwargs) | {"position_ids": None}
    )


def _generate(model: Any, prompt: list[int]) -> list[int]:
    tokens = model.generate(torch.tensor([prompt]))
    return cast(list[int], tokens[0, len(prompt) :].tolist())


def _chunked(model: Any) -> dict[str, Any]:
    """Prefixes are cached where layers keep no states."""
    layers = DynamicCache(config=model.config).layers
    has_states = any("Linear" in type(layer).__name__ for layer in layers)
    return _CHUNKED | {"enable_prefix_caching": not has_states}


@torch.inference_mode()
def _error(output: RequestOutput, model: Any) -> float:
    completion = output.outputs[0]
    prompt = list(output.prompt_token_ids or [])
    tokens = [*prompt, *completion.token_ids]
    exact: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(dim=-1)
    found = _logprobs(prompt[1:], (output.prompt_logprobs or [])[1:])
    found += _logprobs(completion.token_ids, completion.logprobs or [])
    scores = exact[-1 - len(found) : -1]
    chosen = torch.tensor(tokens[-len(found) :])
    largest = float(scores.abs().max())
    error = (torch.tensor(found) - scores.gather(1, chosen[:, None])[:, 0]).abs().max()
    new = scores[-_NUM_NEW:]
    lost = new.amax(dim=-1) - new.gather(1, chosen[-_NUM_NEW:, None])[:, 0]
    return torch.inf if float(lost.max()) > BOUND * largest else float(error) / largest


def _logprobs(tokens: Sequence[int], entries: Sequence[Any]) -> list[float]:
    return [entry[token].logprob for token, entry in zip(tokens, entries, strict=False)]


def _is_accepted(directory: Path, dtype: Literal["bfloat16"]) -> bool:
    try:
        LLM(model=str(directory), dtype=dtype, **_OPTIONS)
    except PagedServeError:
        return False
    return True


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
