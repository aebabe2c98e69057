"""The HTTP layer of all APIs: connections, bodies, errors and responses."""
