"""Draft tokens by n-gram lookup: the tokens that followed an earlier match of the newest ones."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from pagedserve._core import TokenLookup
from pagedserve.drafts.proposer import DraftedText

# Limits for earlier outputs: tokens per salt, and salts; the least recently used are evicted.
_MAX_TOKENS: Final = 1 << 20
_MAX_SALTS: Final = 64


class TextLookup:
    """Looks up n-grams in the sequence itself: its prompt and its output.

    Costs: some microseconds per sequence, whatever its length.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        """Set the lengths of a match; see `TokenLookup`."""
        self._min_match = min_match
        self._max_match = max_match

    def propose(self, texts: Sequence[DraftedText], most: Sequence[int]) -> list[list[int]]:
        """Propose draft tokens; see `Proposer`."""
        return [self._propose(text, number) for text, number in zip(texts, most, strict=True)]

    def end(self, text: DraftedText) -> None:
        """Do nothing: the state of a sequence is stored with it; see `Proposer`."""

    def _propose(self, text: DraftedText, most: int) -> list[int]:
        if text.lookup is None:
            text.lookup = TokenLookup(min_match=self._min_match, max_match=self._max_match)
        text.lookup.extend(text.tail(text.num_looked_up))
        text.num_looked_up = len(text)
        return text.lookup.propose(most)


class OutputLookup:
    """Looks up n-grams in the sequence itself, and then in earlier outputs of the same salt.

    (The longest match among earlier outputs, as in Oliaro et al., "SuffixDecoding", NeurIPS 2025.)
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        """Set the lengths of a match; see `TokenLookup`."""
        self._min_match = min_match
        self._max_match = max_match
        self._own = TextLookup(min_match, max_match)
        self._outputs: OrderedDict[int, TokenLookup] = OrderedDict()

    def propose(self, texts: Sequence[DraftedText], most: Sequence[int]) -> list[list[int]]:
        """Propose draft tokens; see `Proposer`."""
        found = self._own.propose(texts, most)
        for index, (text, number) in enumerate(zip(texts, most, strict=True)):
            outputs = self._outputs.get(text.salt)
            if not found[index] and outputs is not None:
                found[index] = outputs.propose_for(text.tail(-self._max_match), number)
        return found

    def end(self, text: DraftedText) -> None:
        """Store a finished output; see `Proposer`."""
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
