"""Modules that compute in Rust on the CPU; unknown modules stay unchanged."""
