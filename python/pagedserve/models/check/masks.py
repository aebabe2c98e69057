"""Attention patterns of a model, read from the rules of its masks."""

from typing import Any

import torch
from torch import Tensor

from pagedserve.errors import UnsupportedModelError


class MaskReader:
    """A mask function for transformers that reads the rule of a mask instead of creating the mask.

    Invariant: masks are identified by identity, so a mask that a model slices or copies cannot be
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
        """Maximum length up to which windows, and chunks of calls, describe attention exactly."""
        named = self._named - self._unnamed
        lens = (length for mask, length in self._exact_lens.items() if mask not in named)
        return min(lens, default=self._num_positions)

    def __call__(
        self, batch_size: int, q_length: int, kv_length: int, *_: Any, **kwargs: Any
    ) -> Tensor:
        """Create a placeholder mask, and store its window."""
        mask = torch.zeros(batch_size, 1, q_length, kv_length)
        window, exact_len = self._read(kwargs["mask_function"])
        self._windows[id(mask)] = (mask, window)
        self._exact_lens[id(mask)] = exact_len
        return mask

    def window_of(self, mask: object, *, names_chunk: bool = False) -> int | None:
        """The sliding window of a mask created here; None for none, or an unreadable mask.

        Args:
            mask: mask of an attention call.
            names_chunk: whether the call passes a chunk, which the mask then describes.
        """
        (self._named if names_chunk else self._unnamed).add(id(mask))
        return self._windows.get(id(mask), (None, None))[1]

    def _read(self, rule: Any) -> tuple[int | None, int]:
        """The window of a rule, and the maximum length of a sequence for which it is exact."""
        last = self._num_positions - 1
        try:
            seen = self._num_visible(rule, last)
        except IndexError as error:  # it indexes the batch, which may be shorter
            raise UnsupportedModelError(
                "the rule of a mask reads the tokens of a batch, as those of images do; accepted "
                "are causal masks, windows and chunks"
            ) from error
        if seen == last + 1:
            return None, self._num_positions
        earlier = {last - 1, last - seen}  # in chunks, at least one of them sees another number
        if all(self._num_visible(rule, query) == min(seen, query + 1) for query in earlier):
            return seen, self._num_positions
        # Neither full nor a window (chunks, for example): it equals full attention while every
        # query
        # sees the first key.
        first = self._visible(rule, torch.arange(last + 1), torch.tensor(0))
        return None, int(first.long().cumprod(0).sum())

    def _num_visible(self, rule: Any, query: int) -> int:
        """Number of keys that a query attends to."""
        keys = torch.arange(self._num_positions)
        return int(self._visible(rule, torch.tensor(query), keys).sum())

    def _visible(self, rule: Any, query: Tensor, key: Tensor) -> Tensor:
        zero = torch.tensor(0)
        visible = torch.as_tensor(rule(zero, zero, query, key))
        return visible & (key <= query) & torch.ones_like(query * key).bool()
