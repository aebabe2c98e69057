"""A model's modules exchanged for fused ones on a GPU; what is not known stays as it is."""
