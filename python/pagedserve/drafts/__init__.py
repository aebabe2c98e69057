"""Proposers of draft tokens, and how many draft tokens are worth their time."""
