"""Guesses of a smaller model with the same tokens."""

import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pagedserve.drafts.proposer import DraftedText
from pagedserve.inputs import TokensPrompt
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class DraftEngine(Protocol):
    """An engine of its own for the smaller model."""

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence."""

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The smaller model's."""

    def add_request(self, request_id: str, prompt: TokensPrompt, params: SamplingParams) -> None:
        """Take up a request."""

    def step(self) -> list[RequestOutput]:
        """Run a step; requests that ended."""

    def has_unfinished_requests(self) -> bool:
        """Whether another step is wanted."""


class DraftModel:
    """Asks a smaller model for what it takes for likeliest.

    Its engine knows nothing of the large one's: a text is a prompt there, of which its prefix cache
    has all but the newest tokens.  So nothing is kept in step, whatever becomes of a request.

    Costs: for each guess a step of the smaller model, with the rows of all texts.
    """

    def __init__(self, engine: DraftEngine) -> None:
        """Take an engine that caches prefixes."""
        self._engine = engine
        self._numbers = itertools.count()

    def propose(self, texts: Sequence[DraftedText], most: Sequence[int]) -> list[list[int]]:
        """See `Proposer`."""
        names = {}
        for place, (text, number) in enumerate(zip(texts, most, strict=True)):
            room = min(number, self._engine.max_model_len - len(text))
            if room > 0:
                names[name := str(next(self._numbers))] = place
                self._engine.add_request(name, _prompt(text), _likeliest(room))
        found: list[list[int]] = [[] for _ in texts]
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                completion = output.outputs[0]
                if completion.finish_reason == "length":
                    found[names[output.request_id]] = list(completion.token_ids)
                else:
                    logger.warning("no guesses: %s", completion.stop_reason)
        return found

    def end(self, text: DraftedText) -> None:
        """See `Proposer`; the prefix cache forgets what is not asked for."""


def _prompt(text: DraftedText) -> TokensPrompt:
    return {"prompt_token_ids": text.tail(0), "cache_salt": str(text.salt)}


def _likeliest(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
