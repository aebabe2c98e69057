"""Fused modules for a GPU; a module that is not known stays as it is."""
