"""What a model attends to, read from the rules of its masks."""

from typing import Any

import torch
from torch import Tensor

from pagedserve.errors import UnsupportedModelError


class MaskReader:
    """A mask function for transformers that reads the rule of a mask instead of making the mask.

    Invariant: masks are told apart by identity, so a mask that a model slices or copies cannot be
    read, but it is never misread.
    """

    def __init__(self, num_positions: int) -> None:
        """Read rules over positions 0 to ``num_positions - 1``."""
        self._num_positions = num_positions
        self._windows: dict[int, tuple[Tensor, int | None]] = {}
        self._exact_lens: dict[int, int] = {}
        self._named: set[int] = set()
        self._unnamed: set[int] = set()

    @property
    def max_exact_len(self) -> int:
        """Up to so many tokens the windows, and the chunks that calls name, say it all."""
        named = self._named - self._unnamed
        lens = (length for mask, length in self._exact_lens.items() if mask not in named)
        return min(lens, default=self._num_positions)

    def __call__(
        self, batch_size: int, q_length: int, kv_length: int, *_: Any, **kwargs: Any
    ) -> Tensor:
        """Make a stand-in mask, and remember the window it stands for."""
        mask = torch.zeros(batch_size, 1, q_length, kv_length)
        window, exact_len = self._read(kwargs["mask_function"])
        self._windows[id(mask)] = (mask, window)
        self._exact_lens[id(mask)] = exact_len
        return mask

    def window_of(self, mask: object, *, names_chunk: bool = False) -> int | None:
        """The sliding window of a mask made here; None for none, or an unreadable mask.

        Args:
            mask: that a call of attention would have had.
            names_chunk: whether the call named a chunk, which then is what its mask stands for.
        """
        (self._named if names_chunk else self._unnamed).add(id(mask))
        return self._windows.get(id(mask), (None, None))[1]

    def _read(self, rule: Any) -> tuple[int | None, int]:
        """The window that a rule stands for, and how long a sequence may be for it to hold."""
        last = self._num_positions - 1
        try:
            seen = self._num_visible(rule, last)
        except IndexError as error:  # it looks up what a batch holds, and a batch may be shorter
            raise UnsupportedModelError(
                "the rule of a mask reads the tokens of a batch, as those of images do; accepted "
                "are causal masks, windows and chunks"
            ) from error
        if seen == last + 1:
            return None, self._num_positions
        earlier = {last - 1, last - seen}  # in chunks, at least one of them sees another number
        if all(self._num_visible(rule, query) == min(seen, query + 1) for query in earlier):
            return seen, self._num_positions
        # Neither full nor a window (chunks, say): it equals full attention for as long as
        # every query still sees the first key.
        first = self._visible(rule, torch.arange(last + 1), torch.tensor(0))
        return None, int(first.long().cumprod(0).sum())

    def _num_visible(self, rule: Any, query: int) -> int:
        """Keys that a query sees."""
        keys = torch.arange(self._num_positions)
        return int(self._visible(rule, torch.tensor(query), keys).sum())

    def _visible(self, rule: Any, query: Tensor, key: Tensor) -> Tensor:
        zero = torch.tensor(0)
        visible = torch.as_tensor(rule(zero, zero, query, key))
        return visible & (key <= query) & torch.ones_like(query * key).bool()
