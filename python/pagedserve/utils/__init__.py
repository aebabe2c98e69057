"""Alias of vLLM's ``utils`` package, for scripts that import from there.

It contains nothing else.
"""

from pagedserve.config.argument_parser import FlexibleArgumentParser
from pagedserve.vllm_modules import random_uuid

__all__ = ["FlexibleArgumentParser", "random_uuid"]
