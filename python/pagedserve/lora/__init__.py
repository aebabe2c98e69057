"""LoRA adapters: small updates of a model's weights, many of them in one batch."""
