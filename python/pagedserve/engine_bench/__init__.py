"""``pagedserve bench latency``, ``throughput`` and ``startup``: measurements of an engine.

Options and fields of results have the names of vLLM's commands.
"""
