"""Anthropic's Messages API, on top of what chat completions use."""
