"""Beam search of several requests together against transformers', one prompt at a time.

A small choice of searches, unless the environment variable ``PAGEDSERVE_FULL_GRID`` is set: then
every width with every length penalty and every way to stop early, on more prompts and longer.
The answers must be the same sequences in the same order; no tie excuses a difference.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from pagedserve import LLM, RequestOutput, SamplingParams
from pagedserve.sampling_params import EarlyStopping

FULL_GRID = bool(os.environ.get("PAGEDSERVE_FULL_GRID"))
NUM_PROMPTS = 8 if FULL_GRID else 4
NUM_TOKENS = 48 if FULL_GRID else 24
BLOCK_SIZE = 16
SCORE_TOLERANCE = 1e-4

# Some are answered in a few words, so that hypotheses end; of the others beams go on to the last.
QUESTIONS = (
    "What is the capital of France?",
    "Who wrote Hamlet?",
    "What is 2 + 2? Answer with a number only.",
    "Name a primary colour in one word.",
    "Say yes.",
)
OPENINGS = (
    "Once upon a time, in a small village by the sea,",
    "def add(a, b):\n    return",
    "The quick brown fox jumps over the lazy dog.",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600 if FULL_GRID else 600)]


class Way(NamedTuple):
    """How a search measures what it found, and when it has found enough."""

    length_penalty: float
    early_stopping: EarlyStopping


PENALTIES = (0.0, 0.6, 1.0, 2.0)
STOPPINGS: tuple[EarlyStopping, ...] = (True, False, "never")
ALL_WAYS = [Way(*way) for way in product(PENALTIES, STOPPINGS)]
FEW_WAYS = {
    2: [Way(0.0, early_stopping=True), Way(2.0, early_stopping=False)],
    4: [Way(1.0, early_stopping=False)],
    8: [Way(0.6, early_stopping="never")],
}
WAYS = {width: ALL_WAYS if FULL_GRID else few for width, few in FEW_WAYS.items()}


class Answer(NamedTuple):
    """One sequence that transformers returns.

    Attributes:
        token_ids: Without padding.
        score: As returned.
    """

    token_ids: list[int]
    score: float


class TooShortError(Exception):
    """A search goes on where the recorded one was over."""


class RecordedModel:
    """transformers' model, which answers what it was asked before without computing it again.

    Which beams go on depends on neither the length penalty nor early stopping; these decide when
    a search is over.  So all searches of one prompt and one width ask the same, step by step.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._steps: list[tuple[Tensor, Tensor]] = []

    def search(self, prompt: list[int], width: int, way: Way) -> list[Answer]:
        """What ``model.generate`` finds, best first."""
        made = self._generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            return_dict_in_generate=True,
            output_scores=True,
            **way._asdict(),
        )
        scores: list[float] = made.sequences_scores.tolist()
        answers = []
        for sequence, rows, score in zip(made.sequences, made.beam_indices, scores, strict=True):
            length = int((rows >= 0).sum())  # padding belongs to no beam
            answers.append(Answer(sequence[len(prompt) :][:length].tolist(), score))
        return answers

    def _generate(self, **arguments: Any) -> Any:
        try:
            with patch.object(self._model, "forward", self._replay()):
                return self._model.generate(**arguments)
        except TooShortError:
            self._steps.clear()
            with patch.object(self._model, "forward", self._record()):
                return self._model.generate(**arguments)

    def _record(self) -> Any:
        forward = self._model.forward

        @wraps(forward)
        def recording(input_ids: Tensor, **arguments: Any) -> Any:
            output = forward(input_ids=input_ids, **arguments)
            self._steps.append((input_ids.clone(), output.logits[:, -1:].clone()))
            return output

        return recording

    def _replay(self) -> Any:
        steps = iter(self._steps)

        @wraps(self._model.forward)
        def replaying(input_ids: Tensor, **arguments: Any) -> Any:
            asked, logits = next(steps, (None, None))
            if asked is None:
                raise TooShortError
            assert torch.equal(input_ids, asked)
            return CausalLMOutputWithPast(
                logits=logits, past_key_values=arguments["past_key_values"]
            )

        return replaying


@dataclass(frozen=True)
class Reference:
    """The prompts, and what transformers' searches of one width find.

    Attributes:
        eos_token_id: What ends a sequence.
        prompts: Token ids.
        answers: The answers of each prompt, best first.
    """

    eos_token_id: int
    prompts: list[list[int]]
    answers: dict[Way, list[list[Answer]]]


