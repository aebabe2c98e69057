"""Ollama's API: its routes, as chats and completions."""
