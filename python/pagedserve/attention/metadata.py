"""The frozen view of one step that every attention call of the step reads."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagedserve.attention.buckets import Bucket, PlanOptions, StepLayout, plan_buckets


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The rows of a step where kernels read them.

    The two bounds are host integers: kernels choose their launch by them and need not ask the
    device.  They may be larger than what the tensors hold.

    Attributes:
        query_start: int32 ``[R + 1]`` on the model's device.
        seq_lens: int32 ``[R]``, alike; 0 for a row that pads.
        block_tables: int32 ``[R, B]``, alike.
        max_query_len: no row has more queries.
        max_seq_len: no row has more keys.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, layout: StepLayout, device: torch.device) -> "DeviceRows":
        """Copies on a device; on the CPU views."""
        return cls(
            query_start=torch.from_numpy(layout.query_start).to(device),
            seq_lens=torch.from_numpy(layout.seq_lens).to(device),
            block_tables=torch.from_numpy(layout.block_tables).to(device),
            max_query_len=layout.max_query_len,
            max_seq_len=layout.max_seq_len,
        )


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
    _rows: list[DeviceRows] = field(default_factory=list)
    _plans: dict[PlanOptions, list[Bucket]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, T."""
        return int(self.slot_mapping.shape[0])

    @classmethod
    def on_device(
        cls, layout: StepLayout, slot_mapping: Tensor, rows: DeviceRows
    ) -> "AttentionMetadata":
        """A step whose rows are on the device already."""
        return cls(layout, slot_mapping, [rows])

    def rows(self) -> DeviceRows:
        """The rows on the device; copied at first use where they were not given."""
        if not self._rows:
            self._rows.append(DeviceRows.of(self.layout, self.slot_mapping.device))
        return self._rows[0]

    def buckets(self, *, window: int | None, allow_fresh: bool, dtype: torch.dtype) -> list[Bucket]:
        """The rows grouped for attention calls; planned at first use, then remembered.

        Args:
            window: sliding window of the layer.
            allow_fresh: whether rows without cached keys may use the step's own keys.
            dtype: of the masks.
        """
        if window is not None and window >= self.layout.max_seq_len:
            window = None
        options = PlanOptions(window, allow_fresh, dtype, self.slot_mapping.device)
        if options not in self._plans:
            self._plans[options] = plan_buckets(self.layout, options)
        return self._plans[options]
