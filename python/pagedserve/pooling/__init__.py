"""From a model's states of a prompt to one vector: which rules a model has, and their sums."""
