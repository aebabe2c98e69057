"""Layers that keep a recurrent state beside keys and values, or instead, of any family.

Recurrences and short convolutions: transformers keeps their states in special cache layers.  The
modules that write them are detected by that, not by their names.
"""

from inspect import signature, unwrap
from types import FunctionType
from typing import Any, Final

from transformers import DynamicCache, PreTrainedModel

from pagedserve.models.mixers import CACHE_NAMES, Mixer

# What a module calls to store a state in a cache.
_WRITES: Final = frozenset(("update_conv_state", "update_recurrent_state", "set_linear_cache"))
# A scan over several tokens that takes no initial state, as in Mamba 1.
_BEGINS_ANEW: Final = frozenset(("mamba_selective_scan",))


def replace_mixers(model: PreTrainedModel) -> None:
    """Make modules with states accept a flat batch; without states they are unchanged."""
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
    """Names used by the methods of a module's class."""
    methods = (unwrap(method) for method in vars(type(module)).values() if callable(method))
    codes = (method.__code__ for method in methods if isinstance(method, FunctionType))
    return {name for code in codes for name in code.co_names}
