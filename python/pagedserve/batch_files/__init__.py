"""``pagedserve run-batch``: a file of requests, worked through offline to a file of responses.

The requests run as those of ``pagedserve.server.batches``; ``run`` loads the model for them.
"""
