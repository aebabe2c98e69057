"""Profile run: GPU memory that the largest steps leave for the KV cache."""

import traceback
from functools import partial

import torch

from pagedserve.cache.states import state_bytes_per_slot
from pagedserve.config import EngineArgs
from pagedserve.device import Cuda
from pagedserve.errors import ConfigError
from pagedserve.executor.memory import AvailableMemory, shown_bytes
from pagedserve.executor.protocol import StepLimits
from pagedserve.models.loader import LoadedModel
from pagedserve.runner.graphs import reserved_bytes
from pagedserve.runner.padded import ladder
from pagedserve.runner.profile import TrialRow, peak_bytes, run_trial


def available_memory(
    loaded: LoadedModel, args: EngineArgs, limits: StepLimits, cuda: Cuda, *, captures_graphs: bool
) -> AvailableMemory:
    """Run the largest steps on the GPU and measure the memory that they leave.

    Args:
        loaded: The model.
        args: Options of the engine.
        limits: Limits of a step.
        cuda: The model's device.
        captures_graphs: Whether decode steps will be captured as CUDA graphs.

    Raises:
        ConfigError: They do not fit beside the weights.
    """
    free = cuda.memory().free
    trial = partial(
        run_trial, loaded, num_samples=limits.max_num_samples, block_size=args.block_size, cuda=cuda
    )
    try:
        prefill = peak_bytes(cuda, partial(trial, largest_prefill(limits)))
        decode = peak_bytes(cuda, partial(trial, largest_decode(limits)))
    except torch.OutOfMemoryError as error:
        # Its frames hold the tensors of the step, whose memory a retry needs.
        traceback.clear_frames(error.__traceback__)
        raise ConfigError(
            f"out of memory in the profile run on {cuda.device}: weights take "
            f"{shown_bytes(loaded.weight_bytes)}, and the {shown_bytes(free)} that are free beside "
            f"them do not hold the activations of a step of {limits.max_num_tokens} tokens or "
            f"{limits.max_num_rows} sequences, let alone a KV cache: lower max_num_batched_tokens "
            "(and max_model_len, unless prompts are chunked) or max_num_seqs"
        ) from error
    graphs = 0
    if captures_graphs:
        graphs = reserved_bytes(
            ladder(limits.max_num_rows),
            vocab_size=loaded.vocab_size,
            activation_bytes=decode,
            has_adapters=args.enable_lora,
        )
    free, total = cuda.memory()
    budget = int(total * args.gpu_memory_utilization)
    states = limits.max_num_rows * state_bytes_per_slot(loaded.states)
    activations = max(prefill, decode)
    return AvailableMemory(
        num_bytes=max(0, budget - (total - free) - activations - graphs - states),
        total_bytes=total,
        budget_bytes=budget,
        used_bytes=total - free,
        activation_bytes=activations,
        graph_bytes=graphs,
    )


def largest_prefill(limits: StepLimits) -> list[TrialRow]:
    """A step with the maximum tokens, in prompts of the maximum length."""
    longest = limits.max_model_len
    num_whole, rest = divmod(limits.max_num_tokens, longest)
    lengths = [longest] * num_whole + [rest] * (rest > 0)
    return [TrialRow(length, length) for length in lengths[: limits.max_num_rows]]


def largest_decode(limits: StepLimits) -> list[TrialRow]:
    """A decode step with the maximum number of sequences, each of the maximum length."""
    return [TrialRow(1, limits.max_model_len)] * limits.max_num_rows
