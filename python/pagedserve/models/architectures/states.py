"""Architectures whose layers keep a state of each sequence beside keys and values, or instead.

Recurrences and short convolutions: transformers keeps theirs in layers of its cache made for it.
The modules that write there are known by that, and not by the names of architectures.
"""

from inspect import signature, unwrap
from types import FunctionType
from typing import Any, Final

from transformers import DynamicCache, PreTrainedModel

from pagedserve.models.states import CACHE_NAMES, Mixer

# What a module calls that keeps a state in a cache.
_WRITES: Final = frozenset(("update_conv_state", "update_recurrent_state", "set_linear_cache"))
# A scan over several tokens that takes no state to go on from, as Mamba's first version has it.
_BEGINS_ANEW: Final = frozenset(("mamba_selective_scan",))


def hand_over_states(model: PreTrainedModel) -> None:
    """Let modules that keep states take a flat batch; where none are kept they are as before."""
    modules: Any = model.modules()
    found = [module for module in modules if _keeps_states(module)]
    if not found:
        return
    layers = DynamicCache(config=model.config).layers
    for number, module in enumerate(found):
        module.forward = Mixer(
            module,
            number,
            layers[module.layer_idx].number_of_states,
            goes_one_by_one=bool(_BEGINS_ANEW & _names_in(module)),
        )


def _keeps_states(module: Any) -> bool:
    """Whether a module takes a cache and its code writes states into it."""
    if not isinstance(getattr(module, "layer_idx", None), int):
        return False
    takes_cache = not signature(module.forward).parameters.keys().isdisjoint(CACHE_NAMES)
    return takes_cache and bool(_WRITES & _names_in(module))


def _names_in(module: object) -> set[str]:
    """What the methods of a module's class name."""
    methods = (unwrap(method) for method in vars(type(module)).values() if callable(method))
    codes = (method.__code__ for method in methods if isinstance(method, FunctionType))
    return {name for code in codes for name in code.co_names}
