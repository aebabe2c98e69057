"""CUDA graphs of decode steps: `PaddedDecode`, captured once and replayed.

All graphs share one memory pool, and the largest is captured first so that the others fit into it.
Their logits are copied out of it, since two graphs may use the same memory.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from pagedserve.device import Cuda, Graph
from pagedserve.errors import ConfigError
from pagedserve.models.adapters import StepAdapters
from pagedserve.runner.buffers import BatchSizes
from pagedserve.runner.padded import PaddedDecode

# Estimated memory of a graph besides tensors: a few KiB for each of some thousand kernels.
_BYTES_PER_GRAPH: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class _NoRows:
    """A step of padding rows only."""

    num_rows: int = 0
    num_batched_tokens: int = 0
    num_samples: int = 0
    max_num_blocks: int = 0


def reserved_bytes(
    sizes: tuple[int, ...], *, vocab_size: int, activation_bytes: int, has_adapters: bool
) -> int:
    """Estimate the memory to reserve for the graphs of these sizes.

    Args:
        sizes: rows of the graphs.
        has_adapters: whether each is captured with adapters too.
        vocab_size: vocabulary size of the logits.
        activation_bytes: memory of the largest decode step.
    """
    logits = sizes[-1] * vocab_size * torch.float32.itemsize
    num_graphs = len(sizes) * (1 + has_adapters)
    return activation_bytes + logits + num_graphs * _BYTES_PER_GRAPH


class DecodeGraphs(PaddedDecode):
    """Runs decode steps at padded sizes, each as one CUDA graph."""

    @torch.inference_mode()
    def capture(self, vocab_size: int, cuda: Cuda, *, has_adapters: bool = False) -> None:
        """Capture every size; called once, before the first step.

        Args:
            vocab_size: vocabulary size of the logits.
            cuda: the model's device.
            has_adapters: whether rows may have adapters: each size is captured with them too.

        Raises:
            ConfigError: an operation of the model cannot be captured, or memory is out.
        """
        shape = self.sizes[-1], vocab_size
        self._results = torch.empty(shape, dtype=torch.float32, device=cuda.device)
        self._graphs: dict[tuple[int, bool], Graph] = {}
        pool = cuda.graph_pool()
        try:
            for size in reversed(self.sizes):
                for is_adapted in (True, False) if has_adapters else (False,):
                    graph = self._record(size, cuda, pool, is_adapted=is_adapted)
                    self._graphs[size, is_adapted] = graph
        except RuntimeError as error:  # torch raises it for all errors of a device
            raise ConfigError(
                "the decode steps of this model cannot be recorded as CUDA graphs "
                f"({str(error).strip().splitlines()[0]}): give enforce_eager=True, or, if memory "
                "is out, lower gpu_memory_utilization"
            ) from error

    def _record(self, size: int, cuda: Cuda, pool: Any, *, is_adapted: bool) -> Graph:
        self._buffers.writable()
        adapters = self._fill(_NoRows(), size, is_adapted=is_adapted)
        inputs = self._inputs(_NoRows(), size)

        def launch() -> None:
            self._results[:size].copy_(self._run(inputs, adapters))

        # The first run compiles kernels and initializes libraries, which must not be captured.
        launch()
        return cuda.capture(launch, pool)

    def _logits(self, step: BatchSizes, size: int, adapters: StepAdapters | None) -> Tensor:
        del step
        self._graphs[size, adapters is not None].replay()
        return self._results[:size]
