"""Where the workers are, and nothing about scheduling."""
