"""Model runner: from a step's decisions to the logits of its sampled rows."""
