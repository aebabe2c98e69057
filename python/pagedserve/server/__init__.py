"""The OpenAI-compatible server: HTTP alone; what it knows of an engine is ``EngineClient``."""
