"""LoRA adapters: low-rank updates of a model's weights, several per batch."""
