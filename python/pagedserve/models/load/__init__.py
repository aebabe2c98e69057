"""Loading: a model's files, wherever they are, and what transformers makes of them."""
