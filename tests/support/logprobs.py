"""Log-probabilities of one direct forward of transformers over whole sequences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagedserve import LLM, SamplingParams
from pagedserve.inputs import TokensPrompt
from tests.support import references

NAME = "logprobs"
TOLERANCE = 1e-4
NUM_TOP, NUM_PROMPT_TOP = 5, 3
NUM_PROMPTS = 8
NUM_TOKENS = 10
# More than a test asks for, so that those who are near the last of them are known too.
NUM_BEST = 8

GREEDY = SamplingParams(
    temperature=0,
    max_tokens=NUM_TOKENS,
    ignore_eos=True,
    logprobs=NUM_TOP,
    prompt_logprobs=NUM_PROMPT_TOP,
)
RANDOM: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "seed": 7, "max_tokens": NUM_TOKENS}
SAMPLED = SamplingParams(**RANDOM, ignore_eos=True, logprobs=NUM_TOP)
# In turn for the prompts: with and without log-probabilities of the prompt.
PARAMS = (
    GREEDY,
    SAMPLED,
    replace(GREEDY, prompt_logprobs=None),
    replace(SAMPLED, prompt_logprobs=NUM_PROMPT_TOP),
)
SEVERAL = SamplingParams(**RANDOM, n=2, logprobs=NUM_TOP)
FOUR = SamplingParams(**RANDOM, n=4, logprobs=NUM_TOP)
BEST_TWO = SamplingParams(**RANDOM, n=2, best_of=4, logprobs=NUM_TOP)
BEAMS = SamplingParams(
    n=4,
    best_of=4,
    use_beam_search=True,
    temperature=0,
    max_tokens=NUM_TOKENS,
    logprobs=NUM_TOP,
    prompt_logprobs=NUM_PROMPT_TOP,
)
# Of the prompts, the one of those with several outputs.
SHARED_PROMPT = 5


def prompts_of(source: list[int]) -> list[TokensPrompt]:
    """Windows of a text, from 3 to 43 tokens; all but the first begin with the same 20."""
    begin = source[:20]
    others = [begin + source[60 * n : 60 * n + 3 * n + 2] for n in range(1, NUM_PROMPTS)]
    return [{"prompt_token_ids": token_ids} for token_ids in [source[100:103], *others]]


def one_output_each() -> list[SamplingParams]:
    """Of the requests for all prompts together."""
    return [PARAMS[number % len(PARAMS)] for number in range(NUM_PROMPTS)]


def sequences_of(llm: LLM, source: list[int]) -> list[list[int]]:
    """Prompt and output of all requests that are compared with transformers."""
    prompts = prompts_of(source)
    params = [*one_output_each(), SEVERAL, FOUR, BEAMS]
    outputs = llm.generate([*prompts, *[prompts[SHARED_PROMPT]] * 3], params, use_tqdm=False)
    found = {
        (*output.prompt_token_ids, *completion.token_ids)
        for output in outputs
        for completion in output.outputs
    }
    return sorted(map(list, found))


@dataclass(frozen=True)
class Position:
    """What transformers says of the token after one position.

    Attributes:
        best: The likeliest tokens, best first, with their log-probabilities.
        next_logprob: Of the token that does follow, if one does.
        next_ranks: The least and the most that its rank may be within ``TOLERANCE``.
    """

    best: dict[int, float]
    next_logprob: float
    next_ranks: tuple[int, int]

    def logprob(self, token: int, next_token: int) -> float:
        """Of one of the best tokens, or of the next."""
        return self.next_logprob if token == next_token else self.best[token]

    def ranks(self, token: int, next_token: int) -> tuple[int, int]:
        """The least and the most that a token's rank may be."""
        if token == next_token:
            return self.next_ranks
        own = self.best[token]
        values = list(self.best.values())
        least = 1 + sum(value > own + TOLERANCE for value in values)
        return least, sum(value >= own - TOLERANCE for value in values)


class LogprobReferences:
    """What transformers says of each sequence it was asked about."""

    def __init__(self, positions: dict[tuple[int, ...], list[Position]]) -> None:
        self._positions = positions

    def __call__(self, token_ids: Sequence[int]) -> list[Position]:
        """What it says after each of the tokens; the last is followed by nothing."""
        found = self._positions.get(tuple(token_ids))
        assert found is not None, (
            f"transformers was never asked about {list(token_ids)}: either these tokens are wrong, "
            "or what is asked has changed and `make references` records it again"
        )
        return found


def ask_position(row: Tensor, next_token: int) -> Position:
    """From the log-probabilities [V] of what follows."""
    best = row.topk(NUM_BEST)
    true = row[next_token]
    least = 1 + int((row > true + TOLERANCE).sum())
    most = int((row >= true - TOLERANCE).sum())
    values = [round(value, 6) for value in best.values.tolist()]
    return Position(
        dict(zip(best.indices.tolist(), values, strict=True)), round(float(true), 6), (least, most)
    )


@torch.inference_mode()
def ask_one(model: Any, token_ids: Sequence[int]) -> list[Position]:
    """One forward over a sequence."""
    rows = model(torch.tensor([list(token_ids)])).logits[0].log_softmax(dim=-1)
    return [
        ask_position(row, next_token)
        for row, next_token in zip(rows, [*token_ids[1:], token_ids[-1]], strict=True)
    ]


def ask(model: Any, sequences: Iterable[Sequence[int]]) -> list[dict[str, Any]]:
    """Ask transformers' model about sequences, in the form that is recorded."""
    return [
        {
            "token_ids": list(token_ids),
            "positions": [
                [[*position.best.items()], position.next_logprob, position.next_ranks]
                for position in ask_one(model, token_ids)
            ],
        }
        for token_ids in sequences
    ]


def recorded_sequences() -> list[list[int]]:
    """The sequences that transformers was asked about."""
    return [answer["token_ids"] for answer in references.read(NAME)["answers"]]


def recorded() -> LogprobReferences:
    """What transformers answered."""
    return LogprobReferences(
        {
            tuple(answer["token_ids"]): [
                Position(dict(map(tuple, best)), next_logprob, tuple(next_ranks))
                for best, next_logprob, next_ranks in answer["positions"]
            ]
            for answer in references.read(NAME)["answers"]
        }
    )
