"""The sampler for an executor whose logits are torch tensors, in host memory or on a GPU."""

import torch
from torch import Tensor

from pagedserve.device import Cuda
from pagedserve.sampling.on_host import HostOps
from pagedserve.sampling.ops import Array, SamplingOps
from pagedserve.sampling.processors import run_on_tensor


def ops_for(cuda: Cuda | None) -> SamplingOps:
    """Operations for the device of a model, None for host memory.

    Logits processors receive tensors, and kernels in host memory use as many threads as torch.
    """
    if cuda is None:
        return HostOps(run_on_tensor, torch.get_num_threads)
    from pagedserve.sampling.on_gpu import GpuOps

    return GpuOps(cuda)


def as_array(logits: Tensor) -> Array:
    """Logits as those operations take them, without a copy: an array if in host memory."""
    return logits.numpy() if logits.device.type == "cpu" else logits
