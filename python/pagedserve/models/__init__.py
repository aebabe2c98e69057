"""Models: from a name to a transformers model that runs on paged attention."""
