"""``pagedserve bench serve``: load generator for any OpenAI-compatible server.

Nothing here imports the engine: the measurements are those of an HTTP client.
"""
