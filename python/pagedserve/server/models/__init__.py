"""Models of a server: their list, and adapters."""
