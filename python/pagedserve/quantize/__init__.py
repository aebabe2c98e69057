"""Quantized models compared with their originals."""
