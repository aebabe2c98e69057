"""From sampled tokens to outputs: stop conditions, text, request outputs."""
