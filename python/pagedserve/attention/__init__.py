"""Paged attention for transformers' models: metadata of a step, and the attention function."""
