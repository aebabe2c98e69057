"""A cache of transformers that rounds keys and values as pools of bytes do."""

from typing import Any, Final

import torch
from transformers.cache_utils import DynamicCache

from pagedserve.config.cache import KVCacheDtype

# The dtype of torch and its largest number.
LEVELS: Final[dict[KVCacheDtype, tuple[torch.dtype, float]]] = {
    "int8": (torch.int8, 127),
    "fp8_e4m3": (torch.float8_e4m3fn, 448),
    "fp8_e5m2": (torch.float8_e5m2, 57344),
}


def rounded(numbers: torch.Tensor, cache_dtype: KVCacheDtype) -> torch.Tensor:
    """Levels of a scale for each token and head: the least bfloat16 that makes none too large."""
    stored, largest = LEVELS[cache_dtype]
    peaks = numbers.float().abs().amax(-1, keepdim=True) / largest
    scales = peaks.bfloat16().float()
    above = (scales.view(torch.int32) + (1 << 16)).view(torch.float32)
    scales = torch.where(scales < peaks, above, scales)
    levels = numbers / scales
    if stored == torch.int8:
        levels = levels.round()
    return torch.where(scales > 0, levels.to(stored).float() * scales, 0)


class RoundingCache(DynamicCache):
    """Keys and values as a cache in bytes has them."""

    def __init__(self, cache_dtype: KVCacheDtype) -> None:
        super().__init__()
        self._cache_dtype = cache_dtype

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        key_states, value_states = (
            rounded(states, self._cache_dtype) for states in (key_states, value_states)
        )
        return super().update(key_states, value_states, *args, **kwargs)
