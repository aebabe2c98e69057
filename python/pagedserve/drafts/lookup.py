"""Guesses by lookup: what followed the newest tokens when they came before."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from pagedserve._core import TokenLookup
from pagedserve.drafts.proposer import DraftedText

# Of earlier outputs: tokens of a salt, and salts; the ones longest unused are forgotten.
_MAX_TOKENS: Final = 1 << 20
_MAX_SALTS: Final = 64


class TextLookup:
    """Looks in the text itself: its prompt and what came of it.

    Costs: some microseconds a text, whatever its length.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        """Set what a match is; see `TokenLookup`."""
        self._min_match = min_match
        self._max_match = max_match

    def propose(self, texts: Sequence[DraftedText], most: Sequence[int]) -> list[list[int]]:
        """See `Proposer`."""
        return [self._propose(text, number) for text, number in zip(texts, most, strict=True)]

    def end(self, text: DraftedText) -> None:
        """See `Proposer`; nothing is kept of a text but with it."""

    def _propose(self, text: DraftedText, most: int) -> list[int]:
        if text.lookup is None:
            text.lookup = TokenLookup(min_match=self._min_match, max_match=self._max_match)
        text.lookup.extend(text.tail(text.num_looked_up))
        text.num_looked_up = len(text)
        return text.lookup.propose(most)


class OutputLookup:
    """Looks in the text itself, and then in earlier outputs under the same salt.

    (The longest match among earlier outputs, as in Oliaro et al., "SuffixDecoding", NeurIPS 2025.)
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        """Set what a match is; see `TokenLookup`."""
        self._min_match = min_match
        self._max_match = max_match
        self._own = TextLookup(min_match, max_match)
        self._outputs: OrderedDict[int, TokenLookup] = OrderedDict()

    def propose(self, texts: Sequence[DraftedText], most: Sequence[int]) -> list[list[int]]:
        """See `Proposer`."""
        found = self._own.propose(texts, most)
        for index, (text, number) in enumerate(zip(texts, most, strict=True)):
            outputs = self._outputs.get(text.salt)
            if not found[index] and outputs is not None:
                found[index] = outputs.propose_for(text.tail(-self._max_match), number)
        return found

    def end(self, text: DraftedText) -> None:
        """See `Proposer`."""
        outputs = self._outputs.pop(text.salt, None)
        if outputs is None:
            outputs = TokenLookup(
                min_match=self._min_match, max_match=self._max_match, max_tokens=_MAX_TOKENS
            )
        outputs.extend(text.tail(-len(text.token_ids) - self._max_match))
        outputs.end_text()
        self._outputs[text.salt] = outputs
        if len(self._outputs) > _MAX_SALTS:
            self._outputs.popitem(last=False)
