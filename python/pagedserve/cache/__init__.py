"""KV cache: memory of keys, values and recurrent states."""
