"""Attention calls of a model's modules, and their handler over the KV pools.

A *layer* is a call of the attention function in a forward pass, with a separate pool.  The modules
that call it learn the indices of their layers when the model is loaded (`number_layers`), because
some models number their layers twice or not at all.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from torch import Tensor, nn

from pagedserve.attention.backend import AttentionBackend
from pagedserve.attention.chunks import in_chunks
from pagedserve.attention.metadata import AttentionMetadata, AttentionOptions
from pagedserve.errors import StepError, UnsupportedModelError

# Attribute of a module with the indices of its layers.
_LAYERS: Final = "pagedserve_layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Arguments of one layer's call of the attention function.

    Attributes:
        module: the attention module that makes it.
        query: ``[1, H, T, D]``.
        key: ``[1, Hkv, T, D]``.
        value: ``[1, Hkv, T, Dv]``.
        options: scale, window, cap, sinks and slopes.
        has_window: whether the layer passed a window, even None.
        chunk: positions per chunk, for chunked attention; else None.
        mask: the mask object, None unless a mask function was registered.
        position_bias: ``[1, H, T, T]``, added to the scores; None without bias, or if it is given
            by distance in ``options``.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    options: AttentionOptions
    has_window: bool
    chunk: int | None
    mask: object
    position_bias: Tensor | None = None


class AttentionHandler(Protocol):
    """Handles the attention calls of one forward pass."""

    def answer(self, call: AttentionCall) -> Tensor:
        """Returns ``[T, H, Dv]``."""


class LayerStep(NamedTuple):
    """Inputs of one layer in a step: its pool, its window, and the rows over its blocks."""

    pool: Tensor
    window: int | None
    metadata: AttentionMetadata


def number_layers(model: nn.Module, names: Iterable[str]) -> None:
    """Store the indices of their layers in attention modules.

    Args:
        model: model that contains the modules.
        names: name of each layer's module; one that is called several times has several layers.
    """
    found: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        found[name].append(index)
    for name, indices in found.items():
        vars(model.get_submodule(name))[_LAYERS] = tuple(indices)


def layers_of(module: nn.Module) -> tuple[int, ...]:
    """Indices of an attention module's layers, in the order of its calls; empty if unnumbered."""
    layers: tuple[int, ...] = vars(module).get(_LAYERS, ())
    return layers


class PagedAttention:
    """Serves the calls of one step, each from the pool of its layer."""

    def __init__(
        self,
        metadata: AttentionMetadata,
        pools: Sequence[Tensor],
        windows: Sequence[int | None],
        backend: AttentionBackend,
        *,
        causal: bool = True,
        of_layers: Sequence[AttentionMetadata] | None = None,
    ) -> None:
        """Store a step.

        Args:
            metadata: the step.
            pools: pool of each layer, ``[num_blocks, block_size, Hkv, D + Dv]``; the backend
                defines the layout of a block.
            windows: window of each layer, as the probe found them.
            backend: attention backend; the same for all steps over one set of pools.
            causal: whether a token does not attend to later keys.
            of_layers: the step of each layer, over the blocks of its KV group; None if all layers
                share those of ``metadata``.
        """
        self._metadata = metadata
        self._of_layers = of_layers
        self._backend = backend
        self._pools = pools
        self._windows = windows
        self._causal = causal
        self._has_attended = bytearray(len(pools))

    @property
    def num_calls(self) -> int:
        """Number of layers that have attended."""
        return self._has_attended.count(1)

    def attend_next(self, layers: Sequence[int]) -> LayerStep:
        """Inputs of the first of a module's layers that has not attended in this step.

        Raises:
            StepError: all of them have.
        """
        for layer in layers:
            if not self._has_attended[layer]:
                break
        else:
            raise StepError(
                f"a module made more attention calls than the {len(layers)} that it made when the "
                "model was loaded"
            )
        self._has_attended[layer] = 1
        metadata = self._metadata if self._of_layers is None else self._of_layers[layer]
        return LayerStep(self._pools[layer], self._windows[layer], metadata)

    def answer(self, call: AttentionCall) -> Tensor:
        """Write the call's keys and values, then attend.

        Raises:
            UnsupportedModelError: the model passed a mask.
        """
        if call.mask is not None:
            raise UnsupportedModelError(
                "the model passes a custom mask to attention: paged attention is causal, with "
                "a sliding window at most"
            )
        if call.position_bias is not None:
            raise UnsupportedModelError(
                "the model adds a custom bias to each score: paged attention supports slopes, and "
                "biases that are listed by distance"
            )
        pool, window, metadata = self.attend_next(layers_of(call.module))
        options = call.options
        if options.window != window or not self._causal:
            options = replace(options, window=window, causal=self._causal)
        return self._backend.write_and_attend(
            call.query,
            call.key,
            call.value,
            pool,
            metadata=metadata if call.chunk is None else in_chunks(metadata, call.chunk),
            options=options,
        )
