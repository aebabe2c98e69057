"""Interface of proposers of draft tokens, and the sequences that they get."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagedserve._core import TokenLookup
from pagedserve.drafts.prediction import Prediction


@dataclass(slots=True, eq=False)
class DraftedText:
    """A sequence whose next tokens are proposed.

    Attributes:
        prompt_token_ids: Prompt; not modified.
        token_ids: New tokens, which grow.
        salt: Sequences of different salts share no lookups.
        acceptance: Recent acceptance rate of its draft tokens.
        lookup: Index of its tokens, once a lookup was needed.
        num_looked_up: Number of its tokens in the index.
        prediction: The caller's prediction of it; None without one.
        is_predicted: Whether its last draft tokens are of the prediction.
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    salt: int
    acceptance: float = 0.5
    lookup: TokenLookup | None = None
    num_looked_up: int = field(default=0)
    prediction: Prediction | None = None
    is_predicted: bool = False

    def __len__(self) -> int:
        """Number of its tokens, prompt and new ones."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    def tail(self, start: int) -> list[int]:
        """Its tokens from ``start`` on; a negative one counts from the end."""
        first = start + len(self) if start < 0 else start
        num_prompt = len(self.prompt_token_ids)
        if first >= num_prompt:
            return list(self.token_ids[first - num_prompt :])
        return [*self.prompt_token_ids[max(0, first) :], *self.token_ids]


class Proposer(Protocol):
    """Proposes draft tokens."""

    def propose(self, texts: Sequence[DraftedText], most: Sequence[int]) -> list[list[int]]:
        """Draft tokens of each sequence, at most as many as ``most``; may be empty."""

    def end(self, text: DraftedText) -> None:
        """Note that a sequence is complete."""
