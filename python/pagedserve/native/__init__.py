"""Decoder models on the CPU with every layer in Rust, without torch and transformers."""
