"""The check at load: structure and numerics of a model over paged memory."""
