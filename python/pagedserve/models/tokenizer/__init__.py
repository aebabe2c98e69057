"""Tokenizers: of transformers, or without it from the same files."""
