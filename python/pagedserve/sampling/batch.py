"""The sampling parameters of one step's rows, as given and as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedserve.sampling.edits import LogitsEdits


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How to sample one row.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the most likely tokens up to this share; 1 keeps all.
        top_k: keep this many of the most likely; 0 or less keeps all, 1 is greedy.
        min_p: keep tokens at least this share as likely as the likeliest; 0 keeps all.
        uniforms: a random number in [0, 1) for each token to draw; several in the first step of
            parallel sampling.  Not read when greedy, which draws one token.
        edits: what is done to the logits first.
        num_logprobs: report log-probabilities of the drawn tokens and of this many of the
            likeliest; None reports none.  Not read with `num_candidates`, which draws nothing.
        num_candidates: above 0, draw nothing and give this many of the likeliest tokens (beam
            search).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    uniforms: tuple[float, ...] = (0.0,)
    edits: LogitsEdits | None = None
    num_logprobs: int | None = None
    num_candidates: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes the likeliest token: the one definition of greedy."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token of the model's logits is all that the row needs."""
        return self.is_greedy and self.edits is None and not self.num_candidates

    @property
    def num_draws(self) -> int:
        """Number of tokens to draw."""
        if self.num_candidates:
            return 0
        return 1 if self.is_greedy else len(self.uniforms)


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Parameters of rows that are drawn at random, ``[N]`` each.

    Attributes:
        temperature: float64, above 0.
        top_k: int64, 1 to V.
        top_p: float64, above 0.
        min_p: float64.
        uniforms: float64 ``[N, U]``, U the most draws of a row; 0 past a row's own.
        num_draws: int64, 0 to U.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor
    num_draws: Tensor

    @classmethod
    def of(
        cls, rows: Sequence[RowSampling], *, vocab_size: int, device: torch.device
    ) -> "RandomRows":
        """Turn the parameters of random rows, at least one, into arrays."""
        top_k = [row.top_k if 0 < row.top_k < vocab_size else vocab_size for row in rows]
        num_draws = [len(row.uniforms) for row in rows]
        width = max(num_draws)
        uniforms = [row.uniforms + (0.0,) * (width - len(row.uniforms)) for row in rows]

        def array(values: Sequence[object], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=array([row.temperature for row in rows], torch.float64),
            top_k=array(top_k, torch.int64),
            top_p=array([row.top_p for row in rows], torch.float64),
            min_p=array([row.min_p for row in rows], torch.float64),
            uniforms=array(uniforms, torch.float64),
            num_draws=array(num_draws, torch.int64),
        )

    def __len__(self) -> int:
        """Number of rows."""
        return self.temperature.shape[0]

    def pick(self, index: Tensor) -> "RandomRows":
        """Some of the rows."""
        return RandomRows(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.uniforms[index],
            self.num_draws[index],
        )
