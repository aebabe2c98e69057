"""The sampling parameters of one step's rows, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How to sample one row.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the most likely tokens up to this share; 1 keeps all.
        top_k: keep this many of the most likely; 0 or less keeps all, 1 is greedy.
        min_p: keep tokens at least this share as likely as the likeliest; 0 keeps all.
        uniform: this row's random number in [0, 1); not read when greedy.
        banned_token_ids: tokens that must not come.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    uniform: float = 0.0
    banned_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes the likeliest token: the one definition of greedy."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The rows that are drawn at random, ``[N]`` each.

    Attributes:
        index: int64, the row in the step.
        temperature: float64, above 0.
        top_k: int64, 1 to V.
        top_p: float64, above 0.
        min_p: float64.
        uniform: float64.
    """

    index: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @classmethod
    def of(
        cls, rows: Sequence[RowSampling], *, vocab_size: int, device: torch.device
    ) -> "RandomRows":
        """Pick the random rows of a step."""
        chosen = [(index, row) for index, row in enumerate(rows) if not row.is_greedy]
        top_k = [row.top_k if 0 < row.top_k < vocab_size else vocab_size for _, row in chosen]

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            index=column([index for index, _ in chosen], torch.int64),
            temperature=column([row.temperature for _, row in chosen], torch.float64),
            top_k=column(top_k, torch.int64),
            top_p=column([row.top_p for _, row in chosen], torch.float64),
            min_p=column([row.min_p for _, row in chosen], torch.float64),
            uniform=column([row.uniform for _, row in chosen], torch.float64),
        )

    def __len__(self) -> int:
        """Number of random rows."""
        return self.index.shape[0]

    def pick(self, choice: Tensor | slice) -> "RandomRows":
        """Some of the rows."""
        return RandomRows(
            self.index[choice],
            self.temperature[choice],
            self.top_k[choice],
            self.top_p[choice],
            self.min_p[choice],
            self.uniform[choice],
        )
