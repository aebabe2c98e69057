"""``POST /tokenize`` and ``/detokenize``, and ``GET /tokenizer_info``."""
