"""What proposers know of a sequence, and what they are asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagedserve._core import TokenLookup


@dataclass(slots=True, eq=False)
class DraftedText:
    """A sequence as far as its next tokens are guessed.

    Attributes:
        prompt_token_ids: Its prompt; not changed.
        token_ids: Its new tokens, which grow.
        salt: Texts of different salts must not meet.
        acceptance: How likely a guess at its next token is right, as lately seen.
        lookup: Its own tokens, once somebody looked something up there.
        num_looked_up: How many of its tokens that has.
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    salt: int
    acceptance: float = 0.5
    lookup: TokenLookup | None = None
    num_looked_up: int = field(default=0)

    def __len__(self) -> int:
        """Its tokens, prompt and new ones."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    def tail(self, start: int) -> list[int]:
        """Its tokens from ``start`` on; a negative one counts from the end."""
        first = start + len(self) if start < 0 else start
        num_prompt = len(self.prompt_token_ids)
        if first >= num_prompt:
            return list(self.token_ids[first - num_prompt :])
        return [*self.prompt_token_ids[max(0, first) :], *self.token_ids]


class Proposer(Protocol):
    """Guesses next tokens."""

    def propose(self, texts: Sequence[DraftedText], most: Sequence[int]) -> list[list[int]]:
        """What may follow each text, at most so many tokens; none where nothing comes to mind."""

    def end(self, text: DraftedText) -> None:
        """A text is complete."""
