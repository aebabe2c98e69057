"""Greedy tokens against transformers' ``generate``, one prompt at a time on the same weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from pagedserve import LLM, RequestOutput, SamplingParams

NUM_PROMPTS = 48
LONGEST_PROMPT = 600
NUM_TOKENS = 64
# A first difference is nobody's fault where the reference itself hardly tells two tokens apart.
TIE_LOGITS = 1e-4
MAX_TIES = NUM_PROMPTS // 50 + 1
# So few that 48 requests preempt each other at least 20 times.
FEW_BLOCKS = 126
MIN_PREEMPTIONS = 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Reference:
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


def prompts_of(
    tokenizer: PreTrainedTokenizerBase, source: list[int]
) -> Iterator[tuple[str, list[int]]]:
    """Windows of 1 to 600 tokens."""
    # Many short ones, the longest first: so they preempt each other most.
    shares = np.linspace(1, 0, NUM_PROMPTS) ** 2
    lengths = (1 + shares * (LONGEST_PROMPT - 1)).round().astype(int).tolist()
    for index, length in enumerate(lengths):
        start = index * 37 % (len(source) - LONGEST_PROMPT)
        text = tokenizer.decode(source[start : start + length])
        assert isinstance(text, str)
        yield text, tokenizer(text).input_ids


def refer(model: Any, text: str, prompt_token_ids: list[int]) -> Reference:
    made = model.generate(
        input_ids=torch.tensor([prompt_token_ids]),
        attention_mask=torch.ones(1, len(prompt_token_ids), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(made.logits).topk(2).values
    return Reference(
        text,
        prompt_token_ids,
        made.sequences[0, len(prompt_token_ids) :].tolist(),
        (best[:, 0] - best[:, 1]).tolist(),
    )


@pytest.fixture(scope="module")
def references(smollm2: LLM, peer: Any, licence: list[int]) -> list[Reference]:
    prompts = prompts_of(smollm2.get_tokenizer(), licence)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer.generation_config, "eos_token_id", None)
        return [refer(peer, *prompt) for prompt in prompts]


def count_ties(references: Sequence[Reference], outputs: Sequence[RequestOutput]) -> int:
    """How many prompts part from the reference at a tie; any other difference fails."""
    num_ties = 0
    for number, (expected, output) in enumerate(zip(references, outputs, strict=True)):
        found = output.outputs[0].token_ids
        assert len(found) == NUM_TOKENS
        assert output.prompt_token_ids == expected.prompt_token_ids
        pairs = enumerate(zip(found, expected.token_ids, strict=True))
        first = next((index for index, (one, other) in pairs if one != other), None)
        if first is not None:
            gap = expected.gaps[first]
            assert gap < TIE_LOGITS, (
                f"prompt {number} of {len(expected.prompt_token_ids)} tokens differs first at new "
                f"token {first}, where the reference's two best logits are {gap} apart"
            )
            num_ties += 1
    return num_ties


def check(llm: LLM, references: Sequence[Reference], *, as_token_ids: bool = False) -> str:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    if as_token_ids:
        token_ids = [one.prompt_token_ids for one in references]
        outputs = llm.generate(None, params, prompt_token_ids=token_ids, use_tqdm=False)
    else:
        outputs = llm.generate([one.text for one in references], params, use_tqdm=False)
    num_ties = count_ties(references, outputs)
    assert num_ties <= MAX_TIES
    scheduler = llm.llm_engine.scheduler
    assert scheduler.num_free_gpu_blocks == llm.llm_engine.memory.num_gpu_blocks
    scheduler.check()
    return (
        f"{len(references) - num_ties} of {len(references)} prompts exact, {num_ties} ties, "
        f"{scheduler.num_preemptions} preemptions"
    )


@pytest.mark.parametrize("as_token_ids", [False, True], ids=["text", "token ids"])
def test_all_at_once(
    smollm2: LLM,
    references: list[Reference],
    capsys: pytest.CaptureFixture[str],
    *,
    as_token_ids: bool,
) -> None:
    said = check(smollm2, references, as_token_ids=as_token_ids)
    with capsys.disabled():
        print(f"\n{said}")  # noqa: T201  # the figure is the point


def test_with_preemptions(references: list[Reference], capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM("smollm2", dtype="float32", num_gpu_blocks=FEW_BLOCKS)
    said = check(llm, references)
    assert llm.llm_engine.scheduler.num_preemptions >= MIN_PREEMPTIONS
    with capsys.disabled():
        print(f"\n{said}")  # noqa: T201  # the figure is the point
