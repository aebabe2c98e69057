"""Properties of a model under vLLM's names."""

from functools import cached_property
from typing import TYPE_CHECKING, cast

from pagedserve.config import EngineArgs
from pagedserve.errors import extra_needed

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


class ModelConfig:
    """Properties of a model for programs that read vLLM's ``model_config``.

    Attributes:
        model: Name of the model, as given.
        max_model_len: Maximum tokens of a sequence, prompt and output together.
    """

    def __init__(
        self, args: EngineArgs, *, max_model_len: int, dtype: str, device_type: str
    ) -> None:
        """Describe the model of an engine with ``args``; the last two are names of torch."""
        self.model, self.max_model_len = args.model, max_model_len
        self._args, self._dtype, self._device_type = args, dtype, device_type

    @property
    def device(self) -> "torch.device":
        """Device of the weights, of torch, which is imported here.

        Raises:
            MissingPackageError: torch is not installed.
        """
        with extra_needed("model_config.device", "engine"):
            import torch
        return torch.device(self._device_type)

    @property
    def dtype(self) -> "torch.dtype":
        """Dtype of weights and hidden states, of torch, which is imported here.

        Raises:
            MissingPackageError: torch is not installed.
        """
        with extra_needed("model_config.dtype", "engine"):
            import torch
        return cast("torch.dtype", getattr(torch, self._dtype))

    @cached_property
    def hf_config(self) -> "PreTrainedConfig":
        """Config of the model, read by transformers, which is imported here.

        A GGUF file has none: it is that of its converted copy, which is made if necessary.

        Raises:
            MissingPackageError: torch or transformers is not installed.
            UnsupportedModelError: transformers does not know the architecture.
        """
        with extra_needed("model_config.hf_config", "engine"):
            from pagedserve.models.load.files import find_model_files
        return find_model_files(self._args).hf_config
