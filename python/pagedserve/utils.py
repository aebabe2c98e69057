"""Alias of vLLM's ``utils`` module, for scripts that import its argument parser from there.

It contains nothing else.
"""

from pagedserve.config.argument_parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
