"""What a step may hold, and the KV blocks that a device has room for beside the largest one."""

from dataclasses import dataclass

from pagedserve.runner.profile import TrialRow


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The most that a step may hold.

    Attributes:
        max_num_tokens: tokens of a step.
        max_num_rows: rows of a step.
        max_model_len: tokens of a sequence.
    """

    max_num_tokens: int
    max_num_rows: int
    max_model_len: int

    def largest_prefill(self) -> list[TrialRow]:
        """All tokens of a step in prompts as long as they may be."""
        longest = self.max_model_len
        num_whole, rest = divmod(self.max_num_tokens, longest)
        lengths = [longest] * num_whole + [rest] * (rest > 0)
        return [TrialRow(length, length) for length in lengths[: self.max_num_rows]]

    def largest_decode(self) -> list[TrialRow]:
        """A token for each of the most sequences, all of them at their end."""
        return [TrialRow(1, self.max_model_len)] * self.max_num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableBlocks:
    """How many KV blocks a device has room for, and the sum that says so; bytes.

    Attributes:
        num_blocks: blocks.
        total_bytes: the device's memory.
        budget_bytes: the share of it that may be taken.
        used_bytes: taken once the model is loaded, by this process and others.
        activation_bytes: the most that a step takes on top.
        graph_bytes: kept for CUDA graphs.
    """

    num_blocks: int
    total_bytes: int
    budget_bytes: int
    used_bytes: int
    activation_bytes: int
    graph_bytes: int
