"""Pooling: from a prompt's hidden states to one vector, by the model's rules."""
