"""Load on any OpenAI-compatible server, and what it answered: ``pagedserve bench serve``.

Nothing here knows the engine: what is measured is what a client sees over HTTP.
"""
