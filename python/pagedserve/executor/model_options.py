"""Options of an engine that its model does not support."""

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError
from pagedserve.executor.protocol import ModelInfo


def check_model_options(args: EngineArgs, model: ModelInfo) -> None:
    """Refuse options that a model does not support.

    Raises:
        ConfigError: It is a pooling model or an encoder-decoder.
    """
    refused = {}
    if model.encoder_decoder is not None:
        refused["enable_lora"] = "adapters are for decoder-only models"
        refused["enable_prefix_caching"] = "a decoder's keys depend on what its encoder read"
        refused["speculative_config"] = "draft tokens are for decoder-only models"
    if model.pooling is not None:
        refused["enable_lora"] = "adapters are for models that generate"
        refused["speculative_config"] = "draft tokens are for models that generate"
    if model.pooling is not None and model.sees_whole_prompts:
        reason = f"the model pools ({model.pooling.pooling_type}) what one step computes"
        refused |= dict.fromkeys(("enable_prefix_caching", "enable_chunked_prefill"), reason)
    for name, reason in refused.items():
        if value := getattr(args, name):
            raise ConfigError(f"{name} is {value}, and {reason}: leave it out")
