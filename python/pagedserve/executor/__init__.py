"""Who runs the model: the contract that an engine knows, and who keeps it."""
