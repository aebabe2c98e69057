"""Fused modules for a GPU; unknown modules stay unchanged."""
