"""From sampled tokens to what the caller sees: ends, text, request outputs."""
