"""Architectures that transformers lacks, built from the modules of one that it has."""

from importlib import import_module
from typing import Final

_MODULES: Final = {"baichuan": "pagedserve.models.mappings.baichuan"}


def register_mapping(model_type: str | None) -> None:
    """Register a model type of ours with transformers; does nothing for others."""
    if model_type in _MODULES:
        import_module(_MODULES[model_type]).register()
