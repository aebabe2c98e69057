"""Paged attention for transformers' models: one step's view, and the function they call."""
