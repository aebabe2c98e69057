"""``EngineArgs``, every option of an engine, and the tables it is composed of, one per concern."""

from pagedserve.config.engine_args import EngineArgs

__all__ = ["EngineArgs"]
