"""The OpenAI-compatible HTTP server; it accesses an engine only through ``EngineClient``."""
