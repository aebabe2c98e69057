"""What an attention backend is: an object that says what it supports, and computes attention."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pagedserve.attention.metadata import AttentionMetadata, AttentionOptions
from pagedserve.errors import ConfigError


class AttentionBackend(ABC):
    """One implementation of paged attention.

    Attributes:
        name: value of the option ``attention_backend`` that selects it.
        min_block_size: smallest number of tokens per block that it supports; 4 if it supports any.
        can_record_graphs: whether CUDA graphs can record its calls, which then wait for nothing
            and read a step's rows on the device; adapters are applied by such kernels, too.
        fused_layers: kind of fused decoder layers that attend with it; None if none do.
    """

    name: ClassVar[str]
    min_block_size: ClassVar[int] = 4
    can_record_graphs: ClassVar[bool] = False
    fused_layers: ClassVar[Literal["cpu", "gpu"] | None] = None

    @abstractmethod
    def obstacle(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it does not support such tensors, after "which"; None if it does."""

    def check_block_size(self, block_size: int) -> None:  # noqa: B027  # most support any
        """Check that it supports a block size.

        Raises:
            ConfigError: it does not; the message says what is accepted.
        """

    def check_cache_dtype(self, cache_dtype: str, device: torch.device) -> None:
        """Check that it supports pools of a ``kv_cache_dtype``; see `CacheEngine`.

        Raises:
            ConfigError: it does not; the message says what is accepted.
        """
        if cache_dtype != "auto":
            raise ConfigError(
                f"kv_cache_dtype is {cache_dtype!r}, and attention_backend {self.name!r} stores "
                f"keys and values in the model's dtype alone; the model is on {device}: leave it "
                "out, or give attention_backend 'rust' on a CPU, 'triton' on a GPU"
            )

    def describe(self) -> str:
        """Describe the backend and the machine's features that it uses."""
        return self.name

    @abstractmethod
    def write_and_attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pool: Tensor,
        *,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Write the step's keys and values into the pool, then attend over it.

        Args:
            query: ``[1, H, T, D]``.
            key: ``[1, Hkv, T, D]``.
            value: ``[1, Hkv, T, Dv]``.
            pool: ``[num_blocks, block_size, Hkv, D + Dv]`` elements; the backend defines the layout
                of a block.
            metadata: the step.
            options: scale, window, cap, sinks, slopes, biases, whether it is causal.

        Returns:
            ``[T, H, Dv]``; undefined for tokens of no row.

        Raises:
            UnsupportedModelError: an option that it does not compute.
        """
