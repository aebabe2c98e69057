"""Torch modules that add the output of adapters, each with its rank.

Modules use hooks: their types, names and weights stay unchanged.  Sums are float32, whatever the
model's dtype, and rounded once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from pagedserve.errors import StepError
from pagedserve.lora.places import targets_of
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.adapters import AdapterRows, StepAdapters
from pagedserve.models.forward import current_adapters
from pagedserve.models.fused.parts import FusedPart


@dataclass(frozen=True, slots=True)
class _DeviceWeights:
    """``LoraWeights`` as float32 tensors on the model's device."""

    a: Tensor
    b: Tensor

    @classmethod
    def of(cls, weights: LoraWeights, device: torch.device) -> Self:
        """Copy them to a device."""
        return cls(*(torch.from_numpy(part).to(device) for part in weights))


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows, int64 ``index``, of an output ``[T, N]``."""

    output: Tensor
    index: Tensor

    def add(self, numbers: Tensor) -> None:
        """Add float32 numbers, one row for each."""
        sums = self.output.index_select(0, self.index).float().add_(numbers)
        self.output.index_copy_(0, self.index, sums.to(self.output.dtype))


class Hooked(ABC):
    """A torch module that adds adapters to its output."""

    def __init__(self, module: nn.Module, parts: Mapping[str, FusedPart]) -> None:
        """Hook into a module.

        Args:
            module: module that is called with one tensor.
            parts: parts of its output, by names in the model.
        """
        self.targets = targets_of(parts)
        self._parts = parts
        module.register_forward_hook(self._hook)

    @abstractmethod
    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """Load these weights, by name, into a slot, replacing its contents."""

    @abstractmethod
    def _add(self, step: StepAdapters, x: Tensor, output: Tensor) -> None:
        """Add adapters to the output for ``x``, in place."""

    def _check_rows(self, rows: AdapterRows, x: Tensor) -> None:
        if len(x) != rows.num_rows:
            raise StepError(
                f"an adapter changes {', '.join(self.targets)}, which got {len(x)} rows of a "
                f"forward of {rows.num_rows}: leave it out of the adapter"
            )

    def _hook(self, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        step = current_adapters()
        if step is not None:
            self._add(step, inputs[0], output)


class _Looped(Hooked):
    """A module whose adapters are added one after the other."""

    def __init__(
        self,
        module: nn.Module,
        parts: Mapping[str, FusedPart],
        *,
        num_slots: int,
        device: torch.device,
    ) -> None:
        """Store the number of slots and the model's device; see `Hooked`."""
        super().__init__(module, parts)
        # Per slot: weights, each with the first of the features that they change.
        self._slots: list[list[tuple[int, _DeviceWeights]]] = [[] for _ in range(num_slots)]
        self._device = device

    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """Load these weights, by name, into a slot, replacing its contents."""
        self._slots[slot] = [
            (self._parts[name].first_feature, _DeviceWeights.of(pair, self._device))
            for name, pair in weights.items()
        ]

    def _held(self, rows: AdapterRows, output: Tensor) -> Iterator[tuple[_DeviceWeights, Rows]]:
        """Contents of the slots in use, each with the rows and features of the output to change."""
        flat = output.view(-1, output.shape[-1])
        for slot, index in rows.groups:
            for first, weights in self._slots[slot]:
                yield weights, Rows(flat[:, first : first + len(weights.b)], index)


class AdaptedLinear(_Looped):
    """A linear layer, rows ``[..., K]`` to ``[..., N]``, or several of them fused."""

    def _add(self, step: StepAdapters, x: Tensor, output: Tensor) -> None:
        self._add_products(step.tokens, x, output)

    def _add_products(self, rows: AdapterRows, x: Tensor, output: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1])
        for weights, changed in self._held(rows, output):
            self._check_rows(rows, x)
            hidden = x.index_select(0, changed.index).float() @ weights.a.t()
            changed.add(hidden @ weights.b.t())


class AdaptedHead(AdaptedLinear):
    """An LM head, called with the rows that need logits, or with all."""

    def _add(self, step: StepAdapters, x: Tensor, output: Tensor) -> None:
        self._add_products(rows_of_head(step, x), x, output)


def rows_of_head(step: StepAdapters, x: Tensor) -> AdapterRows:
    """The rows that a head was called with, as ``x [..., K]``."""
    is_of_samples = x.shape[:-1].numel() == step.samples.num_rows
    return step.samples if is_of_samples else step.tokens


class AdaptedEmbedding(_Looped):
    """An embedding, ids ``[..., T]`` to ``[..., T, N]``, with an optional scale."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """See `AdaptedLinear`; features in are tokens."""
        super().__init__(module, *args, **kwargs)
        self._scale = embedding_scale(module)

    def _add(self, step: StepAdapters, x: Tensor, output: Tensor) -> None:
        ids = x.reshape(-1)
        for weights, changed in self._held(step.tokens, output):
            columns = weights.a.index_select(1, ids.index_select(0, changed.index))
            changed.add(self._scale * (columns.t() @ weights.b.t()))


def embedding_scale(module: nn.Module) -> float:
    """Factor that an embedding multiplies its output by."""
    return float(getattr(module, "embed_scale", 1.0))
