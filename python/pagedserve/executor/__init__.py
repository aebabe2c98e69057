"""Executors: the interface between an engine and the model, and its implementations."""
