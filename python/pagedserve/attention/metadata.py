"""The frozen view of one step that every attention call of the step reads."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagedserve.attention.buckets import Bucket, PlanOptions, StepLayout, plan_buckets


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step: T tokens of R rows.

    Invariant: the arrays are not changed while the step runs; they may be views of buffers
    that the next step fills.

    Attributes:
        layout: rows and block tables in host memory.
        slot_mapping: int64 ``[T]`` on the model's device; -1 means do not write.
    """

    layout: StepLayout
    slot_mapping: Tensor
    _plans: dict[PlanOptions, list[Bucket]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, T."""
        return int(self.slot_mapping.shape[0])

    def buckets(self, *, window: int | None, allow_fresh: bool, dtype: torch.dtype) -> list[Bucket]:
        """The rows grouped for attention calls; planned at first use, then remembered.

        Args:
            window: sliding window of the layer.
            allow_fresh: whether rows without cached keys may use the step's own keys.
            dtype: of the masks.
        """
        if window is not None and window >= int(self.layout.seq_lens.max(initial=0)):
            window = None
        options = PlanOptions(window, allow_fresh, dtype, self.slot_mapping.device)
        if options not in self._plans:
            self._plans[options] = plan_buckets(self.layout, options)
        return self._plans[options]
