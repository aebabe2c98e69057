"""State of the server, and routes for its operator."""
