"""Selection of the device that a model runs on."""

import torch

from pagedserve.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """Return the device of that name; a GPU becomes the current device, on which kernels launch.

    Args:
        name: "auto", "cpu", "cuda" or "cuda:N"; "auto" is the first visible GPU, else the CPU.

    Raises:
        ConfigError: the GPU does not exist.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and num_gpus == 0):
        return torch.device("cpu")
    index = int(name.partition(":")[2] or 0)
    if num_gpus == 0:
        reason = "is built without CUDA" if torch.version.cuda is None else "finds no CUDA device"
        raise ConfigError(
            f"device is {name!r}, and torch {torch.__version__} {reason}: give 'cpu' or 'auto'"
        )
    if index >= num_gpus:
        raise ConfigError(
            f"device is {name!r}, and there are {num_gpus} CUDA devices: accepted are cuda:0 to "
            f"cuda:{num_gpus - 1}"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
