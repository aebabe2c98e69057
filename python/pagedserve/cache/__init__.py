"""The memory that keys and values live in."""
