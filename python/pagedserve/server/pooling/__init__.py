"""Embeddings and other pooled outputs: their routes."""
