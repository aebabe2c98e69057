"""Tools of requests, and formats of tool calls in texts."""
