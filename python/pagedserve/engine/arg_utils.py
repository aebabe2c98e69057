"""Alias of vLLM's ``arg_utils`` module, for scripts that import engine arguments from there."""

from typing import TypeAlias

from pagedserve.config import EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]

# The options are the same with and without asyncio.
AsyncEngineArgs: TypeAlias = EngineArgs
