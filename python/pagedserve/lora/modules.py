"""Modules of torch that add what adapters give, by hooks: types, names and weights stay theirs.

Sums are float32, whatever the model's dtype, and rounded once.  What is computed of a slot has the
rank that its adapter has there.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pagedserve.errors import StepError
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.adapters import AdapterRows, StepAdapters, current_adapters


class AdaptedModules(Protocol):
    """Modules whose adapters are held in one place."""

    @property
    def targets(self) -> Mapping[str, tuple[int, int]]:
        """Features in and out of each, by name."""

    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """Let a slot hold these, by name, and nothing else."""


class _Hooked(ABC):
    """A module that adds adapters to what it has computed."""

    def __init__(
        self, name: str, module: nn.Module, features: tuple[int, int], *, num_slots: int
    ) -> None:
        """Hook into a module.

        Args:
            name: of the module in its model.
            module: is called with one tensor.
            features: in and out.
            num_slots: of adapters.
        """
        self.targets = {name: features}
        self._name = name
        self._slots: list[LoraWeights | None] = [None] * num_slots
        self._device = next(module.parameters()).device
        module.register_forward_hook(self._hook)

    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """See `AdaptedModules`."""
        held = weights.get(self._name)
        self._slots[slot] = held and LoraWeights(
            held.a.to(self._device, torch.float32), held.b.to(self._device, torch.float32)
        )

    @abstractmethod
    def _add(self, step: StepAdapters, x: Tensor, output: Tensor) -> None:
        """Add to what the module made of ``x``, in place."""

    def _held(self, rows: AdapterRows) -> Iterator[tuple[LoraWeights, Tensor]]:
        """What slots in use hold, each with its rows."""
        for slot, index in rows.groups:
            weights = self._slots[slot]
            if weights is not None:
                yield weights, index

    def _hook(self, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        step = current_adapters()
        if step is not None:
            self._add(step, inputs[0], output)


class AdaptedLinear(_Hooked):
    """A linear layer, rows ``[..., K]`` to ``[..., N]``."""

    def _add(self, step: StepAdapters, x: Tensor, output: Tensor) -> None:
        self._add_products(step.tokens, x, output)

    def _add_products(self, rows: AdapterRows, x: Tensor, output: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1])
        for weights, index in self._held(rows):
            if len(x) != rows.num_rows:
                raise StepError(
                    f"an adapter changes {self._name}, which was given {len(x)} rows of a forward "
                    f"of {rows.num_rows}: leave it out of the adapter"
                )
            hidden = x.index_select(0, index).float() @ weights.a.t()
            _add_rows(output, index, hidden @ weights.b.t())


class AdaptedHead(AdaptedLinear):
    """A head, given the rows whose logits are wanted, or all."""

    def _add(self, step: StepAdapters, x: Tensor, output: Tensor) -> None:
        is_of_samples = x.shape[:-1].numel() == step.samples.num_rows
        self._add_products(step.samples if is_of_samples else step.tokens, x, output)


class AdaptedEmbedding(_Hooked):
    """An embedding, ids ``[..., T]`` to ``[..., T, N]``, which may multiply by a scale."""

    def __init__(
        self, name: str, module: nn.Module, features: tuple[int, int], *, num_slots: int
    ) -> None:
        """See `AdaptedLinear`; ``features`` are tokens and features."""
        super().__init__(name, module, features, num_slots=num_slots)
        self._scale = float(getattr(module, "embed_scale", 1.0))

    def _add(self, step: StepAdapters, x: Tensor, output: Tensor) -> None:
        ids = x.reshape(-1)
        for weights, index in self._held(step.tokens):
            columns = weights.a.index_select(1, ids.index_select(0, index))
            _add_rows(output, index, self._scale * (columns.t() @ weights.b.t()))


def _add_rows(output: Tensor, index: Tensor, numbers: Tensor) -> None:
    rows = output.view(-1, output.shape[-1])
    sums = rows.index_select(0, index).float().add_(numbers)
    rows.index_copy_(0, index, sums.to(rows.dtype))
