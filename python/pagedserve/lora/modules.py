"""Modules that add what adapters give, of the rank that each has there.

Those of torch do so by hooks: types, names and weights stay theirs.  Those with packed weights do
so inside of their products.  Sums are float32, whatever the model's dtype, and rounded once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pagedserve.errors import StepError
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.adapters import AdapterRows, StepAdapters, current_adapters
from pagedserve.models.fused.parts import FusedPart


class AdaptedModules(Protocol):
    """Modules whose adapters are held in one place."""

    @property
    def targets(self) -> Mapping[str, tuple[int, int]]:
        """Features in and out of each, by name."""

    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """Let a slot hold these, by name, and nothing else."""


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
    """A module of torch that adds adapters to what it has computed."""

    def __init__(self, module: nn.Module, parts: Mapping[str, FusedPart]) -> None:
        """Hook into a module.

        Args:
            module: is called with one tensor.
            parts: what it computes, by names in the model.
        """
        self.targets = _targets(parts)
        self._parts = parts
        module.register_forward_hook(self._hook)

    @abstractmethod
    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """See `AdaptedModules`."""

    @abstractmethod
    def _add(self, step: StepAdapters, x: Tensor, output: Tensor) -> None:
        """Add to what the module made of ``x``, in place."""

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
        """See `Hooked`; slots of adapters, and the model's device."""
        super().__init__(module, parts)
        # Of each slot: weights, each with the first of the features that they change.
        self._slots: list[list[tuple[int, LoraWeights]]] = [[] for _ in range(num_slots)]
        self._device = device

    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """See `AdaptedModules`."""
        self._slots[slot] = [
            (self._parts[name].first_feature, _on(self._device, pair))
            for name, pair in weights.items()
        ]

    def _held(self, rows: AdapterRows, output: Tensor) -> Iterator[tuple[LoraWeights, Rows]]:
        """What slots in use hold, each with the rows and features of the output that it changes."""
        flat = output.view(-1, output.shape[-1])
        for slot, index in rows.groups:
            for first, weights in self._slots[slot]:
                yield weights, Rows(flat[:, first : first + len(weights.b)], index)


class AdaptedLinear(_Looped):
    """A linear layer, rows ``[..., K]`` to ``[..., N]``, or several of them side by side."""

    def _add(self, step: StepAdapters, x: Tensor, output: Tensor) -> None:
        self._add_products(step.tokens, x, output)

    def _add_products(self, rows: AdapterRows, x: Tensor, output: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1])
        for weights, changed in self._held(rows, output):
            self._check_rows(rows, x)
            hidden = x.index_select(0, changed.index).float() @ weights.a.t()
            changed.add(hidden @ weights.b.t())


class AdaptedHead(AdaptedLinear):
    """A head, given the rows whose logits are wanted, or all."""

    def _add(self, step: StepAdapters, x: Tensor, output: Tensor) -> None:
        self._add_products(rows_of_head(step, x), x, output)


def rows_of_head(step: StepAdapters, x: Tensor) -> AdapterRows:
    """Those that a head was given as ``x [..., K]``."""
    is_of_samples = x.shape[:-1].numel() == step.samples.num_rows
    return step.samples if is_of_samples else step.tokens


class AdaptedEmbedding(_Looped):
    """An embedding, ids ``[..., T]`` to ``[..., T, N]``, which may multiply by a scale."""

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
    """What an embedding multiplies its numbers by."""
    return float(getattr(module, "embed_scale", 1.0))


class AdaptedPacked:
    """Linear layers whose packed weights are in one place, which adds adapters itself."""

    def __init__(self, parts: Mapping[str, FusedPart]) -> None:
        """Take layers by their names in the model, in the order of their features."""
        self.targets = _targets(parts)
        self._parts = parts
        (self._packed,) = {part.home for part in parts.values()}

    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """See `AdaptedModules`."""
        slices = [
            (part.first_feature, len(weights[name].a), *map(_numbers, weights[name]))
            for name, part in self._parts.items()
            if name in weights
        ]
        self._packed.load_adapter(slot, slices)


def _targets(parts: Mapping[str, FusedPart]) -> dict[str, tuple[int, int]]:
    return {name: (part.in_features, part.out_features) for name, part in parts.items()}


def _on(device: torch.device, weights: LoraWeights) -> LoraWeights:
    return LoraWeights(*(part.to(device, torch.float32) for part in weights))


def _numbers(weights: Tensor) -> NDArray[np.float32]:
    return weights.detach().float().contiguous().reshape(-1).numpy()
