"""Modules that compute in Rust on the CPU; a module that is not known stays as it is."""
