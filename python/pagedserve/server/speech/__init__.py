"""Transcriptions and translations of speech."""
