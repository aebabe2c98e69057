"""Architectures that transformers has not, made of the parts of one that it has."""

from importlib import import_module
from typing import Final

_MODULES: Final = {"baichuan": "pagedserve.models.mappings.baichuan"}


def register_mapping(model_type: str | None) -> None:
    """Make a model type of ours known to transformers; others are left to it."""
    if model_type in _MODULES:
        import_module(_MODULES[model_type]).register()
