"""Draft tokens of a smaller model with the same vocabulary."""

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from pagedserve.drafts.proposer import DraftedText
from pagedserve.errors import RequestError
from pagedserve.inputs import TokensPrompt
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)


class DraftEngine(Protocol):
    """A separate engine for the draft model."""

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence."""

    def get_vocab(self) -> dict[str, int]:
        """Return the draft model's token ids by token."""

    def add_request(self, request_id: str, prompt: TokensPrompt, params: SamplingParams) -> None:
        """Add a request."""

    def step(self) -> list[RequestOutput]:
        """Run a step; return requests that ended."""

    def has_unfinished_requests(self) -> bool:
        """Whether another step is needed."""

    def abort_request(self, request_id: Iterable[str]) -> object:
        """Abort requests."""


class DraftModel:
    """Proposes the most likely tokens of a draft model.

    Its engine is independent of the large one's: a sequence is a prompt there, of which its prefix
    cache has all but the newest tokens.  So no state is kept in sync with requests.

    Costs: for each draft token a step of the draft model, with the rows of all sequences.
    """

    def __init__(self, engine: DraftEngine) -> None:
        """Store an engine that caches prefixes."""
        self._engine = engine
        self._numbers = itertools.count()

    def propose(self, texts: Sequence[DraftedText], most: Sequence[int]) -> list[list[int]]:
        """Propose draft tokens; see `Proposer`."""
        names = {}
        for place, (text, number) in enumerate(zip(texts, most, strict=True)):
            room = min(number, self._engine.max_model_len - len(text))
            if room > 0:
                name = str(next(self._numbers))
                try:
                    self._engine.add_request(name, _prompt(text), _likeliest(room))
                except RequestError as error:  # longer than its KV cache
                    logger.debug("no draft tokens: %s", error)
                else:
                    names[name] = place
        try:
            return self._drafted(names, len(texts))
        except BaseException:
            self._engine.abort_request(names)  # or the next call would get their outputs
            raise

    def _drafted(self, names: Mapping[str, int], num_texts: int) -> list[list[int]]:
        """Draft tokens of each text, once the requests are run; their names have its place."""
        found: list[list[int]] = [[] for _ in range(num_texts)]
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                completion = output.outputs[0]
                if completion.finish_reason == "length":
                    found[names[output.request_id]] = list(completion.token_ids)
                else:
                    logger.warning("no draft tokens: %s", completion.stop_reason)
        return found

    def end(self, text: DraftedText) -> None:
        """Do nothing: the prefix cache evicts unused blocks; see `Proposer`."""


def _prompt(text: DraftedText) -> TokensPrompt:
    return {"prompt_token_ids": text.tail(0), "cache_salt": str(text.salt)}


def _likeliest(num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