def prompts_of(llm: LLM) -> list[list[int]]:
    tokenizer = llm.get_tokenizer()
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [
        tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True)
        for one in conversations
    ]
    # Questions and openings in turn, so that the first few are of both kinds.
    turns = [*zip(texts[:3], OPENINGS, strict=True), texts[3:]]
    prompts = [tokenizer(text).input_ids for turn in turns for text in turn]
    return prompts[:NUM_PROMPTS]


def refer(model: Any, prompts: list[list[int]], width: int) -> Reference:
    answers: dict[Way, list[list[Answer]]] = {way: [] for way in WAYS[width]}
    for prompt in prompts:
        recorded = RecordedModel(model)
        for way in reversed(WAYS[width]):  # the longest searches are among the last
            answers[way].append(recorded.search(prompt, width, way))
    return Reference(int(model.generation_config.eos_token_id), prompts, answers)


def with_few_blocks(reference: Reference, width: int) -> LLM:
    """An engine with hardly more blocks than the beams of one prompt fill."""
    longest = max(map(len, reference.prompts))
    num_shared = longest // BLOCK_SIZE
    num_each = -(-(longest + NUM_TOKENS) // BLOCK_SIZE) - num_shared
    num_blocks = num_shared + width * num_each + 1
    return LLM("smollm2", dtype="float32", num_gpu_blocks=num_blocks, block_size=BLOCK_SIZE)


def compare(reference: Reference, way: Way, outputs: Sequence[RequestOutput]) -> str:
    """How far scores are apart, in words; fails where sequences differ or scores too much."""
    differences = [0.0]
    for prompt, answers, output in zip(
        reference.prompts, reference.answers[way], outputs, strict=True
    ):
        found = output.outputs
        assert output.prompt_token_ids == prompt
        assert [one.token_ids for one in found] == [one.token_ids for one in answers]
        for one, answer in zip(found, answers, strict=True):
            has_ended = one.token_ids[-1] == reference.eos_token_id
            assert one.finish_reason == ("stop" if has_ended else "length")
            assert one.cumulative_logprob is not None
            score = one.cumulative_logprob / len(one.token_ids) ** way.length_penalty
            differences.append(abs(score - answer.score))
    assert max(differences) < SCORE_TOLERANCE
    return f"scores within {max(differences):.1e}"


def search(llm: LLM, reference: Reference, width: int, way: Way) -> str:
    """Search all prompts together; what came out in words."""
    params = SamplingParams(
        use_beam_search=True,
        temperature=0,
        best_of=width,
        n=width,
        max_tokens=NUM_TOKENS,
        **way._asdict(),
    )
    outputs = llm.generate(None, params, prompt_token_ids=reference.prompts, use_tqdm=False)
    difference = compare(reference, way, outputs)
    reasons = [one.finish_reason for output in outputs for one in output.outputs]
    assert "stop" in reasons
    scheduler = llm.llm_engine.scheduler
    assert scheduler.num_free_gpu_blocks == llm.llm_engine.memory.num_gpu_blocks
    scheduler.check()
    return (
        f"width {width}, {way}: {len(outputs)} of {len(reference.prompts)} searches exact, "
        f"{reasons.count('stop')} of {len(reasons)} hypotheses ended, {difference}"
    )


@pytest.mark.parametrize("width", WAYS)
def test_beams_are_those_of_transformers(
    smollm2: LLM, peer: Any, width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = refer(peer, prompts_of(smollm2), width)
    few_blocks = with_few_blocks(reference, width)
    engine = few_blocks.llm_engine
    for way in WAYS[width]:
        said = search(smollm2, reference, width, way)
        preempted, swapped = engine.scheduler.num_preemptions, engine.stats.num_swapped_blocks
        again = search(few_blocks, reference, width, way)
        preempted = engine.scheduler.num_preemptions - preempted
        swapped = engine.stats.num_swapped_blocks - swapped
        assert preempted > 0
        assert swapped > 0
        figures = f"{preempted} preemptions, {swapped} blocks swapped"
        with capsys.disabled():
            print(f"\n{said}\n{again}, {figures}")  # noqa: T201  # the figures are the point
