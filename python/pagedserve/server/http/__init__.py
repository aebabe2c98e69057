"""What the routes of all APIs share: connections, bodies, errors and responses."""
