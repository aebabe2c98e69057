"""Greedy tokens of transformers' ``generate``, one prompt at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, SupportsIndex
from unittest.mock import patch

import numpy as np
import torch

from pagedserve.tokenizer import Tokenizer
from tests.support import references

NAME = "greedy"
NUM_PROMPTS = 48
LONGEST_PROMPT = 600
NUM_TOKENS = 64


@dataclass(frozen=True)
class GreedyReference:
    """One prompt, and what transformers makes of it.

    Attributes:
        text: The prompt.
        prompt_token_ids: The same as token ids.
        token_ids: New tokens.
        gaps: By how much the best logit is above the second, before each of them.
    """

    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    gaps: list[float]


def prompts_of(tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """Windows of 1 to 600 tokens of a text that does not change."""
    source = tokenizer(references.SOURCE.read_text(encoding="utf-8"), verbose=False).input_ids
    # Many short ones, the longest first: so they preempt each other most.
    shares = np.linspace(1, 0, NUM_PROMPTS) ** 2
    lengths = (1 + shares * (LONGEST_PROMPT - 1)).round().astype(int).tolist()
    for index, length in enumerate(lengths):
        start = index * 37 % (len(source) - LONGEST_PROMPT)
        text = tokenizer.decode(source[start : start + length])
        assert isinstance(text, str)
        yield text, tokenizer(text).input_ids


def ask_one(model: Any, text: str, prompt_token_ids: list[int]) -> GreedyReference:
    """What transformers' model makes of one prompt."""
    made = model.generate(
        input_ids=torch.tensor([prompt_token_ids]),
        attention_mask=torch.ones(1, len(prompt_token_ids), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(made.logits).topk(2).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    return GreedyReference(
        text,
        prompt_token_ids,
        made.sequences[0, len(prompt_token_ids) :].tolist(),
        [round(gap, 6) for gap in gaps],
    )


def greedy_tokens(
    model: Any, prompt_token_ids: Sequence[SupportsIndex], num_tokens: int
) -> list[int]:
    """So many new tokens of transformers' model, whether one of them would end the text or not."""
    ids = torch.tensor([prompt_token_ids])
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    tokens: list[int] = whole[0, ids.shape[1] :].tolist()
    return tokens


def ask(model: Any, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Ask transformers' model everything that is recorded."""
    with patch.object(model.generation_config, "eos_token_id", None):
        return [asdict(ask_one(model, *prompt)) for prompt in prompts_of(tokenizer)]


def recorded() -> list[GreedyReference]:
    """What transformers answered."""
    return [GreedyReference(**answer) for answer in references.read(NAME)["answers"]]
