"""Torch modules whose adapters Triton kernels add, from memory at fixed addresses.

All slots of a module are in one tensor, in the model's dtype: one launch serves all rows, and a
CUDA graph uses adapters that were loaded after its capture.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pagedserve.kernels.lora import add_adapters, add_embedding_adapters
from pagedserve.lora.modules import Hooked, embedding_scale, rows_of_head
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.adapters import AdapterRows, StepAdapters
from pagedserve.models.fused.parts import FusedPart


class _InSlots(Hooked):
    """A module with memory for the adapters of all slots; see `kernels.lora` for the shapes."""

    def __init__(
        self,
        module: nn.Module,
        parts: Mapping[str, FusedPart],
        *,
        num_slots: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Allocate the slots for a number of adapters, a rank and a device; see `Hooked`."""
        super().__init__(module, parts)
        self._num_slots = num_slots
        firsts = [part.first_feature for part in parts.values()]
        num_in = next(iter(parts.values())).in_features
        num_out = sum(part.out_features for part in parts.values())
        shape = self._shape(num_slots, len(parts), max_rank, num_in)
        self._a = torch.zeros(shape, dtype=dtype, device=device)
        self._b = torch.zeros(num_slots, num_out, max_rank, dtype=dtype, device=device)
        self._ranks = torch.zeros(num_slots, len(parts), dtype=torch.int32, device=device)
        self._features = torch.tensor([*firsts, num_out], dtype=torch.int32).to(device)

    @staticmethod
    @abstractmethod
    def _shape(num_slots: int, num_slices: int, max_rank: int, num_in: int) -> tuple[int, ...]:
        """Shape of the tensor of all ``a``."""

    @abstractmethod
    def _place(self, slot: int, index: int, weights: LoraWeights) -> LoraWeights:
        """Copy the ``a`` of a slice to its slot; return the weights for ``b``."""

    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """Load these weights, by name, into a slot, replacing its contents."""
        ranks = torch.zeros(len(self._parts), dtype=torch.int32)
        self._a[slot].zero_()
        self._b[slot].zero_()
        for index, (name, part) in enumerate(self._parts.items()):
            if name in weights:
                b = torch.from_numpy(self._place(slot, index, weights[name]).b)
                last_feature = part.first_feature + part.out_features
                self._b[slot, part.first_feature : last_feature, : b.shape[1]].copy_(b)
                ranks[index] = b.shape[1]
        self._ranks[slot].copy_(ranks)

    def _rest(self, rows: AdapterRows) -> tuple[Tensor, ...]:
        """The last arguments of both kernels."""
        return self._b, self._ranks, self._features, *rows.on_device(self._num_slots)


class TritonLinear(_InSlots):
    """A linear layer, rows ``[..., K]`` to ``[..., N]``, or several of them fused."""

    @staticmethod
    def _shape(num_slots: int, num_slices: int, max_rank: int, num_in: int) -> tuple[int, ...]:
        return num_slots, num_slices, max_rank, num_in

    def _place(self, slot: int, index: int, weights: LoraWeights) -> LoraWeights:
        self._a[slot, index, : len(weights.a)].copy_(torch.from_numpy(weights.a))
        return weights

    def _add(self, step: StepAdapters, x: Tensor, output: Tensor) -> None:
        self._add_products(step.tokens, x, output)

    def _add_products(self, rows: AdapterRows, x: Tensor, output: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1])
        self._check_rows(rows, x)
        add_adapters(output.view(len(x), -1), x, self._a, *self._rest(rows))


class TritonHead(TritonLinear):
    """An LM head, called with the rows that need logits, or with all."""

    def _add(self, step: StepAdapters, x: Tensor, output: Tensor) -> None:
        self._add_products(rows_of_head(step, x), x, output)


class TritonEmbedding(_InSlots):
    """An embedding, ids ``[..., T]`` to ``[..., T, N]``, with an optional scale."""

    def __init__(self, module: nn.Module, parts: Mapping[str, FusedPart], **options: Any) -> None:
        """See `_InSlots`; features in are tokens."""
        super().__init__(module, parts, **options)
        self._scale = embedding_scale(module)

    @staticmethod
    def _shape(num_slots: int, num_slices: int, max_rank: int, num_in: int) -> tuple[int, ...]:
        del num_slices  # always one
        return num_slots, num_in, max_rank

    def _place(self, slot: int, index: int, weights: LoraWeights) -> LoraWeights:
        del index
        self._a[slot, :, : len(weights.a)].copy_(torch.from_numpy(weights.a.T))
        return LoraWeights(weights.a, weights.b * np.float32(self._scale))

    def _add(self, step: StepAdapters, x: Tensor, output: Tensor) -> None:
        ids = x.reshape(-1).contiguous()
        rows = self._rest(step.tokens)
        add_embedding_adapters(output.view(len(ids), -1), ids, self._a, *rows)
