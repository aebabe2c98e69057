"""Fused modules that replace a model's modules, for known families of layers."""
