"""Beam searches of transformers' ``generate``, one prompt at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from pagedserve.sampling_params import EarlyStopping
from pagedserve.tokenizer import Tokenizer
from tests.support import references

NAME = "beams"

# Of a score that is the mean of a sequence's log-probabilities: each kind of processor rounds in
# its own way, and records are rounded to 1e-6.
MEAN_TOLERANCE = 1e-4

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


class Way(NamedTuple):
    """How a search measures what it found, and when it has found enough."""

    length_penalty: float
    early_stopping: EarlyStopping

    def tolerance(self, num_tokens: int) -> float:
        """How far two scores of one sequence may be apart.

        A sum is off by as much more than a mean as independent errors add up to.
        """
        spread: float = num_tokens ** (0.5 - self.length_penalty)
        return MEAN_TOLERANCE * max(1.0, spread)


@dataclass(frozen=True)
class Grid:
    """Which searches to make.

    Attributes:
        num_prompts: The first of all prompts.
        num_tokens: New tokens at most.
        ways: For each width.
    """

    num_prompts: int
    num_tokens: int
    ways: dict[int, list[Way]]


PENALTIES = (0.0, 0.6, 1.0, 2.0)
STOPPINGS: tuple[EarlyStopping, ...] = (True, False, "never")
ALL_WAYS = [Way(*way) for way in product(PENALTIES, STOPPINGS)]
RECORDED_GRID = Grid(
    num_prompts=4,
    num_tokens=24,
    ways={
        2: [Way(0.0, early_stopping=True), Way(2.0, early_stopping=False)],
        4: [Way(1.0, early_stopping=False)],
        8: [Way(0.6, early_stopping="never")],
    },
)
FULL_GRID = Grid(num_prompts=8, num_tokens=48, ways=dict.fromkeys((2, 4, 8), ALL_WAYS))


class Answer(NamedTuple):
    """One sequence that transformers returns.

    Attributes:
        token_ids: Without padding.
        score: As returned.
    """

    token_ids: list[int]
    score: float


@dataclass(frozen=True)
class BeamReference:
    """The prompts, and what transformers' searches of one width find.

    Attributes:
        eos_token_id: What ends a sequence.
        num_tokens: New tokens at most.
        prompts: Token ids.
        answers: For each way the answers of each prompt, best first.
    """

    eos_token_id: int
    num_tokens: int
    prompts: list[list[int]]
    answers: list[tuple[Way, list[list[Answer]]]]


class TooShortError(Exception):
    """A search goes on where the remembered one was over."""


class RememberingModel:
    """transformers' model, which answers what it was asked before without computing it again.

    Which beams go on depends on neither the length penalty nor early stopping; these decide when
    a search is over.  So all searches of one prompt and one width ask the same, step by step.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._steps: list[tuple[Tensor, Tensor]] = []

    def search(self, prompt: list[int], width: int, way: Way, num_tokens: int) -> list[Answer]:
        """What ``model.generate`` finds, best first."""
        made = self._generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
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
            token_ids: list[int] = sequence[len(prompt) :][:length].tolist()
            answers.append(Answer(token_ids, round(score, 6)))
        return answers

    def _generate(self, **arguments: Any) -> Any:
        try:
            with patch.object(self._model, "forward", self._replay()):
                return self._model.generate(**arguments)
        except TooShortError:
            self._steps.clear()
            with patch.object(self._model, "forward", self._remember()):
                return self._model.generate(**arguments)

    def _remember(self) -> Any:
        forward = self._model.forward

        @wraps(forward)
        def remembering(input_ids: Tensor, **arguments: Any) -> Any:
            output = forward(input_ids=input_ids, **arguments)
            self._steps.append((input_ids.clone(), output.logits[:, -1:].clone()))
            return output

        return remembering

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


def prompts_of(tokenizer: Tokenizer, num_prompts: int) -> list[list[int]]:
    """Questions and openings in turn, so that the first few are of both kinds."""
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in conversations
    ]
    turns = [*zip(texts[:3], OPENINGS, strict=True), texts[3:]]
    prompts = [tokenizer(text).input_ids for turn in turns for text in turn]
    return prompts[:num_prompts]


def ask_width(
    model: Any, prompts: Sequence[list[int]], grid: Grid, width: int
) -> list[tuple[Way, list[list[Answer]]]]:
    """All searches of one width."""
    ways = grid.ways[width]
    answers: dict[Way, list[list[Answer]]] = {way: [] for way in ways}
    for prompt in prompts:
        remembering = RememberingModel(model)
        for way in reversed(ways):  # the longest searches are among the last
            answers[way].append(remembering.search(prompt, width, way, grid.num_tokens))
    return list(answers.items())


def ask_live(model: Any, tokenizer: Tokenizer, grid: Grid, width: int) -> BeamReference:
    """Ask transformers' model now."""
    prompts = prompts_of(tokenizer, grid.num_prompts)
    eos_token_id = int(model.generation_config.eos_token_id)
    answers = ask_width(model, prompts, grid, width)
    return BeamReference(eos_token_id, grid.num_tokens, prompts, answers)


def ask(model: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """Ask transformers' model everything that is recorded."""
    prompts = prompts_of(tokenizer, RECORDED_GRID.num_prompts)
    return {
        "eos_token_id": int(model.generation_config.eos_token_id),
        "num_tokens": RECORDED_GRID.num_tokens,
        "prompts": prompts,
        "searches": {
            str(width): ask_width(model, prompts, RECORDED_GRID, width)
            for width in RECORDED_GRID.ways
        },
    }


def recorded(width: int) -> BeamReference:
    """What transformers answered."""
    record = references.read(NAME)["answers"]
    answers = [
        (Way(*way), [[Answer(*answer) for answer in prompt] for prompt in found])
        for way, found in record["searches"][str(width)]
    ]
    return BeamReference(record["eos_token_id"], record["num_tokens"], record["prompts"], answers)
